"""The scheduler: all that is due in one batch, the schedule's state shared by all beats."""

from __future__ import annotations

import gc
import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from importlib import import_module
from math import inf
from time import monotonic
from typing import Any

from celery.backends.base import DisabledBackend
from celery.beat import PersistentScheduler, Scheduler

from celery_lease.agenda import AHEAD, Agenda, aware, restore
from celery_lease.dispatch import BATCH
from celery_lease.entry import PLAIN, LeasedEntry, wishes_of
from celery_lease.errors import CeleryLeaseError, ConfigurationError
from celery_lease.heap import ScheduleDict
from celery_lease.leading import LeaseMixin
from celery_lease.lease import Term
from celery_lease.parts import logger, taken
from celery_lease.plan import Batch, Planner
from celery_lease.publish import said
from celery_lease.sending import tell_known, tell_skipped
from celery_lease.stores.entries import EntryState, SQLEntries

__all__ = ["LeasedScheduler", "leased"]

#: Seconds after which a turn decides about no further entry: what is decided is sent first.
PLANNING = 0.2


#: Schedulers that need more than the plain mixin, by module and name: where that is.
_MIXINS = {
    ("django_celery_beat.schedulers", "DatabaseScheduler"): "django.DatabaseLeaseMixin",
    ("redbeat.schedulers", "RedBeatScheduler"): "redbeat.RedBeatLeaseMixin",
}

#: What a scheduler may have for us to call.
_HOOKS = ("find",)


def leased(cls: type[Scheduler]) -> type[Scheduler]:
    """Return *cls* as a scheduler that ticks only while it holds the lease.

    Its storage and its way of finding what is due stay its own. Of django-celery-beat's and
    redbeat's scheduler, and classes made from them, it is what ``celery_lease.django`` and
    ``celery_lease.redbeat`` make of them.

    Args:
        cls: The class. Its ``find(name)``, if it has one, returns an entry as it is now.

    Raises:
        TypeError: It defines a name that the lease needs for itself, or has a lease already.
    """
    if issubclass(cls, LeaseMixin):
        raise TypeError(f"{cls.__name__} is leased already")
    mixin = _mixin_for(cls)
    ours = _defined(mixin, but=PersistentScheduler) - {*dir(PersistentScheduler), *_HOOKS}
    if clash := ours & _defined(cls, but=PersistentScheduler):
        raise taken(cls.__name__, ", ".join(map(repr, sorted(clash))))
    hooks = {name: inspect.getattr_static(cls, name) for name in _HOOKS if hasattr(cls, name)}
    return type(f"Leased{cls.__name__}", (mixin, cls), {"__doc__": cls.__doc__, **hooks})


def _defined(cls: type, *, but: type) -> set[str]:
    """Return the names that *cls* and its bases define which are none of *but*'s."""
    names = {name for each in cls.__mro__ if each not in but.__mro__ for name in vars(each)}
    return {name for name in names if not name.startswith("__")}  # Annotations, say.


def _mixin_for(cls: type[Scheduler]) -> type[LeaseMixin]:
    for each in cls.__mro__:
        home = _MIXINS.get((each.__module__, each.__name__))
        if home is not None:  # then the other package has been imported already
            module, name = home.split(".")
            mixin: type[LeaseMixin] = getattr(import_module(f"celery_lease.{module}"), name)
            return mixin
    return LeaseMixin


