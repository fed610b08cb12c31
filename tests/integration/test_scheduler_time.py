"""The leased scheduler and time: what was missed, what came and went, what is wrong."""

import itertools
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
import sqlalchemy as sa
from celery import schedules
from celery.beat import ScheduleEntry

from celery_lease import plan, scheduler
from celery_lease.stores.schema import entry_table, run_table
from tests.integration.beats import START, Beat, Cluster, no_broker


@pytest.fixture
def cluster(sqlite_url):
    """Beats over SQLite."""
    cluster = Cluster(sqlite_url)
    yield cluster
    cluster.close()


# --- what was missed ----------------------------------------------------------------------------

HOURS_LATE = [
    # policy, grace, what is sent (minutes after the start), what is skipped (first, count)
    ("latest", None, [180], [(60, 2)]),
    ("latest", 1800, [180], [(60, 2)]),
    ("latest", 60, [], [(60, 3)]),
    ("all", None, [60, 120, 180], []),
    ("all", 4500, [120, 180], [(60, 1)]),
    ("skip", None, [], [(60, 3)]),
    ("skip", 1800, [180], [(60, 2)]),
]


@pytest.mark.parametrize(("policy", "grace", "sent", "skipped"), HOURS_LATE)
@pytest.mark.parametrize("per_entry", [True, False])
def test_three_missed_hours_under_each_policy(cluster, policy, grace, sent, skipped, per_entry):
    """A beat that was away from before the first hour to ten minutes past the third."""
    wishes = {"misfire": policy} | ({"grace": grace} if grace is not None else {})
    entry = {"schedule": 3600.0, **(wishes if per_entry else {})}
    conf = {} if per_entry else {f"beat_lease_{key}": value for key, value in wishes.items()}

    beat = cluster.beat({"entry": entry}, **conf).at(hours=3, minutes=10).go()

    assert [due for _, due, _ in cluster.sent()] == sent
    runs = cluster.runs("due", "state", "skipped")
    assert [(due, count) for due, state, count in runs if state == "skipped"] == skipped
    beat.at(hours=4, seconds=1).go()
    assert [due for _, due, _ in cluster.sent()] == [240], "and then it is on time again"


def test_every_missed_occurrence_is_accounted_for(cluster):
    """Sent, or in a series that says how many and until when."""
    cluster.beat({"entry": {"schedule": 3600.0}}).at(hours=3, minutes=10).go()

    (skipped,) = [row for row in cluster.rows(run_table) if row.state == "skipped"]
    assert skipped.skipped == 2
    assert skipped.skipped_until == START + timedelta(hours=2)
    assert skipped.reason == "a newer one was due"


def test_catching_up_is_bounded(cluster):
    """``all`` after a long outage sends the newest of them, and says what it left out."""
    entry = {"schedule": 60.0, "misfire": "all"}
    cluster.beat({"entry": entry}, beat_lease_catch_up_limit=3).at(minutes=10).go()

    assert [due for _, due, _ in cluster.sent()] == [8, 9, 10]
    assert cluster.runs("due", "skipped", "reason")[0] == (1, 7, "more than 3 missed")


def test_a_catch_up_larger_than_a_batch_is_sent_in_order_over_several_turns(cluster):
    """The loop comes back in between; nothing is left out or repeated."""
    entry = {"schedule": 60.0, "misfire": "all"}
    beat = cluster.beat({"entry": entry}, beat_lease_catch_up_limit=1200)

    beat.at(minutes=700).go()

    assert [due for _, due, _ in cluster.sent()] == list(range(1, 701))


@pytest.mark.parametrize(("each", "claims"), [(0.15, [2, 2, 1]), (30, [1] * 5)])
def test_what_takes_long_to_decide_is_sent_over_several_turns(cluster, monkeypatch, each, claims):
    """After an outage each entry has much to look through; the first ones need not wait."""
    instants = itertools.count(0, each)
    monkeypatch.setattr(scheduler, "PLANNING", 0.2)
    monkeypatch.setattr(scheduler, "monotonic", lambda: next(instants))
    beat = cluster.beat({name: {"schedule": 60.0} for name in "abcde"}).go()
    claim, sizes = beat.dispatcher.ledger.claim, []

    def note(term, runs, **kwargs):
        sizes.append(len(runs))
        return claim(term, runs, **kwargs)

    beat.dispatcher.ledger.claim = note
    beat.at(seconds=61)

    waits = [beat.tick() for _ in claims]
    assert sizes == claims
    assert sorted(entry for entry, _, _ in cluster.sent()) == list("abcde")
    assert waits[:-1] == [0.0] * (len(claims) - 1), "no pause while something is due"
    assert waits[-1] > 0


