"""PostgreSQL's last statement and its COMMIT in one message: libpq's pipeline mode.

The server works off what came in one message without waiting for anybody, and after an error
it skips the rest of it. psycopg's own ``pipeline()`` sends each statement as soon as it is
given: a process that is stopped between the two would leave the locks of the first to a server
that waits for the second, and none of its time-outs runs then.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

__all__ = ["can_commit_with", "commit_with", "is_of_commit"]

#: What is asked of psycopg's memory of the statements that it has prepared.
_MEMORY = ("get", "maybe_add_to_cache", "validate")
#: What marks the error of a COMMIT.
_OF_COMMIT = "_celery_lease_of_commit"


class _Query(NamedTuple):
    """What psycopg knows a statement by that it has prepared."""

    query: bytes
    #: Of the parameters: the text says what they are.
    types: tuple[int, ...] = ()


def can_commit_with(dbapi: Any) -> bool:
    """Return whether a driver's connection is psycopg's, in a transaction, and can pipeline.

    Args:
        dbapi: The driver's connection.
    """
    psycopg = sys.modules.get("psycopg")
    return (
        psycopg is not None
        and isinstance(dbapi, psycopg.Connection)
        and dbapi.pgconn.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        and not dbapi.pgconn.pipeline_status
        and psycopg.Pipeline.is_supported()
        and all(hasattr(getattr(dbapi, "_prepared", None), each) for each in _MEMORY)
    )


def commit_with(dbapi: Any, sql: str, parameters: Sequence[str | int]) -> None:
    """Run a statement, and COMMIT if it raises no error.

    Args:
        dbapi: A connection of psycopg's that :func:`can_commit_with` took.
        sql: The statement, its parameters written $1, $2, … and cast to their types.
        parameters: Their values.

    Raises:
        psycopg.Error: The server's, of the statement (nothing is committed) or of the COMMIT
            (see :func:`is_of_commit`). After a broken connection it may be committed.
    """
    from psycopg import errors
    from psycopg.pq import ConnStatus, ExecStatus

    encoding, pgconn = dbapi.info.encoding, dbapi.pgconn
    query = _Query(sql.encode(encoding))
    values = [str(each).encode(encoding) for each in parameters]
    if any(b"\0" in each for each in values):  # libpq would take it for the end.
        raise errors.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
    # There is no public way to these. A statement that we named ourselves would be gone when
    # psycopg has the server forget its own, as at each ROLLBACK, and nobody would tell us.
    prepared = dbapi._prepared  # noqa: SLF001
    with dbapi.lock:
        wanted, name = prepared.get(query)
        key = prepared.maybe_add_to_cache(query, wanted, name)
        try:
            pgconn.enter_pipeline_mode()
            if wanted.name == "SHOULD":
                pgconn.send_prepare(name, query.query)
            if name:
                pgconn.send_query_prepared(name, values)
            else:
                pgconn.send_query_params(query.query, values)
            pgconn.send_query_params(b"COMMIT", None)
            pgconn.pipeline_sync()  # Nothing is sent before.
            results = dbapi.wait(_answers(pgconn))
            if pgconn.status == ConnStatus.OK:
                pgconn.exit_pipeline_mode()
        except BaseException:
            # Between a question and its answer, which the next would take for its own.
            pgconn.finish()
            raise
        if key is not None:
            prepared.validate(key, wanted, name, results[-2:-1])
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            error = errors.error_from_result(result, encoding)
            setattr(error, _OF_COMMIT, result is results[-1])
            raise error
    if not results or results[-1].command_status != b"COMMIT":
        raise errors.OperationalError("the server did not say that it has committed")


def is_of_commit(error: BaseException) -> bool:
    """Return whether an error is of the COMMIT, which runs what was deferred to it.

    Args:
        error: Raised by :func:`commit_with`.
    """
    return getattr(error, _OF_COMMIT, False)


def _answers(pgconn: Any) -> Generator[Any, Any, list[Any]]:
    """Send what is left to send, and return an answer for each statement."""
    from psycopg import DatabaseError
    from psycopg.generators import execute, fetch_many
    from psycopg.pq import ExecStatus

    answers: list[Any] = []
    results = yield from execute(pgconn)
    while results and results[0].status != ExecStatus.PIPELINE_SYNC:
        answers += results
        try:
            results = yield from fetch_many(pgconn)
        except DatabaseError:
            if all(each.status != ExecStatus.FATAL_ERROR for each in answers):
                raise
            break  # That were the last words of a server that has ended the session.
    return answers
