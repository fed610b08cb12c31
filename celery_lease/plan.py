"""What to do about the entries that are due: fire, skip, or ask again later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from celery.beat import ScheduleEntry
from celery.schedules import crontab, schedule, solar

from celery_lease.due import missed
from celery_lease.entry import PLAIN, deadline_of, wishes_of
from celery_lease.occurrence import (
    DEADLINE,
    Decision,
    Misfire,
    MisfirePolicy,
    Run,
    Skipped,
    run_id,
)
from celery_lease.settings import Settings

__all__ = ["Batch", "Planner"]

#: The methods by which a crontab decides whether it is due; a subclass may override them.
_ASKED = ("is_due", "remaining_estimate")
#: Seconds until an entry is asked again whose schedule says "not now".
NOT_NOW = 1.0
#: An entry that waits for its previous run is asked again after PART of that run's age,
#: between SHORTEST and LONGEST seconds: many may wait, and for long.
PART, SHORTEST, LONGEST = 0.1, 1.0, 30.0


@dataclass(slots=True)
class Batch:
    """What one turn claims together."""

    #: Runs to send.
    runs: list[Run] = field(default_factory=list)
    #: Occurrences that are not fired, beside their entries' names.
    skipped: list[tuple[str, Skipped]] = field(default_factory=list)
    #: The last occurrence of each entry that is accounted for then.
    moved: dict[str, datetime] = field(default_factory=dict)
    #: How many runs each entry has in it.
    fired: dict[str, int] = field(default_factory=dict)

    def only(self, name: str) -> Batch:
        """Return what of it is about one entry."""
        return Batch(
            runs=[each for each in self.runs if each.entry == name],
            skipped=[each for each in self.skipped if each[0] == name],
            moved={name: self.moved[name]},
            fired={name: self.fired[name]} if name in self.fired else {},
        )


class Planner:
    """Decides what becomes of occurrences that are due.

    Args:
        settings: What entries leave to the settings.
        deadline: Celery's ``beat_cron_starting_deadline``, in seconds.
        is_due: Asks an entry, as Celery would.
        hooked: Whether the user's scheduler class overrides it: then it may refuse any entry.
        is_fenced: Returns whether an entry's task is fenced.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        deadline: float | None,
        is_due: Callable[[Any], Any],
        hooked: bool,
        is_fenced: Callable[[Any], bool],
    ) -> None:
        self._settings = settings
        self._deadline = deadline
        self._is_due = is_due
        self._hooked = hooked
        self._is_fenced = is_fenced
        self._plain = PLAIN.on_misfire(settings)

    def add(
        self,
        batch: Batch,
        entry: ScheduleEntry,
        first: datetime,
        now: datetime,
        *,
        waits: float,
        room: int,
    ) -> float:
        """Decide about one entry, and put the decision into the batch.

        Args:
            batch: What was decided so far.
            entry: The entry.
            first: Its first occurrence that is not accounted for; it is due.
            now: The instant of the decision.
            waits: For how many seconds it has had a run that it must not overlap; without one,
                for ever.
            room: For how many runs the batch has room.

        Returns:
            0 if it was dealt with; else the seconds until it is to be asked again, since its
            schedule says "not now" or the run before has to be done first.
        """
        wishes = wishes_of(entry)
        misfire = self._plain if wishes is PLAIN else wishes.on_misfire(self._settings)
        unsettled = waits < wishes.overlap_timeout
        if unsettled and misfire.policy is MisfirePolicy.ALL:
            return min(max(SHORTEST, PART * waits), LONGEST)
        decision = self._decide(entry, misfire, first, now, unsettled=unsettled)
        if decision is None:
            return NOT_NOW
        name = str(entry.name)
        if decision.skipped is not None:
            batch.skipped.append((name, decision.skipped))
            batch.moved[name] = decision.skipped.last
        fire = decision.fire[: room if wishes.overlap else 1]
        for due_at in fire:
            batch.runs.append(
                Run(
                    id=run_id(self._settings.name, name, due_at),
                    entry=name,
                    due_at=due_at,
                    fenced=self._is_fenced(entry),
                )
            )
        if fire:
            batch.moved[name], batch.fired[name] = fire[-1], len(fire)
        return 0.0

    def _decide(
        self,
        entry: ScheduleEntry,
        misfire: Misfire,
        first: datetime,
        now: datetime,
        *,
        unsettled: bool,
    ) -> Decision | None:
        found = missed(entry.schedule, first, now, misfire.wanted + 1)
        newest = found.newest[-1]
        deadline = deadline_of(entry, self._deadline)
        past = deadline is not None and (now - newest).total_seconds() > deadline
        asked = self._may_say_no(entry)
        if deadline is not None and not (asked and past):
            # Of exact due times. Celery's `is_due` goes by a clock that moves on meanwhile,
            # and on Celery 5.5 it may take minutes.
            misfire = misfire.within(deadline)
        if unsettled:
            reason = "the one before is not settled"
        elif not asked or self._is_due(entry)[0]:
            return misfire.decide(found, now)
        elif past:
            reason = DEADLINE
        else:
            return None
        return Decision(
            fire=(),
            skipped=Skipped(first=found.first, last=newest, count=found.count, reason=reason),
        )

    def _may_say_no(self, entry: ScheduleEntry) -> bool:
        """Return whether ``is_due`` can refuse what is due by its schedule: few can."""
        if self._hooked or type(entry).is_due is not ScheduleEntry.is_due:
            return True
        kind = type(entry.schedule)
        if issubclass(kind, crontab):
            return any(getattr(kind, each) is not getattr(crontab, each) for each in _ASKED)
        return kind not in (schedule, solar)
