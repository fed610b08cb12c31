"""The fence as a task's body sees it: ``self.fence``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from celery_lease.errors import (
    AlreadySettled,
    FencingError,
    StaleEpoch,
    StoreError,
    UnsafeTransaction,
)
from celery_lease.guards.sqlalchemy import Guard, guarded, plain
from celery_lease.occurrence import Occurrence, Outcome
from celery_lease.stores.fences import FenceStore, Standing, Ticket, refusal

__all__ = ["TaskFence", "Unfenced"]

S = TypeVar("S", bound=Session)


class TaskFence:
    """One execution's way to the fence.

    Args:
        ticket: What it shows at the fence.
        store: The lease database.
        standing: What admission found.
    """

    def __init__(self, ticket: Ticket, store: FenceStore, standing: Standing) -> None:
        self.ticket = ticket
        self.store = store
        #: The planned firing; None where its run is not on record any more.
        self.occurrence: Occurrence | None = standing.occurrence
        #: Why this execution was turned away; None while it was not.
        self.refused: FencingError | None = None
        #: Whether another message goes on with this task id: a retry, a replacement.
        self.handed_on = False
        #: Whether a guarded block is open.
        self.open = False
        self._settled = False
        #: The guard of the block that is open, where its body can commit.
        self._guard: Guard | None = None

    @property
    def settled(self) -> bool:
        """Whether the one outcome is on record, by this execution.

        Asks the database where the body committed inside the open block.

        Raises:
            StoreError: There was a commit inside the open block, and the database does
                not say whether it succeeded.
        """
        return self._settled or (self._guard is not None and self._guard.has_settled())

    @property
    def epoch(self) -> int:
        """The epoch that this task was dispatched under."""
        return self.ticket.epoch

    @property
    def idempotency_key(self) -> str:
        """The same on every attempt: what to give to a service that can tell duplicates."""
        ticket = self.ticket
        # A child's id may be another run's child's as well.
        return ticket.run if ticket.task_id == ticket.run else f"{ticket.run}:{ticket.task_id}"

    def headers(self) -> dict[str, str]:
        """Return HTTP headers for a service that keeps the largest epoch it has seen.

        They prove nothing by themselves: a service that ignores them is not fenced.
        """
        return {
            "Idempotency-Key": self.idempotency_key,
            "Lease-Name": self.ticket.lease,
            "Lease-Epoch": str(self.epoch),
        }

    def check(self) -> None:
        """Ask the lease database whether this task may still go on.

        For long bodies, and before something that cannot check by itself. The answer
        is as old as it is: only a guarded transaction is safe against a takeover.

        Raises:
            StaleEpoch: A newer epoch took over.
            AlreadySettled: Another delivery of this message was faster.
            StoreError: The database did not answer.
        """
        self._raise(refusal(self.ticket, self.store.look(self.ticket)))

    def settle(self, outcome: Outcome) -> None:
        """Record how the task ended. Done for you after the body.

        Args:
            outcome: committed or failed.

        Raises:
            StaleEpoch: A newer epoch took over.
            AlreadySettled: Another delivery was faster.
            StoreError: The database did not answer; the outcome may be recorded.
        """
        try:
            self.store.settle(self.ticket, outcome)
        except FencingError as error:
            self._raise(error)
        self._settled = True

    @overload
    def transaction(
        self,
        target: S | sessionmaker[S] | scoped_session[S],
        *,
        final: bool = True,
        idle: float | None = None,
    ) -> AbstractContextManager[S]: ...

    @overload
    def transaction(
        self, target: sa.Engine | sa.Connection, *, final: bool = True, idle: float | None = None
    ) -> AbstractContextManager[sa.Connection]: ...

    @contextmanager
    def transaction(
        self, target: Any, *, final: bool = True, idle: float | None = None
    ) -> Iterator[Any]:
        """Write in one transaction that only commits if this task is still current.

        Args:
            target: A Session, sessionmaker, scoped_session, Engine or Connection of
                SQLAlchemy, in the database that holds the lease tables.
            final: Whether this is the one block that settles the run. Earlier ones
                say False: they are checked, but may commit once on every attempt.
            idle: Seconds of silence after which the server ends the transaction,
                from its start on, where the server can. The guard's last round trip
                is always limited (``beat_lease_guard_idle``).

        Yields:
            The session or connection to work with.

        Raises:
            StaleEpoch: A newer epoch took over. Nothing was written.
            AlreadySettled: Another delivery was faster. Nothing was written.
            MissingFence: The target is not in the lease database. Nothing was written.
            StoreContention: The fence was moving. Nothing was written; try again.
            UnsafeTransaction: The guard cannot be the last word here.
            ConfigurationError: *idle* is no number of seconds above 0.
            TypeError: *target* is none of these.
            sqlalchemy.exc.DBAPIError: As without a guard. Where the answer to the COMMIT
                was lost, the task's outcome is looked up before its result is stored.
        """
        with self._block():
            guard = self._guard = Guard(self.ticket, self.store, final=final, idle=idle)
            try:
                with guarded(target, guard) as work:
                    yield work
            finally:
                self._guard = None
                # Not known is not settled: settling finds this execution's own row.
                with suppress(StoreError, FencingError):
                    self._settled = guard.has_settled()

    @contextmanager
    def atomic(
        self, using: str = "default", *, final: bool = True, idle: float | None = None
    ) -> Iterator[Any]:
        """Write in one Django transaction that only commits if this task is still current.

        Args:
            using: Alias of a database that holds the lease tables too.
            final: As for :meth:`transaction`.
            idle: As for :meth:`transaction`.

        Yields:
            Django's connection.

        Raises:
            StaleEpoch: A newer epoch took over. Nothing was written.
            AlreadySettled: Another delivery was faster. Nothing was written.
            MissingFence: The lease tables are elsewhere. Nothing was written.
            StoreContention: The fence was moving. Nothing was written; try again.
            UnsafeTransaction: A transaction was begun before.
            ConfigurationError: *idle* is no number of seconds above 0.
            django.db.Error: As without a guard.
        """
        from celery_lease.guards.django import guarded

        def committed() -> None:
            self._settled = final

        with (
            self._block(),
            guarded(using, self.ticket, self.store, committed, final=final, idle=idle) as work,
        ):
            yield work

    @contextmanager
    def _block(self) -> Iterator[None]:
        """Keep account of one guarded block."""
        if self.settled:
            raise UnsafeTransaction(
                "the final guarded block of this run was committed before; all but the last "
                "one say final=False",
                name=self.ticket.lease,
            )
        if self.open:
            raise UnsafeTransaction(
                "a guarded block cannot stand inside another one", name=self.ticket.lease
            )
        self._raise(self.refused)
        self.open = True
        try:
            yield
        except FencingError as error:
            self._raise(error)
        finally:
            self.open = False

    def _raise(self, error: FencingError | None) -> None:
        if error is None:
            return
        if isinstance(error, (StaleEpoch, AlreadySettled)):
            self.refused = error
        raise error


class Unfenced:
    """What ``self.fence`` is in a task that no lease scheduler sent: nothing is checked."""

    epoch: int | None = None
    occurrence: Occurrence | None = None
    idempotency_key: str | None = None
    settled = False

    def headers(self) -> dict[str, str]:
        """Return no headers."""
        return {}

    def check(self) -> None:
        """Do nothing."""

    @overload
    def transaction(
        self,
        target: S | sessionmaker[S] | scoped_session[S],
        *,
        final: bool = True,
        idle: float | None = None,
    ) -> AbstractContextManager[S]: ...

    @overload
    def transaction(
        self, target: sa.Engine | sa.Connection, *, final: bool = True, idle: float | None = None
    ) -> AbstractContextManager[sa.Connection]: ...

    def transaction(
        self, target: Any, *, final: bool = True, idle: float | None = None
    ) -> AbstractContextManager[Any]:
        """Open a plain transaction on the same kinds of target.

        Raises:
            UnsafeTransaction: The target is in a transaction that was begun before.
            TypeError: *target* is none of these.
        """
        return plain(target)

    def atomic(
        self, using: str = "default", *, final: bool = True, idle: float | None = None
    ) -> AbstractContextManager[Any]:
        """Open a plain Django transaction."""
        return _plain_atomic(using)


@contextmanager
def _plain_atomic(using: str) -> Iterator[Any]:
    from django.db import connections, transaction

    with transaction.atomic(using=using, durable=True):
        yield connections[using]
