"""All that differs between PostgreSQL, MySQL/MariaDB and SQLite, and nothing else.

Time is the database's: ``now()`` is a transaction's start on PostgreSQL, so it is
``clock_timestamp()`` there; MySQL's ``NOW()`` drops fractions, so ``UTC_TIMESTAMP(6)``;
SQLite's clock is its host's, in milliseconds.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from celery_lease.errors import (
    ConfigurationError,
    NotWritable,
    SchemaMismatch,
    StoreContention,
    StoreError,
    StoreUnavailable,
)
from celery_lease.stores.schema import (
    SCHEMA_VERSION,
    UTCDateTime,
    commit_table,
    fence_table,
    lease_table,
)

__all__ = [
    "Database",
    "create_engine",
    "database_of",
    "from_now",
    "is_certainly_wrong",
    "masked",
    "seconds_until",
    "translated",
    "utcnow",
]

_MYSQL = ("mysql", "mariadb")
_PG_TIME = "clock_timestamp()"
_MY_TIME = "utc_timestamp(6)"
_LITE_TIME = "'%Y-%m-%d %H:%M:%f000', 'now'"


# --- the database's clock -----------------------------------------------------------------


class utcnow(FunctionElement[Any]):  # noqa: N801 - reads as the SQL function it is
    """The database's clock, at this statement."""

    type = UTCDateTime()
    inherit_cache = True


class from_now(FunctionElement[Any]):  # noqa: N801
    """The database's clock plus so many seconds (a number, which may be negative)."""

    type = UTCDateTime()
    inherit_cache = True


class seconds_until(FunctionElement[Any]):  # noqa: N801
    """Seconds from the database's clock until a column's instant; negative when past."""

    type = sa.Float()
    inherit_cache = True


@compiles(utcnow, "postgresql")
def _(element: utcnow, compiler: Any, **kw: Any) -> str:
    return _PG_TIME


@compiles(utcnow, *_MYSQL)
def _(element: utcnow, compiler: Any, **kw: Any) -> str:
    return _MY_TIME


@compiles(utcnow, "sqlite")
def _(element: utcnow, compiler: Any, **kw: Any) -> str:
    return f"strftime({_LITE_TIME})"


@compiles(from_now, "postgresql")
def _(element: from_now, compiler: Any, **kw: Any) -> str:
    return f"({_PG_TIME} + make_interval(secs => {compiler.process(element.clauses, **kw)}))"


@compiles(from_now, *_MYSQL)
def _(element: from_now, compiler: Any, **kw: Any) -> str:
    return f"({_MY_TIME} + INTERVAL {compiler.process(element.clauses, **kw)} SECOND)"


