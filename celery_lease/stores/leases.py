"""The lease in a SQL database: one atomic statement, or one short transaction, for each verb."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa

from celery_lease.errors import (
    ConfigurationError,
    NotWritable,
    SchemaMismatch,
    StoreContention,
    StoreUnavailable,
)
from celery_lease.lease import MAX_EPOCH, Fence, Holder, Lease, Term, TermRecord
from celery_lease.stores.base import Raised, Renewal
from celery_lease.stores.dialects import (
    Database,
    create_engine,
    database_of,
    from_now,
    masked,
    seconds_until,
    translated,
    utcnow,
)
from celery_lease.stores.schema import (
    SCHEMA_VERSION,
    commit_table,
    fence_table,
    lease_table,
    metadata,
    run_table,
    schema_table,
    term_table,
)

__all__ = ["SQLLeaseStore"]

T = TypeVar("T")


class SQLLeaseStore:
    """A :class:`~celery_lease.stores.base.LeaseStore` over SQLAlchemy Core.

    Args:
        url: SQLAlchemy URL.
        options: The user's options for ``create_engine``.
        lock_wait: Seconds that a statement waits for a lock, far below the ttl.
        statement_wait: Seconds that a statement may take, where the database can tell.
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

    @property
    def database(self) -> Database:
        """What this kind of database does its own way."""
        return database_of(self.engine.dialect)

    def dispose(self) -> None:
        """Close the pooled connections."""
        self.engine.dispose()

    # --- schema -------------------------------------------------------------------------

    def prepare(self, *, create: bool) -> None:
        """Check the tables, making them first where they are missing and *create* is true."""
        found = self._version()
        if found is None and create:
            with translated(self.engine), self.database.schema_lock(self.engine) as connection:
                metadata.create_all(connection, checkfirst=True)
                connection.execute(
                    self.database.insert_ignore(schema_table).values(id=1, version=SCHEMA_VERSION)
                )
            found = self._version()
        if found != SCHEMA_VERSION:
            raise SchemaMismatch(
                _schema_message(found, self.shown), found=found, expected=SCHEMA_VERSION
            )
        with self._statement() as connection:
            reason = self.database.read_only(connection)
        if reason is not None:
            raise NotWritable(f"{self.shown}: {reason}; point beat_lease_url at the primary")

    def _version(self) -> int | None:
        try:
            with self._statement() as connection:
                return connection.execute(sa.select(schema_table.c.version)).scalar()
        except SchemaMismatch:
            return None

    def ensure(self, name: str) -> None:
        """Make the lease's two rows where they are missing."""
        if self.read(name) is not None and self.read_fence(name) is not None:
            return
        with self._transaction() as connection:
            for table in (lease_table, fence_table):
                connection.execute(self.database.insert_ignore(table).values(name=name, epoch=0))

    # --- the verbs ----------------------------------------------------------------------

    def acquire(self, name: str, holder: Holder, ttl: float, attempt: str) -> Term | Lease:
        """Take the lease if it is free or expired by the database's clock."""
        values = {
            "holder": str(holder),
            "term": attempt,
            "acquired_at": utcnow(),
            "renewed_at": utcnow(),
            "expires_at": from_now(ttl),
            "holder_info": json.dumps(dict(holder.info), default=str, sort_keys=True),
            "epoch": _next_epoch(name),
        }
        won = (
            sa.update(lease_table)
            .where(
                lease_table.c.name == name,
                sa.or_(lease_table.c.holder.is_(None), lease_table.c.expires_at <= utcnow()),
            )
            .values(values)
        )
        try:
            if self.database.one_statement_acquire:
                term = self._acquire_in_one(name, won)
            else:
                term = self._acquire_in_some(name, won, attempt)
        except StoreUnavailable:
            # The answer was lost, perhaps around COMMIT: the row tells.
            term = self._find_attempt(name, attempt)
            if term is None:
                raise
        if term is not None:
            return term
        lease = self.read(name)
        if lease is None:
            raise SchemaMismatch(
                f"the lease {name!r} has no row in {self.shown}; run 'celery lease init'",
                found=None,
                expected=SCHEMA_VERSION,
            )
        return lease

    def _acquire_in_one(self, name: str, won: sa.Update) -> Term | None:
        # A sub-select in RETURNING sees the row as it was before this statement.
        before = lease_table.alias("before")
        was = sa.select(before.c.expires_at).where(before.c.name == name).scalar_subquery()
        who = sa.select(before.c.holder).where(before.c.name == name).scalar_subquery()
        grant = won.returning(
            lease_table.c.name,
            lease_table.c.epoch,
            lease_table.c.term,
            lease_table.c.holder,
            lease_table.c.acquired_at,
            was.label("expired_at"),
            who.label("previous_holder"),
        ).cte("won")
        history = (
            sa.insert(term_table)
            .from_select(
                ["name", "epoch", "term", "holder", "acquired_at"],
                sa.select(
                    grant.c.name, grant.c.epoch, grant.c.term, grant.c.holder, grant.c.acquired_at
                ),
            )
            .returning(term_table.c.epoch)
            .cte("history")
        )
        closed = (
            sa.update(term_table)
            .where(
                term_table.c.name == grant.c.name,
                term_table.c.epoch < grant.c.epoch,
                term_table.c.ended_at.is_(None),
            )
            .values(ended_at=sa.func.coalesce(grant.c.expired_at, utcnow()), ended="expired")
            .returning(term_table.c.epoch)
            .cte("closed")
        )
        with self._statement() as connection:
            row = connection.execute(sa.select(grant).add_cte(history, closed)).first()
        return None if row is None else _term(row, row.previous_holder)

    def _acquire_in_some(self, name: str, won: sa.Update, attempt: str) -> Term | None:
        columns = ["name", "epoch", "term", "holder", "acquired_at"]
        mine = sa.select(*(lease_table.c[each] for each in columns)).where(
            lease_table.c.name == name, lease_table.c.term == attempt
        )
        with self._transaction() as connection:
            before = connection.execute(
                sa.select(lease_table.c.expires_at, lease_table.c.holder).where(
                    lease_table.c.name == name
                )
            ).first()
            if before is None or connection.execute(won).rowcount == 0:
                return None
            connection.execute(
                sa.update(term_table)
                .where(term_table.c.name == name, term_table.c.ended_at.is_(None))
                .values(ended_at=before.expires_at or utcnow(), ended="expired")
            )
            connection.execute(sa.insert(term_table).from_select(columns, mine))
            reason = self.database.read_only(connection)
            if reason is not None:
                raise NotWritable(f"{self.shown}: {reason}; point beat_lease_url at the primary")
            return _term(connection.execute(mine).one(), before.holder)

    def _find_attempt(self, name: str, attempt: str) -> Term | None:
        row = self._row(
            sa.select(lease_table).where(
                lease_table.c.name == name,
                lease_table.c.term == attempt,
                lease_table.c.holder.is_not(None),
            )
        )
        return None if row is None else _term(row, None)

    def renew(self, term: Term, ttl: float) -> Renewal:
        """Make the lease good for *ttl* seconds more, if it is exactly this unexpired term's."""
        statement = (
            sa.update(lease_table)
            .where(*_is(lease_table, term), lease_table.c.expires_at > utcnow())
            .values(renewed_at=utcnow(), expires_at=from_now(ttl))
        )
        if self._retried(lambda: self._rowcount(statement)) == 1:
            return Renewal.RENEWED
        row = self._row(
            sa.select(lease_table.c.epoch, lease_table.c.term).where(
                lease_table.c.name == term.name
            )
        )
        twice = row is not None and row.epoch == term.epoch and row.term != term.uuid
        went_back = row is not None and row.epoch < term.epoch
        return Renewal.CONFLICT if twice or went_back else Renewal.LOST

    def release(self, term: Term) -> bool:
        """Free the lease if it is exactly this term's, keeping row, epoch and term."""
        freed = (
            sa.update(lease_table)
            .where(*_is(lease_table, term), lease_table.c.holder.is_not(None))
            .values(holder=None, expires_at=utcnow())
        )
        ended = _end(term, "released")
        if self.database.one_statement_acquire:
            freed_rows = freed.returning(lease_table.c.name).cte("freed")
            ended = ended.where(term_table.c.name.in_(sa.select(freed_rows.c.name)))
            return self._retried(lambda: self._rowcount(ended)) == 1

        def free() -> bool:
            with self._transaction() as connection:
                done = connection.execute(freed).rowcount == 1
                if done:
                    connection.execute(ended)
                return done

        return self._retried(free)

    def raise_fence(self, term: Term) -> Raised:
        """Raise the fence to this term."""
        statement = (
            sa.update(fence_table)
            .where(fence_table.c.name == term.name, fence_table.c.epoch < term.epoch)
            .values(epoch=term.epoch, term=term.uuid)
        )
        if self._retried(lambda: self._rowcount(statement)) == 1:
            return Raised.RAISED
        fence = self.read_fence(term.name)
        if fence is not None and fence.epoch == term.epoch:
            return Raised.RAISED if fence.term == term.uuid else Raised.CONFLICT
        lease = self.read(term.name)
        # A fence above us is a later takeover's, if the lease row went on as well.
        later = lease is not None and lease.epoch > term.epoch
        return Raised.SUPERSEDED if later else Raised.CONFLICT

    # --- looking ------------------------------------------------------------------------

    def read(self, name: str) -> Lease | None:
        """Return what anybody may know of the lease."""
        row = self._row(_SEEN.where(lease_table.c.name == name))
        return None if row is None else _lease(row)

    def read_fence(self, name: str) -> Fence | None:
        """Return the fence."""
        row = self._row(
            sa.select(fence_table.c.epoch, fence_table.c.term).where(fence_table.c.name == name)
        )
        return None if row is None else Fence(name=name, epoch=row.epoch, term=row.term)

    def list(self) -> Sequence[Lease]:
        """Return all leases, by name."""
        with self._statement() as connection:
            return [
                _lease(each) for each in connection.execute(_SEEN.order_by(lease_table.c.name))
            ]

    def history(self, name: str, limit: int) -> Sequence[TermRecord]:
        """Return the newest terms, newest first."""
        query = (
            sa.select(term_table)
            .where(term_table.c.name == name)
            .order_by(term_table.c.epoch.desc())
            .limit(limit)
        )
        with self._statement() as connection:
            return [
                TermRecord(
                    name=each.name,
                    epoch=each.epoch,
                    holder=each.holder,
                    acquired_at=each.acquired_at,
                    ended_at=each.ended_at,
                    ended=each.ended,
                )
                for each in connection.execute(query)
            ]

    # --- repair -------------------------------------------------------------------------

    def floor(self, term: Term) -> int:
        """Return the largest epoch seen in fence, other terms, runs and commits."""
        newest_run = (
            sa.select(run_table.c.epoch)
            .where(run_table.c.lease == term.name)
            .order_by(run_table.c.claimed_at.desc())
            .limit(1)
        )
        newest_commit = (
            sa.select(commit_table.c.epoch)
            .where(commit_table.c.lease == term.name)
            .order_by(commit_table.c.at.desc())
            .limit(1)
        )
        others = sa.select(sa.func.max(term_table.c.epoch)).where(
            term_table.c.name == term.name, term_table.c.term != term.uuid
        )
        fence = sa.select(fence_table.c.epoch).where(
            fence_table.c.name == term.name,
            sa.func.coalesce(fence_table.c.term, "") != term.uuid,
        )
        row = self._row(
            sa.select(
                *(each.scalar_subquery() for each in (newest_run, newest_commit, others, fence))
            )
        )
        return max((each or 0 for each in row), default=0) if row is not None else 0

    def jump(self, term: Term, floor: int) -> Term | None:
        """Give this term an epoch above *floor*."""
        epoch = max(floor, term.epoch) + 1
        _check_range(epoch)
        moved = (
            sa.update(lease_table)
            .where(*_is(lease_table, term), lease_table.c.expires_at > utcnow())
            .values(epoch=epoch)
        )
        history = sa.update(term_table).where(
            term_table.c.name == term.name,
            term_table.c.epoch == term.epoch,
            term_table.c.term == term.uuid,
        )
        with self._transaction() as connection:
            if connection.execute(moved).rowcount == 0:
                return None
            connection.execute(history.values(epoch=epoch))
        return Term(
            name=term.name,
            epoch=epoch,
            uuid=term.uuid,
            holder=term.holder,
            acquired_at=term.acquired_at,
            previous_holder=term.previous_holder,
        )

    def end_by_conflict(self, term: Term) -> None:
        """Record that this term ended by a conflict."""
        self._retried(lambda: self._rowcount(_end(term, "conflict")))

    def raise_epoch(self, name: str, to: int) -> Lease | None:
        """Move the lease row's epoch up to *to*, ending any term."""
        _check_range(to)
        moved = (
            sa.update(lease_table)
            .where(lease_table.c.name == name, lease_table.c.epoch < to)
            .values(epoch=to, holder=None, term=None, expires_at=utcnow())
        )
        ended = (
            sa.update(term_table)
            .where(term_table.c.name == name, term_table.c.ended_at.is_(None))
            .values(ended_at=utcnow(), ended="conflict")
        )
        with self._transaction() as connection:
            if connection.execute(moved).rowcount == 0:
                return None
            connection.execute(ended)
        return self.read(name)

    # --- connections --------------------------------------------------------------------

    @contextmanager
    def _statement(self) -> Iterator[sa.Connection]:
        """Yield a connection for one statement that commits by itself.

        A session left half-open in a transaction would block every candidate.
        """
        with translated(self.engine), self.engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        with translated(self.engine), self.engine.begin() as connection:
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


