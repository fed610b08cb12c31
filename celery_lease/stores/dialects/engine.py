"""Engines for lease databases: waits that end, and errors that name the setting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from celery_lease.errors import ConfigurationError
from celery_lease.stores.dialects.base import Database
from celery_lease.stores.dialects.mysql import MySQL
from celery_lease.stores.dialects.postgresql import PostgreSQL
from celery_lease.stores.dialects.sqlite import SQLite

__all__ = ["create_engine", "database_of", "file_of", "masked"]

_DATABASES: Mapping[str, Database] = {
    "postgresql": PostgreSQL(),
    "mysql": (mysql := MySQL()),
    "mariadb": mysql,
    "sqlite": SQLite(),
}

#: The extra that installs a driver, and the driver.
_DRIVERS = {"postgresql": ("postgresql", "psycopg"), "mysql": ("mysql", "pymysql")}

#: Options that would change what a statement of ours does.
_OURS = ("isolation_level", "stream_results")

_EXAMPLES = "postgresql+psycopg://…, mysql+pymysql://… or sqlite:////absolute/path"


def database_of(dialect: sa.Dialect) -> Database:
    """Return what this database does its own way.

    Raises:
        ConfigurationError: celery-lease does not work with it.
    """
    try:
        return _DATABASES[dialect.name]
    except KeyError:
        raise _wrong_url(
            f": a lease cannot be kept in {dialect.name}; use PostgreSQL, MySQL/MariaDB or SQLite"
        ) from None


def file_of(url: str | sa.URL) -> Path | None:
    """Return the file of an SQLite database, as it is named; None where there is none."""
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        return None
    if parsed.get_backend_name() != "sqlite" or _in_memory(parsed):
        return None
    name = str(parsed.database)
    return None if name.startswith("file:") else Path(name)  # SQLite's own kind of URL


def masked(url: str | sa.URL) -> str:
    """Return the URL without its password, wherever it stands."""
    try:
        text = sa.make_url(url).render_as_string(hide_password=True)
    except (sa.exc.ArgumentError, ValueError):  # ValueError: a port that is no number
        text = str(url)
    text = re.sub(r"(?i)((?:password|passwd|sslpassword)=)[^&;\s]*", r"\1***", text)
    return re.sub(r"(://[^:/@]*:).*@", r"\1***@", text)


def create_engine(
    url: str,
    options: Mapping[str, Any],
    *,
    lock_wait: float,
    statement_wait: float,
    autocommit: bool = False,
    pre_ping: bool = True,
) -> sa.Engine:
    """Return an engine for a lease database. Nothing is connected yet.

    Args:
        url: SQLAlchemy URL.
        options: The user's options, which win over ours.
        lock_wait: Seconds that a statement waits for a lock.
        statement_wait: Seconds that a statement may take, where the database can tell.
        autocommit: Whether each statement commits by itself. To say so of an engine saves
            up to five round trips a statement over saying so of each connection in turn.
        pre_ping: Whether a pooled connection is tried before it is used.

    Raises:
        ConfigurationError: The URL, its driver or the options cannot be used.
    """
    parsed, database = _parse(url)
    given = {**options, **(options.get("execution_options") or {})}
    for name in _OURS:
        if name in given:
            raise ConfigurationError(
                f"beat_lease_engine_options: {name} is not yours to choose, the store's "
                f"statements rely on their own; remove it",
                setting="beat_lease_engine_options",
            )
    arguments = database.engine_arguments(lock_wait, statement_wait)
    if autocommit:
        arguments["isolation_level"] = "AUTOCOMMIT"
    # What the URL says is the user's word too, but SQLAlchemy would let ours replace it.
    ours = arguments.pop("connect_args", {})
    ours = {key: value for key, value in ours.items() if key not in parsed.query}
    connect_args = {**ours, **(options.get("connect_args") or {})}
    if "pool" not in options:  # SQLAlchemy asks a finished pool for its own settings.
        arguments["pool_pre_ping"] = pre_ping
    arguments = {**arguments, **options, "connect_args": connect_args}
    try:
        engine = sa.create_engine(parsed, **arguments)
    except ImportError as error:
        raise _wrong_url(
            f" = {masked(url)!r}: its driver is not installed ({error}); {_driver_for(parsed)}"
        ) from None
    except (TypeError, sa.exc.ArgumentError) as error:
        raise ConfigurationError(
            f"beat_lease_engine_options: {error}", setting="beat_lease_engine_options"
        ) from None
    # A name that SQLAlchemy before 2.0.43 does not know, and then does not look at.
    engine.dialect.skip_autocommit_rollback = autocommit
    _listen(engine, database, lock_wait, statement_wait)
    if not autocommit:
        sa.event.listen(engine, "begin", database.begin)
    return engine


def _parse(url: str) -> tuple[sa.URL, Database]:
    shown = masked(url)
    try:
        parsed = sa.make_url(url)
        dialect = parsed.get_dialect()()
    except sa.exc.NoSuchModuleError:
        raise _wrong_url(
            f" = {shown!r}: SQLAlchemy knows no such database or driver; write {_EXAMPLES}"
        ) from None
    except (sa.exc.ArgumentError, ValueError):
        raise _wrong_url(f" = {shown!r} is not an SQLAlchemy URL; write {_EXAMPLES}") from None
    if dialect.name == "sqlite" and _in_memory(parsed):
        raise _wrong_url(
            f" = {shown!r} is a database in memory, which no other process can see; name a file"
        )
    if dialect.is_async:
        raise _wrong_url(
            f" = {shown!r} names an asynchronous driver; use psycopg, PyMySQL or sqlite3"
        )
    database = database_of(dialect)
    if database.drivers and dialect.driver not in database.drivers:
        known = " or ".join(f"{dialect.name}+{each}://…" for each in database.drivers)
        raise _wrong_url(
            f" = {shown!r}: with this driver a silent server would be waited for without end; "
            f"write {known}"
        )
    return parsed, database


def _driver_for(url: sa.URL) -> str:
    """Return what to do about a driver that is not installed."""
    backend = url.get_backend_name()
    if backend == "sqlite":
        return "write sqlite:///…"
    extra, driver = _DRIVERS["mysql" if backend == "mariadb" else backend]
    other = "" if url.get_driver_name() == driver else f"write {backend}+{driver}://… and "
    return f"{other}pip install 'celery-lease[{extra}]'"


def _in_memory(url: sa.URL) -> bool:
    name = url.database or ""
    return (
        name in ("", ":memory:")
        or name.startswith("file::memory:")
        or url.query.get("mode") == "memory"
    )


def _listen(
    engine: sa.Engine, database: Database, lock_wait: float, statement_wait: float
) -> None:
    @sa.event.listens_for(engine, "do_connect")
    def connect(dialect: sa.Dialect, record: Any, arguments: Any, options: Any) -> Any:
        try:
            return dialect.connect(*arguments, **options)
        except (
            TypeError,
            ValueError,
            FileNotFoundError,
            dialect.loaded_dbapi.ProgrammingError,
            dialect.loaded_dbapi.NotSupportedError,
        ) as error:
            # A word that the driver does not know, a value that it does not take, no such file.
            raise ConfigurationError(
                f"beat_lease_engine_options, connect_args: {error}",
                setting="beat_lease_engine_options",
            ) from error

    @sa.event.listens_for(engine, "connect")
    def connected(dbapi: Any, record: Any) -> None:
        try:
            database.connected(dbapi, lock_wait, statement_wait)
        except BaseException:
            dbapi.close()
            raise

    database.watch(engine)


def _wrong_url(rest: str) -> ConfigurationError:
    return ConfigurationError(f"beat_lease_url{rest}", setting="beat_lease_url")
