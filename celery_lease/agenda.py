"""The entries, and which of them are due."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_lease.due import Ended, due_at, zone_of
from celery_lease.entry import LeasedEntry
from celery_lease.heap import DueHeap, ScheduleDict

__all__ = ["AHEAD", "Agenda", "aware", "restore"]

logger = logging.getLogger("celery_lease.scheduler")

#: Seconds until an entry is looked at again that could not be dealt with now.
AGAIN = 1.0
#: How far a clock may seem to be behind before it is taken for one that went wrong.
AHEAD = timedelta(minutes=1)


class Agenda:
    """Entries in the order in which they are due.

    Args:
        entries: The schedule.
        pause: Seconds until a bad entry is looked at again.
    """

    def __init__(self, entries: ScheduleDict, *, pause: float) -> None:
        self.entries = entries
        self._pause = pause
        self._due = DueHeap()
        #: Names whose place in the heap says when to look again, not when they are due.
        self._aside: set[str] = set()
        #: Names that were told to have no further occurrence.
        self._ended: set[str] = set()
        self._seen: tuple[int, int] | None = None
        #: Names that start from now, as their last run was still to come: to be stored.
        self.restarted: set[str] = set()

    @property
    def next_due(self) -> datetime | None:
        """When to look next; None if there are no entries."""
        return self._due.next_due

    @property
    def changed(self) -> bool:
        """Whether the schedule is another one than at the last :meth:`rebuild`."""
        return self._seen != (self.entries.changes, LeasedEntry.updates)

    def replace(self, entries: ScheduleDict) -> None:
        """Take another schedule."""
        self.entries, self._seen = entries, None

    def rebuild(self, now: datetime) -> None:
        """Look at every entry."""
        self._seen = self.entries.changes, LeasedEntry.updates
        self._aside.clear()
        self._due = DueHeap((self._place(name, now), name) for name in self.entries)

    def put(self, name: str, now: datetime) -> None:
        """Put an entry where its last run says."""
        self._due.push(self._place(name, now), name)

    def again(self, name: str, now: datetime, seconds: float = AGAIN) -> None:
        """Look at an entry again in so many seconds, as if for the first time."""
        self._aside.add(name)
        self._due.push(now + timedelta(seconds=seconds), name)

    def take(self, now: datetime, most: int, busy: Container[str]) -> list[tuple[datetime, str]]:
        """Take out what is due, oldest first.

        Args:
            now: The instant.
            most: At most so many.
            busy: Entries that have an unsent claim. They wait: what is missed meanwhile
                is a misfire.
        """
        found: list[tuple[datetime, str]] = []
        while len(found) < most and (place := self._due.pop(now)) is not None:
            _, name = place
            if name in busy:
                self.again(name, now)
            elif name in self._aside:
                self._aside.discard(name)
                restore(self.entries[name], self.entries[name].last_run_at)
                self.put(name, now)
            else:
                found.append(place)
        return found

    def give_back(self, found: Iterable[tuple[datetime, str]]) -> None:
        """Put back what :meth:`take` took and nobody dealt with."""
        for due, name in found:
            self._due.push(due, name)

    def set_aside(self, name: str, now: datetime, error: Exception) -> None:
        """Keep one bad entry from stopping the others."""
        self._due.push(self._later(name, now, error), name)

    def _place(self, name: str, now: datetime) -> datetime:
        """Return when an entry is due, or when to look at it again."""
        entry = self.entries[name]
        try:
            last = aware(entry.last_run_at)
            if last > now + AHEAD:
                _tell_ahead(name, last)
                restore(entry, now)
                last = now
                self.restarted.add(name)
            return due_at(entry.schedule, last)
        except Ended as error:
            return self._over(name, now, error)
        except Exception as error:  # noqa: BLE001 - a user's schedule may raise anything
            return self._later(name, now, error)

    def _over(self, name: str, now: datetime, error: Ended) -> datetime:
        """Look at a schedule without another occurrence now and then: it may get one."""
        level = logging.DEBUG if name in self._ended else logging.INFO
        logger.log(
            level,
            "%r has no further occurrence: %s",
            name,
            error,
            extra={"action": "entry-ended", "lease_entry": name},
        )
        self._ended.add(name)
        self._aside.add(name)
        return now + timedelta(seconds=self._pause)

    def _later(self, name: str, now: datetime, error: Exception) -> datetime:
        logger.error(
            "%r is set aside: when it is due cannot be told; again in %g s",
            name,
            self._pause,
            exc_info=error,
            extra={"action": "entry-aside", "lease_entry": name},
        )
        self._aside.add(name)
        return now + timedelta(seconds=self._pause)


def aware(instant: datetime) -> datetime:
    """Read a naive instant as Celery does, in UTC."""
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=timezone.utc)


def restore(entry: Any, last: datetime) -> None:
    """Set an entry's last run, in its schedule's own zone, as Celery would have it.

    Where that cannot be told, as it is given: one bad entry must not stop the others. The
    agenda meets the same error, tells it, and comes back here before it tries again.
    """
    entry.last_run_at = last
    with suppress(Exception):
        entry.last_run_at = aware(last).astimezone(zone_of(entry.schedule))


def _tell_ahead(name: str, last: datetime) -> None:
    logger.warning(
        "%r ran last at %s, which is still to come: did a clock go back? It starts from now",
        name,
        last.isoformat(),
        extra={"action": "entry-ahead", "lease_entry": name},
    )
