"""The fence on Django transactions, on the connection that Django itself uses.

The guard is the last statement of the outermost ``atomic`` block. Lease tables and
guarded data live in the same database.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import DatabaseError, Error, connections, transaction
from sqlalchemy import Dialect, Engine
from sqlalchemy.dialects.mysql import pymysql
from sqlalchemy.dialects.postgresql import psycopg
from sqlalchemy.dialects.sqlite import pysqlite

from celery_lease.errors import (
    FencingError,
    StoreContention,
    StoreError,
    UnsafeTransaction,
)
from celery_lease.settings import positive_duration
from celery_lease.stores.dialects import Direct, database_of
from celery_lease.stores.fences import (
    FenceStore,
    Ticket,
    objection,
    passes,
    refusal,
)

__all__ = ["guarded"]

#: Django's vendors, with parameters the way its cursors want them.
_DIALECTS: dict[str, Dialect] = {
    "postgresql": psycopg.dialect(paramstyle="format"),  # type: ignore[no-untyped-call]
    "mysql": pymysql.dialect(paramstyle="format"),
    "sqlite": pysqlite.dialect(paramstyle="format"),
}


class _Connection(Direct):
    """Django's connection, as the guard sees it."""

    def __init__(self, connection: Any, schemas_of: Engine) -> None:
        # No engine, and no pool: what was set on it is given back by :func:`guarded`.
        super().__init__(_DIALECTS[connection.vendor], None, schemas_of)
        self.info = {}
        self._connection = connection

    @property
    def dbapi_connection(self) -> Any:
        return self._connection.connection

    def _cursor(self) -> Any:
        return self._connection.cursor()

    def translated(self) -> Any:
        return self._connection.wrap_database_errors


@contextmanager
def guarded(
    using: str,
    ticket: Ticket,
    store: FenceStore,
    committed: Callable[[], None],
    *,
    final: bool,
    idle: float | None,
) -> Iterator[Any]:
    """Yield Django's connection in a transaction whose last statement is the guard.

    Args:
        using: Alias of the database.
        ticket: What is shown at the fence.
        store: The lease database, for what has to be asked afresh.
        committed: Called once the transaction is committed, before the user's hooks.
        final: Whether passing settles the ticket's task, or is only a check.
        idle: Seconds of silence after which the server ends the transaction, from
            its start on; None for the guard's last round trip only.

    Raises:
        UnsafeTransaction: The guard could not be the last word.
        FencingError: Refused; nothing was written.
        ConfigurationError: *idle* is no number of seconds above 0.
    """
    connection = connections[using]
    if connection.in_atomic_block or not connection.get_autocommit():
        raise UnsafeTransaction(
            f"the connection {using!r} is in a transaction that was begun before",
            name=ticket.lease,
        )
    if connection.vendor not in _DIALECTS:
        raise UnsafeTransaction(
            f"the connection {using!r} is one to {connection.display_name}, where no lease can "
            f"be kept: guard a connection to the lease database",
            name=ticket.lease,
        )
    seen = _Connection(connection, store.engine)
    dbapi: Any = None
    database = database_of(seen.dialect)
    passed = answered = False
    hooks: list[Any] = []

    def answer() -> None:
        nonlocal answered
        answered = True
        committed()

    try:
        with transaction.atomic(using=using, durable=True):
            dbapi = seen.dbapi_connection  # Django may have made it anew just now.
            # The first of its hooks: an error of a later one is no answer to COMMIT.
            transaction.on_commit(answer, using=using)
            if idle is not None:
                seconds = positive_duration("idle", idle)
                database.limit_idle(seen, seconds)
            yield connection
            hooks = connection.run_on_commit
            # Where the COMMIT comes with it, an error may be one of the answer.
            passed = database.brings_commit(seen)
            _guard(seen, ticket, store, final=final, commit=passed)
            passed = True
    except DatabaseError as error:
        # Its COMMIT was sent, and the answer was an error: the ledger knows.
        if answered or not (passed and final and _is_committed(ticket, store, error)):
            raise
        # Django has dropped the hooks, as after a rollback.
        connection.run_on_commit = hooks
        connection.run_and_clear_commit_hooks()
    finally:
        # Where that one broke, Django may have made another by now, on which nothing was set.
        if dbapi is not None and connection.connection is dbapi:
            _give_back(connection, seen)


def _give_back(connection: Any, seen: _Connection) -> None:
    """Undo the idle limit. A connection that breaks at it is no error of the block's."""
    try:
        with connection.wrap_database_errors:
            database_of(seen.dialect).give_back(connection.connection, seen.info)
    except Error:
        connection.close()


def _guard(
    seen: _Connection, ticket: Ticket, store: FenceStore, *, final: bool, commit: bool
) -> None:
    """Run the guard's statement; what it raises rolls the block back."""
    try:
        passed = passes(seen, ticket, final=final, idle=store.idle, commit=commit)
    except DatabaseError as error:
        reason = _reason(seen, ticket, store, error)
        if reason is error:
            raise
        raise reason from error
    if not passed:
        raise _reason(seen, ticket, store, None)


def _reason(
    seen: _Connection, ticket: Ticket, store: FenceStore, error: DatabaseError | None
) -> BaseException:
    """Return why the guard did not pass: neither no row nor a conflict is an answer."""
    driver = None if error is None else error.__cause__
    if driver is not None:
        shown = f"Django's database {seen.dialect.name}"
        told = objection(ticket, store, database_of(seen.dialect), driver, shown=shown)
        if told is not None:
            return told
    try:
        found = refusal(ticket, store.look(ticket))
    except (StoreError, FencingError) as problem:
        return error or problem
    return (
        found or error or StoreContention(f"the fence of {ticket.lease!r} was moving; try again")
    )


def _is_committed(ticket: Ticket, store: FenceStore, error: DatabaseError) -> bool:
    try:
        standing = store.look(ticket)
    except (StoreError, FencingError):
        return False
    refused = refusal(ticket, standing)
    if refused is not None:
        raise refused from error
    return standing.execution == ticket.execution
