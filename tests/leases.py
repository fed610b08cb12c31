"""What tests do to a lease that no user may: let its time pass, put its epochs back."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from celery_lease.lease import Holder, Lease, Term
from celery_lease.stores.dialects import from_now
from celery_lease.stores.fences import Ticket
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.schema import fence_table, lease_table
from tests.services import PostgreSQL

#: The lease of most tests.
NAME = "celery"


@contextmanager
def opened(url: str, *, name: str = NAME, **waits: float) -> Iterator[SQLLeaseStore]:
    """A store whose tables and rows are there."""
    store = SQLLeaseStore(url, **waits)
    try:
        store.prepare(create=True)
        store.ensure(name)
        yield store
    finally:
        store.dispose()


@contextmanager
def read_only_sessions(postgresql: PostgreSQL, url: str) -> Iterator[None]:
    """Have sessions that begin in here stay read-only, as a provider does to a full disk."""
    database = sa.make_url(url).database
    postgresql.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    try:
        yield
    finally:
        postgresql.execute(f"ALTER DATABASE {database} RESET default_transaction_read_only")


def own_schema(url: str, name: str = "own") -> dict[str, Any]:
    """Make a schema in a PostgreSQL database; return the options that have the tables there."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql(f'CREATE SCHEMA "{name}"')
    engine.dispose()
    return {"execution_options": {"schema_translate_map": {None: name}}}


def holder(nonce: str = "0") -> Holder:
    """A process that may lead."""
    return Holder(host="host", pid=1, nonce=nonce, info={"host": "host"})


def take(
    store: SQLLeaseStore, who: str = "a", *, ttl: float = 30.0, name: str = NAME
) -> Term | Lease:
    """Ask for the lease."""
    return store.acquire(name, holder(who), ttl, str(uuid.uuid4()))


def grant(store: SQLLeaseStore, who: str = "a", *, ttl: float = 30.0, name: str = NAME) -> Term:
    """Take the lease, which must be free or expired."""
    answer = take(store, who, ttl=ttl, name=name)
    assert isinstance(answer, Term), f"not granted: {answer}"
    return answer


def expire(store: SQLLeaseStore, name: str = NAME) -> None:
    """Let the lease's time pass, by the database clock."""
    with store.engine.begin() as connection:
        connection.execute(
            sa.update(lease_table)
            .where(lease_table.c.name == name)
            .values(expires_at=from_now(-0.001))
        )


def put_back(store: SQLLeaseStore, epoch: int, term: str | None = None) -> None:
    """Put the lease row back to an older epoch, free, as a restored backup does."""
    with store.engine.begin() as connection:
        connection.execute(
            sa.update(lease_table)
            .where(lease_table.c.name == NAME)
            .values(epoch=epoch, term=term, holder=None)
        )


def ticket(term: Term, task: str) -> Ticket:
    """What a task of this term shows."""
    return Ticket(
        lease=term.name, epoch=term.epoch, term=term.uuid, task_id=task, run=task,
        execution=str(uuid.uuid4()),
    )  # fmt: skip


def lock_fence(connection: sa.Connection, name: str = NAME) -> None:
    """Lock the fence row as a guard does, where the database locks rows."""
    connection.execute(
        sa.select(fence_table.c.epoch).where(fence_table.c.name == name).with_for_update(read=True)
    )