def test_a_database_that_answers_slowly_does_not_make_the_batches_small(cluster, monkeypatch):
    """What the limit bounds is deciding; asking once for all is what a batch is for."""
    now = [0.0]
    monkeypatch.setattr(scheduler, "PLANNING", 0.2)
    monkeypatch.setattr(scheduler, "monotonic", lambda: now[0])
    alone = {"schedule": 60.0, "fenced": True, "overlap": False}
    beat = cluster.beat({name: dict(alone) for name in "abcde"}).go()
    running = beat.dispatcher.ledger.running

    def slow(*args):
        now[0] += 1.0
        return running(*args)

    beat.dispatcher.ledger.running = slow
    beat.at(seconds=61).tick()

    assert len(cluster.sent()) == 5


def test_a_takeover_alone_skips_nothing(cluster):
    """``skip`` is about outages: ttl and retry interval are the price of a failover."""
    entry = {"schedule": 60.0, "misfire": "skip"}

    cluster.beat({"entry": entry}).at(seconds=60 + 59).go()

    assert [due for _, due, _ in cluster.sent()] == [1]


def test_celerys_own_deadline_is_a_recorded_skip(cluster):
    """``beat_cron_starting_deadline`` is honoured, and can be looked up afterwards."""
    hourly = {"entry": {"schedule": schedules.crontab(minute=0)}}
    beat = cluster.beat(hourly, beat_cron_starting_deadline=60)

    beat.at(hours=1, minutes=10).go()

    assert cluster.messages() == []
    assert cluster.runs("due", "state", "reason") == [
        (60, "skipped", "beat_cron_starting_deadline")
    ]


@pytest.mark.parametrize("who", ["the same leader", "the next leader"])
def test_a_deadline_is_one_for_what_was_claimed_and_not_sent_as_well(cluster, who):
    """Celery's word for it is "starting": the claim starts nothing yet."""
    hourly = {"entry": {"schedule": schedules.crontab(minute=0)}}
    beat = cluster.beat(hourly, beat_cron_starting_deadline=60)
    beat.before_flush = no_broker
    beat.at(hours=1, seconds=1).go()
    if who == "the next leader":
        cluster.depose()
        beat = cluster.beat(hourly, beat_cron_starting_deadline=60)
    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    beat.at(hours=1, minutes=10).go()

    assert cluster.messages() == []
    assert cluster.runs("due", "state", "reason") == [
        (60, "skipped", "beat_cron_starting_deadline")
    ]


class Renamed(schedules.crontab):
    """A user's crontab that is Celery's in all that matters."""


@pytest.mark.parametrize("kind", [schedules.crontab, Renamed])
def test_a_deadline_is_not_asked_of_celery(cluster, monkeypatch, kind):
    """Celery 5.5 goes from the last run to now in steps of the lateness.

    For a daily crontab that is found after some milliseconds they are millions.
    """
    monkeypatch.setattr(schedules.crontab, "is_due", lambda self, last_run_at: 1 / 0)
    entry = {"schedule": kind(minute=0)}

    cluster.beat({"entry": entry}, beat_cron_starting_deadline=60).at(hours=1, seconds=1).go()

    assert [due for _, due, _ in cluster.sent()] == [60]


def test_a_deadline_does_not_drop_the_run_of_the_day_on_which_its_time_does_not_exist(cluster):
    """Half past two is half past three then, and Celery looks for a half past two."""
    before = datetime(2025, 3, 29, 1, 30, tzinfo=timezone.utc)
    nightly = schedules.crontab(hour=2, minute=30)
    cluster.conf["timezone"] = "Europe/Berlin"

    class InSpring(Beat):
        clock = before + timedelta(days=1, seconds=1)

    beat = cluster.beat(
        {"entry": {"schedule": nightly, "last_run_at": before}},
        cls=InSpring,
        beat_cron_starting_deadline=600,
    )
    nightly.nowfun = lambda: beat.now().astimezone(ZoneInfo("Europe/Berlin"))
    beat.go()

    assert [row.due_at for row in cluster.rows(run_table)] == [before + timedelta(days=1)]
    assert cluster.runs("state") == [("published",)]


