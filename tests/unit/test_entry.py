"""What an entry may ask for in ``beat_schedule``."""

import time
from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import crontab, schedule

from celery_lease.entry import PLAIN, LeasedEntry
from celery_lease.errors import ConfigurationError
from celery_lease.occurrence import MisfirePolicy
from celery_lease.settings import Settings


@pytest.fixture
def app():
    """An app that no other test sees."""
    return Celery("entries", set_as_current=False)


def entry(app, **keys):
    """Return an entry as the scheduler makes it."""
    return LeasedEntry(name="nightly", task="t", schedule=60.0, app=app, **keys)


class Flag:
    """A schedule of somebody's own."""

    def is_due(self, last_run_at):
        return (True, 5.0)


def test_an_entry_that_asks_for_nothing_shares_one_answer(app):
    """A hundred thousand entries need not carry a hundred thousand of them."""
    assert entry(app).wishes is PLAIN


def test_wishes_are_read_and_the_settings_fill_in_the_rest(app):
    """An entry knows better than the settings, where it says so."""
    wishes = entry(app, misfire="all", retry_lost_after=timedelta(minutes=1)).wishes

    misfire = wishes.on_misfire(Settings(grace=30.0, catch_up_limit=7))

    assert (misfire.policy, misfire.grace, misfire.limit) == (MisfirePolicy.ALL, 30.0, 7)
    assert wishes.retry_lost_after == 60.0


def test_a_grace_of_its_own_wins(app):
    """Zero is a grace too: exactly on time, or not at all."""
    assert entry(app, grace=0).wishes.on_misfire(Settings(grace=30.0)).grace == 0.0


def test_to_skip_what_is_late_allows_for_a_takeover(app):
    """Without a grace, "late" means later than a failover makes it."""
    settings = Settings(ttl=40.0, retry_interval=5.0)

    assert entry(app, misfire="skip").wishes.on_misfire(settings).grace == 45.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("misfire", "sometimes"),
        ("grace", "an hour"),
        ("grace", -1),
        ("overlap", "no"),
        ("fenced", 1),
        ("overlap_timeout", None.__class__),
        ("retry_lost_after", True),
    ],
)
def test_a_wish_that_cannot_be_names_entry_and_key(app, key, value):
    """Among thousands of entries, "misfire is wrong" is no help."""
    with pytest.raises(ConfigurationError) as told:
        entry(app, **{key: value})

    assert f"beat_schedule['nightly']['{key}']" in str(told.value)


@pytest.mark.parametrize(
    ("key", "nearest"), [("missfire", "misfire"), ("last_run", "last_run_at")]
)
def test_a_key_that_nothing_would_read_names_entry_and_the_nearest_one(app, key, nearest):
    """It is a typing error, or another package's key: either way it would not do anything."""
    with pytest.raises(ConfigurationError) as told:
        entry(app, **{key: "all"})

    words = (
        f"beat_schedule['nightly']['{key}'] is not a key of an entry; did you mean '{nearest}'?"
    )
    assert words in str(told.value)


@pytest.mark.parametrize("wrong", ["*/5 * * * *", None, crontab, ["a list"]])
def test_a_schedule_that_is_none_names_the_entry(app, wrong):
    """Some of them Celery takes, until the entry is due."""
    with pytest.raises(ConfigurationError) as told:
        LeasedEntry(name="nightly", task="t", schedule=wrong, app=app)

    assert f"beat_schedule['nightly']['schedule'] = {wrong!r} is not a schedule" in str(told.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"schedule": 0.5, "relative": True},
        {"schedule": timedelta(milliseconds=500), "relative": True},
        {"schedule": schedule(0.5, relative=True)},
    ],
)
def test_a_relative_interval_below_a_second_is_refused(app, wrong):
    """Celery rounds it down to the second in which it began, so it would never be due."""
    with pytest.raises(ConfigurationError, match="give 1 second or more") as told:
        LeasedEntry(name="nightly", task="t", app=app, **wrong)

    assert f"beat_schedule['nightly']['schedule'] = {wrong['schedule']!r}" in str(told.value)
    LeasedEntry(name="nightly", task="t", app=app, schedule=0.5)
    LeasedEntry(name="nightly", task="t", app=app, schedule=1, relative=True)


