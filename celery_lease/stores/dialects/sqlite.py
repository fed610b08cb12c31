"""SQLite: one writer a file, so its write lock is the guard.

The clock is the host's, in milliseconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.ext.compiler import compiles

from celery_lease.errors import (
    NotWritable,
    SchemaMismatch,
    StoreContention,
    StoreError,
    StoreUnavailable,
)
from celery_lease.stores.dialects.base import (
    BOTH,
    COMMIT_COLUMNS,
    OnConflict,
    Weakness,
    commit_row,
    is_current,
)
from celery_lease.stores.dialects.clock import from_now, seconds_until, utcnow
from celery_lease.stores.dialects.direct import Direct, within
from celery_lease.stores.schema import commit_table, fence_table, lease_table

__all__ = ["SQLite"]

_FORMAT = "'%Y-%m-%d %H:%M:%f000', 'now'"

#: What needs no transaction: it writes nothing, or must not be in one, or begins one.
_NO_BEGIN = re.compile(
    r"\s*(SELECT|EXPLAIN|PRAGMA|BEGIN|WITH\b(?!.*\b(INSERT|UPDATE|DELETE|REPLACE)))\b",
    re.IGNORECASE | re.DOTALL,
)

#: How long to wait for others who make the tables too, in seconds.
_PATIENCE = 60.0
#: How long to ask for WAL again where the answer is another mode, in seconds.
_INSISTENCE = 1.0


class SQLite(OnConflict):
    """SQLite 3.35 and later."""

    insert = staticmethod(sqlite.insert)
    _SETTLE = sa.insert(commit_table).from_select(
        COMMIT_COLUMNS, commit_row(BOTH, lease_table, fence_table)
    )
    # The statement must take the write lock, which a SELECT does not.
    _CHECK = (
        sa.update(fence_table)
        .values(lockable=fence_table.c.lockable)
        .where(
            *is_current(fence_table, prefix="of_"),
            sa.exists().where(*is_current(lease_table, prefix="of_")),
        )
    )

    def engine_arguments(self, lock_wait: float, statement_wait: float) -> dict[str, Any]:
        """Wait for the file's one writer."""
        return {"connect_args": {"timeout": lock_wait}}

    def connected(self, dbapi: Any, lock_wait: float, statement_wait: float) -> None:
        """Take BEGIN out of the driver's hands: it would not begin at a SELECT."""
        dbapi.isolation_level = None

    def watch(self, engine: sa.Engine) -> None:
        """Look, whenever a connection is taken, whether the file was deleted or replaced.

        Who has it open does not notice, and would go on to lead there, beside a beat that
        has opened the new one.
        """

        @sa.event.listens_for(engine, "checkout")
        def checked_out(dbapi: Any, record: Any, proxy: Any) -> None:
            if _FILE not in record.info:  # new
                record.info[_FILE] = _open_file(dbapi)
            elif not _is_still(*record.info[_FILE]):
                # What has the pool make a new one.
                raise sa.exc.DisconnectionError("the database's file was replaced")

    def begin(self, connection: sa.Connection) -> None:
        """Take the write lock at once; single statements run without a transaction."""
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    @contextmanager
    def schema_lock(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        """Switch the file to WAL, so that readers do not block its writer, then lock it."""
        with engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            before = connection.exec_driver_sql("PRAGMA busy_timeout").scalar()
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(_PATIENCE * 1000)}")
            try:
                _to_wal(connection)
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                try:
                    yield connection
                except BaseException:
                    connection.exec_driver_sql("ROLLBACK")
                    raise
                connection.exec_driver_sql("COMMIT")
            finally:
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {before}")

    def read_only(self, connection: sa.Connection) -> str | None:
        """Ask whether this file may be written: the file system has a say in it."""
        if connection.exec_driver_sql("PRAGMA query_only").scalar():
            return "the connection is read-only (PRAGMA query_only)"
        try:
            # Touches no row, but has to be allowed to; BEGIN IMMEDIATE would not tell.
            connection.execute(sa.update(fence_table).values(lockable=None).where(sa.false()))
        except sa.exc.OperationalError as error:
            if self.classify(error.orig or error) is not NotWritable:
                raise
            return "the file is read-only"
        return None

    def weaknesses(self, connection: sa.Connection) -> list[Weakness]:
        """Look at the journal, and whether commits wait for the disk."""
        found = []
        journal = str(connection.exec_driver_sql("PRAGMA journal_mode").scalar())
        if journal.lower() in ("off", "memory"):
            found.append(Weakness(True, f"journal_mode = {journal}: a crash can ruin the file"))
        if connection.exec_driver_sql("PRAGMA synchronous").scalar() == 0:
            found.append(Weakness(False, "synchronous = OFF: a power cut can lose commits"))
        return found

    def classify(self, orig: BaseException) -> type[StoreError] | None:
        """Go by the message: Python 3.10 gives no code."""
        text = str(orig).lower()
        if "locked" in text or "busy" in text:
            return StoreContention
        if "readonly" in text or "read-only" in text:
            return NotWritable
        if "no such table" in text or "no such column" in text or "has no column" in text:
            return SchemaMismatch
        if "unable to open" in text or "disk i/o" in text or "is full" in text:
            return StoreUnavailable
        return None

    def settle(self, connection: Direct, *, idle: float, **values: Any) -> bool:
        """Insert the commit row, which takes the write lock."""
        return connection.execute(self._SETTLE, values).rowcount == 1

    def check(self, connection: Direct, *, lease: str, epoch: int, term: str, idle: float) -> bool:
        """Take the write lock and look."""
        values = {"of_lease": lease, "of_epoch": epoch, "of_term": term}
        return connection.execute(self._CHECK, values).rowcount == 1

    def begin_guarded(self, connection: sa.Connection, statement: str) -> None:
        """Send the BEGIN that the driver sends before INSERT, UPDATE and DELETE only.

        Without it ``RELEASE SAVEPOINT`` is a commit, and so is each ``WITH … INSERT`` and
        each DDL statement. Not before a mere read: its snapshot would be held from there
        on, and a renewal of the lease in between would turn the first write away. The write
        lock comes with it, as a table that is there already makes a read of its CREATE.
        """
        dbapi: Any = connection.connection.dbapi_connection
        if not dbapi.in_transaction and _NO_BEGIN.match(statement) is None:
            within(connection).unseen("BEGIN IMMEDIATE")

    def autocommits(self, dbapi: Any) -> bool:
        """Look for an open transaction: isolation_level None may mean explicit BEGINs."""
        if dbapi.in_transaction:
            return False
        return dbapi.isolation_level is None or getattr(dbapi, "autocommit", None) is True