class Gate:
    """What a user's schedule has that says "not now" for a while."""

    open = False

    def is_due(self, last_run_at):
        due = super().is_due(last_run_at)
        return due if self.open else schedules.schedstate(False, 10.0)


class Gated(Gate, schedules.schedule):
    """An interval with a gate."""


class GatedCrontab(Gate, schedules.crontab):
    """A crontab with a gate."""


class Postponed(schedules.crontab):
    """A crontab with a gate in the other method that Celery's answer comes from."""

    open = False

    def remaining_estimate(self, last_run_at):
        left = super().remaining_estimate(last_run_at)
        return left if self.open or left > timedelta(0) else timedelta(seconds=10)


@pytest.mark.parametrize("deadline", [None, 60])
@pytest.mark.parametrize("gate", [lambda: Gated(60.0), GatedCrontab, Postponed])
def test_a_schedule_that_says_not_now_is_asked_again(cluster, gate, deadline):
    """As stock beat does: the occurrence is not lost, it waits, for as long as it is in time."""
    gate = gate()
    beat = cluster.beat({"entry": {"schedule": gate}}, beat_cron_starting_deadline=deadline)
    gate.nowfun = beat.now
    beat.at(seconds=61).go()
    assert cluster.runs("id") == []

    gate.open = True
    beat.at(seconds=65).go()

    assert [due for _, due, _ in cluster.sent()] == [1]


class Maintained(Beat):
    """A user's scheduler that sends nothing while it is closed."""

    closed = True

    def is_due(self, entry):
        return schedules.schedstate(False, 10.0) if self.closed else super().is_due(entry)


@pytest.mark.parametrize("deadline", [None, 60])
@pytest.mark.parametrize("kind", [schedules.crontab, lambda: schedules.schedule(60.0)])
def test_a_schedulers_own_is_due_is_asked_about_every_entry(cluster, kind, deadline):
    """It is how one holds beat back without stopping it; nothing is lost by that either."""
    schedule = kind()
    beat = cluster.beat(
        {"entry": {"schedule": schedule}}, cls=Maintained, beat_cron_starting_deadline=deadline
    )
    schedule.nowfun = beat.now
    beat.at(seconds=61).go()
    assert cluster.runs("id") == []

    beat.closed = False
    beat.at(seconds=65).go()

    assert [due for _, due, _ in cluster.sent()] == [1]


def test_a_deadline_that_passes_while_a_scheduler_says_no_is_a_recorded_skip(cluster):
    """To be asked again for ever would record nothing, and hold up what comes after."""
    hourly = schedules.crontab(minute=0)
    beat = cluster.beat(
        {"entry": {"schedule": hourly}}, cls=Maintained, beat_cron_starting_deadline=60
    )
    hourly.nowfun = beat.now

    beat.at(hours=1, minutes=10).go()

    assert cluster.runs("due", "reason") == [(60, "beat_cron_starting_deadline")]


@pytest.mark.parametrize("asked", [False, True])
def test_celerys_own_deadline_holds_for_each_occurrence(cluster, asked):
    """``all`` fires what is in time for it, and not what was missed before that."""
    hourly = schedules.crontab(minute=0)
    beat = cluster.beat(
        {"entry": {"schedule": hourly, "misfire": "all"}},
        cls=type("Open", (Maintained,), {"closed": False}) if asked else Beat,
        beat_cron_starting_deadline=5400,
    )
    hourly.nowfun = beat.now

    beat.at(hours=3, minutes=10).go()

    assert [due for _, due, _ in cluster.sent()] == [120, 180]
    assert cluster.runs("due", "skipped", "reason")[0] == (60, 1, "beat_cron_starting_deadline")


def test_an_entry_class_that_knows_no_wishes_is_taken(cluster):
    """Celery lets a scheduler have any class of entries; such an entry asks for nothing."""

    class Own(Beat):
        Entry = ScheduleEntry

    beat = cluster.beat(cls=Own, beat_lease_misfire="all").at(seconds=121).go()

    assert [due for _, due, _ in cluster.sent()] == [1, 2]
    assert beat.lost_after() == {}


