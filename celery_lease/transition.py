"""What can happen to a lease, as one process sees it: for logs, signals and commands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from celery_lease.lease import Lease

__all__ = ["Action", "Transition"]


class Action(str, Enum):
    """What happened to a lease, as seen by one process."""

    #: This process leads.
    ACQUIRED = "acquired"
    #: Epochs had gone back in the database; this term was moved above them.
    JUMPED = "jumped"
    #: A takeover waits for guarded transactions to end.
    RAISING = "raising"
    #: Renewed, but later than planned.
    RENEWED_LATE = "renewed-late"
    #: A renewal got no answer; the term is still trusted for a while.
    RENEWAL_FAILED = "renewal-failed"
    #: The loop is overdue: renewing stops.
    STALLED = "stalled"
    #: The loop came back in time: renewing goes on.
    RESUMED = "resumed"
    #: The term is over and was not given up.
    LOST = "lost"
    #: The term was given up.
    RELEASED = "released"
    #: One epoch was granted twice, or a larger one appeared in a trusted term.
    CONFLICT = "conflict"
    #: Somebody else leads.
    STANDING_BY = "standing-by"
    #: The lease database does not answer.
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One thing that happened to a lease, for logs and signals."""

    #: What happened.
    action: Action
    #: Name of the lease.
    name: str
    #: This process.
    holder: str
    #: The epoch that was gained, held or lost.
    epoch: int | None = None
    #: The lease as a loser saw it.
    lease: Lease | None = None
    #: Why, in words.
    reason: str | None = None
    #: Seconds that belong to it: trust left, lateness.
    seconds: float | None = None
    #: Who held the lease before, at a takeover.
    previous_holder: str | None = None
