"""Names of others' insides that we rely on: a release that renames one fails here, by its name.

Behaviour is tested elsewhere. But an attribute that we only *set* (``_heap = None``) can go
away without any error: ours would be a new one, which nobody reads.
"""

import logging
from shelve import Shelf

import pytest
import sqlalchemy as sa
from celery import Celery, _state
from celery.app.task import Context, Task
from celery.beat import PersistentScheduler, Scheduler
from sqlalchemy.orm import Session

from celery_lease.guards.sqlalchemy import _begun


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (_state._task_stack, "stack"),  # stamp: the tasks around the running one
        (Context, "_protected"),  # task: whether a request's body runs
        (Task, "_backend"),  # task: the backend that ours stands before
        (Scheduler, "_do_sync"),  # sending: a state that cannot be stored
        (PersistentScheduler, "_store"),  # leading: a file that is open
        (Shelf({}), "cache"),  # leading: what would be written to it
        (logging.Formatter(), "_fmt"),  # logs: whether the user chose a format
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_name_that_we_use_is_there(owner, name):
    """None of them is promised; each has no public equal."""
    assert hasattr(owner, name)


def test_a_stock_scheduler_keeps_what_is_due_in_its_heap():
    """Set to None after an error: it would miss what its tick took off the heap before."""
    assert "_heap" in vars(Scheduler(app=Celery(set_as_current=False), lazy=True))


def test_a_session_tells_which_connections_it_works_on():
    """Without them the transaction that a session has begun would go unguarded."""
    engine = sa.create_engine("sqlite://")
    with Session(engine) as session:
        connection = session.connection()
        assert _begun(session) == [connection]
    engine.dispose()
