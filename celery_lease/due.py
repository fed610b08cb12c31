"""When a schedule's occurrences are due: exactly, and the same in every process.

Celery's schedules answer "how long yet?" from a clock that moves while they think.
Frozen at one instant, the same arithmetic gives one instant. All sums are made in
UTC: between two datetimes of one zone Python counts wall-clock time, which is wrong
by an hour around a change of daylight saving time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from itertools import islice
from typing import Any

from celery import schedules

from celery_lease.occurrence import Missed

__all__ = ["due_at", "frozen", "interval", "missed"]

#: How far occurrences are followed one by one before looking back from now instead.
WALK = 2000
#: The same for the kinds that give the same occurrences from wherever one looks.
WALK_ANYWHERE = 64


def interval(schedule: Any) -> timedelta | None:
    """Return the interval of a plain ``schedule``; None for every other kind."""
    if type(schedule) is schedules.schedule and not schedule.relative:
        every: timedelta = schedule.run_every  # type: ignore[attr-defined] # not in the stubs
        return every
    return None


def due_at(schedule: Any, last_run_at: datetime) -> datetime:
    """Return the first occurrence after *last_run_at*, in UTC.

    Args:
        schedule: Any Celery schedule, a user's own class included.
        last_run_at: An aware datetime: the occurrence before, or when the entry began.

    Raises:
        ValueError: The schedule does not move on, as an interval of 0 would not.
    """
    last = last_run_at.astimezone(timezone.utc)
    due = _after(schedule, last)
    while due <= last:
        # Celery's crontab counts wall-clock time, so in the repeated hour of autumn
        # it goes back; its occurrences before `last` are passed over.
        before, due = due, _after(schedule, due)
        if due <= before:
            raise ValueError(f"{schedule!r} does not move on from {last.isoformat()}")
    return due


def frozen(schedule: Any, instant: datetime) -> Any:
    """Return a copy of *schedule* whose clock stands at *instant*."""
    # copy.copy() goes through __reduce__, which parses a crontab again and loses
    # what a subclass does not list there.
    clone = object.__new__(type(schedule))
    clone.__dict__.update(vars(schedule))
    clone.nowfun = clone.now = lambda: instant
    return clone


def missed(schedule: Any, first: datetime, now: datetime, most: int) -> Missed:
    """Return what is due by *now*.

    Args:
        schedule: Any Celery schedule.
        first: The first occurrence that is not accounted for; it is due.
        now: An aware datetime.
        most: How many of the newest occurrences to list.
    """
    every = interval(schedule)
    if every is not None:
        count = (now - first) // every + 1
        newest = [first + n * every for n in range(max(0, count - most), count)]
        return Missed(first=first, newest=tuple(newest), count=count)
    anywhere = isinstance(schedule, (schedules.crontab, schedules.solar))
    steps = max(WALK_ANYWHERE if anywhere else WALK, most)
    walked = list(islice(_until(schedule, first, now), steps))
    if due_at(schedule, walked[-1]) > now:
        return Missed(first=first, newest=tuple(walked[-most:]), count=len(walked))
    return Missed(first=first, newest=_look_back(schedule, walked, now, most), count=None)


def _look_back(
    schedule: Any, walked: list[datetime], now: datetime, most: int
) -> tuple[datetime, ...]:
    """Return the newest occurrences, found from ever further behind *now*."""
    span = (walked[-1] - walked[0]) / len(walked) * (most + 1)
    newest: deque[datetime] = deque(maxlen=most)
    while len(newest) < most:
        start = max(_in_phase(schedule, walked[-1], now - span), walked[0])
        newest = deque(_until(schedule, due_at(schedule, start), now), maxlen=most)
        if start == walked[0]:
            break
        span *= 2
    return tuple(newest)


def _in_phase(schedule: Any, known: datetime, start: datetime) -> datetime:
    """Return an instant about *start* from which an interval keeps the phase of *known*.

    A crontab or the sun gives the same occurrences from anywhere; a relative
    interval counts on from the occurrence before.
    """
    every = getattr(schedule, "run_every", None)
    if not isinstance(every, timedelta) or every <= timedelta(0):
        return start
    return known + (start - known) // every * every


def _until(schedule: Any, due: datetime, now: datetime) -> Iterator[datetime]:
    """Yield *due* and the occurrences that follow it, up to *now*."""
    while due <= now:
        yield due
        due = due_at(schedule, due)


def _after(schedule: Any, last: datetime) -> datetime:
    every = interval(schedule)
    if every is not None:
        return last + every
    # In the schedule's own zone: that is where a crontab's fields are read.
    zone = getattr(schedule, "tz", None) or timezone.utc
    local = last.astimezone(zone)
    clone = frozen(schedule, local)
    try:
        remaining = clone.remaining_estimate(local)
    except NotImplementedError:
        # Celery asks a schedule of the user's own for is_due() alone.
        due, seconds = clone.is_due(local)
        remaining = timedelta(0) if due else timedelta(seconds=seconds)
    due_at: datetime = last + remaining
    return due_at
