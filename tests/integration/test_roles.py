"""The grants that ``celery lease init --sql … --grants`` prints: enough, and no more than that."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

import pytest
import sqlalchemy as sa

from celery_lease import canary
from celery_lease.errors import NotWritable, StaleEpoch, UnsafeTransaction
from celery_lease.guards.sqlalchemy import Guard, guarded
from celery_lease.occurrence import Run, run_id
from celery_lease.stores import ddl
from celery_lease.stores.base import Raised, Renewal
from celery_lease.stores.dialects import translated
from celery_lease.stores.entries import EntryState, SQLEntries
from celery_lease.stores.fences import FenceStore
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.ledger import SQLLedger, pending
from celery_lease.stores.retention import prune
from celery_lease.stores.schema import metadata
from tests.leases import NAME, expire, grant, opened, ticket

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


@dataclass
class Roles:
    """One database, as three roles see it."""

    owner: str
    beat: str
    worker: str


@pytest.fixture(
    params=[
        pytest.param("postgresql", marks=pytest.mark.postgresql),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
    ]
)
def roles(request) -> Iterator[Roles]:
    """A database whose tables an administrator made, with the documented grants."""
    service = request.getfixturevalue(request.param)
    owner = request.getfixturevalue(f"{request.param}_url")
    suffix = uuid.uuid4().hex[:8]
    names = {each: f"{each}_{suffix}" for each in ("beat", "worker")}
    with opened(owner) as store:
        for name in names.values():
            service.execute(
                f"CREATE ROLE {name} LOGIN"
                if request.param == "postgresql"
                else f"CREATE USER {name}"
            )
        with store.engine.begin() as connection:
            # MariaDB's accounts are those of a host.
            accounts = {
                each: name if request.param == "postgresql" else f"{name}@%"
                for each, name in names.items()
            }
            for statement in ddl.grants(request.param, **accounts):
                connection.exec_driver_sql(statement, None, {"no_parameters": True})
        yield Roles(
            owner,
            *(
                sa.make_url(owner).set(username=names[each]).render_as_string(hide_password=False)
                for each in ("beat", "worker")
            ),
        )
        if request.param == "postgresql":
            with store.engine.begin() as connection:
                for name in names.values():
                    connection.exec_driver_sql(f"DROP OWNED BY {name}")
        for name in names.values():
            service.execute(
                f"DROP ROLE {name}" if request.param == "postgresql" else f"DROP USER {name}"
            )


@contextlib.contextmanager
def beat(roles: Roles) -> Iterator[SQLLeaseStore]:
    """The lease database as a beat's role sees it."""
    store = SQLLeaseStore(roles.beat)
    try:
        yield store
    finally:
        store.dispose()


@contextlib.contextmanager
def workers_own(roles: Roles) -> Iterator[sa.Engine]:
    """The engine of a worker's own transactions, under the worker's role."""
    engine = sa.create_engine(roles.worker)
    try:
        yield engine
    finally:
        engine.dispose()


@contextlib.contextmanager
def worker(roles: Roles) -> Iterator[FenceStore]:
    """The lease database as a worker's role sees it."""
    fences = FenceStore(roles.worker)
    try:
        yield fences
    finally:
        fences.dispose()


def test_a_beat_can_do_all_that_a_lease_asks_of_it(roles):
    """One right too few, and a takeover fails in the night in which it is needed."""
    with beat(roles) as store:
        store.prepare(create=True)
        store.ensure("another")
        first = grant(store)
        assert store.raise_fence(first) is Raised.RAISED
        assert store.renew(first, 30) is Renewal.RENEWED
        assert store.floor(first) < first.epoch
        assert store.jump(first, 7).epoch == 8
        expire(store)
        second = grant(store)
        store.end_by_conflict(second)
        assert store.release(second)
        assert store.raise_epoch(NAME, 50).epoch == 50
        assert len(store.history(NAME, 10)) == 2


def test_a_beat_can_do_all_that_the_ledger_asks_of_it(roles):
    """The same, for what is dispatched under the lease."""
    with beat(roles) as store:
        term = grant(store)
        store.raise_fence(term)
        ledger, entries = SQLLedger(store.engine, idle=5.0), SQLEntries(store.engine, idle=5.0)
        runs = [
            Run(id=run_id(NAME, "e", due), entry="e", due_at=due, fenced=True)
            for due in (NOW, NOW + timedelta(hours=1))
        ]
        state = EntryState(name="e", first_seen_at=NOW, last_run_at=NOW, total_run_count=1)
        assert ledger.claim(term, runs, moved=[state]) == set()
        assert ledger.mark(term, [runs[0].id]) == 1
        assert [each.id for each in ledger.to_recover(term, limit=9, own=True)] == [runs[1].id]
        assert ledger.reclaim(term, ledger.to_recover(term, limit=9, own=True))
        assert len(list(entries.load(NAME))) == 1
        prune(store.engine, NAME, retention=0.0, limit=10)


@pytest.mark.parametrize("table", ["celery_lease", "celery_lease_fence"])
def test_a_beat_cannot_delete_what_keeps_the_epoch(roles, table):
    """A row that is gone starts again at epoch 1."""
    with beat(roles) as store, pytest.raises(NotWritable):
        _execute(store.engine, f"DELETE FROM {table}")