@pytest.mark.parametrize("right", [60, 0.5, timedelta(days=1), crontab(), Flag()])
def test_whatever_celery_takes_for_a_schedule_is_taken(app, right):
    """It asks no more of one than whether it is due."""
    assert LeasedEntry(name="nightly", task="t", schedule=right, app=app).name == "nightly"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("x" * 256, "longer than 255"),
        ("nightly ", "ends with white space"),
        ("night\0ly", "no database keeps"),
        ("night\ud800ly", "no database keeps"),
        (7, "not a string"),
        ("t.a(<celery.beat.BeatLazyFunc object at 0x7fac85f6e2d0>)", "in each process.*name="),
    ],
)
def test_a_name_that_would_not_be_known_again_is_refused(app, name, why):
    """Two names that agree in what is stored would be one entry, and one would never run.

    One that is another in each process begins anew at each takeover.
    """
    with pytest.raises(ConfigurationError, match=why) as told:
        LeasedEntry(name=name, task="t", schedule=60.0, app=app)

    assert len(str(told.value)) < 250


def test_an_update_takes_the_wishes_too_and_is_counted(app):
    """Celery merges a changed configuration into the entries that are there."""
    old, new = entry(app), entry(app, overlap=False)
    before = LeasedEntry.updates

    old.update(new)

    assert old.wishes.overlap is False
    assert LeasedEntry.updates == before + 1


def test_a_stock_entry_can_be_taken_over(app):
    """Code that makes plain entries goes on working."""
    old = entry(app, overlap=False)

    old.update(ScheduleEntry(name="nightly", task="t", schedule=60.0, app=app))

    assert old.wishes is PLAIN


def test_the_next_instance_keeps_the_wishes(app):
    """Celery copies entries by their attributes."""
    old = entry(app, overlap=False)

    assert next(old).wishes.overlap is False


def test_an_entry_begins_by_its_schedules_clock_if_it_has_one(app):
    """Tests and replays give a schedule a clock of its own."""
    noon = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
    schedule = entry(app).schedule
    schedule.nowfun = lambda: noon

    assert LeasedEntry(name="e", task="t", schedule=schedule, app=app).last_run_at == noon


def naive(hours):
    """Return a clock without a zone that is so many hours ahead of UTC."""
    return lambda: (datetime.now(timezone.utc) + timedelta(hours=hours)).replace(tzinfo=None)


@pytest.mark.parametrize("hours", [-5, 5.5])
@pytest.mark.parametrize("kind", [lambda **clock: schedule(60, **clock), crontab])
def test_a_clock_that_tells_the_time_on_the_wall_is_refused(app, hours, kind):
    """Read as UTC, nine in the morning is another hour on every host, and none may be right."""
    with pytest.raises(ConfigurationError, match=r"\['nightly'\].*nowfun.*a clock that is aware"):
        LeasedEntry(name="nightly", task="t", schedule=kind(nowfun=naive(hours)), app=app)


def test_a_local_clock_is_refused_even_while_it_agrees_with_utc(app, monkeypatch):
    """In London it does so for one half of the year."""
    monkeypatch.setenv("TZ", "Europe/London")
    time.tzset()
    try:
        with pytest.raises(ConfigurationError, match="nowfun"):
            LeasedEntry(name="e", task="t", schedule=crontab(nowfun=datetime.now), app=app)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_clock_of_utc_needs_no_zone(app):
    """``datetime.utcnow`` was Celery's own recipe for years, and Celery reads it rightly."""
    before = datetime.now(timezone.utc).replace(tzinfo=None)

    began = LeasedEntry(name="e", task="t", schedule=crontab(nowfun=naive(0)), app=app)

    assert before <= began.last_run_at <= before + timedelta(minutes=1)
