"""Occurrences: the planned firings of a schedule's entries, and what becomes of late ones."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum

__all__ = ["MisfirePolicy", "Occurrence", "run_id"]

#: Namespace of run ids. Part of the stored format: it must never change.
_NAMESPACE = uuid.UUID("5a8e1c0e-6f0b-5d7c-9c55-0d5f3b1f4a9e")


class MisfirePolicy(str, Enum):
    """What to do with occurrences that were found late."""

    #: Fire the newest missed one, once; the older ones are recorded as skipped.
    LATEST = "latest"
    #: Fire each missed one, oldest first, up to ``beat_lease_catch_up_limit``.
    ALL = "all"
    #: Fire none of them; they are recorded as skipped.
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """One planned firing of one entry, as a task sees it in ``self.occurrence``."""

    #: Name of the lease.
    lease: str
    #: Name of the entry in the schedule.
    entry: str
    #: When it was planned for, in UTC: the same on every attempt.
    due_at: datetime
    #: 1 for the first dispatch, larger when it had to be dispatched again.
    attempt: int = 1

    @property
    def run_id(self) -> str:
        """Id of the run, which is its Celery task id on every attempt."""
        return run_id(self.lease, self.entry, self.due_at)


def run_id(lease: str, entry: str, due_at: datetime) -> str:
    """Return the id that this occurrence has in every process.

    Args:
        lease: Name of the lease.
        entry: Name of the entry.
        due_at: An aware datetime.
    """
    instant = due_at.astimezone(timezone.utc).isoformat(timespec="microseconds")
    # Lengths keep two names from running into each other.
    return str(uuid.uuid5(_NAMESPACE, f"{len(lease)}:{lease}{len(entry)}:{entry}{instant}"))
