"""An SQLite file that is deleted or replaced while processes have it open."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from celery_lease.errors import MissingFence, SchemaMismatch
from celery_lease.stores.base import Renewal
from celery_lease.stores.fences import FenceStore
from tests.leases import grant, opened, ticket


def remove(url: str) -> None:
    """Delete the file, and what belongs to it."""
    path = Path(sa.make_url(url).database or "")
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()


def test_a_leader_whose_file_was_deleted_leads_no_more(sqlite_url):
    """It would go on in a file that nobody else can open, and the next beat lead as well."""
    with opened(sqlite_url) as store:
        term = grant(store)
        remove(sqlite_url)
        with pytest.raises(SchemaMismatch):
            store.renew(term, 30.0)


def test_a_leader_whose_file_was_replaced_meets_whoever_leads_there(sqlite_url):
    """One file, one leader: the terms of both are compared in the new one."""
    with opened(sqlite_url) as store:
        old = grant(store, "a")
        remove(sqlite_url)
        with opened(sqlite_url) as other:
            new = grant(other, "b")
            assert store.renew(old, 30.0) is Renewal.CONFLICT
            assert other.renew(new, 30.0) is Renewal.RENEWED


def test_a_worker_whose_file_was_deleted_finds_no_fence(sqlite_url):
    """What it knows of the fence is not what the next leader raises."""
    fences = FenceStore(sqlite_url)
    with opened(sqlite_url) as store:
        term = grant(store)
        store.raise_fence(term)
        task = ticket(term, "a")
        assert fences.look(task).current
        remove(sqlite_url)
        with pytest.raises(MissingFence):
            fences.look(task)
    fences.dispose()
