"""A database that is read-only for a while: who asks again later must get another answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa

from celery_lease.errors import NotWritable
from celery_lease.stores.fences import FenceStore
from tests.leases import grant, opened, ticket
from tests.services import PostgreSQL

pytestmark = pytest.mark.postgresql


@contextmanager
def read_only_sessions(postgresql: PostgreSQL, url: str) -> Iterator[None]:
    """Have sessions that begin in here stay read-only, as a provider does to a full disk."""
    database = sa.make_url(url).database
    postgresql.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    try:
        yield
    finally:
        postgresql.execute(f"ALTER DATABASE {database} RESET default_transaction_read_only")


def test_a_beat_leads_again_when_the_database_takes_writes_again(postgresql, postgresql_url):
    """The session that said "read-only" will say so for ever: without a new one no beat leads."""
    with opened(postgresql_url) as store:
        store.dispose()
        with read_only_sessions(postgresql, postgresql_url), pytest.raises(NotWritable):
            grant(store)
        assert grant(store).epoch == 1


def test_a_beat_that_was_refused_at_its_start_starts_later(postgresql, postgresql_url):
    """Looking whether a server takes writes is a question too, and must not pin the answer."""
    with opened(postgresql_url) as store:
        store.dispose()
        with read_only_sessions(postgresql, postgresql_url), pytest.raises(NotWritable):
            store.prepare(create=True)
        store.prepare(create=True)


def test_a_worker_settles_again_when_the_database_takes_writes_again(postgresql, postgresql_url):
    """A worker keeps its sessions for as long as it lives."""
    fences = FenceStore(postgresql_url)
    with opened(postgresql_url) as store:
        term = grant(store)
        store.raise_fence(term)
        task = ticket(term, "a")
        with read_only_sessions(postgresql, postgresql_url), pytest.raises(NotWritable):
            fences.settle(task, "committed")
        assert fences.settle(task, "committed") == "committed"
    fences.dispose()
