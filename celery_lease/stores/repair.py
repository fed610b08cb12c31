"""What happened to a lease, and what to do when its epochs went back.

A restored backup or a failover that lost commits brings old epochs back. What they
left behind (a fence, runs, commits) tells how far they had come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sqlalchemy as sa

from celery_lease.errors import ConfigurationError, StoreError, StoreUnavailable
from celery_lease.lease import MAX_EPOCH, Lease, Term, TermRecord
from celery_lease.stores.connections import SQLStore
from celery_lease.stores.dialects import utcnow
from celery_lease.stores.rows import SEEN, end, is_term, seen
from celery_lease.stores.schema import (
    commit_table,
    fence_table,
    lease_table,
    run_table,
    term_table,
)

__all__ = ["Repair"]


class Repair(SQLStore):
    """The verbs that look back, and those that move epochs up."""

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

    def floor(self, term: Term) -> int:
        """Return the largest epoch seen in fence, other terms, runs and commits."""
        # The newest by age, which an index knows; the largest would need a scan.
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
        return max((each or 0 for each in row or ()), default=0)

    def jump(self, term: Term, floor: int) -> Term | None:
        """Give this term an epoch above *floor*."""
        epoch = max(floor, term.epoch) + 1
        if epoch >= MAX_EPOCH:
            raise StoreError(f"no epoch is left above {floor}: they end below 2**53")
        try:
            moved = self._move(term, epoch)
        except StoreUnavailable:
            # The answer was lost, perhaps around COMMIT: the row tells.
            moved = self._is_at(term, epoch)
            if not moved:
                raise
        return replace(term, epoch=epoch) if moved else None

    def _move(self, term: Term, epoch: int) -> bool:
        lease = (
            sa.update(lease_table)
            .where(*is_term(lease_table, term), lease_table.c.expires_at > utcnow())
            .values(epoch=epoch)
        )
        history = sa.update(term_table).where(*is_term(term_table, term)).values(epoch=epoch)
        with self._transaction() as connection:
            if connection.execute(lease).rowcount == 0:
                return False
            connection.execute(history)
            return True

    def _is_at(self, term: Term, epoch: int) -> bool:
        there = sa.select(sa.literal(1)).where(*is_term(lease_table, replace(term, epoch=epoch)))
        return self._row(there) is not None

    def end_by_conflict(self, term: Term) -> None:
        """Record that this term ended by a conflict."""
        self._retried(lambda: self._rowcount(end(term, "conflict")))

    def raise_epoch(self, name: str, to: int) -> Lease | None:
        """Move the lease row's epoch up to *to*, ending any term."""
        if not 0 < to < MAX_EPOCH:
            raise ConfigurationError(
                f"epoch {to} is out of range; epochs are above 0 and below 2**53", setting="to"
            )
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
        row = self._row(SEEN.where(lease_table.c.name == name))
        return None if row is None else seen(row)