def test_an_entry_that_must_not_overlap_waits_for_the_run_before(cluster):
    """Skipped with that reason while the one before is not settled."""
    entry = {"schedule": 60.0, "fenced": True, "overlap": False}
    beat = cluster.beat({"entry": entry}).at(seconds=61).go()
    ((run,),) = cluster.runs("id")

    beat.at(seconds=121).go()
    assert cluster.runs("due", "state") == [(1, "published"), (2, "skipped")]

    cluster.commit(run)
    beat.at(seconds=181).go()

    assert [due for _, due, _ in cluster.sent()] == [1, 3]


#: Each of them is about a period of its own, and they must come one after the other.
EACH = {"schedule": 60.0, "fenced": True, "overlap": False, "misfire": "all"}


def settle(cluster):
    """Settle what was sent."""
    for run, state in cluster.runs("id", "state"):
        with suppress(sa.exc.IntegrityError):  # it is settled
            if state == "published":
                cluster.commit(run)


def test_catching_up_does_not_overlap_and_leaves_none_out(cluster):
    """With ``all`` each of them handles a period: the next one waits for the one before."""
    beat = cluster.beat({"entry": EACH}).at(minutes=3, seconds=1).go()
    beat.at(minutes=3, seconds=30).go()
    assert [due for _, due, _ in cluster.sent()] == [1]

    for seconds in (60, 90):
        settle(cluster)
        beat.at(minutes=3, seconds=seconds).go()

    assert [due for _, due, _ in cluster.sent()] == [2, 3]
    assert {state for (state,) in cluster.runs("state")} == {"published"}


def test_what_waits_for_the_one_before_is_bounded_like_any_catch_up(cluster):
    """A task that is slower than its schedule would never be done with it."""
    beat = cluster.beat({"entry": EACH}, beat_lease_catch_up_limit=3).at(minutes=2).go()
    beat.at(minutes=10).go()
    assert cluster.runs("due") == [(1,)], "nothing is decided while it waits"

    settle(cluster)
    beat.at(minutes=11).go()

    assert [due for _, due, _ in cluster.sent()] == [1, 9]
    assert cluster.runs("due", "skipped", "reason")[1] == (2, 7, "more than 3 missed")


def claimed_for(cluster, seconds):
    """Have the newest run that was sent be claimed for so long by the database's clock."""
    claimed = datetime.now(timezone.utc) - timedelta(seconds=seconds)
    sent = sa.select(sa.func.max(run_table.c.due_at)).where(run_table.c.state == "published")
    newest = run_table.c.due_at == sent.scalar_subquery()
    cluster.write(sa.update(run_table).where(newest).values(claimed_at=claimed))


def test_what_waits_for_a_lost_message_waits_for_so_long(cluster):
    """``overlap_timeout`` ends it here too."""
    entry = {**EACH, "overlap_timeout": 90}
    beat = cluster.beat({"entry": entry}).at(seconds=61).go()

    claimed_for(cluster, 80)
    beat.at(seconds=121).go().at(seconds=150).go()
    assert [due for _, due, _ in cluster.sent()] == [1]
    claimed_for(cluster, 91)
    beat.at(seconds=160).go()

    assert [due for _, due, _ in cluster.sent()] == [2]


@pytest.mark.parametrize(("waits", "pause"), [(1, 1.0), (60, 6.0), (1200, 30.0)])
def test_what_waits_is_looked_at_ever_less_often(cluster, monkeypatch, waits, pause):
    """And nothing is worked out for it: thousands may wait for tasks that take an hour."""
    beat = cluster.beat({"entry": EACH}).at(seconds=61).go()
    claimed_for(cluster, waits)
    monkeypatch.setattr(plan, "missed", lambda *args: 1 / 0)

    beat.at(minutes=30).go()

    assert (beat.agenda.next_due - beat.now()).total_seconds() == pytest.approx(pause, rel=0.2)


def test_a_lost_message_does_not_silence_an_entry_for_ever(cluster):
    """After ``overlap_timeout`` the run before does not count any more."""
    entry = {"schedule": 60.0, "fenced": True, "overlap": False, "overlap_timeout": 90}
    beat = cluster.beat({"entry": entry}).at(seconds=61).go()

    claimed_for(cluster, 80)
    beat.at(seconds=121).go()
    claimed_for(cluster, 91)
    beat.at(seconds=181).go()

    assert [due for _, due, _ in cluster.sent()] == [1, 3]