class LeasedScheduler(LeaseMixin, Scheduler):
    """Celery beat's scheduler for any number of beats, of which one leads.

    What is due is dispatched in batches: claimed, published, marked. When each entry ran
    last is kept in the lease database.
    """

    Entry = LeasedEntry

    data: ScheduleDict

    # --- the schedule -------------------------------------------------------------------

    def setup_schedule(self) -> None:
        """Read ``beat_schedule``, and look at the lease database."""
        self._set_up_at = self.now()
        #: The latest instant of a turn, until the clock went back.
        self._latest = self._set_up_at
        #: Entries with a row in the database.
        self._stored: set[str] = set()
        #: Entries that had one at some time.
        self._known: set[str] = set()
        self._warned: str | None = None
        self.agenda = Agenda(ScheduleDict(self.data), pause=self.longest)
        self.data = self.agenda.entries
        try:
            with _gc_paused():
                self.merge_inplace(self.app.conf.beat_schedule)
        except ConfigurationError as error:
            self._refuse(error)
        except Exception as error:  # noqa: BLE001 - whatever an entry's class or clock raises
            self._refuse(self._which_entry(error))
        if not isinstance(self.app.backend, DisabledBackend):  # else there is nothing to clean
            self.install_default_entries(self.data)
        super().setup_schedule()

    def _which_entry(self, error: Exception) -> ConfigurationError:
        """Return an error that names the entry which could not be made: Celery's does not."""
        setting, entries = "beat_schedule", self.app.conf.beat_schedule
        if not isinstance(entries, Mapping):
            kind = type(entries).__name__
            return ConfigurationError(
                f"{setting} is a {kind}; give a dict of entries", setting=setting
            )
        for name, entry in entries.items():
            try:
                self.Entry(**dict(entry, name=name, app=self.app))
            except Exception as found:  # noqa: BLE001 - the same
                setting, error = f"{setting}[{name!r}]", found
                break
        return ConfigurationError(f"{setting}: {' '.join(said(error).split())}", setting=setting)

    @property
    def schedule(self) -> ScheduleDict:
        """The entries, by name."""
        return self.data

    @schedule.setter
    def schedule(self, schedule: dict[str, Any]) -> None:
        self.data = ScheduleDict(schedule)
        self.agenda.replace(self.data)

    @cached_property
    def planner(self) -> Planner:
        """What decides about late occurrences."""
        return Planner(
            self.settings,
            deadline=self.app.conf.beat_cron_starting_deadline,
            is_due=self.is_due,
            hooked=type(self).is_due is not Scheduler.is_due,
            is_fenced=self.is_fenced,
        )

    @cached_property
    def _entries(self) -> SQLEntries:
        return SQLEntries(self.store.engine, idle=self.settings.guard_idle)

    def find(self, name: str) -> Any:
        """Return the entry of that name as it is now; None if there is none."""
        return self.agenda.entries.get(name)

    def load(self, term: Term) -> None:
        """Take over where the last leader stopped."""
        self._stored = set()
        with _gc_paused():
            for state in self._entries.load(term.name):
                self._stored.add(state.name)
                self._known.add(state.name)
                entry = self.find(state.name)
                if entry is not None:
                    restore(entry, state.last_run_at or state.first_seen_at)
                    entry.total_run_count = state.total_run_count
            self._reconcile(term)

    def _reconcile(self, term: Term) -> None:
        """Bring the database and the agenda in line with the schedule."""
        now, entries = self.now(), self.agenda.entries
        added = []
        for name, entry in entries.items():
            if name not in self._stored:
                try:
                    last = aware(entry.last_run_at)
                    # What came into being with this process starts when a leader first sees
                    # it, and what comes back, now; an earlier instant was given on purpose.
                    given = last < self._set_up_at and name not in self._known
                    restore(entry, last if given else now)
                except Exception:  # noqa: BLE001, S112 - the agenda says so, and sets it aside
                    continue
                added.append(
                    EntryState(
                        name=name,
                        first_seen_at=entry.last_run_at,
                        last_run_at=None,
                        total_run_count=entry.total_run_count,
                    )
                )
        removed = [name for name in self._stored if name not in entries]
        self._entries.reconcile(term, added=added, removed=removed)
        self._stored = set(entries)
        self._known |= self._stored
        self._rebuild(term, now)

    def _rebuild(self, term: Term, now: datetime) -> None:
        """Look at every entry, and store which ones start from now: the next leader would not."""
        self.agenda.rebuild(now)
        entries, names = self.agenda.entries, self.agenda.restarted
        self.agenda.restarted = set()
        self._entries.write(
            term,
            [
                self._state(name, aware(entries[name].last_run_at))
                for name in names
                if name in entries
            ],
        )

    # --- a turn -------------------------------------------------------------------------

    def turn(self, term: Term, *_args: Any, **_kwargs: Any) -> float:
        """Dispatch what is due, at most one batch of it."""
        if self.agenda.changed:
            self._reconcile(term)
        now = self.now()
        if now >= self._latest:
            self._latest = now
        elif now < self._latest - AHEAD:
            self._went_back(term, now)
        next_due = self.agenda.next_due
        if next_due is not None and next_due <= now:
            self._dispatch(term, self._plan(term, now), now)
            next_due = self.agenda.next_due
        wait = self.longest
        if next_due is not None:
            wait = min(wait, max(0.0, (next_due - now).total_seconds()))
        return min(wait, self.dispatcher.retry_in) if self.dispatcher.busy else wait

    def _went_back(self, term: Term, now: datetime) -> None:
        """Look at every entry again: after a step of the clock none is due when it should be."""
        logger.warning(
            "lease %r: the clock of this host went back by %.0f s; what is due is looked for "
            "again from now",
            self.settings.name,
            (self._latest - now).total_seconds(),
            extra={"action": "clock-back", "lease_name": self.settings.name},
        )
        self._latest = now
        self._rebuild(term, now)

    def _plan(self, term: Term, now: datetime) -> Batch:
        """Decide about the entries that are due, oldest first.

        At least about one. What there is no room or time for is due at once in the next turn.
        """
        batch, entries = Batch(), self.agenda.entries
        found = self.agenda.take(now, BATCH, self.dispatcher.waiting)
        alone = [name for _, name in found if not wishes_of(entries[name]).overlap]
        running = self.dispatcher.ledger.running(term.name, alone)
        until = monotonic() + PLANNING  # Of deciding alone: the database is asked once.
        for done, (first, name) in enumerate(found):
            room, waits = BATCH - len(batch.runs), running.get(name, inf)
            if room == 0 or (done and monotonic() > until):
                self.agenda.give_back(found[done:])
                break
            try:
                again = self.planner.add(batch, entries[name], first, now, waits=waits, room=room)
                if again:
                    self.agenda.again(name, now, again)
            except Exception as error:  # noqa: BLE001 - a user's schedule may raise anything
                self.agenda.set_aside(name, now, error)
        return batch

    def _dispatch(self, term: Term, batch: Batch, now: datetime) -> None:
        """Claim, move the entries on, and send."""
        if not batch.moved:
            return
        try:
            known = self.dispatcher.ledger.claim(
                term, batch.runs, skipped=batch.skipped, moved=self._moved(batch)
            )
        except CeleryLeaseError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a driver raises
            self._dispatch_apart(term, batch, now, error)
            return
        self._advance(term, batch, now)
        for run in batch.runs:
            if run.id in known:
                tell_known(term, run)
        self.dispatcher.send(term, [each for each in batch.runs if each.id not in known])

    def _dispatch_apart(self, term: Term, batch: Batch, now: datetime, error: Exception) -> None:
        """Dispatch an entry at a time: one that the database does not take stops no other."""
        if len(batch.moved) == 1:
            (name,) = batch.moved
            self.agenda.set_aside(name, now, error)
            return
        for name in batch.moved:
            self._dispatch(term, batch.only(name), now)

    def _advance(self, term: Term, batch: Batch, now: datetime) -> None:
        """Move the entries on, as their rows were by the claim."""
        for name, last in batch.moved.items():
            entry = self.agenda.entries[name]
            restore(entry, last)
            entry.total_run_count += batch.fired.get(name, 0)
            self.agenda.put(name, now)
        for name, skipped in batch.skipped:
            tell_skipped(term, name, skipped)

    def _moved(self, batch: Batch) -> Sequence[EntryState]:
        """Return the state of the batch's entries as it is once they have moved on."""
        return [
            self._state(name, last, fired=batch.fired.get(name, 0))
            for name, last in batch.moved.items()
        ]

    def _state(self, name: str, last: datetime, *, fired: int = 0) -> EntryState:
        return EntryState(
            name=name,
            first_seen_at=last,  # of a known entry it stays what it was
            last_run_at=last,
            total_run_count=self.agenda.entries[name].total_run_count + fired,
        )

    def lost_after(self) -> dict[str, float]:
        """Return the entries that ask for ``retry_lost_after``."""
        return {
            name: wishes.retry_lost_after
            for name, entry in self.agenda.entries.items()
            if (wishes := wishes_of(entry)) is not PLAIN and wishes.retry_lost_after is not None
        }

    def sync(self) -> None:
        """Nothing: the schedule's state was stored with each claim."""

    # --- telling the schedules of two apps apart ------------------------------------------

    def holder_info(self) -> dict[str, Any]:
        """Let others see which schedule this is."""
        digest = hashlib.sha256()
        for name in sorted(self.agenda.entries):
            digest.update(f"{name}\0{self.agenda.entries[name].task}\0".encode())
        schedule = {"schedule": digest.hexdigest()[:12], "entries": len(self.agenda.entries)}
        return {**super().holder_info(), **schedule}

    def stood_by(self) -> None:
        """Warn where the leader has another schedule: one of the two silently never runs."""
        seen, mine = self.elector.seen, self.elector.holder.info
        if seen is None or seen.holder == self._warned:
            return
        theirs = seen.holder_info
        if theirs.get("schedule") in (None, mine["schedule"]):
            return
        self._warned = seen.holder
        logger.warning(
            "lease %r: the leader on host %s has another schedule (%s, %s entries) than this "
            "beat on host %s (%s, %d entries), and what only this one has does not run; "
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


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Make many objects that all stay: looking for garbage among them takes a third longer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
