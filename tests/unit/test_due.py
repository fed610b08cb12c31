"""When occurrences are due: one value, whoever asks and whenever."""

import subprocess
import sys
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, schedules

from celery_lease.due import Ended, due_at, missed

UTC = timezone.utc
START = datetime(2026, 3, 28, 12, 0, 0, 123456, tzinfo=UTC)
ZONES = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"]


def app_in(zone):
    """Return an app whose schedules are read in *zone*."""
    app = Celery("due", set_as_current=False)
    app.conf.update(timezone=zone, enable_utc=True)
    return app


def follow(schedule, start, until):
    """Return all occurrences after *start*, up to *until*."""
    found = []
    due = due_at(schedule, start)
    while due <= until:
        found.append(due)
        due = due_at(schedule, due)
    return found


class Weekdays(schedules.schedule):
    """A schedule of a user's own."""

    def remaining_estimate(self, last_run_at):
        due = last_run_at + self.run_every
        while due.weekday() >= 5:
            due += timedelta(days=1)
        return due - self.now()


class OnlyIsDue(schedules.BaseSchedule):
    """A schedule of a user's own that has the one method which Celery asks for."""

    def is_due(self, last_run_at):
        seconds = 90 - (self.now() - last_run_at).total_seconds()
        return schedules.schedstate(seconds <= 0, seconds if seconds > 0 else 90)


