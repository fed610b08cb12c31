"""The workers' side of a lease database: is this work current, and how did it end?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa

from celery_lease.errors import (
    AlreadySettled,
    CeleryLeaseError,
    FencingError,
    MissingFence,
    NotWritable,
    SchemaMismatch,
    StaleEpoch,
    StoreError,
    StoreUnavailable,
    UnsafeTransaction,
)
from celery_lease.lease import Fence
from celery_lease.occurrence import Occurrence, Outcome, RunState
from celery_lease.settings import Settings
from celery_lease.stores.dialects import (
    Database,
    Direct,
    create_engine,
    database_of,
    direct,
    masked,
    translated_own,
)
from celery_lease.stores.schema import commit_table, fence_table, lease_table, run_table

__all__ = [
    "FenceStore",
    "Standing",
    "Ticket",
    "look",
    "objection",
    "passes",
    "refusal",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a guarded write shows at the fence: one execution of one stamped task."""

    #: Name of the lease.
    lease: str
    #: Epoch of its stamp.
    epoch: int
    #: Uuid of the term of its stamp.
    term: str
    #: The id that it settles.
    task_id: str
    #: Id of the run that it is, or is a consequence of.
    run: str
    #: Uuid of this one execution: a redelivered message has another.
    execution: str
    #: For a child: a uuid of its run and that run's term, since its own id may repeat. Empty
    #: for a run.
    origin: str = ""

    def values(self, outcome: Outcome) -> dict[str, Any]:
        """Return the commit row that records *outcome*."""
        return {
            "task_id": self.task_id,
            "origin": self.origin,
            "lease": self.lease,
            "epoch": self.epoch,
            "term": self.term,
            "execution": self.execution,
            "outcome": outcome,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the database knows of a ticket."""

    #: Whether its epoch and term are the current ones.
    current: bool
    #: The current epoch.
    epoch: int
    #: The fence, where a takeover is not in the middle of raising it.
    fence: Fence | None
    #: How the ticket's task ended: committed, failed, expired or revoked; None if it has not.
    outcome: str | None
    #: Which execution ended it.
    execution: str | None
    #: The planned firing it belongs to, where the run is still on record.
    occurrence: Occurrence | None
    #: Whether the run is one of a fenced task; None where there is no record of it.
    fenced: bool | None
    #: The (epoch, term) that the run was settled under; None if it was not.
    settled_under: tuple[int, str] | None


def _of_lease(table: sa.FromClause, *conditions: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    # The call keeps a planner without statistics from taking the index that the lease is
    # first in, and reading all rows of it; the primary key is the one way left.
    name = sa.func.coalesce(table.c.lease, sa.literal_column("''"))
    return sa.and_(*conditions, name == fence_table.c.name)


_own = commit_table.alias("own")
_runs = commit_table.alias("runs")
_LOOK = (
    sa.select(
        fence_table.c.epoch.label("fence_epoch"),
        fence_table.c.term.label("fence_term"),
        lease_table.c.epoch.label("lease_epoch"),
        lease_table.c.term.label("lease_term"),
        _own.c.outcome,
        _own.c.execution,
        run_table.c.entry,
        run_table.c.due_at,
        run_table.c.attempt,
        run_table.c.fenced,
        _runs.c.epoch.label("settled_epoch"),
        _runs.c.term.label("settled_term"),
    )
    .select_from(fence_table)
    .join(lease_table, lease_table.c.name == fence_table.c.name)
    .outerjoin(
        _own,
        _of_lease(
            _own,
            _own.c.task_id == sa.bindparam("task_id"),
            _own.c.origin == sa.bindparam("origin"),
        ),
    )
    .outerjoin(run_table, _of_lease(run_table, run_table.c.id == sa.bindparam("run")))
    .outerjoin(
        _runs, _of_lease(_runs, _runs.c.task_id == sa.bindparam("run"), _runs.c.origin == "")
    )
    .where(fence_table.c.name == sa.bindparam("lease"))
)

#: The only thing that a worker ever writes into a run. Found by its primary key alone, for
#: the same reason.
_REFUSE = (
    sa.update(run_table)
    .where(
        run_table.c.id == sa.bindparam("run_id"),
        run_table.c.epoch == sa.bindparam("of_epoch"),
        run_table.c.term == sa.bindparam("of_term"),
        sa.or_(
            run_table.c.state == RunState.CLAIMED.value,
            run_table.c.state == RunState.PUBLISHED.value,
        ),
        ~sa.exists().where(commit_table.c.task_id == run_table.c.id),
    )
    .values(state=RunState.REFUSED.value, open=True)
)


class _Row(NamedTuple):
    """What :data:`_LOOK` reads, in its order."""

    fence_epoch: int
    fence_term: str | None
    lease_epoch: int
    lease_term: str | None
    outcome: str | None
    execution: str | None
    entry: str | None
    due_at: Any
    attempt: Any
    fenced: bool | None
    settled_epoch: int | None
    settled_term: Any


def look(connection: Direct, ticket: Ticket, shown: str) -> Standing:
    """Read, without locking, what there is to know of a ticket.

    Args:
        connection: To the database that is asked.
        ticket: What is shown.
        shown: URL of the database, password masked.

    Raises:
        MissingFence: There is no fence for its lease in this database.
    """
    values = {
        "task_id": ticket.task_id,
        "origin": ticket.origin,
        "run": ticket.run,
        "lease": ticket.lease,
    }
    found = connection.execute(_LOOK, values).row
    if found is None:
        raise missing_fence(ticket.lease, shown)
    row = _Row(*found)
    raised = (row.fence_epoch, row.fence_term)
    # Between its acquire and its raising of the fence a takeover shows two terms.
    fence = occurrence = settled_under = None
    if raised == (row.lease_epoch, row.lease_term):
        fence = Fence(name=ticket.lease, epoch=row.fence_epoch, term=row.fence_term)
    if row.entry is not None:
        occurrence = Occurrence(
            lease=ticket.lease, entry=row.entry, due_at=row.due_at, attempt=row.attempt
        )
    if row.settled_epoch is not None:
        settled_under = (row.settled_epoch, row.settled_term)
    return Standing(
        current=fence is not None and raised == (ticket.epoch, ticket.term),
        epoch=max(row.fence_epoch, row.lease_epoch),
        fence=fence,
        outcome=row.outcome,
        execution=row.execution,
        occurrence=occurrence,
        fenced=row.fenced,
        settled_under=settled_under,
    )


def passes(
    connection: Direct, ticket: Ticket, *, final: bool, idle: float, commit: bool = False
) -> bool:
    """Run the guard's statement: the last one of the transaction on *connection*.

    Args:
        connection: In the transaction that is about to commit.
        ticket: What is shown at the fence.
        final: Whether passing settles the ticket's task, or is only a check.
        idle: Seconds that the server waits for the COMMIT.
        commit: Whether to bring the COMMIT along, where the database takes both at once.

    Returns:
        False where another epoch or term is current. A duplicate raises IntegrityError.
    """
    database = database_of(connection.dialect)
    if final:
        values = ticket.values("committed")
        if commit:
            return database.settle_and_commit(connection, **values)
        return database.settle(connection, idle=idle, **values)
    term: dict[str, Any] = {"lease": ticket.lease, "epoch": ticket.epoch, "term": ticket.term}
    if commit:
        return database.check_and_commit(connection, **term)
    return database.check(connection, idle=idle, **term)


def refusal(ticket: Ticket, standing: Standing) -> FencingError | None:
    """Return why the ticket must not go on; None where it may."""
    if standing.epoch == ticket.epoch:
        stale = f"epoch {ticket.epoch} was granted twice, and the current grant is another one"
    else:
        stale = f"epoch {ticket.epoch} is stale, the current epoch is {standing.epoch}"
    if standing.outcome is not None:
        if standing.execution == ticket.execution:
            return None
        before = f"{ticket.task_id} was settled before ({standing.outcome})"
        return AlreadySettled(
            before if standing.current else f"{stale}, and {before}",
            name=ticket.lease,
            task_id=ticket.task_id,
            outcome=standing.outcome,
            current_epoch=standing.epoch,
        )
    if standing.current:
        return None
    return StaleEpoch(stale, name=ticket.lease, epoch=ticket.epoch, current_epoch=standing.epoch)


def objection(
    ticket: Ticket,
    store: FenceStore,
    database: Database,
    driver: BaseException,
    *,
    shown: str,
) -> CeleryLeaseError | None:
    """Return what a guard is told that the database itself turned away.

    Args:
        ticket: What was shown.
        store: The lease database, as this package connects to it.
        database: The kind of database that turned the guard away.
        driver: The driver's error.
        shown: The database that turned it away, in words.

    Returns:
        None where the driver's own error says it best.
    """
    if database.is_of_commit(driver):
        return None  # Then it is about the user's own tables.
    kind = database.classify(driver)
    if kind is SchemaMismatch:
        return missing_fence(ticket.lease, shown)
    if kind is NotWritable:
        return _forbidden(ticket, store, database, driver) or NotWritable(str(driver))
    return None


def _forbidden(
    ticket: Ticket, store: FenceStore, database: Database, driver: BaseException
) -> UnsafeTransaction | None:
    """Return the error for a guard that may not write; None where nobody may at present.

    Waiting helps where a server was demoted, and not where the role lacks a privilege, or
    where the transaction itself is read-only.
    """
    try:
        if not database.is_forbidden(driver) and store.is_read_only():
            return None
    except StoreError:
        return None
    return UnsafeTransaction(
        f"the guard may not write in this transaction ({driver}): its role needs the workers' "
        f"privileges (docs, 'Grants'), and it must not be read-only",
        name=ticket.lease,
    )


def missing_fence(lease: str, shown: str) -> MissingFence:
    """Return the error for a database that knows nothing of the lease.

    Args:
        lease: Name of the lease.
        shown: URL of the database, password masked.
    """
    return MissingFence(
        f"there is no fence for the lease {lease!r} in {shown}: do beat and this worker share "
        f"beat_lease_url, and is the guarded data in that same database? Put the lease tables "
        f"and the guarded data into one database and point beat_lease_url at it. On PostgreSQL "
        f"the search_path of both must find the lease tables",
        name=lease,
    )


class FenceStore:
    """The few statements that a worker needs besides the guard, each committing by itself.

    Lazy, and one engine for each process: a worker forks after it has read its settings.

    Args:
        url: SQLAlchemy URL of the lease database.
        options: Options for ``create_engine``.
        idle: Seconds that the server waits for a silent guard.
        lock_wait: Seconds that a statement waits for a lock.
        statement_wait: Seconds that a statement may take.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        idle: float = 5.0,
        lock_wait: float = 2.0,
        statement_wait: float = 5.0,
    ) -> None:
        self._url = url
        self._options = options or {}
        self._lock_wait = lock_wait
        self._statement_wait = statement_wait
        self._engines: dict[int, sa.Engine] = {}
        #: Seconds that the server waits for a silent guard.
        self.idle = idle
        #: The URL without its password.
        self.shown = masked(url)

    @classmethod
    def of(cls, settings: Settings) -> FenceStore:
        """Return the store that these settings name. Nothing is connected yet."""
        return cls(settings.url, settings.engine_options, idle=settings.guard_idle)

    @property
    def engine(self) -> sa.Engine:
        """This process's engine. Nothing is connected.

        Raises:
            ConfigurationError: The URL, its driver or the options cannot be used.
        """
        pid = os.getpid()
        engine = self._engines.get(pid)
        if engine is None:
            # No lock: it might be held in the parent at the moment of the fork.
            engine = self._engines.setdefault(pid, self._create())
        return engine

    def _create(self) -> sa.Engine:
        return create_engine(
            self._url,
            self._options,
            lock_wait=self._lock_wait,
            statement_wait=self._statement_wait,
            autocommit=True,
            pre_ping=False,  # Each statement is tried twice instead.
        )

    def dispose(self) -> None:
        """Close the pooled connections; those of a parent process are not ours to close."""
        while self._engines:
            pid, engine = self._engines.popitem()
            engine.dispose(close=pid == os.getpid())

    def look(self, ticket: Ticket) -> Standing:
        """Read what there is to know of a ticket.

        Raises:
            MissingFence: There is no fence for its lease in this database.
            StoreError: The database did not answer.
        """

        def read() -> Standing:
            with self._statement() as connection:
                return look(connection, ticket, self.shown)

        try:
            return _twice(read)
        except SchemaMismatch:
            raise missing_fence(ticket.lease, self.shown) from None

    def settle(self, ticket: Ticket, outcome: Outcome) -> str:
        """Record the one outcome of the ticket's task, if it is current.

        Args:
            ticket: Who asks.
            outcome: committed, failed, expired or revoked.

        Returns:
            The outcome on record: an earlier one, if this same execution recorded it.

        Raises:
            StaleEpoch: Its epoch is not the current one.
            AlreadySettled: Another execution settled it.
            MissingFence: There is no fence for its lease in this database.
            StoreError: The database did not answer; the outcome may be recorded.
        """

        def record() -> bool:
            with self._statement() as connection:
                database = database_of(connection.dialect)
                return database.settle(connection, idle=self.idle, **ticket.values(outcome))

        try:
            if _twice(record):
                return outcome
        except sa.exc.IntegrityError:
            pass  # A row is there: whose, is read below.
        except SchemaMismatch:
            raise missing_fence(ticket.lease, self.shown) from None
        standing = self.look(ticket)
        refused = refusal(ticket, standing)
        if refused is not None:
            raise refused
        if standing.outcome is None:
            raise StoreUnavailable(f"{self.shown} did not say why {ticket.task_id} cannot settle")
        return standing.outcome

    def refuse(self, ticket: Ticket) -> bool:
        """Mark the run as refused, so that it is dispatched again.

        Returns:
            False where it is not waiting under exactly the ticket's epoch and term.
        """
        values = {
            "run_id": ticket.run,
            "of_epoch": ticket.epoch,
            "of_term": ticket.term,
        }

        def mark() -> bool:
            with self._statement() as connection:
                return connection.execute(_REFUSE, values).rowcount == 1

        return _twice(mark)

    def is_read_only(self) -> bool:
        """Return whether nobody can write there now, whatever this or that role may.

        Raises:
            StoreError: The database did not answer.
        """
        engine = self.engine
        with translated_own(engine), engine.connect() as connection:
            return database_of(engine.dialect).read_only(connection) is not None

    @contextmanager
    def _statement(self) -> Iterator[Direct]:
        engine = self.engine
        with translated_own(engine), direct(engine) as connection:
            yield connection


def _twice(verb: Callable[[], T]) -> T:
    """Try again what may be done twice: its pooled connection may have died long ago."""
    try:
        return verb()
    except StoreUnavailable:
        return verb()
