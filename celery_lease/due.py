"""When a schedule's occurrences are due: exactly, and the same in every process.

Celery's schedules answer "how long yet?" from a clock that moves while they think.
Frozen at one instant, the same arithmetic gives one instant. All sums are made in
UTC: between two datetimes of one zone Python counts wall-clock time, which is wrong
by an hour around a change of daylight saving time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone, tzinfo
from itertools import islice
from typing import Any

from celery import VERSION, schedules
from celery.utils.time import timezone as zones

from celery_lease.occurrence import Missed

__all__ = ["Ended", "due_at", "missed", "zone_of"]

#: How far occurrences are followed one by one before looking back from now instead: what
#: keeps one entry, after any outage, to some hundredths of a second.
WALK = 500
#: The same for the kinds that give the same occurrences from wherever one looks.
WALK_ANYWHERE = 64
#: What a relative interval is rounded to: the first of them that fits into it.
_UNITS = tuple(timedelta(seconds=each) for each in (86400, 3600, 60, 1))
#: Whether Celery reads a crontab in the zone of its `nowfun`, where it has one.
_BY_ITS_CLOCK = VERSION < (5, 7)
#: Whether Celery adds an interval to what the clocks on the walls show, and so waits for
#: an hour too long in autumn.
_BY_THE_WALL = VERSION < (5, 7)


def interval(schedule: Any) -> timedelta | None:
    """Return the interval of a plain ``schedule``; None for every other kind."""
    if type(schedule) is schedules.schedule and not schedule.relative:
        every: timedelta = schedule.run_every  # type: ignore[attr-defined] # not in the stubs
        return every
    return None


class Ended(ValueError):
    """The schedule has no further occurrence, as far as it says today."""


def due_at(schedule: Any, last_run_at: datetime) -> datetime:
    """Return the first occurrence after *last_run_at*, in UTC.

    Args:
        schedule: Any Celery schedule, a user's own class included.
        last_run_at: An aware datetime: the occurrence before, or when the entry began.

    Raises:
        Ended: There is none.
        ValueError: The schedule does not move on, as an interval of 0 would not.
    """
    last = last_run_at.astimezone(timezone.utc)
    due = _after(schedule, last)
    while due <= last:
        # Celery's crontab counts wall-clock time, so in the repeated hour of autumn
        # it goes back; its occurrences before `last` are passed over.
        before, due = due, _after(schedule, due)
        if due <= before:
            kind = Ended if interval(schedule) is None else ValueError
            raise kind(f"{schedule!r} does not move on from {last.isoformat()}")
    return due


def zone_of(schedule: Any) -> tzinfo:
    """Return the zone in which a schedule's fields are read."""
    nowfun = getattr(schedule, "nowfun", None)
    if _BY_ITS_CLOCK and nowfun is not None:
        zone: tzinfo | None = nowfun().tzinfo
        if zone is not None:
            return zone
    found: tzinfo = zones.get_timezone(getattr(schedule, "tz", None) or timezone.utc)
    return found


def frozen(schedule: Any, instant: datetime) -> Any:
    """Return a copy of *schedule* whose clock stands at *instant*, if it is Celery's clock.

    Where there can be no such copy, *schedule* itself.
    """
    if not hasattr(schedule, "__dict__"):
        return schedule
    with suppress(AttributeError, TypeError):  # `now` may be a property
        # copy.copy() goes through __reduce__, which parses a crontab again and loses
        # what a subclass does not list there.
        clone = object.__new__(type(schedule))
        for name in _slots(type(schedule)):
            if hasattr(schedule, name):
                setattr(clone, name, getattr(schedule, name))
        clone.__dict__.update(vars(schedule))
        clone.nowfun = clone.now = lambda: instant
        return clone
    return schedule


def _slots(cls: type) -> set[str]:
    found: set[str] = set()
    for each in cls.__mro__:
        slots = vars(each).get("__slots__", ())
        found.update([slots] if isinstance(slots, str) else slots)
    return found - {"__dict__", "__weakref__"}


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
    following = _following(schedule, walked[-1])
    if following is None or following > now:
        return Missed(first=first, newest=tuple(walked[-most:]), count=len(walked))
    return Missed(first=first, newest=_look_back(schedule, walked, now, most), count=None)