#: Key of ``Connection.info``: the path that was opened, and the file that was there.
_FILE = "celery_lease_file"


def _open_file(dbapi: Any) -> tuple[str, tuple[int, int]]:
    dbapi.execute("PRAGMA schema_version").close()  # Opens the file, and makes a new one.
    path: str = dbapi.execute("PRAGMA database_list").fetchone()[2]
    return path, _identity(path)


def _is_still(path: str, identity: tuple[int, int]) -> bool:
    try:
        return _identity(path) == identity
    except OSError:
        return False


def _identity(path: str) -> tuple[int, int]:
    status = Path(path).stat()
    return status.st_dev, status.st_ino


def _to_wal(connection: sa.Connection) -> None:
    """Switch to WAL, which needs the file to itself for a moment and ignores the busy timeout."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            mode = connection.exec_driver_sql("PRAGMA journal_mode = WAL").scalar()
        except sa.exc.OperationalError as error:
            if "locked" not in str(error.orig) or time.monotonic() > end:
                raise
        else:
            # What cannot have it (some network file systems) says so, and works without.
            if mode == "wal":
                return
            end = min(end, time.monotonic() + _INSISTENCE)
            if time.monotonic() > end:
                return
        time.sleep(0.02)


def _literal(text: str, compiler: Any) -> str:
    """Double each % where parameters are written with one, as Django's are."""
    doubled = compiler.dialect.paramstyle in ("format", "pyformat")
    return text.replace("%", "%%") if doubled else text


@compiles(utcnow, "sqlite")
def _utcnow(element: utcnow, compiler: Any, **kw: Any) -> str:
    return f"strftime({_literal(_FORMAT, compiler)})"


@compiles(from_now, "sqlite")
def _from_now(element: from_now, compiler: Any, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    offset = _literal("'%+.3f seconds'", compiler)
    return f"strftime({_literal(_FORMAT, compiler)}, printf({offset}, {seconds}))"


@compiles(seconds_until, "sqlite")
def _seconds_until(element: seconds_until, compiler: Any, **kw: Any) -> str:
    column = compiler.process(element.clauses, **kw)
    # A day of that calendar, as a float, is exact to 40 microseconds only; both are milliseconds.
    return f"round((julianday({column}) - julianday('now')) * 86400.0, 3)"