def test_a_worker_can_do_all_that_the_guard_asks_of_it(roles):
    """Admission, the guard of its own transaction, settling and refusing."""
    with opened(roles.owner) as store, worker(roles) as fences, workers_own(roles) as engine:
        term = grant(store)
        store.raise_fence(term)
        assert fences.look(ticket(term, "a")).current
        assert fences.settle(ticket(term, "a"), "committed") == "committed"
        for final in (True, False):
            with guarded(engine, Guard(ticket(term, "b"), fences, final=final)):
                pass
        run = Run(id="c", entry="e", due_at=NOW, fenced=True)
        SQLLedger(store.engine, idle=5.0).claim(term, [run])
        assert fences.refuse(ticket(term, "c"))


def test_a_worker_is_refused_as_stale_and_not_for_its_rights(roles):
    """An error about privileges would be retried, or hide what happened."""
    with opened(roles.owner) as store, worker(roles) as fences, workers_own(roles) as engine:
        old = grant(store)
        store.raise_fence(old)
        expire(store)
        store.raise_fence(grant(store))
        guard = Guard(ticket(old, "a"), fences, final=True)
        with pytest.raises(StaleEpoch), guarded(engine, guard):
            pass


def test_a_guard_that_lacks_a_privilege_says_so_for_good(roles):
    """Tried later, its task would run again and again, each minute, for one forgotten grant."""
    with opened(roles.owner) as store, worker(roles) as fences:
        store.raise_fence(term := grant(store))
        name = sa.make_url(roles.worker).username
        with store.engine.begin() as connection:
            connection.exec_driver_sql(f"REVOKE INSERT ON celery_lease_commit FROM {name}")
        guard = Guard(ticket(term, "a"), fences, final=True)
        with (
            workers_own(roles) as engine,
            pytest.raises(UnsafeTransaction, match="Grants"),
            guarded(engine, guard),
        ):
            pass


def test_a_transaction_that_the_user_made_read_only_says_so_for_good(server_url):
    """Others may write there: waiting does not help."""
    fences, engine = FenceStore(server_url), sa.create_engine(server_url)
    with opened(server_url) as store:
        store.raise_fence(term := grant(store))
        guard = Guard(ticket(term, "a"), fences, final=True)
        with engine.connect() as connection:
            connection.exec_driver_sql(
                "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"
                if engine.dialect.name == "postgresql"
                else "SET SESSION TRANSACTION READ ONLY"
            )
            connection.commit()
            with pytest.raises(UnsafeTransaction, match="read-only"), guarded(connection, guard):
                connection.execute(sa.text("SELECT 1"))
            connection.invalidate()
    engine.dispose()
    fences.dispose()


def test_a_worker_can_see_who_leads_and_who_led(roles):
    """On a worker's host there is often no other role at hand."""
    with opened(roles.owner) as store:
        grant(store)
    store = SQLLeaseStore(roles.worker)
    try:
        store.prepare(create=False, write=False)
        assert [each.epoch for each in store.read_all()] == [1]
        assert [each.epoch for each in store.history(NAME, 10)] == [1]
        assert pending(store.engine, NAME) == (0, None)
    finally:
        store.dispose()


FORBIDDEN = {
    "take the lease": "UPDATE celery_lease SET holder = 'me', term = 't'",
    "raise the lease's epoch": "UPDATE celery_lease SET epoch = epoch + 1",
    "lower the lease's epoch": "UPDATE celery_lease SET epoch = 0",
    "extend the lease": "UPDATE celery_lease SET expires_at = '2099-01-01'",
    "make a lease": "INSERT INTO celery_lease (name, epoch) VALUES ('x', 9)",
    "delete the lease": "DELETE FROM celery_lease",
    "raise the fence": "UPDATE celery_lease_fence SET epoch = epoch + 1",
    "lower the fence": "UPDATE celery_lease_fence SET epoch = 0",
    "change the fence's term": "UPDATE celery_lease_fence SET term = 'mine'",
    "delete the fence": "DELETE FROM celery_lease_fence",
    "rewrite history": "DELETE FROM celery_lease_term",
    "take a settled task back": "DELETE FROM celery_lease_commit",
    "change an outcome": "UPDATE celery_lease_commit SET outcome = 'failed'",
    "move a run to another epoch": "UPDATE celery_lease_run SET epoch = 0",
    "make a run": "INSERT INTO celery_lease_run (id) VALUES ('x')",
    "move an entry on": "UPDATE celery_lease_entry SET last_run_at = NULL",
    "drop a table": "DROP TABLE celery_lease_commit",
}


@pytest.mark.parametrize("statement", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_worker_cannot(roles, statement):
    """What a task's code may do to the lease must not depend on what it means to do."""
    with opened(roles.owner) as store, worker(roles) as fences:
        store.raise_fence(grant(store))
        with pytest.raises(NotWritable):
            _execute(fences.engine, statement)


def _execute(engine: sa.Engine, statement: str) -> None:
    with translated(engine), engine.begin() as connection:
        connection.exec_driver_sql(statement)


def test_a_check_under_a_beats_role_leaves_nothing_that_looks_like_a_lease(roles):
    """It may not delete leases; one that nobody holds any more is what people watch for."""
    findings = canary.run(roles.beat, {}, rounds=1, create=False)

    assert canary.Status.FAILED not in {each.status for each in findings}
    with opened(roles.owner) as store:
        assert [each.name for each in store.read_all()] == [NAME]
        with store.engine.connect() as connection:
            for table in metadata.sorted_tables:
                count = connection.scalar(sa.select(sa.func.count()).select_from(table))
                kept = {"celery_lease": 2, "celery_lease_fence": 2, "celery_lease_schema": 1}
                assert count == kept.get(table.name, 0), table.name
