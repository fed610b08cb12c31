"""One entry of the schedule, and what it wants that a stock entry cannot say."""

from __future__ import annotations

import difflib
import inspect
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, ClassVar

from celery.beat import ScheduleEntry
from celery.schedules import crontab
from celery.schedules import schedule as celery_interval

from celery_lease.errors import ConfigurationError
from celery_lease.occurrence import Misfire, MisfirePolicy, storable
from celery_lease.settings import Settings, duration, misfire_policy

__all__ = ["PLAIN", "LeasedEntry", "Wishes", "deadline_of", "refuse_wishes", "wishes_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What an entry asks for. Durations are in seconds.

    Raises:
        ConfigurationError: A value cannot be; the message names entry and key.
    """

    #: Which of the occurrences that were found late to fire; None leaves it to the settings.
    misfire: MisfirePolicy | None = None
    #: How late is still fine; None leaves it to the settings.
    grace: float | None = None
    #: Whether an occurrence may be sent while the one before is not settled.
    overlap: bool = True
    #: After how long an unsettled one does not count any more: its message may be lost.
    overlap_timeout: float = 3600.0
    #: Whether the task is fenced, for tasks that beat does not import; None leaves it to the task.
    fenced: bool | None = None
    #: After how long an unsettled one is sent again, even under the same epoch; None for never.
    retry_lost_after: float | None = None

    @classmethod
    def read(cls, entry: str, given: Mapping[str, Any]) -> Wishes:
        """Read the keys of an entry in ``beat_schedule``."""
        values: dict[str, Any] = {}
        for key, value in given.items():
            if value is None:
                continue
            setting = f"beat_schedule[{entry!r}][{key!r}]"
            if key in ("overlap", "fenced"):
                if not isinstance(value, bool):
                    raise ConfigurationError(
                        f"{setting} = {value!r} is not True or False", setting=setting
                    )
                values[key] = value
            elif key == "misfire":
                values[key] = misfire_policy(setting, value)
            else:
                values[key] = duration(setting, value)
                if values[key] < 0:
                    raise ConfigurationError(
                        f"{setting} = {value!r} is negative; give seconds, 0 or more",
                        setting=setting,
                    )
        return cls(**values)

    def on_misfire(self, settings: Settings) -> Misfire:
        """Return what to do with late occurrences, the settings filled in."""
        policy = self.misfire or settings.misfire
        grace = self.grace if self.grace is not None else settings.grace
        if policy is MisfirePolicy.SKIP and grace is None:
            # "Skip what is late" needs a "late": a takeover alone must not skip anything.
            grace = settings.ttl + settings.retry_interval
        return Misfire(policy=policy, grace=grace, limit=settings.catch_up_limit)


def deadline_of(entry: Any, deadline: float | None) -> float | None:
    """Return the deadline where it is one for *entry*: Celery has it for crontabs alone."""
    return deadline if isinstance(entry.schedule, crontab) else None


#: Characters that the database keeps of an entry's name.
LONGEST_NAME = 255
#: Seconds between two occurrences that nobody lives to see.
LONGEST_INTERVAL = 1000 * 365 * 86400.0
#: A clock without a zone counts as UTC where it is no further from it than this.
NEAR = timedelta(minutes=1)
#: Of an entry that asks for nothing: one for all of them.
PLAIN = Wishes()

#: What `repr()` shows of an object that has no other: where it is in this process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")
_KEYS = tuple(Wishes.__dataclass_fields__)
#: Keys of Celery's, and what a scheduler gives beside them.
_CELERYS = frozenset(inspect.signature(ScheduleEntry).parameters)
_GIVEN = frozenset({"name", "app"})


def refuse_wishes(entries: Any, cls: type[ScheduleEntry]) -> None:
    """Refuse keys of ours in a schedule of which another scheduler makes the entries.

    Args:
        entries: The ``beat_schedule``.
        cls: What that scheduler makes its entries of. A key that it takes is its own.

    Raises:
        ConfigurationError: An entry has one; the message names both.
    """
    foreign = set(_KEYS) - set(inspect.signature(cls).parameters)
    for name, given in entries.items() if isinstance(entries, Mapping) else ():
        for key in sorted(foreign.intersection(given)):
            setting = f"beat_schedule[{name!r}][{key!r}]"
            raise ConfigurationError(
                f"{setting} is for celery_lease:LeasedScheduler, and a {cls.__name__} does not "
                f"know it; remove it",
                setting=setting,
            )


class LeasedEntry(ScheduleEntry):
    """A schedule entry with wishes, whose ``last_run_at`` is the occurrence's due time."""

    #: How many times entries were updated in place, in this process: one more reason
    #: to look at a schedule again.
    updates: ClassVar[int] = 0

    def __init__(
        self,
        name: str | None = None,
        task: str | None = None,
        last_run_at: datetime | None = None,
        total_run_count: int | None = None,
        schedule: Any = None,
        *args: Any,
        wishes: Wishes | None = None,
        **kwargs: Any,
    ) -> None:
        given = {key: kwargs.pop(key) for key in _KEYS if key in kwargs}
        if name is not None:
            _check_name(name)
            _check_task(name, task, kwargs.get("options"))
            _check_schedule(name, schedule, relative=kwargs.get("relative", False))
        try:
            super().__init__(name, task, last_run_at, total_run_count, schedule, *args, **kwargs)
        except TypeError:
            _check_keys(name, kwargs)  # Not before: there may be a hundred thousand entries.
            raise
        self.wishes = Wishes.read(name or "", given) if given else wishes or PLAIN
        clock = getattr(self.schedule, "nowfun", None)
        if clock is not None:
            _check_clock(name, clock)

    def default_now(self) -> datetime:
        """Return the instant at which an entry that was never run begins.

        Celery's takes the long way through the app's zone, which for a hundred
        thousand entries is a second or two.
        """
        nowfun = getattr(self.schedule, "nowfun", None)
        return nowfun() if nowfun is not None else datetime.now(timezone.utc)

    def update(self, other: ScheduleEntry) -> None:
        """Take over what can be edited from another entry."""
        super().update(other)
        self.wishes = wishes_of(other)
        LeasedEntry.updates += 1


def wishes_of(entry: Any) -> Wishes:
    """Return what an entry asks for; of a class that knows no wishes, nothing."""
    wishes: Wishes = getattr(entry, "wishes", PLAIN)
    return wishes


def _check_name(name: Any) -> None:
    """Refuse a name that another beat, or a database, would not know again.

    Raises:
        ConfigurationError: It would not be.
    """
    if not isinstance(name, str):
        trouble = "the name is not a string; write it as one"
    elif len(name) > LONGEST_NAME:
        trouble = (
            f"the name is longer than {LONGEST_NAME} characters; give it a shorter one "
            f"(add_periodic_task takes a name=…)"
        )
    elif name != name.rstrip():
        trouble = "the name ends with white space, which MySQL does not see; remove it"
    elif _ADDRESS.search(name):
        trouble = (
            "the name has the address of an object and is another one in each process; "
            "add_periodic_task takes a name=…"
        )
    elif name != storable(name):
        trouble = "the name has a character that no database keeps; remove it"
    else:
        return
    shown = repr(name) if len(repr(name)) < 80 else f"{repr(name)[:80]}…"
    raise ConfigurationError(f"beat_schedule[{shown}]: {trouble}", setting="beat_schedule")


def _check_keys(name: str | None, given: Mapping[str, Any]) -> None:
    """Refuse a key that nothing would read.

    Raises:
        ConfigurationError: There is one.
    """
    key = next((each for each in given if each not in _CELERYS), None)
    if key is None:
        return
    known = sorted(_CELERYS - _GIVEN) + list(_KEYS)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0)
    setting = f"beat_schedule[{name!r}][{key!r}]"
    raise ConfigurationError(
        f"{setting} is not a key of an entry; did you mean {near[0]!r}? Otherwise remove it",
        setting=setting,
    )