@compiles(from_now, "sqlite")
def _(element: from_now, compiler: Any, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    return f"strftime({_LITE_TIME}, printf('%+.3f seconds', {seconds}))"


@compiles(seconds_until, "postgresql")
def _(element: seconds_until, compiler: Any, **kw: Any) -> str:
    column = compiler.process(element.clauses, **kw)
    return f"CAST(EXTRACT(EPOCH FROM ({column} - {_PG_TIME})) AS DOUBLE PRECISION)"


@compiles(seconds_until, *_MYSQL)
def _(element: seconds_until, compiler: Any, **kw: Any) -> str:
    column = compiler.process(element.clauses, **kw)
    return f"(TIMESTAMPDIFF(MICROSECOND, {_MY_TIME}, {column}) / 1e6)"


@compiles(seconds_until, "sqlite")
def _(element: seconds_until, compiler: Any, **kw: Any) -> str:
    column = compiler.process(element.clauses, **kw)
    return f"((julianday({column}) - julianday('now')) * 86400.0)"


# --- one class for each database ----------------------------------------------------------


class Database:
    """What one kind of database does its own way. The base is what they share."""

    #: Whether an UPDATE and the INSERT that depends on it can be one statement.
    one_statement_acquire = False

    def engine_arguments(self, lock_wait: float, statement_wait: float) -> dict[str, Any]:
        """Return arguments for ``create_engine`` that keep waits below the ttl."""
        return {}

    def connected(self, dbapi: Any, lock_wait: float, statement_wait: float) -> None:
        """Set up a new connection of our own."""

    def begin(self, connection: sa.Connection) -> None:
        """Begin a transaction of our own."""

    def insert_ignore(self, table: sa.Table) -> Any:
        """Return an INSERT that does nothing where the key is there already."""
        raise NotImplementedError

    @contextmanager
    def schema_lock(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        """Yield a transaction in which no other process makes the tables."""
        with engine.begin() as connection:
            yield connection

    def read_only(self, connection: sa.Connection) -> str | None:
        """Return why nobody should lead on this server; None if it takes writes."""
        return None

    def classify(self, orig: BaseException) -> type[StoreError] | None:
        """Return the kind of a driver's error; None if it is none of ours."""
        return None

    def settle(self, connection: sa.Connection, *, idle: float, **values: Any) -> bool:
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
        return bool(connection.execute(_SETTLE_JOINED, values).rowcount == 1)

    def check(
        self, connection: sa.Connection, *, lease: str, epoch: int, term: str, idle: float
    ) -> bool:
        """Return whether (lease, epoch, term) is current, locking as :meth:`settle` does."""
        raise NotImplementedError

    def limit_idle(self, connection: sa.Connection, seconds: float) -> None:
        """Have the server end this transaction after so many seconds of silence."""


def _current(source: sa.FromClause, *tables: sa.Table) -> sa.Select[Any]:
    """Select the columns of a commit row from *source* where *tables* show this term."""
    bind = sa.bindparam
    columns: list[sa.ColumnElement[Any]] = [
        bind("task_id", type_=sa.String),
        bind("lease", type_=sa.String),
        bind("epoch", type_=sa.BigInteger),
        bind("term", type_=sa.String),
        bind("execution", type_=sa.String),
        bind("outcome", type_=sa.String),
        utcnow(),
    ]
    return sa.select(*columns).select_from(source).where(*_matches(*tables))


def _matches(*tables: sa.Table) -> list[sa.ColumnElement[bool]]:
    found: list[sa.ColumnElement[bool]] = []
    for table in tables:
        found += [
            table.c.name == sa.bindparam("lease", type_=sa.String),
            table.c.epoch == sa.bindparam("epoch", type_=sa.BigInteger),
            table.c.term == sa.bindparam("term", type_=sa.String),
        ]
    return found


_COLUMNS = [each.name for each in commit_table.columns]
_BOTH = lease_table.join(fence_table, lease_table.c.name == fence_table.c.name)

#: The lease row is read, not locked: once an acquire has committed, no guard of an
#: older epoch begins, so the takeover waits only for those in flight.
_SETTLE_JOINED = sa.insert(commit_table).from_select(
    _COLUMNS, _current(_BOTH, lease_table, fence_table)
)


class PostgreSQL(Database):
    """PostgreSQL 12 and later."""

    one_statement_acquire = True

    _settled = (
        sa.insert(commit_table)
        .from_select(
            _COLUMNS,
            _current(_BOTH, lease_table, fence_table).with_for_update(read=True, of=fence_table),
        )
        .returning(commit_table.c.task_id)
        .cte("settled")
    )
    _SETTLE = sa.select(
        sa.func.count(),
        sa.func.set_config("idle_in_transaction_session_timeout", sa.bindparam("idle"), True),
    ).select_from(_settled)
    _checked = (
        sa.select(sa.literal(1).label("one"))
        .select_from(_BOTH)
        .where(*_matches(lease_table, fence_table))
        .with_for_update(read=True, of=fence_table)
        .cte("checked")
    )
    _CHECK = sa.select(
        sa.func.count(),
        sa.func.set_config("idle_in_transaction_session_timeout", sa.bindparam("idle"), True),
    ).select_from(_checked)

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
            "lock_timeout": f"{int(lock_wait * 1000)}ms",
            "statement_timeout": f"{int(statement_wait * 1000)}ms",
            "idle_in_transaction_session_timeout": f"{int(2 * statement_wait * 1000)}ms",
            "synchronous_commit": "on",
        }
        calls = ", ".join(
            f"set_config('{key}', '{value}', false)" for key, value in settings.items()
        )
        _execute_outside(dbapi, f"SELECT {calls}")

    def insert_ignore(self, table: sa.Table) -> Any:
        """Use ON CONFLICT DO NOTHING."""
        from sqlalchemy.dialects.postgresql import insert

        return insert(table).on_conflict_do_nothing()

    @contextmanager
    def schema_lock(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        """Hold an advisory lock for as long as the transaction lasts."""
        with engine.begin() as connection:
            # The lock waits longer than a lease statement may: 32 processes may queue.
            connection.execute(sa.text("SET LOCAL lock_timeout = '60s'"))
            connection.execute(sa.text("SET LOCAL statement_timeout = '60s'"))
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(7163915846170451)"))
            yield connection

    def read_only(self, connection: sa.Connection) -> str | None:
        """Refuse a standby server and a read-only one."""
        row = connection.execute(
            sa.text("SELECT pg_is_in_recovery(), current_setting('transaction_read_only')")
        ).one()
        if row[0]:
            return "the server is a standby (pg_is_in_recovery)"
        return "the session is read-only" if row[1] == "on" else None

    def classify(self, orig: BaseException) -> type[StoreError] | None:
        """Go by SQLSTATE; a connection that broke has none."""
        state = getattr(orig, "sqlstate", None) or getattr(orig, "pgcode", None)
        if state is None:
            return None
        if state in ("40001", "40P01", "55P03"):
            return StoreContention
        if state in ("25006", "42501"):
            return NotWritable
        if state in ("42P01", "42703", "3F000"):
            return SchemaMismatch
        if state[:2] in ("08", "53", "57", "28", "3D") or state == "25P03":
            return StoreUnavailable
        return None

    def settle(self, connection: sa.Connection, *, idle: float, **values: Any) -> bool:
        """Set the idle limit in the same statement."""
        row = connection.execute(self._SETTLE, {**values, "idle": f"{int(idle * 1000)}ms"}).one()
        return bool(row[0] == 1)

    def check(
        self, connection: sa.Connection, *, lease: str, epoch: int, term: str, idle: float
    ) -> bool:
        """Lock the fence row shared; the lease row is read only."""
        values = {"lease": lease, "epoch": epoch, "term": term, "idle": f"{int(idle * 1000)}ms"}
        return bool(connection.execute(self._CHECK, values).one()[0] == 1)

    def limit_idle(self, connection: sa.Connection, seconds: float) -> None:
        """Set ``idle_in_transaction_session_timeout`` for this transaction."""
        connection.execute(
            sa.select(
                sa.func.set_config(
                    "idle_in_transaction_session_timeout", f"{int(seconds * 1000)}ms", True
                )
            )
        )


class MySQL(Database):
    """MariaDB 10.6 and later; MySQL 8.0 and later by the book, not by test."""

    # The fence row alone: LOCK IN SHARE MODE would lock the lease row as well, and
    # locks queue fairly here, so a takeover does not starve.
    _SETTLE = sa.insert(commit_table).from_select(
        _COLUMNS, _current(fence_table, fence_table).with_for_update(read=True)
    )
    _CHECK = (
        sa.select(sa.literal(1))
        .select_from(fence_table)
        .where(*_matches(fence_table))
        .with_for_update(read=True)
    )

    def engine_arguments(self, lock_wait: float, statement_wait: float) -> dict[str, Any]:
        """Give every socket wait an end."""
        seconds = max(2, int(statement_wait))
        return {
            # No gap locks; 1020 cannot come up.
            "isolation_level": "READ COMMITTED",
            "connect_args": {
                "connect_timeout": seconds,
                "read_timeout": seconds + 1,
                "write_timeout": seconds + 1,
            },
        }

    def connected(self, dbapi: Any, lock_wait: float, statement_wait: float) -> None:
        """Cap the waits: the default lock wait is 50 seconds, longer than any ttl."""
        seconds = max(1, int(lock_wait))
        cursor = dbapi.cursor()
        try:
            cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {seconds}")
            cursor.execute(f"SET SESSION lock_wait_timeout = {max(seconds, 60)}")
        finally:
            cursor.close()
        _idle_transaction_timeout(dbapi, 2 * statement_wait)

    def insert_ignore(self, table: sa.Table) -> Any:
        """Use INSERT IGNORE. It swallows truncation too: use it for rows of our own making."""
        from sqlalchemy.dialects.mysql import insert

        return insert(table).prefix_with("IGNORE")

    @contextmanager
    def schema_lock(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        """Hold a named lock: DDL commits by itself here."""
        with engine.connect() as connection:
            got = connection.execute(
                sa.text("SELECT GET_LOCK('celery_lease_schema', 60)")
            ).scalar()
            if got != 1:
                raise StoreUnavailable("no answer from GET_LOCK('celery_lease_schema')")
            try:
                yield connection
                connection.commit()
            finally:
                connection.execute(sa.text("SELECT RELEASE_LOCK('celery_lease_schema')"))

    def read_only(self, connection: sa.Connection) -> str | None:
        """Refuse a read-only server, even where a privileged role could write there."""
        value = connection.execute(sa.text("SELECT @@global.read_only")).scalar()
        return "the server is read-only (@@read_only)" if str(value) not in ("0", "OFF") else None

    def classify(self, orig: BaseException) -> type[StoreError] | None:
        """Go by the error number."""
        number = orig.args[0] if orig.args and isinstance(orig.args[0], int) else None
        if number in (1213, 1205, 1020, 3572, 1637):
            return StoreContention
        if number in (1290, 1792, 1836, 1142, 1143, 1227):
            return NotWritable
        if number in (1146, 1054):
            return SchemaMismatch
        if number in (1044, 1045, 1049, 1040, 1053, 1129, 1130, 1152, 1158, 1159, 1160, 1161):
            return StoreUnavailable
        if number in (1203, 1226, 1969, 2002, 2003, 2005, 2006, 2013, 2014, 2055, 3024, 4031):
            return StoreUnavailable
        return None

    def settle(self, connection: sa.Connection, *, idle: float, **values: Any) -> bool:
        """Set the idle limit of this connection once, then settle."""
        self.limit_idle(connection, idle)
        return bool(connection.execute(self._SETTLE, values).rowcount == 1)

    def check(
        self, connection: sa.Connection, *, lease: str, epoch: int, term: str, idle: float
    ) -> bool:
        """Lock the fence row shared."""
        self.limit_idle(connection, idle)
        values = {"lease": lease, "epoch": epoch, "term": term}
        return connection.execute(self._CHECK, values).first() is not None

    def limit_idle(self, connection: sa.Connection, seconds: float) -> None:
        """Set MariaDB's ``idle_transaction_timeout``, which spares idle pooled connections.

        MySQL has no such variable, and ``wait_timeout`` would end pooled connections.
        """
        if connection.info.get("celery_lease_idle") != seconds:
            _idle_transaction_timeout(connection.connection.dbapi_connection, seconds)
            connection.info["celery_lease_idle"] = seconds


class SQLite(Database):
    """SQLite 3.35 and later: one writer a file, so the write lock is the guard."""

    # The statement must take the write lock, which a SELECT does not.
    _CHECK = (
        sa.update(fence_table)
        .values(lockable=fence_table.c.lockable)
        .where(
            *_matches(fence_table),
            sa.exists().where(*_matches(lease_table)),
        )
    )

    def engine_arguments(self, lock_wait: float, statement_wait: float) -> dict[str, Any]:
        """Wait for the file's one writer."""
        return {"connect_args": {"timeout": lock_wait}}

    def connected(self, dbapi: Any, lock_wait: float, statement_wait: float) -> None:
        """Take BEGIN out of the driver's hands: it would not begin at a SELECT."""
        dbapi.isolation_level = None

    def begin(self, connection: sa.Connection) -> None:
        """Take the write lock at once; single statements run without a transaction."""
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    def insert_ignore(self, table: sa.Table) -> Any:
        """Use ON CONFLICT DO NOTHING."""
        from sqlalchemy.dialects.sqlite import insert

        return insert(table).on_conflict_do_nothing()

    @contextmanager
    def schema_lock(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        """Switch the file to WAL, so that readers and the writer do not block each other."""
        _to_wal(engine)
        with engine.begin() as connection:
            yield connection

    def read_only(self, connection: sa.Connection) -> str | None:
        """Ask whether the connection may write."""
        value = connection.exec_driver_sql("PRAGMA query_only").scalar()
        return "the connection is read-only (PRAGMA query_only)" if value else None

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

    def check(
        self, connection: sa.Connection, *, lease: str, epoch: int, term: str, idle: float
    ) -> bool:
        """Take the write lock and look."""
        values = {"lease": lease, "epoch": epoch, "term": term}
        return bool(connection.execute(self._CHECK, values).rowcount == 1)


_POSTGRESQL, _MYSQL_DB, _SQLITE = PostgreSQL(), MySQL(), SQLite()
_DATABASES: Mapping[str, Database] = {
    "postgresql": _POSTGRESQL,
    "mysql": _MYSQL_DB,
    "mariadb": _MYSQL_DB,
    "sqlite": _SQLITE,
}


def database_of(dialect: sa.Dialect) -> Database:
    """Return what this database does its own way.

    Raises:
        ConfigurationError: celery-lease does not work with it.
    """
    try:
        return _DATABASES[dialect.name]
    except KeyError:
        raise ConfigurationError(
            f"beat_lease_url: a lease cannot be kept in {dialect.name}; use PostgreSQL, "
            f"MySQL/MariaDB or SQLite",
            setting="beat_lease_url",
        ) from None


def _execute_outside(dbapi: Any, statement: str) -> None:
    """Run a statement on a new connection so that no transaction is left open."""
    cursor = dbapi.cursor()
    try:
        cursor.execute(statement)
    finally:
        cursor.close()
    dbapi.commit()


def _idle_transaction_timeout(dbapi: Any, seconds: float) -> None:
    cursor = dbapi.cursor()
    try:
        # A comment that MariaDB alone executes; MySQL has no such variable.
        cursor.execute(
            f"/*M!100300 SET SESSION idle_transaction_timeout = {max(1, round(seconds))} */"
        )
    except Exception as error:  # MySQL answers an empty query with 1065
        if not (error.args and error.args[0] == 1065):
            raise
    finally:
        cursor.close()


def _to_wal(engine: sa.Engine, patience: float = 30.0) -> None:
    """Switch to WAL, which needs the file to itself for a moment and ignores the busy timeout."""
    end = time.monotonic() + patience
    while True:
        try:
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
                if mode in ("wal", "memory"):
                    return
                if connection.exec_driver_sql("PRAGMA journal_mode = WAL").scalar() == "wal":
                    return
        except sa.exc.OperationalError as error:
            if "locked" not in str(error.orig) or time.monotonic() > end:
                raise
        if time.monotonic() > end:
            return
        time.sleep(0.02)


# --- engines ------------------------------------------------------------------------------


def masked(url: str | sa.URL) -> str:
    """Return the URL without its password, wherever it stands."""
    try:
        text = sa.make_url(url).render_as_string(hide_password=True)
    except sa.exc.ArgumentError:
        text = str(url)
    text = re.sub(r"(?i)((?:password|passwd|sslpassword)=)[^&;]*", r"\1***", text)
    return re.sub(r"(://[^:/@]*:)[^@/]*@", r"\1***@", text)


def create_engine(
    url: str, options: Mapping[str, Any], *, lock_wait: float, statement_wait: float
) -> sa.Engine:
    """Return an engine for a lease database. Nothing is connected yet.

    Args:
        url: SQLAlchemy URL.
        options: The user's options, which win over ours.
        lock_wait: Seconds that a statement waits for a lock.
        statement_wait: Seconds that a statement may take, where the database can tell.

    Raises:
        ConfigurationError: The URL, its driver or the options cannot be used.
    """
    shown = masked(url)
    try:
        parsed = sa.make_url(url)
        dialect = parsed.get_dialect()
        database = database_of(dialect())
        arguments = database.engine_arguments(lock_wait, statement_wait)
        connect_args = {**arguments.pop("connect_args", {}), **options.get("connect_args", {})}
        arguments = {"pool_pre_ping": True, **arguments, **options, "connect_args": connect_args}
        engine = sa.create_engine(parsed, **arguments)
    except sa.exc.NoSuchModuleError:
        raise ConfigurationError(
            f"beat_lease_url = {shown!r}: SQLAlchemy knows no such database or driver; write "
            f"postgresql+psycopg://…, mysql+pymysql://… or sqlite:///…",
            setting="beat_lease_url",
        ) from None
    except sa.exc.ArgumentError as error:
        raise ConfigurationError(
            f"beat_lease_url = {shown!r} is not an SQLAlchemy URL; write "
            f"postgresql+psycopg://user@host/database or the like ({type(error).__name__})",
            setting="beat_lease_url",
        ) from None
    except ImportError as error:
        raise ConfigurationError(
            f"beat_lease_url = {shown!r}: its driver is not installed ({error}); "
            f"pip install 'celery-lease[{_extra(url)}]'",
            setting="beat_lease_url",
        ) from None
    except TypeError as error:
        raise ConfigurationError(
            f"beat_lease_engine_options: {error}", setting="beat_lease_engine_options"
        ) from None
    if engine.dialect.is_async:
        raise ConfigurationError(
            f"beat_lease_url = {shown!r} names an asynchronous driver; use psycopg, PyMySQL "
            f"or sqlite3",
            setting="beat_lease_url",
        )

    @sa.event.listens_for(engine, "connect")
    def connected(dbapi: Any, record: Any) -> None:
        database.connected(dbapi, lock_wait, statement_wait)

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        database.begin(connection)

    return engine


def _extra(url: str) -> str:
    return "mysql" if url.startswith(_MYSQL) else "postgresql"


# --- errors -------------------------------------------------------------------------------


@contextmanager
def translated(engine: sa.Engine) -> Iterator[None]:
    """Turn a driver's errors into StoreError kinds. What is none of ours passes."""
    try:
        yield
    except sa.exc.TimeoutError as error:
        raise StoreUnavailable(f"no free connection: {error}") from error
    except sa.exc.DBAPIError as error:
        kind = _kind(engine.dialect, error)
        if kind is None:
            raise
        text = _first_line(error)
        if kind is SchemaMismatch:
            raise SchemaMismatch(
                f"the tables are missing or of another version ({text}); run 'celery lease init'",
                found=None,
                expected=SCHEMA_VERSION,
            ) from error
        raise kind(text) from error


def _kind(dialect: sa.Dialect, error: sa.exc.DBAPIError) -> type[StoreError] | None:
    orig = error.orig
    kind = database_of(dialect).classify(orig) if orig is not None else None
    if kind is not None:
        return kind
    broken = error.connection_invalidated or isinstance(
        error, (sa.exc.OperationalError, sa.exc.InterfaceError)
    )
    return StoreUnavailable if broken else None


def _first_line(error: sa.exc.DBAPIError) -> str:
    lines = str(error.orig).strip().splitlines()
    return masked(lines[0]) if lines else type(error.orig).__name__


_CERTAIN = re.compile(
    r"password authentication failed|no password supplied|role \"[^\"]*\" does not exist"
    r"|database \"[^\"]*\" does not exist|no pg_hba\.conf entry"
    r"|Access denied for user|Unknown database",
    re.IGNORECASE,
)


def is_certainly_wrong(error: BaseException) -> bool:
    """Return whether waiting cannot help: the name, the role or the password is wrong.

    psycopg gives no SQLSTATE for a refused connection, a bad role and a bad database
    alike, so this goes by the message; in doubt the database is merely down.
    """
    return _CERTAIN.search(str(error)) is not None
