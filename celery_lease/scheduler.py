"""The scheduler: all that is due in one batch, the schedule's state shared by all beats."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import Any

from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import crontab, schedule, solar

from celery_lease import due
from celery_lease.dispatch import BATCH
from celery_lease.entry import PLAIN, LeasedEntry
from celery_lease.errors import CeleryLeaseError
from celery_lease.heap import DueHeap, ScheduleDict
from celery_lease.leading import LeaseMixin
from celery_lease.lease import Term
from celery_lease.occurrence import Decision, Misfire, Run, Skipped, run_id
from celery_lease.stores.entries import EntryState, SQLEntries

__all__ = ["LeasedScheduler", "leased"]

logger = logging.getLogger(__name__)

#: Seconds until an entry is looked at again that could not be dealt with.
AGAIN = 1.0
#: How far ahead a stored last run may be before it is taken for a clock that went wrong.
AHEAD = timedelta(minutes=1)


def leased(cls: type[Scheduler]) -> type[Scheduler]:
    """Return *cls* as a scheduler that ticks only while it holds the lease.

    Its storage and its way of finding what is due stay its own.
    """
    return type(f"Leased{cls.__name__}", (LeaseMixin, cls), {"__doc__": cls.__doc__})


@dataclass(slots=True)
class Batch:
    """What one turn claims together."""

    runs: list[Run] = field(default_factory=list)
    skipped: list[tuple[str, Skipped]] = field(default_factory=list)
    #: Entries to move on, with the occurrence that is accounted for then.
    moved: dict[str, datetime] = field(default_factory=dict)
    #: How many runs each entry has in it.
    fired: dict[str, int] = field(default_factory=dict)


class LeasedScheduler(LeaseMixin, Scheduler):
    """Celery beat's scheduler for any number of beats, of which one leads.

    What is due is dispatched in batches: claimed, published, marked. When each entry ran
    last is kept in the lease database.
    """

    Entry = LeasedEntry

    # --- the schedule -------------------------------------------------------------------

    def setup_schedule(self) -> None:
        """Read ``beat_schedule``, and look at the lease database."""
        self._set_up_at = self.now()
        self._due = DueHeap()
        #: Entries with a row in the database.
        self._stored: set[str] = set()
        #: Entries that could not be dealt with; their place in the heap says when again.
        self._aside: set[str] = set()
        self._seen: tuple[int, int] | None = None
        try:
            self.data = ScheduleDict(self.data)
            self.merge_inplace(self.app.conf.beat_schedule)
            self.install_default_entries(self.data)
        except CeleryLeaseError as error:
            self._refuse(error)
        super().setup_schedule()

    def now(self) -> datetime:
        """Return the instant at which to look for what is due, in UTC."""
        return datetime.now(timezone.utc)

    def holder_info(self) -> dict[str, Any]:
        """Let others see which schedule this is."""
        digest = hashlib.sha256()
        for name in sorted(self.schedule):
            digest.update(f"{name}\0{self.schedule[name].task}\0".encode())
        schedule = {"schedule": digest.hexdigest()[:12], "entries": len(self.schedule)}
        return {**super().holder_info(), **schedule}

    def _warn_of_another_schedule(self) -> None:
        seen, mine = self.elector.seen, self.elector.holder.info
        theirs = seen.holder_info if seen is not None else {}
        if theirs.get("schedule") in (None, mine["schedule"]) or seen.holder == self._warned:
            return
        self._warned = seen.holder
        logger.warning(
            "lease %r: the leader on host %s has another schedule (%s, %s entries) than this "
            "beat on host %s (%s, %d entries): entries that the leader does not have do not run; "
            "give each app a beat_lease_name of its own",
            self.settings.name,
            theirs.get("host"),
            theirs.get("schedule"),
            theirs.get("entries"),
            mine["host"],
            mine["schedule"],
            mine["entries"],
            extra={"action": "schedule-differs", "lease_name": self.settings.name},
        )

    _warned: str | None = None

    def load(self, term: Term) -> None:
        """Take over where the last leader stopped."""
        self._stored = set()
        for state in self._entries.load(term.name):
            self._stored.add(state.name)
            entry = self.schedule.get(state.name)
            if entry is not None:
                self._restore(entry, state.last_run_at or state.first_seen_at)
                entry.total_run_count = state.total_run_count
        self._rebuild(term)

    @property
    def _entries(self) -> SQLEntries:
        return SQLEntries(self.store.engine, idle=self.settings.guard_idle)

    def _restore(self, entry: LeasedEntry, last: datetime) -> None:
        """Set an entry's last run, in the schedule's own zone, as Celery's would be."""
        entry.last_run_at = last.astimezone(getattr(entry.schedule, "tz", None) or timezone.utc)

    def _changes(self) -> tuple[int, int]:
        return self.schedule.changes, LeasedEntry.updates

    def _rebuild(self, term: Term) -> None:
        """Look at every entry: the schedule changed, or a term begins."""
        self._seen = self._changes()
        now = self.now()
        added = []
        for name, entry in self.schedule.items():
            if name not in self._stored:
                last = _aware(entry.last_run_at)
                # What came into being with this process starts when it is first seen by
                # a leader; an earlier instant was given on purpose.
                self._restore(entry, last if last < self._set_up_at else now)
                added.append(_state(name, entry.last_run_at, None, entry.total_run_count))
        removed = [name for name in self._stored if name not in self.schedule]
        self._entries.reconcile(term, added=added, removed=removed)
        self._stored = set(self.schedule)
        self._aside.clear()
        self._due = DueHeap(self._place(name, now) for name in self.schedule)

    def _place(self, name: str, now: datetime) -> tuple[datetime, str]:
        """Return an entry's place in the heap: when it is due, or to be looked at again."""
        entry = self.schedule[name]
        try:
            last = _aware(entry.last_run_at)
            if last > now + AHEAD:
                logger.warning(
                    "%r ran last at %s, which is still to come: did a clock go back? "
                    "It starts from now",
                    name,
                    last.isoformat(),
                    extra={"action": "entry-ahead", "lease_entry": name},
                )
                self._restore(entry, now)
                last = now
            return due.due_at(entry.schedule, last), name
        except Exception:
            return self._set_aside(name, now)

    def _set_aside(self, name: str, now: datetime) -> tuple[datetime, str]:
        """Keep one bad entry from stopping the others."""
        logger.exception(
            "%r is set aside: when it is due cannot be told; again in %g s",
            name,
            self.max_interval,
            extra={"action": "entry-aside", "lease_entry": name},
        )
        self._aside.add(name)
        return now + timedelta(seconds=self.max_interval), name

    # --- a turn -------------------------------------------------------------------------

    def turn(self, term: Term, *args: Any, **kwargs: Any) -> float:
        """Dispatch what is due, at most one batch of it."""
        if self._changes() != self._seen:
            self._rebuild(term)
        now = self.now()
        next_due = self._due.next_due
        if next_due is not None and next_due <= now:
            self._dispatch(term, self._plan(term, now), now)
        return self._wait(now)

    def _wait(self, now: datetime) -> float:
        next_due = self._due.next_due
        wait = float(self.max_interval)
        if next_due is not None:
            wait = min(wait, max(0.0, (next_due - now).total_seconds()))
        return min(wait, self.dispatcher.retry_in or AGAIN) if self.dispatcher.busy else wait

    def _plan(self, term: Term, now: datetime) -> Batch:
        """Decide about the entries that are due, oldest first."""
        batch = Batch()
        found = self._take_due(now)
        running = self._running(term, [name for _, name in found])
        for first, name in found:
            room = BATCH - len(batch.runs)
            entry = self.schedule[name]
            try:
                decision = self._decide(entry, first, now, running.get(name))
            except Exception:
                self._due.push(*self._set_aside(name, now))
                continue
            if decision is None or room == 0:
                self._again(name, now, AGAIN if room else 0.0)
            else:
                self._add(batch, term, entry, decision, room)
        return batch

    def _take_due(self, now: datetime) -> list[tuple[datetime, str]]:
        """Take from the heap what is due and can be dealt with."""
        found: list[tuple[datetime, str]] = []
        while len(found) < BATCH and (place := self._due.pop(now)) is not None:
            _, name = place
            if name not in self.schedule:
                continue
            if name in self._aside:
                self._aside.discard(name)
                self._due.push(*self._place(name, now))
            elif name in self.dispatcher.waiting:
                # One unsent claim at a time: what is missed meanwhile is a misfire.
                self._again(name, now, AGAIN)
            else:
                found.append(place)
        return found

    def _again(self, name: str, now: datetime, seconds: float) -> None:
        self._aside.add(name)
        self._due.push(now + timedelta(seconds=seconds), name)

    def _running(self, term: Term, names: list[str]) -> dict[str, datetime]:
        """Return which of the entries that must not overlap are running, and since when."""
        alone = [name for name in names if not self.schedule[name].wishes.overlap]
        return self.dispatcher.ledger.running(term.name, alone) if alone else {}

    def _decide(
        self, entry: LeasedEntry, first: datetime, now: datetime, since: datetime | None
    ) -> Decision | None:
        """Return what to do with an entry's due occurrences; None to ask again later."""
        misfire = self._misfire(entry)
        found = due.missed(entry.schedule, first, now, misfire.wanted + 1)
        reason = None
        if since is not None and (now - since).total_seconds() < entry.wishes.overlap_timeout:
            reason = "the one before is not settled"
        elif self._may_say_no(entry) and not self.is_due(entry)[0]:
            if not isinstance(entry.schedule, crontab):
                return None
            reason = "beat_cron_starting_deadline"
        if reason is None:
            return misfire.decide(found, now)
        skipped = Skipped(
            first=found.first, last=found.newest[-1], count=found.count, reason=reason
        )
        return Decision(fire=(), skipped=skipped)

    def _misfire(self, entry: LeasedEntry) -> Misfire:
        wishes = entry.wishes
        return self._plain_misfire if wishes is PLAIN else wishes.on_misfire(self.settings)

    @cached_property
    def _plain_misfire(self) -> Misfire:
        return PLAIN.on_misfire(self.settings)

    def _may_say_no(self, entry: LeasedEntry) -> bool:
        """Whether ``is_due`` can refuse what is due by its schedule: few can."""
        kind = type(entry.schedule)
        if type(entry).is_due is not ScheduleEntry.is_due:
            return True
        if kind is crontab:
            return self.app.conf.beat_cron_starting_deadline is not None
        return kind not in (schedule, solar)

    def _add(
        self, batch: Batch, term: Term, entry: LeasedEntry, decision: Decision, room: int
    ) -> None:
        name = entry.name
        if decision.skipped is not None:
            batch.skipped.append((name, decision.skipped))
            batch.moved[name] = decision.skipped.last
        for due_at in decision.fire[:room]:
            batch.runs.append(
                Run(
                    id=run_id(term.name, name, due_at),
                    entry=name,
                    due_at=due_at,
                    fenced=self.is_fenced(entry),
                )
            )
            batch.moved[name] = due_at
            batch.fired[name] = batch.fired.get(name, 0) + 1

    def _dispatch(self, term: Term, batch: Batch, now: datetime) -> None:
        """Claim, move the entries on, and send."""
        if not batch.moved:
            return
        moved = [
            _state(
                name, last, last, self.schedule[name].total_run_count + batch.fired.get(name, 0)
            )
            for name, last in batch.moved.items()
        ]
        known = self.dispatcher.ledger.claim(term, batch.runs, skipped=batch.skipped, moved=moved)
        for state in moved:
            entry = self.schedule[state.name]
            self._restore(entry, state.last_run_at)
            entry.total_run_count = state.total_run_count
            self._due.push(*self._place(state.name, now))
        for name, skipped in batch.skipped:
            _tell_skipped(term, name, skipped)
        runs = [each for each in batch.runs if each.id not in known] if known else batch.runs
        self.dispatcher.send(term, runs)

    def lost_after(self) -> dict[str, float]:
        """Return the entries that ask for ``retry_lost_after``."""
        return {
            name: entry.wishes.retry_lost_after
            for name, entry in self.schedule.items()
            if entry.wishes is not PLAIN and entry.wishes.retry_lost_after is not None
        }

    def sync(self) -> None:
        """Nothing: the schedule's state was stored with each claim."""


def _aware(last: datetime) -> datetime:
    """Read a naive instant as Celery does, in UTC."""
    return last if last.tzinfo is not None else last.replace(tzinfo=timezone.utc)


def _state(name: str, first: datetime, last: datetime | None, count: int) -> EntryState:
    return EntryState(name=name, first_seen_at=first, last_run_at=last, total_run_count=count)


def _tell_skipped(term: Term, name: str, skipped: Skipped) -> None:
    logger.warning(
        "lease %r: %s of %r skipped, due %s to %s: %s",
        term.name,
        "some" if skipped.count is None else skipped.count,
        name,
        skipped.first.isoformat(),
        skipped.last.isoformat(),
        skipped.reason,
        extra={
            "action": "run-skipped",
            "lease_name": term.name,
            "lease_epoch": term.epoch,
            "lease_entry": name,
        },
    )
