"""A transaction of the leader's: it commits only while its term is the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from celery_lease.errors import LeaseLost
from celery_lease.lease import Term
from celery_lease.stores.dialects import database_of, translated, within

__all__ = ["guarded"]


@contextmanager
def guarded(engine: sa.Engine, term: Term, idle: float) -> Iterator[sa.Connection]:
    """Yield a transaction that commits only if *term* is the current one.

    Args:
        engine: The lease database.
        term: The leader's term.
        idle: Seconds that the database waits for the commit.

    Raises:
        LeaseLost: Another term is the current one; nothing was written.
    """
    with translated(engine), engine.begin() as connection:
        yield connection
        # Last: nothing of this is visible to anybody yet, and from here on a takeover
        # waits for the transaction to end.
        if not database_of(engine.dialect).check(
            within(connection), lease=term.name, epoch=term.epoch, term=term.uuid, idle=idle
        ):
            raise LeaseLost(
                f"epoch {term.epoch} of {term.name!r} is not the current one",
                name=term.name,
                held_epoch=term.epoch,
            )
