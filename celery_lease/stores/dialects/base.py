"""What every database has to do its own way, and the guard's statement where two share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import sqlalchemy as sa

from celery_lease.errors import StoreError
from celery_lease.stores.dialects.clock import utcnow
from celery_lease.stores.dialects.direct import Direct
from celery_lease.stores.schema import commit_table, fence_table, lease_table

__all__ = [
    "BOTH",
    "COMMIT_COLUMNS",
    "Database",
    "OnConflict",
    "Weakness",
    "commit_row",
    "is_current",
]


class Weakness(NamedTuple):
    """Something about a server that can cost acknowledged epochs."""

    #: Whether it is certain to, at the first crash.
    certain: bool
    #: What it is, in words.
    text: str


class Database:
    """What one kind of database does its own way. The base is what they share."""

    #: Whether an UPDATE and the INSERT that depends on it can be one statement.
    one_statement_acquire = False
    #: The drivers, in SQLAlchemy's words, whose waits for a silent server are given an end
    #: below; none where there is no server.
    drivers: ClassVar[tuple[str, ...]] = ()

    def engine_arguments(self, lock_wait: float, statement_wait: float) -> dict[str, Any]:
        """Return arguments for ``create_engine`` that keep waits below the ttl.

        Args:
            lock_wait: Seconds that a statement waits for a lock.
            statement_wait: Seconds that a statement may take, where the database can tell.
        """
        return {}

    def connected(self, dbapi: Any, lock_wait: float, statement_wait: float) -> None:
        """Set up a new connection of our own."""

    def watch(self, engine: sa.Engine) -> None:
        """Have an engine of our own notice where its connections lead nowhere any more."""

    def begin(self, connection: sa.Connection) -> None:
        """Begin a transaction of our own."""

    def insert_ignore(self, table: sa.Table) -> Any:
        """Return an INSERT that does nothing where the key is there already."""
        raise NotImplementedError

    def insert_or_update(self, table: sa.Table, columns: Sequence[str]) -> Any:
        """Return an INSERT that updates *columns* where the key is there already."""
        raise NotImplementedError

    @contextmanager
    def schema_lock(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        """Yield a transaction in which no other process makes the tables."""
        raise NotImplementedError

    def read_only(self, connection: sa.Connection) -> str | None:
        """Return why nobody should lead on this server; None if it takes writes."""
        return None

    def weaknesses(self, connection: sa.Connection) -> list[Weakness]:
        """Return what about this server can lose an epoch that it acknowledged."""
        return []

    def session_id(self, connection: sa.Connection) -> int | None:
        """Return the number of the server's session behind a connection, where it has one."""
        return None

    def classify(self, orig: BaseException) -> type[StoreError] | None:
        """Return the kind of a driver's error; None if it is none of ours."""
        return None

    def is_outdated(self, orig: BaseException) -> bool:
        """Return whether what a connection remembers of the tables makes it useless."""
        return False

    def is_forbidden(self, orig: BaseException) -> bool:
        """Return whether a driver's error is about privileges, which waiting does not mend."""
        return False

    def is_of_commit(self, orig: BaseException) -> bool:
        """Return whether a driver's error is of the COMMIT that a guard brought along.

        What is deferred to the COMMIT, constraint triggers say, is run by it.
        """
        return False

    # --- the guard ----------------------------------------------------------------------

    def settle(self, connection: Direct, *, idle: float, **values: Any) -> bool:
        """Record an outcome if (lease, epoch, term) is current, locking the fence shared.

        This is the guard: one statement, the last of its transaction. A takeover
        waits until the transaction ends, the server ends it after *idle* seconds
        of silence where it can.

        Args:
            connection: In the transaction that is about to commit.
            idle: Seconds.
            values: task_id, lease, epoch, term, execution, outcome.

        Returns:
            False for stale. A duplicate raises IntegrityError.
        """
        raise NotImplementedError

    def check(self, connection: Direct, *, lease: str, epoch: int, term: str, idle: float) -> bool:
        """Return whether (lease, epoch, term) is current, locking as :meth:`settle` does."""
        raise NotImplementedError

    def brings_commit(self, connection: Direct) -> bool:
        """Return whether the guard can bring the COMMIT along, in one message.

        Nobody can be stopped between the two then, and a takeover waits for the server
        alone. Where it cannot, :meth:`settle` and :meth:`check` come before the COMMIT.
        """
        return False

    def settle_and_commit(self, connection: Direct, **values: Any) -> bool:
        """Do what :meth:`settle` does, and commit if it passes.

        Args:
            connection: In the transaction, of which nothing is left but this.
            values: As for :meth:`settle`.

        Returns:
            False for stale: nothing is committed. After an error that is not the server's
            own it may be.
        """
        raise NotImplementedError

    def check_and_commit(self, connection: Direct, *, lease: str, epoch: int, term: str) -> bool:
        """Do what :meth:`check` does, and commit if it passes, as :meth:`settle_and_commit`."""
        raise NotImplementedError

    def begin_guarded(self, connection: sa.Connection, statement: str) -> None:
        """Make sure that *statement* of a guarded transaction is in one: drivers may be late."""

    def limit_idle(self, connection: Direct, seconds: float) -> None:
        """Have the server end this transaction after so many seconds of silence."""

    def give_back(self, dbapi: Any, info: dict[Any, Any]) -> None:
        """Undo what :meth:`limit_idle` set for longer than its transaction.

        Args:
            dbapi: The driver's connection.
            info: Its ``Connection.info``.
        """

    def autocommits(self, dbapi: Any) -> bool:
        """Return whether each statement on a driver's connection commits by itself.

        Asked of the driver: the isolation level that a server reports does not tell.
        """
        asked = getattr(dbapi, "get_autocommit", None)
        return bool(asked() if asked is not None else getattr(dbapi, "autocommit", False))


