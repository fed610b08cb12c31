"""The lease in a SQL database: one atomic statement, or one short transaction, for each verb."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa

from celery_lease.errors import NotWritable, SchemaMismatch, StoreUnavailable
from celery_lease.lease import Fence, Holder, Lease, Term
from celery_lease.settings import Settings
from celery_lease.stores.base import Raised, Renewal
from celery_lease.stores.dialects import file_of, from_now, utcnow
from celery_lease.stores.repair import Repair
from celery_lease.stores.rows import SEEN, end, is_term, seen
from celery_lease.stores.schema import (
    SCHEMA_VERSION,
    fence_table,
    lease_table,
    metadata,
    schema_table,
    term_table,
)

__all__ = ["SCRATCH", "SQLLeaseStore"]


class SQLLeaseStore(Repair):
    """A :class:`~celery_lease.stores.base.LeaseStore` over SQLAlchemy Core."""

    @classmethod
    def of(cls, settings: Settings) -> SQLLeaseStore:
        """Return the store of a candidate, whose waits end far before its ttl does.

        Raises:
            ConfigurationError: The URL, its driver or the options cannot be used.
        """
        window = settings.ttl - settings.margin
        return cls(
            settings.url,
            settings.engine_options,
            lock_wait=min(1.0, window / 4),
            statement_wait=max(1.0, min(10.0, window / 2)),
        )

    # --- schema -------------------------------------------------------------------------

    def prepare(self, *, create: bool, write: bool = True) -> None:
        """Check the tables, making them first where they are missing and *create* is true.

        Args:
            create: Whether to make missing tables.
            write: Whether this is for more than to read.
        """
        file = file_of(self.engine.url)
        # SQLite would make the file, for a mere look and for a typing error.
        absent = file is not None and not create and not file.exists()
        found = None if absent else self._retried(self._version)
        lacking = self._retried(self._lacking) if found == SCHEMA_VERSION else []
        if create and (found is None or lacking):
            self._retried(self._create)
            found, lacking = self._retried(self._version), self._retried(self._lacking)
        if found != SCHEMA_VERSION:
            there = found is None and not absent and not self._retried(self._lacking)
            text = self._mismatch(found, there=there)
            raise SchemaMismatch(text, found=found, expected=SCHEMA_VERSION)
        if lacking:
            raise SchemaMismatch(
                f"{', '.join(lacking)} in {self.shown}: missing, or not as this package makes "
                f"it; run 'celery lease init'",
                found=found,
                expected=SCHEMA_VERSION,
            )
        if write:
            self._retried(self._check_writable)

    def _version(self) -> int | None:
        try:
            with self._statement() as connection:
                return connection.execute(sa.select(schema_table.c.version)).scalar()
        except SchemaMismatch:
            return None

    def _lacking(self) -> list[str]:
        """Return the tables that are not there, as where one of them was dropped."""
        found = []
        for table in metadata.sorted_tables:
            try:
                with self._statement() as connection:
                    connection.execute(sa.select(table).where(sa.false()))
            except SchemaMismatch:
                found.append(table.name)
            except NotWritable:
                pass  # There, and not for this role to read.
        return found

    def _create(self) -> None:
        with self._translated(), self.database.schema_lock(self.engine) as connection:
            metadata.create_all(connection, checkfirst=True)
            # create_all() leaves out the indexes of a table that is there. MySQL commits each
            # DDL statement, so that a process which died in between leaves such a table.
            for index in (each for table in metadata.sorted_tables for each in table.indexes):
                index.create(connection, checkfirst=True)
            # Last, so that tables without it are known to be half made.
            connection.execute(
                self.database.insert_ignore(schema_table).values(id=1, version=SCHEMA_VERSION)
            )

    def _check_writable(self) -> None:
        with self._statement() as connection:
            self._refuse_read_only(connection)

    def _refuse_read_only(self, connection: sa.Connection) -> None:
        reason = self.database.read_only(connection)
        if reason is not None:
            on_a_server = file_of(self.engine.url) is None
            mend = (
                "point beat_lease_url at the primary"
                if on_a_server
                else "this user must be able to write to the file and to its directory"
            )
            raise NotWritable(f"{self.shown}: {reason}; {mend}")

    def _mismatch(self, found: int | None, *, there: bool) -> str:
        if there:
            return (
                f"the tables in {self.shown} do not tell their version; run 'celery lease init', "
                f"which adds the row of {schema_table.name} that does"
            )
        if found is None:
            return (
                f"the tables are missing in {self.shown}; run 'celery lease init', or start a "
                f"beat, which makes them where beat_lease_auto_init = True"
            )
        return (
            f"the tables in {self.shown} are of version {found}, this package works with version "
            f"{SCHEMA_VERSION}; run the same version of celery-lease everywhere"
        )

    def ensure(self, name: str) -> None:
        """Make the lease's two rows where they are missing."""
        if self.read(name) is None or self.read_fence(name) is None:
            self._retried(lambda: self._insert_rows(name))

    def _insert_rows(self, name: str) -> None:
        with self._transaction() as connection:
            for table in (lease_table, fence_table):
                connection.execute(self.database.insert_ignore(table).values(name=name, epoch=0))

    # --- the verbs ----------------------------------------------------------------------

    def acquire(self, name: str, holder: Holder, ttl: float, attempt: str) -> Term | Lease:
        """Take the lease if it is free or expired by the database's clock."""
        one = self.database.one_statement_acquire
        take = self._acquire_in_one if one else self._acquire_in_some
        won = (
            sa.update(lease_table)
            .where(
                lease_table.c.name == name,
                sa.or_(lease_table.c.holder.is_(None), lease_table.c.expires_at <= utcnow()),
            )
            .values(
                holder=str(holder),
                term=attempt,
                epoch=_next_epoch(name),
                acquired_at=utcnow(),
                renewed_at=utcnow(),
                expires_at=from_now(ttl),
                holder_info=json.dumps(dict(holder.info), default=str, sort_keys=True),
            )
        )
        try:
            term = self._contended(lambda: take(name, won, attempt))
        except StoreUnavailable:
            # The answer was lost, perhaps around COMMIT: the row tells.
            term = self._find_attempt(name, attempt)
            if term is None:
                raise
        return term or self._lost(name)

    def _acquire_in_one(self, name: str, won: sa.Update, attempt: str) -> Term | None:
        # A sub-select in RETURNING sees the row as it was before this statement.
        before = lease_table.alias("before")
        was = [
            sa.select(before.c[each]).where(before.c.name == name).scalar_subquery().label(label)
            for each, label in (
                ("expires_at", "expired_at"),
                ("holder", "previous_holder"),
                ("epoch", "previous_epoch"),
            )
        ]
        grant = won.returning(*(lease_table.c[each] for each in _GRANT), *was).cte("won")
        history = (
            sa.insert(term_table)
            .from_select(_GRANT, sa.select(*(grant.c[each] for each in _GRANT)))
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
        return None if row is None else _term(row, row.previous_holder, row.previous_epoch)

    def _acquire_in_some(self, name: str, won: sa.Update, attempt: str) -> Term | None:
        mine = sa.select(*(lease_table.c[each] for each in _GRANT)).where(
            lease_table.c.name == name, lease_table.c.term == attempt
        )
        with self._transaction() as connection:
            before = connection.execute(
                sa.select(lease_table).where(lease_table.c.name == name)
            ).first()
            if before is None or connection.execute(won).rowcount == 0:
                return None
            # A privileged role may write to a read-only server.
            self._refuse_read_only(connection)
            connection.execute(
                sa.update(term_table)
                .where(term_table.c.name == name, term_table.c.ended_at.is_(None))
                .values(ended_at=before.expires_at or utcnow(), ended="expired")
            )
            connection.execute(sa.insert(term_table).from_select(_GRANT, mine))
            return _term(connection.execute(mine).one(), before.holder, before.epoch)

    def _find_attempt(self, name: str, attempt: str) -> Term | None:
        row = self._row(
            sa.select(lease_table).where(
                lease_table.c.name == name,
                lease_table.c.term == attempt,
                lease_table.c.holder.is_not(None),
            )
        )
        return None if row is None else _term(row, None, None)

    def _lost(self, name: str) -> Lease:
        lease = self.read(name)
        if lease is None:
            raise SchemaMismatch(
                f"the lease {name!r} has no row in {self.shown}; run 'celery lease init'",
                found=None,
                expected=SCHEMA_VERSION,
            )
        return lease

    def renew(self, term: Term, ttl: float) -> Renewal:
        """Make the lease good for *ttl* seconds more, if it is exactly this unexpired term's."""
        statement = (
            sa.update(lease_table)
            .where(*is_term(lease_table, term), lease_table.c.expires_at > utcnow())
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
        free = self._free_in_one if self.database.one_statement_acquire else self._free_in_some
        try:
            return self._contended(lambda: free(term))
        except StoreUnavailable:
            # Did it happen? Only a release leaves a row with this term and no holder.
            return self._retried(lambda: free(term)) or self._is_free(term)

    def _free_in_one(self, term: Term) -> bool:
        freed = _freed(term).returning(lease_table.c.name).cte("freed")
        ended = (
            end(term, "released")
            .where(term_table.c.name.in_(sa.select(freed.c.name)))
            .returning(term_table.c.epoch)
            .cte("ended")
        )
        with self._statement() as connection:
            return connection.execute(sa.select(freed).add_cte(ended)).first() is not None

    def _free_in_some(self, term: Term) -> bool:
        with self._transaction() as connection:
            if connection.execute(_freed(term)).rowcount == 0:
                return False
            connection.execute(end(term, "released"))
            return True

    def _is_free(self, term: Term) -> bool:
        free = sa.select(sa.literal(1)).where(
            *is_term(lease_table, term), lease_table.c.holder.is_(None)
        )
        return self._row(free) is not None

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
        row = self._row(SEEN.where(lease_table.c.name == name))
        return None if row is None else seen(row)

    def read_fence(self, name: str) -> Fence | None:
        """Return the fence."""
        row = self._row(
            sa.select(fence_table.c.epoch, fence_table.c.term).where(fence_table.c.name == name)
        )
        return None if row is None else Fence(name=name, epoch=row.epoch, term=row.term)

    def skew(self) -> tuple[float, float]:
        """Return how many seconds this host's clock is ahead of the database's, give or take.

        The second number is half of what the question took: an answer that came late says
        nothing about the clocks.
        """
        with self._statement() as connection:
            before = datetime.now(timezone.utc)
            at: datetime = connection.execute(sa.select(utcnow())).scalar_one()
            after = datetime.now(timezone.utc)
        doubt = (after - before) / 2
        return (before + doubt - at).total_seconds(), doubt.total_seconds()

    def read_all(self) -> Sequence[Lease]:
        """Return all leases, by name, but for what checks left that may not delete."""
        query = SEEN.where(lease_table.c.name.not_like(f"{SCRATCH}%"))
        with self._statement() as connection:
            return [seen(each) for each in connection.execute(query.order_by(lease_table.c.name))]


#: How the names of leases begin that were made to be tried out.
SCRATCH = "celery-lease-check-"
#: What a grant and its line of history have in common.
_GRANT = ["name", "epoch", "term", "holder", "acquired_at"]


def _next_epoch(name: str) -> sa.ColumnElement[int]:
    """One more than the largest of the row and the history: a restored row may be behind."""
    known = (
        sa.select(sa.func.coalesce(sa.func.max(term_table.c.epoch), 0))
        .where(term_table.c.name == name)
        .scalar_subquery()
    )
    return sa.case((lease_table.c.epoch >= known, lease_table.c.epoch), else_=known) + 1


def _freed(term: Term) -> sa.Update:
    return (
        sa.update(lease_table)
        .where(*is_term(lease_table, term), lease_table.c.holder.is_not(None))
        .values(holder=None, expires_at=utcnow())
    )


def _term(row: Any, holder: str | None, epoch: int | None) -> Term:
    return Term(
        name=row.name,
        epoch=row.epoch,
        uuid=row.term,
        holder=row.holder,
        acquired_at=row.acquired_at,
        previous_holder=holder,
        previous_epoch=epoch,
    )
