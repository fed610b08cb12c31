"""A pooler in transaction mode between us and PostgreSQL: what works, and what has to be set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from celery import Celery
from click.testing import CliRunner

from celery_lease.cli import lease
from celery_lease.errors import StaleEpoch, StoreContention
from celery_lease.guards.sqlalchemy import Guard, guarded
from celery_lease.stores.base import Raised, Renewal
from celery_lease.stores.fences import FenceStore
from celery_lease.stores.leases import SQLLeaseStore
from tests.leases import NAME, expire, grant, lock_fence, opened, ticket
from tests.races import race
from tests.services.pgbouncer import PgBouncer

pytestmark = pytest.mark.postgresql

#: What psycopg needs: a prepared statement belongs to a session that is another's by then.
OPTIONS = {"connect_args": {"prepare_threshold": None}}


@pytest.fixture
def pooled_url(postgresql_url) -> Iterator[str]:
    """The database by way of a pooler."""
    with PgBouncer(postgresql_url) as pooler:
        yield pooler.url()


@pytest.fixture
def store(pooled_url) -> Iterator[SQLLeaseStore]:
    """A lease store behind the pooler, its tables made through it."""
    made = SQLLeaseStore(pooled_url, OPTIONS)
    made.prepare(create=True)
    made.ensure(NAME)
    yield made
    made.dispose()


def test_all_verbs_work_through_the_pooler(store):
    """Each is one statement, or one transaction: nothing needs a session of its own."""
    for number in range(1, 20):
        term = grant(store)
        assert term.epoch == number
        assert store.raise_fence(term) is Raised.RAISED
        assert store.renew(term, 30) is Renewal.RENEWED
        assert store.release(term)
    assert store.raise_epoch(NAME, 100).epoch == 100


def test_the_race_has_one_winner_through_the_pooler(pooled_url, store):
    """The database decides, whoever carries the statement there."""
    found = race(pooled_url, processes=4, rounds=3)

    assert (found["winners"], found["epochs_gained"]) == (3, 3)


def test_the_guard_refuses_and_passes_through_the_pooler(pooled_url, store):
    """Its lock and its idle limit are the transaction's, so they go where it goes."""
    fences, engine = FenceStore(pooled_url, OPTIONS), sa.create_engine(pooled_url, **OPTIONS)
    old = grant(store)
    store.raise_fence(old)
    for task in "abcdefgh":
        with guarded(engine, Guard(ticket(old, task), fences, final=True)):
            pass
    expire(store)
    store.raise_fence(grant(store))
    stale = Guard(ticket(old, "stale"), fences, final=True)
    with pytest.raises(StaleEpoch), guarded(engine, stale):
        pass
    fences.dispose()
    engine.dispose()


def test_waits_are_limited_where_the_role_says_so(postgresql_url, pooled_url, store):
    """Limits of a session are not ours to keep here; a role's hold in every session."""
    with opened(postgresql_url) as direct:
        database = sa.make_url(postgresql_url).database
        with direct.engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER DATABASE {database} SET lock_timeout = '300ms'")
    term = grant(store)
    with (
        PgBouncer(postgresql_url) as fresh,
        opened(postgresql_url) as worker,
        worker.engine.begin() as connection,
    ):
        lock_fence(connection)
        behind = SQLLeaseStore(fresh.url(), OPTIONS)
        with pytest.raises(StoreContention):
            behind.raise_fence(term)
        behind.dispose()


@pytest.mark.parametrize("oldest_first", [True, False])
def test_the_check_notices_the_pooler_and_says_what_to_set(postgresql_url, oldest_first):
    """It is no failure: a lease is safe there. But limits have to be set elsewhere."""
    with PgBouncer(postgresql_url, oldest_first=oldest_first) as pooler:
        app = Celery("tests", set_as_current=False)
        app.conf.update(beat_lease_url=pooler.url(), beat_lease_engine_options=OPTIONS)
        done = CliRunner().invoke(
            lease, ["check", "--rounds", "2", "--json"], obj=SimpleNamespace(app=app)
        )

    found = {each["check"]: each for each in json.loads(done.stdout)["checks"]}
    pooler = found["no pooler in transaction mode"]
    assert done.exit_code == 0
    assert pooler["status"] == "warning"
    assert "prepare_threshold = None" in pooler["detail"]