def _look_back(
    schedule: Any, walked: list[datetime], now: datetime, most: int
) -> tuple[datetime, ...]:
    """Return the newest occurrences, found from ever further behind the last of them."""
    gap = (walked[-1] - walked[0]) / len(walked)
    span, end = gap * (most + 1), _about_newest(schedule, walked[-1], now, gap)
    newest: deque[datetime] = deque(maxlen=most)
    while len(newest) < most:
        start = max(_in_phase(schedule, walked[-1], end - span), walked[0])
        newest = deque(_until(schedule, _following(schedule, start), now), maxlen=most)
        if start == walked[0]:
            break
        span *= 2
    return tuple(newest)


def _about_newest(schedule: Any, known: datetime, now: datetime, near: timedelta) -> datetime:
    """Return about when the newest occurrence by *now* was: there may be none for long."""
    end, middle = now, now - near
    while end - known > near:
        following = _following(schedule, middle)
        if following is None or following > now:
            end = middle
        else:
            known = middle
        middle = known + (end - known) / 2
    return end


def _in_phase(schedule: Any, known: datetime, start: datetime) -> datetime:
    """Return an instant about *start* from which an interval keeps the phase of *known*.

    A crontab or the sun gives the same occurrences from anywhere; a relative
    interval counts on from the occurrence before, which was rounded.
    """
    every = getattr(schedule, "run_every", None)
    if not isinstance(every, timedelta) or every <= timedelta(0):
        return start
    if getattr(schedule, "relative", False):
        every -= every % next((each for each in _UNITS if each <= every), every)
    return known + (start - known) // every * every


def _until(schedule: Any, due: datetime | None, now: datetime) -> Iterator[datetime]:
    """Yield *due* and the occurrences that follow it, up to *now*."""
    while due is not None and due <= now:
        yield due
        due = _following(schedule, due)


def _following(schedule: Any, due: datetime) -> datetime | None:
    try:
        return due_at(schedule, due)
    except Ended:
        return None


def _after(schedule: Any, last: datetime) -> datetime:
    every = interval(schedule)
    if every is not None:
        return last + every
    local = last.astimezone(_zone_of_sums(schedule, last))
    clone = frozen(schedule, local)
    if clone is not schedule:
        if hasattr(clone, "remaining_estimate"):
            with suppress(NotImplementedError):
                due: datetime = last + _some(clone.remaining_estimate(local), schedule, last)
                return due
        # Of a schedule of the user's own Celery asks no more than this.
        is_due, seconds = clone.is_due(local)
        if not is_due:
            return last + timedelta(seconds=_some(seconds, schedule, last))
    # At the very instant at which it ran? Then it goes by another clock than Celery's.
    return _asked(schedule, local)


def _zone_of_sums(schedule: Any, last: datetime) -> tzinfo:
    """Return the zone in which Celery is to work out a schedule's next occurrence."""
    if isinstance(schedule, schedules.solar):
        # The sun knows no zone. In one, Celery before 5.7 goes back in the repeated hour.
        return timezone.utc
    zone = zone_of(schedule)
    if _BY_THE_WALL and _is_celerys_interval(schedule):
        # As the clocks there are when it is over: that is what it may be rounded to.
        return timezone((last + schedule.run_every).astimezone(zone).utcoffset() or timedelta(0))
    return zone


def _is_celerys_interval(schedule: Any) -> bool:
    """Return whether a schedule is a length of time, and leaves the sum to Celery.

    A relative one of days is not: it goes by the calendar.
    """
    kind = type(schedule)
    return (
        issubclass(kind, schedules.schedule)
        and kind.remaining_estimate is schedules.schedule.remaining_estimate
        and not (schedule.relative and schedule.run_every >= _UNITS[0])
    )


def _asked(schedule: Any, last: datetime) -> datetime:
    """Return when ``is_due()`` says, counted from now."""
    due, seconds = schedule.is_due(last)
    now = datetime.now(timezone.utc)
    if due:
        return max(now, last + timedelta(seconds=seconds or 0))
    return now + timedelta(seconds=_some(seconds, schedule, last))


def _some(left: Any, schedule: Any, last: datetime) -> Any:
    """Return what is left until the next occurrence; a schedule that has ended says None."""
    if left is None:
        raise Ended(f"{schedule!r} has none after {last.isoformat()}")
    return left
