"""Occurrences: the planned firings of a schedule's entries, and what becomes of late ones."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from enum import Enum
from typing import Literal

__all__ = [
    "DEADLINE",
    "NEWER",
    "Decision",
    "Misfire",
    "MisfirePolicy",
    "Missed",
    "Occurrence",
    "Outcome",
    "Run",
    "RunState",
    "Skipped",
    "run_id",
    "storable",
]

#: Namespace of run ids. Part of the stored format: it must never change.
_NAMESPACE = uuid.UUID("5a8e1c0e-6f0b-5d7c-9c55-0d5f3b1f4a9e")
#: Celery's setting: crontabs that are later than so many seconds are not fired.
DEADLINE = "beat_cron_starting_deadline"
#: Why the older ones are not fired where one makes up for all that were missed.
NEWER = "a newer one was due"


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
    """One planned firing of one entry, as a task sees it in ``self.occurrence``.

    Raises:
        TypeError: *due_at* is no aware datetime.
    """

    #: Name of the lease.
    lease: str
    #: Name of the entry in the schedule.
    entry: str
    #: When it was planned for, in UTC: the same on every attempt.
    due_at: datetime
    #: 1 for the first dispatch, larger when it had to be dispatched again.
    attempt: int = 1

    def __post_init__(self) -> None:
        if getattr(self.due_at, "tzinfo", None) is None:  # Its id would be the host's zone's.
            raise TypeError(
                f"due_at = {self.due_at!r} is not an aware datetime; give one that knows its zone"
            )

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


#: How a run or a child task was settled. Part of the stored format.
Outcome = Literal["committed", "failed", "expired", "revoked"]


class RunState(str, Enum):
    """What the leader did about an occurrence. What became of it, the commits tell."""

    #: To be sent: a crash or a broker that is away may lie between.
    CLAIMED = "claimed"
    #: The broker has the message.
    PUBLISHED = "published"
    #: A worker turned the attempt away: its epoch had passed.
    REFUSED = "refused"
    #: Not to be sent, with the reason.
    SKIPPED = "skipped"
    #: It could not be sent, or was sent too often, with the reason.
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The ledger's record of one occurrence, as far as a leader acts on it."""

    #: Its id, which is its Celery task id on every attempt.
    id: str
    #: Name of the entry.
    entry: str
    #: When it was planned for, in UTC.
    due_at: datetime
    #: Whether its task is fenced: only then is it known how it ended.
    fenced: bool
    #: Which attempt at it was claimed last.
    attempt: int = 1
    #: What was done about it last.
    state: RunState = RunState.CLAIMED
    #: The epoch and the term that it was claimed under; None for a new one.
    epoch: int | None = None
    term: str | None = None
    #: For how many seconds it was published when it was read, by the database's clock alone;
    #: None if it never was.
    published_for: float | None = None

    @property
    def next_attempt(self) -> int:
        """Which attempt it is if it is claimed again now.

        What was claimed and left may have been sent or not. That counts once: a broker that
        is away while leaders come and go must not use up what attempts there are.
        """
        left = self.state is RunState.CLAIMED
        return max(self.attempt, 2) if left else self.attempt + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """The occurrences of one entry that are due by now. In normal life: one."""

    #: The oldest of them.
    first: datetime
    #: The newest of them, oldest first: as many as were asked for, at least one.
    newest: tuple[datetime, ...]
    #: How many there are; None where counting them all would take too long.
    count: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Occurrences in a row that are not fired, which is recorded."""

    #: The oldest of them.
    first: datetime
    #: The newest of them.
    last: datetime
    #: How many there are, where it is known.
    count: int | None
    #: Why they are not fired.
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do with the occurrences that are due."""

    #: The ones to fire, oldest first.
    fire: tuple[datetime, ...]
    #: The ones that go before them and are not fired.
    skipped: Skipped | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfire:
    """What one entry wants done with occurrences that are found late."""

    #: Which of them to fire.
    policy: MisfirePolicy
    #: How many seconds late is still fine; None for no limit, which SKIP must not have.
    grace: float | None
    #: How many of them ``all`` fires at most.
    limit: int
    #: What sets the limit; None for the grace itself.
    because: str | None = None

    def within(self, deadline: float | None) -> Misfire:
        """Return the same with Celery's deadline, in seconds, where that is the tighter one."""
        if deadline is None or (self.grace is not None and self.grace <= deadline):
            return self
        return replace(self, grace=deadline, because=DEADLINE)

    @property
    def wanted(self) -> int:
        """How many of the newest occurrences a decision has to see."""
        return self.limit if self.policy is MisfirePolicy.ALL else 1

    @property
    def lateness(self) -> str:
        """Why an occurrence that is too late is not fired, in words."""
        return self.because or f"more than {self.grace:g} s late"

    def too_late(self, due_at: datetime, now: datetime) -> bool:
        """Return whether an occurrence is later than the grace allows."""
        return self.grace is not None and (now - due_at).total_seconds() > self.grace

    def decide(self, missed: Missed, now: datetime) -> Decision:
        """Return which occurrences to fire, and which to record as skipped.

        Args:
            missed: What is due, with at least the newest :attr:`wanted` of it.
            now: The instant of the decision, aware.
        """
        candidates = missed.newest[-self.wanted :]
        fire = tuple(each for each in candidates if not self.too_late(each, now))
        if fire and fire[0] == missed.first:
            return Decision(fire=fire)
        return Decision(fire=fire, skipped=self._skipped(missed, candidates, fire))

    def _skipped(
        self, missed: Missed, candidates: tuple[datetime, ...], fire: tuple[datetime, ...]
    ) -> Skipped:
        older = [each for each in missed.newest if not fire or each < fire[0]]
        late = len(fire) < len(candidates)
        if late or self.policy is MisfirePolicy.SKIP:
            reason = self.lateness
        elif self.policy is MisfirePolicy.ALL:
            reason = f"more than {self.limit} missed"
        else:
            reason = NEWER
        return Skipped(
            first=missed.first,
            # Only the end of a long series is listed; where nothing of it is, its
            # last one is not worth the search.
            last=older[-1] if older else missed.first,
            count=None if missed.count is None else missed.count - len(fire),
            reason=reason,
        )


def storable(text: str) -> str:
    """Return *text* with a ``?`` for each character that some database does not keep."""
    return text.encode(errors="replace").decode().replace("\0", "?")