def test_a_lost_message_does_not_let_later_runs_overlap(cluster):
    """It does not count any more; the run that was sent after it does."""
    entry = {"schedule": 60.0, "fenced": True, "overlap": False, "overlap_timeout": 90}
    beat = cluster.beat({"entry": entry}).at(minutes=1).go()
    claimed_for(cluster, 91)
    beat.at(minutes=2).go()

    beat.at(minutes=3).go()

    assert [due for _, due, _ in cluster.sent()] == [1, 2]


def test_a_clock_that_is_ahead_of_the_databases_does_not_let_runs_overlap(cluster):
    """Since when the run before is not settled, the database says; so it says for how long."""
    entry = {"schedule": 60.0, "fenced": True, "overlap": False}
    beat = cluster.beat({"entry": entry}).at(hours=100, minutes=1).go()

    beat.at(hours=100, minutes=2).go()

    assert len(cluster.sent()) == 1


def test_a_clock_that_is_ahead_of_the_databases_finds_no_run_lost(cluster):
    """An hour would make each of them an hour older, and send it again at once."""
    entry = {"schedule": 60.0, "fenced": True, "retry_lost_after": 1800}
    beat = cluster.beat({"entry": entry}).at(seconds=61).go()
    published = datetime.now(timezone.utc) - timedelta(seconds=1900)
    beat.schedule["entry"].options = {"countdown": 600}
    cluster.write(sa.update(run_table).values(published_at=published))
    beat.turn = lambda term: 1.0

    beat._renewals -= 1
    beat.at(hours=100).go()

    assert len(cluster.messages()) == 1


# --- what came and went -------------------------------------------------------------------------


def test_a_long_interval_goes_on_across_restarts(cluster):
    """Stock beat begins again at each deployment, and a month never passes."""
    month = {"entry": {"schedule": timedelta(days=30)}}
    for day in range(1, 31, 7):
        beat = cluster.beat(month, cls=forgetful())
        beat.at(days=day).go()
        beat.close()
    assert cluster.messages() == []

    cluster.beat(month, cls=forgetful()).at(days=31, minutes=1).go()

    assert [due for _, due, _ in cluster.sent()] == [31 * 24 * 60]


def forgetful():
    """Return a beat whose entries begin with the process, as in real life."""

    class Forgetful(Beat):
        def merge_inplace(self, entries):
            super().merge_inplace(
                {
                    name: {k: v for k, v in e.items() if k != "last_run_at"}
                    for name, e in entries.items()
                }
            )

    return Forgetful


def test_a_new_entry_starts_from_now(cluster):
    """It has not been missed by anybody."""
    cluster.beat(cls=forgetful()).at(minutes=90).go()

    assert cluster.runs("id") == []


def test_an_entry_that_comes_back_starts_from_now(cluster):
    """Its old last run is from another time."""
    both = {"entry": {"schedule": 60.0}, "other": {"schedule": 3600.0}}
    beat = cluster.beat(both, cls=forgetful()).at(minutes=1).go()
    entry = beat.schedule.pop("entry")
    beat.at(minutes=5).go()
    assert [row.entry for row in cluster.rows(entry_table)] == ["other"]

    entry.last_run_at = datetime.now(timezone.utc) + timedelta(days=1)
    beat.schedule["entry"] = entry
    beat.at(minutes=20).go().at(minutes=20, seconds=59).go()
    assert cluster.runs("id") == []

    beat.at(minutes=21).go()
    assert [due for _, due, _ in cluster.sent()] == [21]


def test_an_entry_that_another_leader_removed_starts_from_now(cluster):
    """A deployment without it led for a while, and was rolled back."""
    both = {"entry": {"schedule": 60.0}, "other": {"schedule": 3600.0}}
    cluster.beat(both).at(minutes=1).go().close()
    cluster.messages()
    later = type("Later", (forgetful(),), {"clock": START + timedelta(seconds=90)})
    first = cluster.beat(both, cls=later).go()
    cluster.depose()
    cluster.beat({"other": both["other"]}).at(minutes=2).go().close()

    first.at(minutes=20, seconds=30).tick()
    assert not first.elector.leading, "it notices that it was deposed"
    first.go().at(minutes=21, seconds=31).go()

    assert [(due, epoch) for _, due, epoch in cluster.sent()] == [(21.5, 4)]
    assert cluster.runs("due") == [(1,), (21.5,)], "and none was missed"