class OnConflict(Database):
    """A database whose INSERT has an ON CONFLICT clause."""

    #: The dialect's own ``insert()``, which knows the clause.
    insert: ClassVar[Any]

    def insert_ignore(self, table: sa.Table) -> Any:
        """Use ON CONFLICT DO NOTHING."""
        return self.insert(table).on_conflict_do_nothing()

    def insert_or_update(self, table: sa.Table, columns: Sequence[str]) -> Any:
        """Use ON CONFLICT DO UPDATE."""
        statement = self.insert(table)
        return statement.on_conflict_do_update(
            index_elements=list(table.primary_key),
            set_={each: statement.excluded[each] for each in columns},
        )


#: The columns of a commit row, in the order of :func:`commit_row`.
COMMIT_COLUMNS = [each.name for each in commit_table.columns]

#: The lease row is read, not locked: once an acquire has committed, no guard of an
#: older epoch begins, so the takeover waits only for those in flight.
BOTH = lease_table.join(fence_table, lease_table.c.name == fence_table.c.name)


def commit_row(source: sa.FromClause, *tables: sa.Table) -> sa.Select[Any]:
    """Select the values of a commit row from *source* where *tables* show this term."""
    columns: list[sa.ColumnElement[Any]] = [
        utcnow() if each.name == "at" else sa.bindparam(each.name, type_=each.type)
        for each in commit_table.columns
    ]
    return sa.select(*columns).select_from(source).where(*is_current(*tables))


def is_current(*tables: sa.Table, prefix: str = "") -> list[sa.ColumnElement[bool]]:
    """Return the conditions that each of *tables* shows this (lease, epoch, term).

    Args:
        tables: Tables with a name, an epoch and a term.
        prefix: Put before the parameters' names: in an UPDATE they must not be columns'.
    """
    return [
        column == sa.bindparam(prefix + parameter, type_=column.type)
        for table in tables
        for column, parameter in (
            (table.c.name, "lease"),
            (table.c.epoch, "epoch"),
            (table.c.term, "term"),
        )
    ]
