"""What the rest of the package asks of a lease database.

"No" is a value: a lease that somebody else holds, a term that is over. Exceptions
(:class:`~celery_lease.errors.StoreError`) are for a database that did not answer.
Provisional: it may still change, and no setting names another store yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from celery_lease.lease import Fence, Holder, Lease, Term, TermRecord

__all__ = ["LeaseStore", "Raised", "Renewal"]


class Renewal(str, Enum):
    """What the database said to a renewal."""

    #: The lease is good for another ttl.
    RENEWED = "renewed"
    #: It expired, was released or was taken over: this term is over.
    LOST = "lost"
    #: The row shows our epoch with another term: one epoch was granted twice.
    CONFLICT = "conflict"


class Raised(str, Enum):
    """What became of raising the fence."""

    #: The fence stands at this term.
    RAISED = "raised"
    #: It stands above this term already: another takeover was later.
    SUPERSEDED = "superseded"
    #: It shows this epoch with another term, or a larger one that the lease row knows nothing of.
    CONFLICT = "conflict"


class LeaseStore(Protocol):
    """A lease in a database: a few atomic verbs.

    Every verb may raise StoreUnavailable (the outcome may then be unknown) or
    StoreContention (nothing happened; try again).
    """

    def prepare(self, *, create: bool) -> None:
        """Check the tables, making them first where they are missing and *create* is true.

        Safe when many processes start on an empty database at once.

        Raises:
            SchemaMismatch: They are missing, or of another version.
            NotWritable: The server is a replica or read-only.
        """

    def ensure(self, name: str) -> None:
        """Make the lease's two rows where they are missing: locking a missing row deadlocks."""

    def acquire(self, name: str, holder: Holder, ttl: float, attempt: str) -> Term | Lease:
        """Take the lease if it is free or expired *by the database's clock*.

        One atomic step: a larger epoch, *attempt* as the uuid of the term, a line
        of history. It does not touch the fence, so no worker can hold it up. Where
        the answer is lost, the row is read again: it shows *attempt* or it does not.

        Args:
            name: Name of the lease.
            holder: Who asks.
            ttl: Seconds that the grant is good for.
            attempt: A new uuid.

        Returns:
            The term, or what a loser may know.
        """

    def renew(self, term: Term, ttl: float) -> Renewal:
        """Make the lease good for *ttl* seconds more, if it is exactly this unexpired term's."""

    def release(self, term: Term) -> bool:
        """Free the lease if it is exactly this term's, keeping row, epoch and term.

        Returns:
            False where it was not: a late release cannot end a newer term. Where the
            answer was lost, it is tried again and the row is asked.
        """

    def raise_fence(self, term: Term) -> Raised:
        """Raise the fence to this term.

        It waits for guarded transactions in their last round trip, no longer than
        the store's lock wait (StoreContention: try again, renewing meanwhile).
        """

    def read(self, name: str) -> Lease | None:
        """Return what anybody may know of the lease; None if it has no row."""

    def read_fence(self, name: str) -> Fence | None:
        """Return the fence; None if it has no row."""

    def read_all(self) -> Sequence[Lease]:
        """Return all leases, by name."""

    def history(self, name: str, limit: int) -> Sequence[TermRecord]:
        """Return the newest terms, newest first."""

    def floor(self, term: Term) -> int:
        """Return the largest epoch seen in fence, other terms, runs and commits; 0 if none.

        Not smaller than the term's own epoch means that epochs went back: a
        restored backup, a lossy failover.
        """

    def jump(self, term: Term, floor: int) -> Term | None:
        """Give this term an epoch above *floor*; None if the term is over."""

    def end_by_conflict(self, term: Term) -> None:
        """Record that this term ended by a conflict."""

    def raise_epoch(self, name: str, to: int) -> Lease | None:
        """Move the lease row's epoch up to *to*, ending any term; None if *to* is not larger."""
