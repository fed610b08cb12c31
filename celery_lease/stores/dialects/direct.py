"""The few statements that each fenced task pays for, with little around them.

SQLAlchemy takes as long over a statement (its context, the description of its columns, a
transaction that it begins and ends even where the driver commits by itself) as a database
nearby does. These are compiled once, and go to the driver as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import sqlalchemy as sa

__all__ = ["Direct", "direct", "within"]

#: A connection that streams its results would make a cursor of each statement.
_AT_ONCE = {"stream_results": False}


class Direct:
    """As much of an SQLAlchemy connection as these statements need.

    Args:
        dialect: What they are compiled for.
        engine: Whose connection it is; None if it is not SQLAlchemy's.
        schemas_of: What says which schemas the lease tables are in; None for the default one.
    """

    #: What is remembered of the driver's connection.
    info: dict[Any, Any]

    def __init__(
        self,
        dialect: sa.Dialect,
        engine: sa.Engine | None,
        schemas_of: sa.Engine | sa.Connection | None = None,
    ) -> None:
        self.dialect = dialect
        self.engine = engine
        options = {} if schemas_of is None else schemas_of.get_execution_options()
        self._schemas = tuple((options.get("schema_translate_map") or {}).items())

    @property
    def dbapi_connection(self) -> Any:
        """The driver's connection."""
        raise NotImplementedError

    def execute(self, statement: sa.Executable, values: Mapping[str, Any]) -> Answer:
        """Run a SELECT of at most one row, or a statement that changes rows.

        Columns are read by their types, but *values* go to the driver as they are: give
        text, numbers and booleans, and no instants, which only ``UTCDateTime`` converts.
        """
        text = self.compiled(statement)
        row, rowcount = self._run(text, text.parameters(values))
        return Answer(None if row is None else text.read(row), rowcount)

    def unseen(self, statement: str) -> Answer:
        """Run the driver's own SQL, without parameters, which no events and no log see."""
        with self._cursor() as cursor:
            cursor.execute(statement)
            row = None if cursor.description is None else cursor.fetchone()
            return Answer(row, cursor.rowcount)

    def compiled(self, statement: sa.Executable, dialect: sa.Dialect | None = None) -> Text:
        """Return a statement as the driver wants it, or as another *dialect* does."""
        return compiled(statement, dialect or self.dialect, self._schemas)

    def _run(self, text: Text, parameters: Any) -> tuple[Sequence[Any] | None, int]:
        with self._cursor() as cursor:
            cursor.execute(text.sql, parameters)
            return cursor.fetchone() if text.returns_row else None, cursor.rowcount

    def _cursor(self) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def translated(self) -> AbstractContextManager[Any]:
        """Turn the driver's errors into those that the users of this connection catch."""
        raise NotImplementedError


class Answer(NamedTuple):
    """What came of a statement."""

    #: The row of a SELECT, if there is one.
    row: Sequence[Any] | None
    #: How many rows were changed.
    rowcount: int


@contextmanager
def direct(engine: sa.Engine) -> Iterator[Direct]:
    """Lend a connection of an engine whose statements each commit by themselves."""
    pooled = engine.raw_connection()
    try:
        yield _Pooled(engine, pooled)
    finally:
        pooled.close()


def within(connection: sa.Connection, schemas_of: sa.Engine | None = None) -> Direct:
    """Return a way into the transaction of *connection*, which its events and its log see.

    Args:
        connection: The user's, or one of our own.
        schemas_of: The engine that says which schemas the lease tables are in, where that is
            not the connection's own.
    """
    return _Within(connection, schemas_of or connection)