def test_an_entry_added_while_leading_runs(cluster):
    """The schedule is a dict that anybody may write to."""
    beat = cluster.beat({"first": {"schedule": 3600.0}}).at(minutes=1).go()

    beat.add(name="second", task="tasks.plain", schedule=60.0, last_run_at=START)
    beat.go()

    assert [entry for entry, _, _ in cluster.sent()] == ["second"]


def test_an_entry_updated_in_place_runs_by_its_new_schedule(cluster):
    """``Entry.update`` is how Celery merges a changed configuration."""
    beat = cluster.beat({"entry": {"schedule": 3600.0}}).at(minutes=1).go()
    other = beat.Entry(
        name="entry", task="tasks.plain", schedule=schedules.schedule(60.0), app=beat.app
    )

    beat.schedule["entry"].update(other)
    beat.go()

    assert [due for _, due, _ in cluster.sent()] == [1]


def test_an_idle_turn_does_not_look_at_the_entries(cluster):
    """At a hundred thousand entries stock beat compares them all, each time."""
    beat = cluster.beat().at(seconds=1).go()
    looked = []
    beat.agenda.rebuild = looked.append

    beat.go().go()

    assert looked == []


def test_the_state_is_restored_in_the_schedules_zone(cluster):
    """A crontab's fields are read there; what other code compares with it, too."""
    nine = {"entry": {"schedule": schedules.crontab(minute=0)}}
    cluster.conf["timezone"] = "Asia/Kolkata"
    cluster.beat(nine).at(hours=1, minutes=40).go()

    second = cluster.beat(nine)
    cluster.depose()
    second.at(hours=1, minutes=41).go()

    last = second.schedule["entry"].last_run_at
    assert last == START + timedelta(minutes=90)
    assert (last.hour + last.minute / 60) % 1 == 0
    assert last.utcoffset() == timedelta(hours=5, minutes=30)


class Twice(schedules.BaseSchedule):
    """Fires twice, and then says None, as redbeat's rrule with a count does."""

    def remaining_estimate(self, last_run_at):
        dates = (START + timedelta(minutes=n) for n in (1, 2))
        return next((each - self.now() for each in dates if each > last_run_at), None)

    def is_due(self, last_run_at):
        left = self.remaining_estimate(last_run_at)
        if left is None:
            return schedules.schedstate(False, None)
        return schedules.schedstate(left <= timedelta(0), max(0.0, left.total_seconds()))


def test_a_schedule_that_ends_fires_its_last_occurrence_and_is_at_rest(cluster, caplog):
    """It is not a bad entry, about which the log would complain for ever."""
    caplog.set_level("INFO")
    series = Twice()
    beat = cluster.beat({"series": {"schedule": series}})
    series.nowfun = beat.now

    for seconds in (61, 121, 181, 3600):
        beat.at(seconds=seconds).go()

    assert [due for _, due, _ in cluster.sent()] == [1, 2]
    assert "'series' has no further occurrence" in caplog.text
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


# --- what is wrong ------------------------------------------------------------------------------


class Broken(schedules.schedule):
    """A user's schedule with a bug, for a while."""

    broken = True

    def remaining_estimate(self, last_run_at):
        if self.broken:
            raise ZeroDivisionError("a bug of the user's")
        return super().remaining_estimate(last_run_at)


def test_one_bad_entry_is_set_aside_and_tried_again(cluster, caplog):
    """The others go on, and so does this one once it can."""
    bad = Broken(60.0)
    beat = cluster.beat({"bad": {"schedule": bad}, "good": {"schedule": 60.0}})
    bad.nowfun = beat.now
    beat.at(seconds=61).go()
    assert [entry for entry, _, _ in cluster.sent()] == ["good"]
    assert "'bad' is set aside" in caplog.text

    bad.broken = False
    beat.at(seconds=61 + beat.max_interval).go()

    assert sorted(entry for entry, _, _ in cluster.sent()) == ["bad", "good"]


def test_a_bug_in_is_due_sets_only_that_entry_aside(cluster, caplog):
    """The same for the other method that a user may write."""

    class BrokenToo(schedules.schedule):
        def is_due(self, last_run_at):
            raise ZeroDivisionError("a bug of the user's")

    beat = cluster.beat({"bad": {"schedule": BrokenToo(60.0)}, "good": {"schedule": 60.0}})
    beat.at(seconds=61).go()

    assert [entry for entry, _, _ in cluster.sent()] == ["good"]
    assert "'bad' is set aside" in caplog.text