_SEEN = sa.select(
    *(each for each in lease_table.c if each.name != "term"),
    seconds_until(lease_table.c.expires_at).label("remaining"),
)


def _next_epoch(name: str) -> sa.ColumnElement[int]:
    """One more than the largest of the row and the history: a restored row may be behind."""
    known = (
        sa.select(sa.func.coalesce(sa.func.max(term_table.c.epoch), 0))
        .where(term_table.c.name == name)
        .scalar_subquery()
    )
    return sa.case((lease_table.c.epoch >= known, lease_table.c.epoch), else_=known) + 1


def _is(table: sa.Table, term: Term) -> list[sa.ColumnElement[bool]]:
    return [
        table.c.name == term.name,
        table.c.term == term.uuid,
        table.c.epoch == term.epoch,
    ]


def _end(term: Term, how: str) -> sa.Update:
    return (
        sa.update(term_table)
        .where(*_is(term_table, term), term_table.c.ended_at.is_(None))
        .values(ended_at=utcnow(), ended=how)
    )


def _term(row: Any, previous_holder: str | None) -> Term:
    return Term(
        name=row.name,
        epoch=row.epoch,
        uuid=row.term,
        holder=row.holder,
        acquired_at=row.acquired_at,
        previous_holder=previous_holder,
    )


def _lease(row: Any) -> Lease:
    return Lease(
        name=row.name,
        holder=row.holder,
        epoch=row.epoch,
        acquired_at=row.acquired_at,
        renewed_at=row.renewed_at,
        expires_at=row.expires_at,
        remaining=max(0.0, float(row.remaining or 0.0)) if row.holder is not None else 0.0,
        holder_info=_info(row.holder_info),
    )


def _info(text: str | None) -> Mapping[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _schema_message(found: int | None, shown: str) -> str:
    if found is None:
        return (
            f"the tables are missing in {shown}; run 'celery lease init', or set "
            f"beat_lease_auto_init = True"
        )
    return (
        f"the tables in {shown} are of version {found}, this package works with version "
        f"{SCHEMA_VERSION}; run the same version of celery-lease everywhere"
    )


def _check_range(epoch: int) -> None:
    if not 0 < epoch < MAX_EPOCH:
        raise ConfigurationError(
            f"epoch {epoch} is out of range; epochs are above 0 and below 2**53", setting="--to"
        )