class _Pooled(Direct):
    """The driver's own cursor, on a connection of a pool; its errors are SQLAlchemy's."""

    engine: sa.Engine

    def __init__(self, engine: sa.Engine, pooled: sa.PoolProxiedConnection) -> None:
        super().__init__(engine.dialect, engine, engine)
        self.info = pooled.info
        self._pooled = pooled

    @property
    def dbapi_connection(self) -> Any:
        return self._pooled.dbapi_connection

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        with self.translated(), closing(self._pooled.cursor()) as cursor:
            yield cursor

    @contextmanager
    def translated(self) -> Iterator[None]:
        driver = self.dialect.loaded_dbapi
        try:
            yield
        except driver.Error as error:
            gone = self.dialect.is_disconnect(error, self._pooled, None)
            if gone:
                # As SQLAlchemy does: the others of its age will be no better.
                self._pooled.invalidate(error)
                self.engine.dispose()
            raise _sqlalchemys(self.dialect, error, gone) from error
        except BaseException as interruption:
            # Between a question and its answer, which the next would take for its own.
            self._pooled.invalidate(interruption)
            raise


class _Within(Direct):
    """A transaction of SQLAlchemy's."""

    def __init__(self, connection: sa.Connection, schemas_of: sa.Engine | sa.Connection) -> None:
        super().__init__(connection.dialect, connection.engine, schemas_of)
        self.info = connection.info
        self._connection = connection

    @property
    def dbapi_connection(self) -> Any:
        return self._connection.connection.dbapi_connection

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        with self.translated(), closing(self._connection.connection.cursor()) as cursor:
            yield cursor

    @contextmanager
    def translated(self) -> Iterator[None]:
        try:
            yield
        except self.dialect.loaded_dbapi.Error as error:
            gone = self.dialect.is_disconnect(error, self._connection.connection, None)
            if gone:
                self._connection.invalidate(error)
            raise _sqlalchemys(self.dialect, error, gone) from error

    def _run(self, text: Text, parameters: Any) -> tuple[Sequence[Any] | None, int]:
        result = self._connection.exec_driver_sql(text.sql, parameters, _AT_ONCE)
        return result.first() if text.returns_row else None, result.rowcount


def _sqlalchemys(dialect: sa.Dialect, error: Exception, gone: bool) -> BaseException:
    """Return a driver's error as SQLAlchemy has it: it is what tasks and we ourselves catch."""
    return sa.exc.DBAPIError.instance(
        None,
        None,
        error,
        dialect.loaded_dbapi.Error,
        connection_invalidated=gone,
        dialect=dialect,
    )


class Text(NamedTuple):
    """A statement as the driver wants it."""

    sql: str
    #: What the statement itself says of its parameters.
    defaults: Mapping[str, Any]
    #: The order of the parameters, where they go by their place.
    order: Sequence[str] | None
    #: How to read each column of its row; none where it returns no row.
    columns: Sequence[Callable[[Any], Any] | None]

    @property
    def returns_row(self) -> bool:
        """Whether it is a SELECT."""
        return bool(self.columns)

    def parameters(self, values: Mapping[str, Any]) -> Any:
        """Return *values* as the driver wants them."""
        given = {**self.defaults, **values}
        return given if self.order is None else tuple([given[each] for each in self.order])

    def read(self, row: Sequence[Any]) -> tuple[Any, ...]:
        """Return the row with its columns' types."""
        return tuple(
            value if convert is None else convert(value)
            for value, convert in zip(row, self.columns, strict=True)
        )


@lru_cache(maxsize=128)
def compiled(statement: sa.Executable, dialect: sa.Dialect, schemas: tuple[Any, ...]) -> Text:
    """Compile a statement, once for each dialect."""
    wanted: dict[str, Any] = {}
    if schemas:
        wanted = {"schema_translate_map": dict(schemas), "render_schema_translate": True}
    text: Any = statement.compile(dialect=dialect, **wanted)  # type: ignore[attr-defined]
    columns: list[Any] = []
    if isinstance(statement, sa.Select):
        types = [each.type.dialect_impl(dialect) for each in statement.selected_columns]
        columns = [each.result_processor(dialect, None) for each in types]
    order = text.positiontup if text.positional else None
    return Text(str(text), text.params, order, columns)
