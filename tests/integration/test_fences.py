"""The workers' statements, on each database: look, settle, refuse."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import NoReturn

import pytest
import sqlalchemy as sa

from celery_lease import AlreadySettled, MissingFence, Occurrence, StaleEpoch
from celery_lease.lease import Holder
from celery_lease.stores.fences import FenceStore, Ticket
from celery_lease.stores.schema import run_table
from celery_lease.testing import HeldLease, hold


@pytest.fixture
def store(database_url: str) -> Iterator[FenceStore]:
    """The workers' side of a database."""
    store = FenceStore(database_url)
    yield store
    store.dispose()


@pytest.fixture
def lease(database_url: str) -> Iterator[HeldLease]:
    """A lease that is held at epoch 1."""
    lease = hold(database_url)
    yield lease
    lease.close()


@pytest.fixture
def occurrence(lease: HeldLease) -> Occurrence:
    """An occurrence whose run is published under epoch 1."""
    found = Occurrence(
        lease="celery", entry="daily", due_at=datetime(2025, 3, 30, 6, 0, 0, 5, timezone.utc)
    )
    lease.record(found)
    return found


def ticket(lease: HeldLease, task_id: str, run: str | None = None) -> Ticket:
    """Return the ticket of a new execution."""
    return Ticket(
        lease="celery",
        epoch=lease.epoch,
        term=lease.term.uuid,
        task_id=task_id,
        run=run or task_id,
        execution=str(uuid.uuid4()),
    )


def test_looking_finds_the_occurrence_to_the_microsecond(
    store: FenceStore, lease: HeldLease, occurrence: Occurrence
) -> None:
    """The planned time is part of what a task writes."""
    standing = store.look(ticket(lease, occurrence.run_id))
    assert standing.occurrence == occurrence
    assert (standing.current, standing.epoch, standing.fenced) == (True, 1, True)
    assert (standing.outcome, standing.settled_under) == (None, None)


def test_looking_for_an_unknown_lease_is_an_error(store: FenceStore, lease: HeldLease) -> None:
    """No row to compare with: nothing may pass."""
    with pytest.raises(MissingFence, match="beat_lease_url"):
        store.look(replace(ticket(lease, "x"), lease="another"))


def test_the_same_epoch_of_another_term_is_not_current(
    store: FenceStore, lease: HeldLease
) -> None:
    """A lossy failover can hand one epoch out twice."""
    twin = replace(ticket(lease, "x"), term=str(uuid.uuid4()))
    assert not store.look(twin).current
    with pytest.raises(StaleEpoch, match="granted twice"):
        store.settle(twin, "committed")


def test_settling_again_is_the_same_for_this_execution_and_not_for_another(
    store: FenceStore, lease: HeldLease
) -> None:
    """So a settlement whose answer was lost may be sent again."""
    mine = ticket(lease, "x")
    assert store.settle(mine, "committed") == "committed"
    assert store.settle(mine, "failed") == "committed"
    with pytest.raises(AlreadySettled) as caught:
        store.settle(ticket(lease, "x"), "failed")
    assert caught.value.outcome == "committed"


def test_a_settled_childs_run_says_under_what_it_was_settled(
    store: FenceStore, lease: HeldLease, occurrence: Occurrence
) -> None:
    """A child asks whether its run is over."""
    store.settle(ticket(lease, occurrence.run_id), "committed")
    standing = store.look(ticket(lease, "child", run=occurrence.run_id))
    assert standing.settled_under == (1, lease.term.uuid)
    assert standing.outcome is None


def test_a_takeover_before_its_fence_is_raised_leaves_nobody_current(
    store: FenceStore, lease: HeldLease
) -> None:
    """Between acquire and raising the fence the old epoch is over and the new one not begun."""
    lease._store.release(lease.term)
    lease._store.acquire("celery", Holder.current(), 60.0, str(uuid.uuid4()))
    standing = store.look(ticket(lease, "x"))
    assert (standing.current, standing.epoch, standing.fence) == (False, 2, None)


def test_a_refused_run_is_marked_once(
    store: FenceStore, lease: HeldLease, occurrence: Occurrence
) -> None:
    """Still open: the leader has to dispatch it again. No other run is touched."""
    other = replace(occurrence, entry="hourly")
    lease.record(other)
    stale = ticket(lease, occurrence.run_id)
    new = lease.depose()
    assert store.refuse(stale)
    assert not store.refuse(stale)
    assert new.run_state(occurrence.run_id) == "refused"
    assert new.run_state(other.run_id) == "published"
    with new._store.engine.connect() as connection:
        assert connection.scalars(sa.select(run_table.c.open)).all() == [True, True]


def test_a_run_that_was_claimed_again_is_not_marked_by_its_old_attempt(
    store: FenceStore, lease: HeldLease, occurrence: Occurrence
) -> None:
    """It waits under another epoch and term."""
    stale = ticket(lease, occurrence.run_id)
    new = lease.depose()
    for changed in ({"epoch": 2}, {"epoch": 1, "term": new.term.uuid}):
        with new._store.engine.begin() as connection:
            connection.execute(sa.update(run_table).values(changed))
        assert not store.refuse(stale)
    assert new.run_state(occurrence.run_id) == "published"


def test_a_settled_run_is_not_marked(
    store: FenceStore, lease: HeldLease, occurrence: Occurrence
) -> None:
    """It was settled between a stale attempt's look and its mark."""
    store.settle(ticket(lease, occurrence.run_id), "committed")
    assert not store.refuse(ticket(lease, occurrence.run_id))
    assert lease.run_state(occurrence.run_id) == "published"


def test_a_dead_connection_is_replaced_without_a_ping(
    store: FenceStore, lease: HeldLease, database_url: str
) -> None:
    """Instead of a round trip ahead of each statement, each is tried twice."""
    if database_url.startswith("sqlite"):
        pytest.skip("a file has no sessions to end")
    store.look(ticket(lease, "x"))
    with store.engine.connect() as connection:
        number = connection.scalar(
            sa.text(
                "SELECT pg_backend_pid()"
                if database_url.startswith("postgresql")
                else "SELECT connection_id()"
            )
        )
    with lease._store.engine.connect() as connection:
        connection.execute(
            sa.text(
                f"SELECT pg_terminate_backend({number})"
                if database_url.startswith("postgresql")
                else f"KILL {number}"
            )
        )
    assert store.look(ticket(lease, "x")).current
    assert store.settle(ticket(lease, "x"), "committed") == "committed"


@pytest.mark.postgresql
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_a_connection_whose_question_was_interrupted_is_not_asked_again(
    store: FenceStore, lease: HeldLease
) -> None:
    """A soft time limit is raised wherever the task is: its answer is still on its way.

    On PostgreSQL, where a reader can be made to wait.
    """

    class SoftTimeLimit(Exception):
        """What the signal's handler raises."""

    def ring(*_: object) -> NoReturn:
        raise SoftTimeLimit

    store.look(ticket(lease, "x"))
    dropped: list[object] = []
    sa.event.listen(store.engine, "invalidate", lambda dbapi, *_: dropped.append(dbapi))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with lease._store.engine.begin() as connection:
            connection.execute(sa.text("LOCK TABLE celery_lease_fence"))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(SoftTimeLimit):
                store.look(ticket(lease, "x"))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(dropped) == 1
    assert store.look(ticket(lease, "y")).current


def test_each_process_has_an_engine_of_its_own(
    store: FenceStore, lease: HeldLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that two processes share mixes their answers up."""
    before = store.engine
    assert store.engine is before
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert store.engine is not before
    store.dispose()
    monkeypatch.undo()