class Elsewhere(schedules.crontab):
    """A user's schedule that asks somebody for its zone, who does not always answer."""

    away = False

    @property
    def tz(self):
        if self.away:
            raise ConnectionError("the tenants' zones cannot be read")
        return timezone.utc


def test_an_entry_whose_zone_cannot_be_told_holds_up_no_other(cluster, caplog):
    """Neither a takeover nor a turn may end at it; it goes on where it was once it can."""
    where = Elsewhere()
    beat = cluster.beat({"bad": {"schedule": where}, "good": {"schedule": 60.0}})
    beat.at(seconds=61).go()
    assert len(cluster.messages()) == 2

    where.away = True
    beat._forget()  # as after any error of the lease database
    beat.at(minutes=2, seconds=1).go().at(minutes=3, seconds=1).go()
    assert cluster.sent() == [("good", 2, 1), ("good", 3, 1)]
    assert "'bad' is set aside" in caplog.text

    where.away = False
    beat.at(seconds=121 + beat.max_interval).go()
    assert sorted(cluster.sent()) == [("bad", 7, 1), ("good", 7, 1)]
    assert (2, "skipped", 5) in cluster.runs("due", "state", "skipped"), "none is forgotten"


def test_a_zone_that_goes_away_after_the_claim_holds_up_no_message(cluster, caplog):
    """What is claimed is sent, whatever becomes of the entry then."""
    where = Elsewhere()
    beat = cluster.beat({"bad": {"schedule": where}, "good": {"schedule": 60.0}}).go()
    claim = beat.dispatcher.ledger.claim

    def claim_and_lose(*args, **kwargs):
        known = claim(*args, **kwargs)
        where.away = True
        return known

    beat.dispatcher.ledger.claim = claim_and_lose
    beat.at(seconds=61).go().at(seconds=121).go()

    assert sorted(cluster.sent()) == [("bad", 1, 1), ("good", 1, 1), ("good", 2, 1)]
    assert "'bad' is set aside" in caplog.text


def test_a_last_run_to_come_does_not_silence_an_entry(cluster, caplog):
    """A clock was wrong by years and is right again."""
    cluster.beat().at(seconds=61).go()
    cluster.messages()
    cluster.write(sa.update(entry_table).values(last_run_at=START + timedelta(days=5000)))
    second = cluster.beat()
    cluster.depose()

    second.at(seconds=90).go().at(seconds=151).go()

    assert [due for _, due, _ in cluster.sent()] == [2.5]
    assert "did a clock go back?" in caplog.text


@pytest.mark.parametrize("noticed", ["by the next leader", "by the same leader"])
def test_a_last_run_to_come_does_not_silence_an_entry_that_outlasts_its_leaders(cluster, noticed):
    """Each of them would start from its own now, and a deployment a day is enough for never."""
    daily = {"entry": {"schedule": timedelta(days=1)}}
    beat = cluster.beat(daily).go()
    beat.at(days=60, seconds=1).go()
    if noticed == "by the same leader":
        beat.at(hours=1).go()
    cluster.messages()

    for hours in range(1, 42, 20):
        beat.close()
        beat = cluster.beat(daily).at(hours=hours).go()

    assert [due for _, due, _ in cluster.sent()] == [25 * 60]


def test_a_clock_that_is_stepped_back_does_not_silence_a_leader(cluster, caplog):
    """The entries would wait for it to be as late again."""
    both = {"every": {"schedule": 60.0}, "cron": {"schedule": schedules.crontab(minute="*/5")}}
    beat = cluster.beat(both).at(minutes=59).go()
    assert len(cluster.messages()) == 2

    beat.at(minutes=6).go().at(minutes=10, seconds=1).go()
    assert cluster.sent() == [("every", 10, 1), ("cron", 10, 1)]
    assert "went back by 3180 s" in caplog.text

    caplog.clear()
    beat.at(minutes=9, seconds=30).go()
    assert caplog.text == "", "half a minute is no step"


def test_the_same_occurrence_is_not_sent_twice_when_the_clock_goes_back(cluster):
    """The second claim finds the run of the first."""
    cluster.beat().at(seconds=61).go()
    cluster.messages()
    second = cluster.beat()
    cluster.write(sa.update(entry_table).values(last_run_at=START))
    cluster.depose()

    second.at(seconds=62).go()

    assert cluster.messages() == []
    assert cluster.runs("due", "state", "attempt") == [(1, "published", 1)]