KINDS = {
    "interval": lambda app: schedules.schedule(7.25, app=app),
    "relative": lambda app: schedules.schedule(timedelta(hours=1), relative=True, app=app),
    "crontab": lambda app: schedules.crontab(minute="*/7", hour="1-22", app=app),
    "monthly": lambda app: schedules.crontab(minute=5, hour=3, day_of_month="31", app=app),
    "solar": lambda app: schedules.solar("sunset", 52.5, 13.4, app=app),
    "subclass": lambda app: Weekdays(timedelta(hours=5), app=app),
    "is_due only": lambda app: OnlyIsDue(app=app),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_does_not_depend_on_when_it_is_asked(kind):
    """The id of a run comes from its due_at: two beats must compute the same one."""
    schedule = KINDS[kind](app_in("Europe/Berlin"))

    answers = {due_at(schedule, START) for _ in range(50)}

    assert len(answers) == 1
    assert answers.pop() > START


@pytest.mark.parametrize("zone", ZONES)
def test_another_process_gets_the_same_answers(zone):
    """A standby on another host has its own clock and its own hash seed."""
    code = (
        "from tests.unit.test_due import *\n"
        f"app = app_in({zone!r})\n"
        "print([due_at(KINDS[kind](app), START).isoformat() for kind in KINDS])"
    )

    theirs = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()

    app = app_in(zone)
    assert theirs == str([due_at(KINDS[kind](app), START).isoformat() for kind in KINDS])


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("change", [(2026, 3, 7), (2026, 3, 28), (2026, 10, 24), (2026, 10, 31)])
@pytest.mark.parametrize("kind", KINDS)
def test_occurrences_go_forward_and_are_distinct_around_a_clock_change(kind, change, zone):
    """An occurrence that comes twice has one id and would be sent once; a step back, never."""
    schedule = KINDS[kind](app_in(zone))
    start = datetime(*change, tzinfo=UTC)

    found = follow(schedule, start, start + timedelta(days=9))

    assert all(earlier < later for earlier, later in pairwise(found))
    assert kind == "monthly" or found


class Renamed(schedules.schedule):
    """A user's interval that is Celery's in all that matters."""


INTERVALS = [schedules.schedule, partial(schedules.schedule, relative=True), Renamed]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("change", [(2026, 3, 28), (2026, 10, 24)])
@pytest.mark.parametrize("kind", INTERVALS)
def test_an_interval_is_exact_around_a_clock_change(kind, change, zone):
    """Ten minutes are a length of time, whatever the clocks on the walls do."""
    schedule = kind(timedelta(minutes=10), app=app_in(zone))
    start = datetime(*change, tzinfo=UTC)

    found = follow(schedule, start, start + timedelta(days=2))

    assert found == [start + timedelta(minutes=10) * n for n in range(1, 289)]


@pytest.mark.parametrize("zone", ZONES[:2])
@pytest.mark.parametrize("change", [(2026, 3, 7), (2026, 3, 28), (2026, 10, 24), (2026, 10, 31)])
def test_a_relative_hour_is_an_hour_where_the_clocks_change_by_one(change, zone):
    """It begins with the hour on the wall, before and after."""
    schedule = schedules.schedule(timedelta(hours=1), relative=True, app=app_in(zone))
    start = datetime(*change, 1, 20, tzinfo=UTC)

    found = follow(schedule, start, start + timedelta(days=2))

    assert found == [start - timedelta(minutes=20) + timedelta(hours=n) for n in range(1, 49)]


def test_a_crontab_is_silent_in_the_repeated_hour():
    """Celery's own crontab is, and we follow it: 02:30 in Berlin comes once that night."""
    schedule = schedules.crontab(minute=30, app=app_in("Europe/Berlin"))
    start = datetime(2026, 10, 24, 22, 45, tzinfo=UTC)  # 00:45 in Berlin

    found = follow(schedule, start, start + timedelta(hours=4))

    local = [each.astimezone(ZoneInfo("Europe/Berlin")).strftime("%H:%M %z") for each in found]
    assert local == ["01:30 +0200", "02:30 +0200", "03:30 +0100"]


def test_the_sun_rises_in_the_repeated_hour_as_well():
    """London's sunrise is then one in New York; Celery before 5.7 goes back from there."""
    schedule = schedules.solar("sunrise", 51.5, -0.12, app=app_in("America/New_York"))
    start = datetime(2025, 10, 30, 12, tzinfo=UTC)

    found = follow(schedule, start, start + timedelta(days=7))

    assert [each.day for each in found] == [31, 1, 2, 3, 4, 5, 6]
    assert {(each.hour, each.minute // 10) for each in found} <= {(6, 4), (6, 5), (7, 0)}


def test_an_entry_that_began_in_the_repeated_hour_goes_forward():
    """From there Celery's crontab answers with an instant that has passed."""
    schedule = schedules.crontab(minute="*/10", app=app_in("Europe/Berlin"))
    start = datetime(2026, 10, 25, 1, 5, tzinfo=UTC)  # 02:05 in Berlin, the second time

    assert due_at(schedule, start) == datetime(2026, 10, 25, 2, 0, tzinfo=UTC)


def test_a_crontab_is_read_in_its_own_zone():
    """The database gives UTC back; three in the morning is three in Berlin."""
    schedule = schedules.crontab(minute=0, hour=3, app=app_in("Europe/Berlin"))

    due = due_at(schedule, datetime(2026, 7, 1, tzinfo=UTC))

    assert due == datetime(2026, 7, 1, 1, 0, tzinfo=UTC)


def test_a_zone_may_be_named_as_celery_has_it():
    """Celery takes a string for a zone wherever it reads one."""
    schedule = schedules.crontab(minute=0, hour=3, app=app_in("UTC"))
    schedule.tz = "Europe/Berlin"

    due = due_at(schedule, datetime(2026, 7, 1, tzinfo=UTC))

    assert due == datetime(2026, 7, 1, 1, 0, tzinfo=UTC)


def test_a_schedule_that_does_not_move_on_is_an_error():
    """An interval of 0 has no next occurrence; the entry is set aside instead of looping."""
    with pytest.raises(ValueError, match="does not move on"):
        due_at(schedules.schedule(0, app=app_in("UTC")), START)


class Once(schedules.BaseSchedule):
    """Fires once, as django-celery-beat's clocked schedule does."""

    def __init__(self, at, **kwargs):
        super().__init__(**kwargs)
        self.at = at

    def remaining_estimate(self, last_run_at):
        return self.at - self.now()


def test_a_schedule_of_one_occurrence_fires_it_and_ends():
    """To look for the one after must not lose the one that is due."""
    once = Once(START, app=app_in("UTC"))

    first = due_at(once, START - timedelta(days=1))

    assert first == START
    assert missed(once, first, START + timedelta(seconds=1), 2).newest == (START,)
    with pytest.raises(Ended):
        due_at(once, START)


class Thrice(schedules.BaseSchedule):
    """Fires three times, a minute apart, and then says None, as redbeat's rrule does."""

    def remaining_estimate(self, last_run_at):
        dates = (START + timedelta(minutes=n) for n in range(3))
        return next((each - self.now() for each in dates if each > last_run_at), None)


class ThriceIsDue(Thrice):
    """The same, of which Celery knows ``is_due`` alone."""

    def is_due(self, last_run_at):
        left = Thrice.remaining_estimate(self, last_run_at)
        if left is None:
            return schedules.schedstate(False, None)
        return schedules.schedstate(left <= timedelta(0), max(0.0, left.total_seconds()))

    remaining_estimate = schedules.BaseSchedule.remaining_estimate


@pytest.mark.parametrize("kind", [Thrice, ThriceIsDue])
def test_a_schedule_that_ends_fires_its_last_occurrence(kind):
    """That there is none after it is no error: the one that is due would be lost by it."""
    schedule = kind(app=app_in("UTC"))
    last = START + timedelta(minutes=2)

    assert follow(schedule, START - timedelta(days=1), last - timedelta(seconds=1))[-1] < last
    assert due_at(schedule, START + timedelta(minutes=1)) == last
    assert missed(schedule, last, last + timedelta(seconds=1), 2).newest == (last,)
    with pytest.raises(Ended, match="has none after"):
        due_at(schedule, last)


class Series(schedules.BaseSchedule):
    """Fires each minute until an instant, and then says None."""

    def __init__(self, until, **kwargs):
        super().__init__(**kwargs)
        self.until = until
        self.asked = []

    def remaining_estimate(self, last_run_at):
        self.asked.append(last_run_at)
        due = START + ((last_run_at - START) // timedelta(minutes=1) + 1) * timedelta(minutes=1)
        return due - self.now() if due <= self.until else None


@pytest.mark.parametrize("most", [1, 2, 100])
@pytest.mark.parametrize("lasted", [timedelta(hours=9), timedelta(days=300)])
@pytest.mark.parametrize("ago", [timedelta(seconds=30), timedelta(hours=2), timedelta(days=900)])
def test_the_last_of_a_schedule_that_ended_while_nobody_looked_are_found(ago, lasted, most):
    """However long it was, and however long ago: they would neither be fired nor recorded."""
    last = START + lasted
    series = Series(last, app=app_in("UTC"))

    found = missed(series, START, last + ago, most)

    assert found.newest == tuple(last - timedelta(minutes=n) for n in reversed(range(most)))
    assert len(series.asked) < 1500, "and not by asking for each of them"


def test_the_last_of_a_season_are_found_long_after_it():
    """A look that walks through all of a January keeps the loop away for seconds."""
    asked = []

    class Counted(schedules.crontab):
        def remaining_estimate(self, last_run_at):
            asked.append(last_run_at)
            return super().remaining_estimate(last_run_at)

    season = Counted(month_of_year=1, app=app_in("UTC"))
    first = datetime(2025, 1, 1, tzinfo=timezone.utc)

    found = missed(season, first, first + timedelta(days=350), 2)

    last = datetime(2025, 1, 31, 23, 59, tzinfo=timezone.utc)
    assert found.newest == (last - timedelta(minutes=1), last)
    assert len(asked) < 150


class Spent:
    """Is never due again, and asks the system for the time."""

    __slots__ = ()

    def is_due(self, last_run_at):
        return (False, None)


def test_a_schedule_that_goes_by_another_clock_may_end_as_well():
    """It is asked as it is, and says None as Celery lets it."""
    with pytest.raises(Ended):
        due_at(Spent(), START)


class OwnClock:
    """Asks the system for the time, has one method, and keeps no attributes."""

    __slots__ = ("seconds",)

    def __init__(self, seconds):
        self.seconds = seconds

    def is_due(self, last_run_at):
        left = self.seconds - (datetime.now(UTC) - last_run_at).total_seconds()
        return (left <= 0, left if left > 0 else self.seconds)


class Flag:
    """Is due for as long as something is so."""

    up = True

    def is_due(self, last_run_at):
        return (self.up, 5.0)


class SetClock(schedules.schedule):
    """Has a clock that is not to be set."""

    @property
    def now(self):
        return lambda: datetime.now(UTC)


class Mapped(dict):
    """Is of a kind that has no copy without its own constructor."""

    is_due = OwnClock.is_due
    seconds = 60


@pytest.mark.parametrize(
    "schedule",
    [OwnClock(60), Flag(), SetClock(60, app=app_in("UTC")), Mapped()],
    ids=["own clock", "flag", "clock that cannot be set", "no copy"],
)
def test_a_schedule_that_goes_by_another_clock_is_due_when_it_says_so(schedule):
    """Stock beat asks for is_due() alone, so anything that answers is a schedule."""
    before = datetime.now(UTC)

    due = due_at(schedule, before - timedelta(hours=1))

    assert before <= due <= datetime.now(UTC)
    assert missed(schedule, due, datetime.now(UTC), 2).newest == (due,)
    assert due_at(schedule, due) - due >= timedelta(seconds=5), "not over and over"


def test_a_schedule_that_goes_by_another_clock_is_not_due_before_it_says_so():
    """What it says counts from now, however long ago the run before was."""
    before = datetime.now(UTC)

    due = due_at(OwnClock(3600), before - timedelta(minutes=40))

    assert due >= before + timedelta(minutes=19)


def test_a_crontab_whose_clock_has_a_zone_is_read_as_celery_reads_it():
    """Which zone that is depends on the version of Celery."""
    zone = ZoneInfo("America/New_York")
    schedule = schedules.crontab(
        minute=30, hour=7, nowfun=lambda: datetime.now(zone), app=app_in("UTC")
    )
    last = schedule.nowfun()  # As an entry begins, and goes on.

    celerys = datetime.now(UTC) + schedule.remaining_estimate(last)

    assert abs(due_at(schedule, last) - celerys) < timedelta(seconds=5)


def test_asking_leaves_the_schedule_alone():
    """The frozen clock is a copy's: the user's object may be shared with other code."""
    app = app_in("UTC")
    schedule = schedules.crontab(minute=5, app=app)
    before = dict(vars(schedule))

    due_at(schedule, START)

    assert {key: value for key, value in vars(schedule).items() if key != "tz"} == {
        key: value for key, value in before.items() if key != "tz"
    }


def test_one_occurrence_is_due_in_normal_life():
    """The common case: a list of one, counted."""
    schedule = schedules.schedule(60, app=app_in("UTC"))
    first = due_at(schedule, START)

    found = missed(schedule, first, first + timedelta(seconds=1), 2)

    assert (found.first, found.newest, found.count) == (first, (first,), 1)


def test_missed_intervals_are_counted_without_being_walked():
    """Ten years of seconds must not take ten years of steps."""
    schedule = schedules.schedule(1, app=app_in("UTC"))
    first = due_at(schedule, START)
    now = first + timedelta(days=3650, seconds=0.5)

    found = missed(schedule, first, now, 3)

    assert found.count == 3650 * 86400 + 1
    assert found.newest == tuple(now - timedelta(seconds=each) for each in (2.5, 1.5, 0.5))


@pytest.mark.parametrize("kind", ["crontab", "relative", "solar", "subclass"])
@pytest.mark.parametrize("most", [1, 2, 100])
def test_looking_back_finds_what_walking_finds(kind, most):
    """After a long outage only the newest are looked for; they must be the right ones."""
    schedule = KINDS[kind](app_in("Europe/Berlin"))
    first = due_at(schedule, START)
    now = START + timedelta(days=40, minutes=3)

    found = missed(schedule, first, now, most)

    assert found.first == first
    assert found.newest == tuple(follow(schedule, START, now)[-most:])


@pytest.mark.parametrize("seconds", [7.25, 150, 9000])
def test_looking_back_keeps_the_phase_of_a_rounded_interval(seconds):
    """Celery rounds to whole seconds, minutes, hours: every other one, from where it began."""
    schedule = schedules.schedule(seconds, relative=True, app=app_in("UTC"))
    first = due_at(schedule, START)
    now = START + timedelta(seconds=seconds) * 2500

    assert missed(schedule, first, now, 3).newest == tuple(follow(schedule, START, now)[-3:])


class Counted(schedules.schedule):
    """Counts how many times it is asked."""

    asked = 0

    def remaining_estimate(self, last_run_at):
        type(self).asked += 1
        return super().remaining_estimate(last_run_at)


@pytest.mark.parametrize("relative", [True, False])
def test_one_entry_takes_a_bounded_time_after_any_outage(relative):
    """A step is about a twentieth of a millisecond, and hundreds of entries may be as late."""
    schedule = Counted(10, relative=relative, app=app_in("Europe/Berlin"))
    Counted.asked = 0

    missed(schedule, due_at(schedule, START), START + timedelta(days=365), 101)

    assert 0 < Counted.asked < 1000


def test_what_was_not_walked_is_not_counted():
    """A count that is not known must not be made up."""
    schedule = schedules.crontab(app=app_in("UTC"))

    assert missed(schedule, due_at(schedule, START), START + timedelta(days=400), 1).count is None
