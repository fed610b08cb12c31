"""What a driver's errors mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from celery_lease.errors import NotWritable, SchemaMismatch, StoreError, StoreUnavailable
from celery_lease.stores.dialects.engine import database_of, file_of, masked
from celery_lease.stores.schema import SCHEMA_VERSION

__all__ = ["is_certainly_wrong", "translated", "translated_own"]


@contextmanager
def translated(engine: sa.Engine) -> Iterator[None]:
    """Turn a driver's errors into kinds of StoreError.

    What is about the caller's own rows passes: IntegrityError, DataError.
    """
    try:
        yield
    except sa.exc.TimeoutError as error:
        raise StoreUnavailable(f"no free connection: {error}") from error
    except (sa.exc.IntegrityError, sa.exc.DataError):
        raise
    except sa.exc.DBAPIError as error:
        broken = error.connection_invalidated or isinstance(
            error, (sa.exc.OperationalError, sa.exc.InterfaceError)
        )
        raise _failure(engine, error.orig or error, broken=broken) from error
    except OSError as error:
        # A `creator` of the user's asks others for a password or a token first.
        raise StoreUnavailable(f"no connection: {error}") from error
    except engine.dialect.loaded_dbapi.Error as error:
        # Setting up a new connection failed: SQLAlchemy does not wrap that.
        raise _failure(engine, error, broken=True) from error


@contextmanager
def translated_own(engine: sa.Engine) -> Iterator[None]:
    """Do the same for an engine of our own, and drop connections that will be no better.

    A session can stay read-only when its server is not any more, and stays with a primary
    that was demoted; another remembers tables as they were. The next try makes a new one.
    """
    try:
        with translated(engine):
            yield
    except StoreError as error:
        orig = getattr(error.__cause__, "orig", None)
        outdated = orig is not None and database_of(engine.dialect).is_outdated(orig)
        if outdated or isinstance(error, NotWritable):
            engine.dispose()
        raise


def _failure(engine: sa.Engine, error: BaseException, *, broken: bool) -> StoreError:
    database = database_of(engine.dialect)
    kind = database.classify(error)
    text = _first_line(error)
    file = file_of(engine.url)
    if file is not None and "unable to open" in text:
        text += f" {file.absolute()}"
    if kind is SchemaMismatch:
        return SchemaMismatch(
            f"the tables are missing or of another version ({text}); run 'celery lease init'",
            found=None,
            expected=SCHEMA_VERSION,
        )
    if kind is NotWritable and database.is_forbidden(error):
        grants = f"celery lease init --sql {engine.dialect.name} --grants"
        return NotWritable(f"{text}; grant what {grants!r} prints", forbidden=True)
    return (kind or (StoreUnavailable if broken else StoreError))(text)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return masked(lines[0]) if lines else type(error).__name__


_CERTAIN = re.compile(
    r"password authentication failed|no password supplied|role \"[^\"]*\" does not exist"
    r"|database \"[^\"]*\" does not exist|no pg_hba\.conf entry"
    r"|Access denied for user|Unknown database",
    re.IGNORECASE,
)


def is_certainly_wrong(error: BaseException, url: str) -> bool:
    """Return whether waiting cannot help: the name, the role, the password or path is wrong.

    psycopg gives no SQLSTATE for a refused connection, a bad role and a bad database
    alike, so this goes by the message; in doubt the database is merely down.

    Args:
        error: Why it does not answer.
        url: Where it was looked for.
    """
    file = file_of(url)
    if file is not None:
        return not file.parent.is_dir()
    return _CERTAIN.search(str(error)) is not None
