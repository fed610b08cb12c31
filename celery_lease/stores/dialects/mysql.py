"""MySQL and MariaDB.

``NOW()`` drops fractions of a second, so the clock is ``UTC_TIMESTAMP(6)``: the start
of the statement, which after a wait for a lock is early, so never too favourable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.compiler import compiles

from celery_lease.errors import (
    NotWritable,
    SchemaMismatch,
    StoreContention,
    StoreError,
    StoreUnavailable,
)
from celery_lease.stores.dialects.base import (
    COMMIT_COLUMNS,
    Database,
    Weakness,
    commit_row,
    is_current,
)
from celery_lease.stores.dialects.clock import from_now, seconds_until, utcnow
from celery_lease.stores.dialects.direct import Direct
from celery_lease.stores.schema import commit_table, fence_table, metadata

__all__ = ["MySQL"]

_NAMES = ("mysql", "mariadb")

_PRIVILEGES = {1142, 1143, 1227}

_KINDS: dict[type[StoreError], set[int]] = {
    # Lock wait timeout, deadlock, snapshot overtaken, NOWAIT, too many active transactions.
    StoreContention: {1205, 1213, 1020, 3572, 1637},
    # --read-only, a read-only transaction, engine or database, a log that takes statements
    # of other isolation levels only, privileges.
    NotWritable: {1290, 1792, 1836, 1665, *_PRIVILEGES},
    # No such table, no such column.
    SchemaMismatch: {1146, 1054},
    # Who may come in, and how many; the server ends; packets; killed; the client's own.
    StoreUnavailable: {
        *(1040, 1044, 1045, 1049, 1129, 1130, 1152, 1203, 1226),
        *(1053, 1158, 1159, 1160, 1161, 1317, 1927, 1969, 3024, 4031),
        *(2002, 2003, 2005, 2006, 2013, 2014, 2055),
    },
}


#: No gap locks, and 1020 cannot come up.
_LEVEL = "READ COMMITTED"


class MySQL(Database):
    """MariaDB 10.6 and later; MySQL 8.0 and later by the book, not by test."""

    #: PyMySQL and mysqlclient, which take the same words.
    drivers = ("pymysql", "mysqldb")

    # The fence row alone: LOCK IN SHARE MODE would lock the lease row as well, and
    # locks queue fairly here, so a takeover does not starve.
    _SETTLE = sa.insert(commit_table).from_select(
        COMMIT_COLUMNS, commit_row(fence_table, fence_table).with_for_update(read=True)
    )
    _CHECK = (
        sa.select(sa.literal_column("1", sa.Integer).label("one"))
        .select_from(fence_table)
        .where(*is_current(fence_table))
        .with_for_update(read=True)
    )

    def engine_arguments(self, lock_wait: float, statement_wait: float) -> dict[str, Any]:
        """Give every wait for the socket an end, and every name its letters."""
        seconds = max(2, int(statement_wait))
        return {
            "isolation_level": _LEVEL,
            "connect_args": {
                "connect_timeout": seconds,
                "read_timeout": seconds + 1,
                "write_timeout": seconds + 1,
                # mysqlclient takes what its C library was built with: it may be latin1.
                "charset": "utf8mb4",
            },
        }

    def connected(self, dbapi: Any, lock_wait: float, statement_wait: float) -> None:
        """Cap the waits: the default lock wait is 50 seconds, longer than any ttl."""
        _execute(dbapi, f"SET SESSION innodb_lock_wait_timeout = {max(1, int(lock_wait))}")
        limit = _SET.format(seconds=max(1, round(2 * statement_wait)))
        try:
            # A comment that MariaDB alone executes; MySQL has no such variable.
            _execute(dbapi, f"/*M!100300 {limit} */")
        except Exception as error:  # MySQL answers an empty query with 1065
            if _number(error) != 1065:
                raise
        # Of statements that commit by themselves too: of those SQLAlchemy says nothing.
        _execute(dbapi, f"SET SESSION TRANSACTION ISOLATION LEVEL {_LEVEL}")

    def insert_ignore(self, table: sa.Table) -> Any:
        """Use INSERT IGNORE. It swallows truncation too: use it for rows of our own making."""
        return mysql.insert(table).prefix_with("IGNORE")

    def insert_or_update(self, table: sa.Table, columns: Sequence[str]) -> Any:
        """Use ON DUPLICATE KEY UPDATE."""
        statement = mysql.insert(table)
        return statement.on_duplicate_key_update(
            {each: statement.inserted[each] for each in columns}
        )

    @contextmanager
    def schema_lock(self, engine: sa.Engine) -> Iterator[sa.Connection]:
        """Hold a named lock: DDL commits by itself here."""
        name = sa.func.concat("celery_lease.", sa.func.database())
        with engine.connect() as connection:
            # Shorter than the driver's patience with a silent socket; whoever waits asks again.
            for _attempt in range(60):
                if connection.execute(sa.select(sa.func.get_lock(name, 1))).scalar() == 1:
                    break
            else:
                raise StoreUnavailable("another process has been making the tables for a minute")
            try:
                yield connection
                connection.commit()
            finally:
                connection.execute(sa.select(sa.func.release_lock(name)))

    def read_only(self, connection: sa.Connection) -> str | None:
        """Refuse a read-only server, even where a privileged role could write there."""
        value = connection.execute(sa.text("SELECT @@global.read_only")).scalar()
        return "the server is read-only (@@read_only)" if str(value) not in ("0", "OFF") else None

    def weaknesses(self, connection: sa.Connection) -> list[Weakness]:
        """Look for engines without transactions, and for commits that do not wait for the disk."""
        tables = sa.text(
            "SELECT table_name, engine FROM information_schema.tables "
            "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name IN :tables"
        ).bindparams(
            sa.bindparam("schema", connection.schema_for_object(commit_table)),
            sa.bindparam("tables", list(metadata.tables), expanding=True),
        )
        found = [
            Weakness(True, f"{name} is in {engine}, which knows no transactions; use InnoDB")
            for name, engine in connection.execute(tables)
            if engine.upper() != "INNODB"
        ]
        flush = connection.execute(sa.text("SELECT @@innodb_flush_log_at_trx_commit")).scalar()
        if int(flush or 0) != 1:
            text = f"innodb_flush_log_at_trx_commit = {flush}: a crash can lose commits"
            found.append(Weakness(False, text))
        cluster = connection.execute(sa.text("SHOW GLOBAL STATUS LIKE 'wsrep_cluster_size'"))
        nodes = int(row[1]) if (row := cluster.first()) is not None else 0
        if nodes > 1:
            text = (
                f"a Galera cluster of {nodes} nodes, between which no lock is shared: all beats "
                f"and workers must write to one node"
            )
            found.append(Weakness(False, text))
        return found

    def session_id(self, connection: sa.Connection) -> int | None:
        """Ask for the thread that serves this connection."""
        return connection.execute(sa.select(sa.func.connection_id())).scalar()

    def classify(self, orig: BaseException) -> type[StoreError] | None:
        """Go by the error number."""
        number = _number(orig)
        return next((kind for kind, numbers in _KINDS.items() if number in numbers), None)

    def is_forbidden(self, orig: BaseException) -> bool:
        """Go by the error number."""
        return _number(orig) in _PRIVILEGES

    def settle(self, connection: Direct, *, idle: float, **values: Any) -> bool:
        """Set the idle limit of this connection, then insert the commit row."""
        self.limit_idle(connection, idle)
        return connection.execute(self._SETTLE, values).rowcount == 1

    def check(self, connection: Direct, *, lease: str, epoch: int, term: str, idle: float) -> bool:
        """Lock the fence row shared."""
        self.limit_idle(connection, idle)
        values = {"lease": lease, "epoch": epoch, "term": term}
        return connection.execute(self._CHECK, values).row is not None

    def limit_idle(self, connection: Direct, seconds: float) -> None:
        """Set MariaDB's ``idle_transaction_timeout`` until the connection is back in its pool.

        MySQL has no such variable, and ``wait_timeout`` would end pooled connections.
        A statement that commits by itself leaves no transaction to be idle in.
        """
        info = connection.info
        if info.get(_LIMIT) == seconds or self.autocommits(connection.dbapi_connection):
            return
        if _BEFORE not in info:
            row = connection.unseen(_READ).row
            info[_BEFORE] = None if row is None else int(row[1])
        if info[_BEFORE] is None:
            return
        # Django's connections have no pool; they are given back by its guard.
        pool = getattr(connection.engine, "pool", None)
        if pool is not None and not sa.event.contains(pool, "checkin", self._checked_in):
            sa.event.listen(pool, "checkin", self._checked_in)
        connection.unseen(_SET.format(seconds=max(1, round(seconds))))
        info[_LIMIT] = seconds

    def give_back(self, dbapi: Any, info: dict[Any, Any]) -> None:
        """Undo the limit: what the user does next on this connection may take its time."""
        if info.pop(_LIMIT, None) is not None:
            _execute(dbapi, _SET.format(seconds=info[_BEFORE]))

    def _checked_in(self, dbapi: Any, record: Any) -> None:
        if dbapi is not None:
            self.give_back(dbapi, record.info)


#: Keys of ``Connection.info``: the limit that is set, and the one that was there before.
_LIMIT, _BEFORE = "celery_lease_idle", "celery_lease_idle_before"
_READ = "SHOW SESSION VARIABLES LIKE 'idle_transaction_timeout'"
_SET = "SET SESSION idle_transaction_timeout = {seconds}"


def _number(error: BaseException) -> Any:
    """Return the error number. A user's own engine may have any driver, and some have errno."""
    return getattr(error, "errno", None) or (error.args[0] if error.args else None)


def _execute(dbapi: Any, statement: str) -> None:
    cursor = dbapi.cursor()
    try:
        cursor.execute(statement)
    finally:
        cursor.close()


@compiles(utcnow, *_NAMES)
def _utcnow(element: utcnow, compiler: Any, **kw: Any) -> str:
    return "utc_timestamp(6)"


@compiles(from_now, *_NAMES)
def _from_now(element: from_now, compiler: Any, **kw: Any) -> str:
    return f"(utc_timestamp(6) + INTERVAL {compiler.process(element.clauses, **kw)} SECOND)"


@compiles(seconds_until, *_NAMES)
def _seconds_until(element: seconds_until, compiler: Any, **kw: Any) -> str:
    column = compiler.process(element.clauses, **kw)
    return f"(TIMESTAMPDIFF(MICROSECOND, utc_timestamp(6), {column}) / 1e6)"
