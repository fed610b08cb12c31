"""An engine for a lease database, and how statements run on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa

from celery_lease.errors import StoreContention, StoreError, StoreUnavailable
from celery_lease.stores.dialects import (
    Database,
    create_engine,
    database_of,
    masked,
    translated_own,
)

__all__ = ["SQLStore"]

T = TypeVar("T")

#: How often a verb that lost a lock is tried before that is an error.
_TRIES = 3


class SQLStore:
    """A lease database: its engine, and short ways to it that end in time.

    Args:
        url: SQLAlchemy URL.
        options: The user's options for ``create_engine``.
        lock_wait: Seconds that a statement waits for a lock, far below the ttl.
        statement_wait: Seconds that a statement may take, where the database can tell.

    Raises:
        ConfigurationError: The URL, its driver or the options cannot be used.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        lock_wait: float = 1.0,
        statement_wait: float = 10.0,
    ) -> None:
        #: The engine. Nobody else's transactions run on it.
        self.engine = create_engine(
            url, options or {}, lock_wait=lock_wait, statement_wait=statement_wait
        )
        #: The URL without its password.
        self.shown = masked(url)
        self._pid = os.getpid()

    @property
    def database(self) -> Database:
        """What this kind of database does its own way."""
        return database_of(self.engine.dialect)

    def dispose(self) -> None:
        """Close the pooled connections. In a forked process they are the parent's, and stay."""
        self.engine.dispose(close=self._pid == os.getpid())

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn errors into StoreErrors: rows that are not taken are nobody's but ours here."""
        try:
            with translated_own(self.engine):
                yield
        except (sa.exc.IntegrityError, sa.exc.DataError) as error:
            said = " ".join(str(error.orig).split())
            raise StoreError(f"the tables in {self.shown} do not take a row: {said}") from error

    @contextmanager
    def _statement(self) -> Iterator[sa.Connection]:
        """Yield a connection for one statement that commits by itself.

        A session left half-open in a transaction would block every candidate.
        """
        with self._translated(), self.engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        """Yield a connection in a transaction, for what one statement cannot do."""
        with self._translated(), self.engine.begin() as connection:
            yield connection

    def _row(self, query: sa.Select[Any]) -> sa.Row[Any] | None:
        def read() -> sa.Row[Any] | None:
            with self._statement() as connection:
                return connection.execute(query).first()

        return self._retried(read)

    def _rowcount(self, statement: sa.Update) -> int:
        with self._statement() as connection:
            return connection.execute(statement).rowcount

    def _retried(self, verb: Callable[[], T]) -> T:
        """Try a verb that may be done twice once more: its connection may have been dropped."""
        try:
            return verb()
        except (StoreUnavailable, StoreContention):
            return verb()

    def _contended(self, verb: Callable[[], T]) -> T:
        """Try a verb again that lost a lock or was a deadlock's victim: nothing happened."""
        for _ in range(_TRIES - 1):
            try:
                return verb()
            except StoreContention:
                continue
        return verb()
