"""PostgreSQL.

``now()`` is the start of the transaction here, so the clock is ``clock_timestamp()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import psycopg
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
from celery_lease.stores.dialects.direct import Direct
from celery_lease.stores.dialects.pipeline import can_commit_with, commit_with, is_of_commit
from celery_lease.stores.schema import commit_table, fence_table, lease_table, metadata

__all__ = ["PostgreSQL"]

#: Any number that nobody else is likely to take an advisory lock on.
_SCHEMA_LOCK = 7163915846170451

#: "cached plan must not change result type", until the connection is a new one.
_OUTDATED = "0A000"

_IDLE = "idle_in_transaction_session_timeout"


#: Sets the idle limit in the statement that it is a condition of.
_LIMITED = sa.func.set_config(
    sa.literal_column(f"'{_IDLE}'"), sa.bindparam("idle", type_=sa.String), sa.true()
) != sa.literal_column("''")


#: What brings its COMMIT along has parameters like this one: $1::VARCHAR.
_NUMBERED = psycopg.dialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]
#: Not called what the columns are: in the VALUES of an INSERT those names are taken.
_GIVEN = {each.name: sa.bindparam(f"the_{each.name}", type_=each.type) for each in commit_table.c}
#: Read, not locked, as in BOTH. A subquery costs less to plan than a join.
_LEASES_TERM = (
    sa.select(lease_table.c.term)
    .where(lease_table.c.name == _GIVEN["lease"], lease_table.c.epoch == _GIVEN["epoch"])
    .scalar_subquery()
)
#: The epoch where it is the current one, its fence locked shared; NULL where it is not.
_CURRENT = (
    sa.select(fence_table.c.epoch)
    .where(
        fence_table.c.name == _GIVEN["lease"],
        fence_table.c.epoch == _GIVEN["epoch"],
        fence_table.c.term == _GIVEN["term"],
        _GIVEN["term"] == _LEASES_TERM,
    )
    .with_for_update(read=True)
    .scalar_subquery()
)
#: What the server's log says of a check that did not pass.
_NOT_PASSED = "celery-lease: this epoch is not the current one"


class PostgreSQL(OnConflict):
    """PostgreSQL 12 and later."""

    insert = staticmethod(postgresql.insert)
    one_statement_acquire = True
    drivers = ("psycopg", "psycopg2")

    _SETTLE = sa.insert(commit_table).from_select(
        COMMIT_COLUMNS,
        commit_row(BOTH, lease_table, fence_table)
        .where(_LIMITED)
        .with_for_update(read=True, of=fence_table),
    )
    _CHECK = (
        sa.select(sa.literal_column("1", sa.Integer).label("one"))
        .select_from(BOTH)
        .where(*is_current(lease_table, fence_table), _LIMITED)
        .with_for_update(read=True, of=fence_table)
    )
    # Only an error keeps the COMMIT in the same message from being executed. A commit row has no
    # NULL for its epoch; and a text is no number, once concat(), never beforehand, has made it.
    _SETTLE_OR_FAIL = sa.insert(commit_table).values({**_GIVEN, "epoch": _CURRENT, "at": utcnow()})
    _CHECK_OR_FAIL = sa.select(
        sa.func.coalesce(
            _CURRENT,
            sa.cast(sa.func.concat(sa.literal_column(f"'{_NOT_PASSED}'")), sa.BigInteger),
        )
    )

    _LIMIT = sa.select(_LIMITED)

    def engine_arguments(self, lock_wait: float, statement_wait: float) -> dict[str, Any]:
        """Keep a silent network from holding a connection for longer than a statement may."""
        seconds = max(2, int(statement_wait))
        return {
            "isolation_level": "READ COMMITTED",
            "connect_args": {
                "connect_timeout": seconds,
                "keepalives_idle": seconds,
                "keepalives_interval": 2,
                "keepalives_count": 3,
                "tcp_user_timeout": int(statement_wait * 1000),
            },
        }

    def connected(self, dbapi: Any, lock_wait: float, statement_wait: float) -> None:
        """Cap the waits; make sure that an acknowledged epoch is on disk."""
        settings = {
            "lock_timeout": _ms(lock_wait),
            "statement_timeout": _ms(statement_wait),
            _IDLE: _ms(2 * statement_wait),
            "synchronous_commit": "on",
            # Of statements that commit by themselves too: SQLAlchemy sets it for a BEGIN.
            "default_transaction_isolation": "read committed",
            # The one style whose times psycopg reads.
            "datestyle": "ISO",
        }
        calls = (f"set_config('{key}', '{value}', false)" for key, value in settings.items())
        cursor = dbapi.cursor()
        try:
            cursor.execute(f"SELECT {', '.join(calls)}")
        finally:
            cursor.close()
        dbapi.commit()

    @contextmanager
    def schema_lock(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        """Hold an advisory lock for as long as the transaction lasts."""
        with engine.begin() as connection:
            # The lock waits longer than a lease statement may: 32 processes may queue.
            connection.execute(sa.text("SET LOCAL lock_timeout = '60s'"))
            connection.execute(sa.text("SET LOCAL statement_timeout = '60s'"))
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_SCHEMA_LOCK)))
            yield connection

    def read_only(self, connection: sa.Connection) -> str | None:
        """Refuse a standby server and a read-only one."""
        row = connection.execute(
            sa.text("SELECT pg_is_in_recovery(), current_setting('transaction_read_only')")
        ).one()
        if row[0]:
            return "the server is a standby (pg_is_in_recovery)"
        return "the session is read-only (transaction_read_only)" if row[1] == "on" else None

    def weaknesses(self, connection: sa.Connection) -> list[Weakness]:
        """Look for tables that a crash empties, and for commits that do not wait for the disk."""
        quote = connection.dialect.identifier_preparer.quote
        schema = connection.schema_for_object(commit_table)
        where = "" if schema is None else f"{quote(schema)}."
        unlogged = connection.execute(
            sa.text(
                "SELECT relname FROM pg_class WHERE relpersistence = 'u' "
                "AND oid = ANY (SELECT to_regclass(t) FROM unnest(CAST(:tables AS text[])) AS t)"
            ),
            {"tables": [where + quote(each) for each in metadata.tables]},
        ).scalars()
        found = [Weakness(True, f"{table} is UNLOGGED: a crash empties it") for table in unlogged]
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            # What the user's own sessions begin with: ours has set some of them.
            query = sa.text("SELECT reset_val FROM pg_settings WHERE name = :name")
            value = connection.execute(query, {"name": setting}).scalar()
            if value == "off":
                found.append(Weakness(False, f"{setting} = off: a crash can lose commits"))
        return found

    def session_id(self, connection: sa.Connection) -> int | None:
        """Ask for the process that serves this connection."""
        return connection.execute(sa.select(sa.func.pg_backend_pid())).scalar()

    def classify(self, orig: BaseException) -> type[StoreError] | None:
        """Go by SQLSTATE; a connection that broke has none."""
        state = _state(orig)
        if state is None:
            return None
        if state in ("40001", "40P01", "55P03"):
            return StoreContention
        if state in ("25006", "42501"):
            return NotWritable
        if state in ("42P01", "42703", "3F000"):
            return SchemaMismatch
        if state[:2] in ("08", "53", "57", "28", "3D") or state in ("25P03", _OUTDATED):
            return StoreUnavailable
        return None

    def is_outdated(self, orig: BaseException) -> bool:
        """Know a plan that was made before a column changed its type."""
        return _state(orig) == _OUTDATED

    def is_forbidden(self, orig: BaseException) -> bool:
        """Go by SQLSTATE."""
        return _state(orig) == "42501"

    def is_of_commit(self, orig: BaseException) -> bool:
        """Go by which of the two was answered with it."""
        return is_of_commit(orig)

    def settle(self, connection: Direct, *, idle: float, **values: Any) -> bool:
        """Insert the commit row, with the idle limit set in the same statement."""
        return connection.execute(self._SETTLE, {**values, "idle": _ms(idle)}).rowcount == 1

    def check(self, connection: Direct, *, lease: str, epoch: int, term: str, idle: float) -> bool:
        """Lock the fence row shared; the lease row is read only."""
        values = {"lease": lease, "epoch": epoch, "term": term, "idle": _ms(idle)}
        return connection.execute(self._CHECK, values).row is not None

    def brings_commit(self, connection: Direct) -> bool:
        """Take psycopg 3, in a transaction that it has begun."""
        return can_commit_with(connection.dbapi_connection)

    def settle_and_commit(self, connection: Direct, **values: Any) -> bool:
        """Insert the commit row."""
        return self._commit_with(connection, self._SETTLE_OR_FAIL, values)

    def check_and_commit(self, connection: Direct, *, lease: str, epoch: int, term: str) -> bool:
        """Lock the fence row shared; the lease row is read only."""
        values = {"lease": lease, "epoch": epoch, "term": term}
        return self._commit_with(connection, self._CHECK_OR_FAIL, values)

    def _commit_with(
        self, connection: Direct, guard: sa.Executable, values: dict[str, Any]
    ) -> bool:
        text = connection.compiled(guard, _NUMBERED)
        given = text.parameters({f"the_{each}": value for each, value in values.items()})
        try:
            with connection.translated():
                commit_with(connection.dbapi_connection, text.sql, given)
        except Exception as error:  # SQLAlchemy's or Django's, around the driver's
            if error.__cause__ is not None and _has_not_passed(error.__cause__):
                return False  # The server went no further.
            raise
        return True

    def limit_idle(self, connection: Direct, seconds: float) -> None:
        """Set ``idle_in_transaction_session_timeout`` for this transaction."""
        connection.execute(self._LIMIT, {"idle": _ms(seconds)})


def _has_not_passed(orig: Any) -> bool:
    """Return whether an error is what a guard that brings its COMMIT says of a stale epoch."""
    if _state(orig) == "23502":
        null = (orig.diag.table_name, orig.diag.column_name)
        return null == (commit_table.name, commit_table.c.epoch.name)
    return _state(orig) == "22P02" and _NOT_PASSED in str(orig)


def _state(orig: BaseException) -> str | None:
    """Return the SQLSTATE of an error, of psycopg's or of psycopg2's."""
    return getattr(orig, "sqlstate", None) or getattr(orig, "pgcode", None)


def _ms(seconds: float) -> str:
    # 0 would mean no limit at all.
    return f"{max(1, int(seconds * 1000))}ms"


@compiles(utcnow, "postgresql")
def _utcnow(element: utcnow, compiler: Any, **kw: Any) -> str:
    return "clock_timestamp()"


@compiles(from_now, "postgresql")
def _from_now(element: from_now, compiler: Any, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    return f"(clock_timestamp() + make_interval(secs => {seconds}))"


@compiles(seconds_until, "postgresql")
def _seconds_until(element: seconds_until, compiler: Any, **kw: Any) -> str:
    column = compiler.process(element.clauses, **kw)
    return f"CAST(EXTRACT(EPOCH FROM ({column} - clock_timestamp())) AS DOUBLE PRECISION)"
