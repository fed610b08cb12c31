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
    from psycopg.pq import ExecStatus

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
        statement = 1 if wanted.name == "SHOULD" else 0  # Its place among the answers.
        try:
            pgconn.enter_pipeline_mode()
            if statement > 0:
                pgconn.send_prepare(name, query.query)
            if name:
                pgconn.send_query_prepared(name, values)
            else:
                pgconn.send_query_params(query.query, values)
            pgconn.send_query_params(b"COMMIT", None)
            pgconn.pipeline_sync()  # Nothing is sent before.
            answers = dbapi.wait(_answers(pgconn))
            if answers and answers[-1].status == ExecStatus.PIPELINE_SYNC:
                pgconn.exit_pipeline_mode()
            else:
                pgconn.finish()  # As the server has: it may have committed before.
        except BaseException:
            # Between a question and its answer, which the next would take for its own.
            pgconn.finish()
            raise
        if key is not None:
            prepared.validate(key, wanted, name, answers[statement : statement + 1])
    for place, answer in enumerate(answers):
        if answer.status == ExecStatus.FATAL_ERROR:
            error = errors.error_from_result(answer, encoding)
            setattr(error, _OF_COMMIT, place == statement + 1)
            raise error
    if b"COMMIT" not in [each.command_status for each in answers[statement + 1 :]]:
        raise errors.OperationalError("the server did not say that it has committed")


def is_of_commit(error: BaseException) -> bool:
    """Return whether an error is of the COMMIT, which runs what was deferred to it.

    Args:
        error: Raised by :func:`commit_with`.
    """
    return getattr(error, _OF_COMMIT, False)


def _answers(pgconn: Any) -> Generator[Any, Any, list[Any]]:
    """Send what is left to send, and return the answers.

    The last one is that to the end of the message, unless the server ended the session before:
    then one of them says why.
    """
    from psycopg import DatabaseError
    from psycopg.generators import execute, fetch_many
    from psycopg.pq import ExecStatus

    answers: list[Any] = yield from execute(pgconn)
    while answers and answers[-1].status != ExecStatus.PIPELINE_SYNC:
        try:
            more = yield from fetch_many(pgconn)
        except DatabaseError:
            more = []
            if all(each.status != ExecStatus.FATAL_ERROR for each in answers):
                raise
        if not more:
            break
        answers += more
    return answers