def _check_task(name: str, task: Any, options: Any) -> None:
    """Refuse what no message can be made of, at each of its times.

    Raises:
        ConfigurationError: The task is no name, or the options are no dict.
    """
    if not isinstance(task, str) or not task:
        setting = f"beat_schedule[{name!r}]['task']"
        raise ConfigurationError(
            f"{setting} = {task!r} is not the name of a task; give its name",
            setting=setting,
        )
    if options and not isinstance(options, Mapping):
        setting = f"beat_schedule[{name!r}]['options']"
        raise ConfigurationError(
            f"{setting} = {options!r} is not a dict; give options of apply_async by their names",
            setting=setting,
        )


def _check_schedule(name: str, schedule: Any, *, relative: bool) -> None:
    """Refuse what is no schedule, some of which Celery takes until it is due.

    Raises:
        ConfigurationError: It is none.
    """
    # Celery makes an interval of a number.
    interval: Any = schedule
    if type(schedule) is celery_interval:
        interval, relative = getattr(schedule, "run_every", None), schedule.relative
    if isinstance(interval, (int, float, timedelta)):
        seconds = interval.total_seconds() if isinstance(interval, timedelta) else interval
        if not 0 < seconds < LONGEST_INTERVAL:
            raise _no_schedule(
                name,
                schedule,
                "is no interval that comes round; give seconds or a timedelta above 0 and below "
                "a thousand years",
            )
        if relative and seconds < 1:
            raise _no_schedule(
                name,
                schedule,
                "is relative, and so rounded to whole seconds, of which it has none; give 1 "
                "second or more, or leave out relative",
            )
        return
    if isinstance(schedule, type) or not hasattr(schedule, "is_due"):
        raise _no_schedule(
            name,
            schedule,
            "is not a schedule; give seconds, a timedelta, a crontab or another schedule of "
            "Celery's or your own",
        )


def _no_schedule(name: str, schedule: Any, why: str) -> ConfigurationError:
    setting = f"beat_schedule[{name!r}]['schedule']"
    return ConfigurationError(f"{setting} = {schedule!r} {why}", setting=setting)


def _check_clock(name: str | None, clock: Callable[[], datetime]) -> None:
    """Refuse a clock that tells the time on the wall and not where that wall is.

    Celery takes it for UTC and counts in hours that are shifted by the host's zone. No
    other host need have that zone, and a due time is the same for all of them.

    Raises:
        ConfigurationError: Its answer has no zone, and is not UTC.
    """
    now = clock()
    if now.tzinfo is not None:
        return
    off = abs(now.replace(tzinfo=timezone.utc) - datetime.now(timezone.utc))
    # London's clock is right in winter.
    if off > NEAR or (clock == datetime.now and time.daylight):
        raise ConfigurationError(
            f"beat_schedule[{name!r}]: the schedule's nowfun tells a local time without its "
            f"zone; give it a clock that is aware, or none, and set timezone",
            setting="beat_schedule",
        )
