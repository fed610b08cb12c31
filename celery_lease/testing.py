"""Helpers for people's tests: hold a lease at an epoch, depose it, run a task under it.

::

    def test_a_stale_summary_writes_nothing(lease_url, held_lease):
        app.conf.beat_lease_url = lease_url
        held_lease.depose()
        assert run(summarise, under=held_lease).state == "IGNORED"

The two fixtures are in :mod:`celery_lease.fixtures`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa

from celery_lease.errors import CeleryLeaseError, StoreContention
from celery_lease.lease import Holder, Lease, Term
from celery_lease.occurrence import Occurrence, RunState
from celery_lease.stamp import Stamp
from celery_lease.stores.base import Raised
from celery_lease.stores.dialects import utcnow
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.schema import commit_table, run_table

__all__ = ["HeldLease", "hold", "run"]


class HeldLease:
    """A lease that a test holds, in place of a beat.

    Args:
        url: SQLAlchemy URL of the lease database.
        term: The term that is held.
        store: Its lease database.
    """

    def __init__(self, url: str, term: Term, store: SQLLeaseStore) -> None:
        self.url = url
        #: The term: its epoch, its uuid.
        self.term = term
        self._store = store

    @property
    def epoch(self) -> int:
        """The epoch that is held."""
        return self.term.epoch

    def depose(self) -> HeldLease:
        """Have another holder take over, as if this one had died; return the new lease."""
        self._store.release(self.term)
        return _take(self.url, self.term.name, self._store)

    def stamp(self, run_id: str) -> Stamp:
        """Return the stamp of a run that is dispatched under this lease."""
        return Stamp(name=self.term.name, epoch=self.epoch, term=self.term.uuid, run=run_id)

    def options(self, task_id: str | None = None) -> dict[str, Any]:
        """Return options for ``apply`` and ``apply_async``: a run under this lease.

        Args:
            task_id: Id of the run; a new one if not given.
        """
        task_id = task_id or str(uuid.uuid4())
        return {"task_id": task_id, **self.stamp(task_id).options()}

    def dispatch(
        self,
        task: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        entry: str = "test",
        **options: Any,
    ) -> Any:
        """Record a run as published and send its message, as a leading beat would.

        Args:
            task: The task.
            args: Its arguments.
            kwargs: Its keyword arguments.
            entry: Name of the entry in the schedule.
            options: More options for ``apply_async``.

        Returns:
            The result object.
        """
        occurrence = Occurrence(
            lease=self.term.name, entry=entry, due_at=datetime.now(timezone.utc)
        )
        self.record(occurrence)
        stamped = self.stamp(occurrence.run_id).options(options)
        return task.apply_async(args, kwargs, task_id=occurrence.run_id, **stamped)

    def record(self, occurrence: Occurrence, *, fenced: bool = True) -> None:
        """Record a run of *occurrence* as published under this lease."""
        with self._store.engine.begin() as connection:
            connection.execute(
                sa.insert(run_table).values(
                    id=occurrence.run_id,
                    lease=occurrence.lease,
                    entry=occurrence.entry,
                    due_at=occurrence.due_at,
                    epoch=self.epoch,
                    term=self.term.uuid,
                    fenced=fenced,
                    state=RunState.PUBLISHED.value,
                    open=True,
                    claimed_at=utcnow(),
                    published_at=utcnow(),
                )
            )

    def run_state(self, run_id: str) -> str | None:
        """Return what the ledger says of a run; None if it is not there.

        That is claimed, published, refused, skipped or failed.
        """
        state: str | None = self._value(
            sa.select(run_table.c.state).where(run_table.c.id == run_id)
        )
        return state

    def outcome(self, task_id: str) -> str | None:
        """Return how a task was settled, last where its id repeats; None while it is not."""
        outcome: str | None = self._value(_last(commit_table.c.outcome, task_id))
        return outcome

    def epoch_of(self, task_id: str) -> int | None:
        """Return the epoch that a task was settled under; None while it is not."""
        epoch: int | None = self._value(_last(commit_table.c.epoch, task_id))
        return epoch

    def close(self) -> None:
        """Release the lease if this term still holds it, and close the connections."""
        with suppress(CeleryLeaseError):  # The database may be gone before its fixture.
            self._store.release(self.term)
        self._store.dispose()

    def _value(self, query: sa.Select[Any]) -> Any:
        # No transaction: on SQLite ours take the write lock.
        with self._store.engine.connect() as connection:
            return connection.execution_options(isolation_level="AUTOCOMMIT").scalar(query)


def _last(column: sa.Column[Any], task_id: str) -> sa.Select[Any]:
    query = sa.select(column).where(commit_table.c.task_id == task_id)
    return query.order_by(commit_table.c.epoch.desc(), commit_table.c.at.desc()).limit(1)


def hold(url: str, name: str = "celery") -> HeldLease:
    """Take a free lease, making the tables where they are missing, and raise its fence.

    Args:
        url: SQLAlchemy URL of the lease database.
        name: Name of the lease.

    Raises:
        RuntimeError: Somebody holds it, or epochs went back in this database.
    """
    store = SQLLeaseStore(url)
    try:
        store.prepare(create=True)
        store.ensure(name)
        return _take(url, name, store)
    except BaseException:
        store.dispose()
        raise


def run(
    task: Any,
    *args: Any,
    under: HeldLease,
    task_id: str | None = None,
    **kwargs: Any,
) -> Any:
    """Run a task here and now, under a lease; return its ``EagerResult``.

    A refused task ends in the state IGNORED.

    Args:
        task: The task.
        args: Its arguments.
        under: The lease, current or deposed.
        task_id: Id of the run; a new one if not given.
        kwargs: Its keyword arguments.
    """
    return task.apply(args, kwargs, **under.options(task_id))


def _take(url: str, name: str, store: SQLLeaseStore) -> HeldLease:
    term = store.acquire(name, Holder.current(), 3600.0, str(uuid.uuid4()))
    if isinstance(term, Lease):
        raise RuntimeError(f"the lease {name!r} is held by {term.holder}")
    end = time.monotonic() + 30
    while True:
        try:
            raised = store.raise_fence(term)
        except StoreContention:
            # A guard in flight. A beat would renew and go on trying.
            if time.monotonic() > end:
                raise
        else:
            break
    if raised is not Raised.RAISED:
        store.release(term)
        raise RuntimeError(
            f"the lease {name!r} was granted at epoch {term.epoch}, but its fence is "
            f"{raised.value}: take a fresh database"
        )
    return HeldLease(url, term, store)
