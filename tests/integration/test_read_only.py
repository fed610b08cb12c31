"""A database that is read-only for a while: who asks again later must get another answer."""

from __future__ import annotations

import pytest

from celery_lease.errors import NotWritable
from celery_lease.stores.fences import FenceStore
from tests.leases import grant, opened, read_only_sessions, ticket

pytestmark = pytest.mark.postgresql


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
