"""A lease store with the verbs that trying a database out needs. Nothing else uses them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import sqlalchemy as sa

from celery_lease.lease import Term
from celery_lease.stores.dialects import from_now, within
from celery_lease.stores.dialects.base import Weakness
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.schema import commit_table, fence_table, lease_table, term_table

__all__ = ["Probe"]


class Probe(SQLLeaseStore):
    """One client of the database that is tried out."""

    def expire(self, name: str) -> None:
        """Let a lease's time pass."""
        self._rowcount(
            sa.update(lease_table)
            .where(lease_table.c.name == name)
            .values(expires_at=from_now(-0.001))
        )

    def write(self, term: Term, task_id: str) -> bool:
        """Commit a guarded write under *term*; False where it was refused as stale."""
        with self.writing(term, task_id) as passed:
            return passed

    @contextmanager
    def writing(self, term: Term, task_id: str) -> Iterator[bool]:
        """Do the same, with its COMMIT at the end of the block; yield whether it passed."""
        with self._transaction() as connection:
            yield self.database.settle(
                within(connection),
                idle=5.0,
                task_id=task_id,
                origin="",
                lease=term.name,
                epoch=term.epoch,
                term=term.uuid,
                execution=str(uuid.uuid4()),
                outcome="committed",
            )

    def written(self, task_id: str) -> bool:
        """Return whether a guarded write is there."""
        found = sa.select(commit_table.c.epoch).where(commit_table.c.task_id == task_id)
        return self._row(found) is not None

    def weaknesses(self) -> list[Weakness]:
        """Return what about this server can lose an epoch that it acknowledged."""
        with self._statement() as connection:
            return self.database.weaknesses(connection)

    def is_pooled(self, other: Probe) -> bool:
        """Return whether a pooler gives one connection's transactions to several sessions.

        Two clients let go of their sessions and take one again, in either order: through a
        pooler in transaction mode each gets the other's, be it that the session that was
        let go last is lent first, or the one that was let go first.
        """
        session_id = self.database.session_id
        with (
            self._translated(),
            self.engine.connect() as ours,
            other.engine.connect() as theirs,
        ):
            for order in ((ours, theirs), (theirs, ours)):
                before = {each: session_id(each) for each in (ours, theirs)}
                ours.rollback()
                theirs.rollback()
                after = {each: session_id(each) for each in order}
                ours.rollback()
                theirs.rollback()
                if before != after:
                    return True
        return False

    def remove(self, name: str) -> None:
        """Free a lease, and delete all that it left in the tables.

        Raises:
            NotWritable: Its two rows are left: a beat's role may not delete those.
        """
        ours = lease_table.c.name == name
        with self._transaction() as connection:
            connection.execute(sa.update(lease_table).where(ours).values(holder=None))
            connection.execute(sa.delete(commit_table).where(commit_table.c.lease == name))
            connection.execute(sa.delete(term_table).where(term_table.c.name == name))
        with self._transaction() as connection:
            connection.execute(sa.delete(fence_table).where(fence_table.c.name == name))
            connection.execute(sa.delete(lease_table).where(ours))
