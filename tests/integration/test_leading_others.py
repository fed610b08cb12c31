"""Other schedulers under the lease: their storage stays their own, and only one writes it."""

import errno
import shelve
from contextlib import suppress
from datetime import timedelta

import pytest
import sqlalchemy as sa
from celery import schedules
from celery.beat import PersistentScheduler, ScheduleEntry, Scheduler

from celery_lease import recovery
from celery_lease.errors import StoreUnavailable
from celery_lease.leading import LeaseMixin
from celery_lease.occurrence import Run, run_id
from celery_lease.scheduler import LeasedScheduler, leased
from celery_lease.signals import occurrence_skipped
from celery_lease.stores.schema import run_table
from tests.integration.beats import START, Cluster, no_broker
from tests.services import wait_until

#: An entry that is due once.
DUE = {"entry": {"schedule": timedelta(days=1), "last_run_at": START - timedelta(hours=25)}}


@pytest.fixture
def cluster(sqlite_url):
    """Beats over SQLite."""
    cluster = Cluster(sqlite_url)
    yield cluster
    cluster.close()


class Steered:
    """A clock and a broker in the test's hands, for any leased scheduler."""

    before_flush = staticmethod(lambda runs: None)

    def flush(self, sendings):
        """Let the test step in."""
        self.before_flush([each.run for each in sendings])
        super().flush(sendings)

    def go(self, times=20):
        """Tick a few times."""
        for _ in range(times):
            self.tick()
        return self


class Stock(Steered, LeaseMixin, Scheduler):
    """Celery's own in-memory scheduler, led."""


def test_leased_makes_a_class_of_any_scheduler():
    """The one line for people who have a scheduler already."""
    cls = leased(PersistentScheduler)

    assert cls.__mro__[:2] == (cls, LeaseMixin)
    assert issubclass(cls, PersistentScheduler)
    assert cls.__name__ == "LeasedPersistentScheduler"


def test_leased_refuses_a_class_that_defines_what_it_needs_for_itself():
    """One of the two would get the other's, and fail somewhere else."""

    class Base(Scheduler):
        def now(self):
            return self.app.now()

    class Own(Base):
        _term = 30

        def tick(self):  # Celery's own names are for anybody to override.
            return super().tick()

    with pytest.raises(TypeError, match=r"Own uses '_term', 'now', which .* rename it"):
        leased(Own)


def test_a_led_scheduler_cannot_set_what_the_lease_needs_for_itself(cluster):
    """A class does not show what it sets on itself: it is refused where it does so."""

    class Own(Scheduler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.store = {}

    with pytest.raises(TypeError, match=r"LeasedOwn uses 'store', which .* rename it"):
        leased(Own)(app=cluster.app({}), lazy=True)


def test_leased_is_not_for_a_class_that_has_a_lease():
    """It would be gated twice."""
    with pytest.raises(TypeError, match="LeasedScheduler is leased already"):
        leased(LeasedScheduler)


def test_our_keys_are_refused_where_another_scheduler_makes_the_entries(cluster, caplog):
    """It would raise an error in each turn, or forget them without a word."""
    app = cluster.app({})
    app.conf.beat_schedule = {"entry": {"task": "t", "schedule": 60.0, "misfire": "all"}}

    class Entry(ScheduleEntry):
        def __init__(self, *args, misfire=None, **kwargs):
            super().__init__(*args, **kwargs)

    with pytest.raises(SystemExit):
        leased(PersistentScheduler)(app=app)
    assert "beat cannot start: beat_schedule['entry']['misfire'] is for" in caplog.text
    own = type("Own", (Scheduler,), {"Entry": Entry})
    leased(own)(app=app).close()


def test_leased_takes_a_class_with_annotations_and_a_find_of_any_kind():
    """Neither is a name that the lease needs."""

    class Own(Scheduler):
        seen: int = 1

        @staticmethod
        def find(name):
            return name

    assert leased(Own).find("entry") == "entry"
    assert isinstance(leased(Own).__dict__["find"], staticmethod)


def test_a_led_schedulers_hold_on_the_apps_own_schedule_is_left_alone(cluster):
    """What somebody adds to it in a term is not the scheduler's to forget."""

    class Own(Scheduler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.wanted, self.cached = self.app.conf.beat_schedule, {}

    beat = cluster.beat({}, cls=leased(Own))
    beat.tick()
    beat.wanted["late"], beat.cached["late"] = {"task": "t", "schedule": 60.0}, True

    beat.unload()

    assert "late" in beat.app.conf.beat_schedule
    assert beat.cached == {}


def test_a_scheduler_may_say_itself_how_an_entry_is_found(cluster):
    """Its schedule has only what is due, and what is to be sent again need not be."""

    class Own(Scheduler):
        elsewhere = None

        def find(self, name):
            return self.elsewhere

    cls = type("Led", (Steered, leased(Own)), {})
    beat = cluster.beat({"entry": {"schedule": timedelta(days=3650)}}, cls=cls).go(1)
    Own.elsewhere = beat.schedule.pop("entry")
    claim(beat, [("entry", 0)])
    beat._forget()  # as after any error of the lease database
    beat.go(3)

    assert cluster.runs("state") == [("published",)]


def test_a_standby_does_not_touch_the_others_files(cluster, tmp_path):
    """A stock scheduler that finds its file locked "repairs" it by deleting it."""
    path = tmp_path / "schedule"
    cls = leased(PersistentScheduler)
    first = cls(app=cluster.app({}), schedule_filename=str(path))
    second = cls(app=cluster.app({}), schedule_filename=str(path))
    cluster.beats += [first, second]
    assert list(tmp_path.glob("schedule*")) == []

    first.tick()
    second.tick()

    assert first.elector.leading
    assert second._store is None


class Locking:
    """Opens a file once at a time, as GNU's dbm does."""

    shelf = None

    @classmethod
    def open(cls, filename, **kwargs):
        if cls.shelf is not None and not isinstance(cls.shelf.dict, shelve._ClosedDict):
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable", filename)
        cls.shelf = shelve.DbfilenameShelf(filename, **kwargs)
        return cls.shelf


def persistent(cluster, path, **attributes):
    """Start a leased PersistentScheduler with an entry that is due in years."""
    app = cluster.app({"entry": {"schedule": timedelta(days=3650)}})
    beat = type("Led", (leased(PersistentScheduler),), attributes)(
        app=app, schedule_filename=str(path)
    )
    cluster.beats.append(beat)
    return beat


def test_a_beat_that_leads_again_finds_its_file_as_it_was(cluster, tmp_path):
    """A stock scheduler that cannot open it, since it is open, deletes it."""
    beat = persistent(cluster, tmp_path / "schedule", persistence=Locking)
    beat.tick()
    beat.schedule["entry"].last_run_at = START - timedelta(days=1)
    beat.sync()

    beat.elector.concede("a blip")
    cluster.depose()
    while beat.elector.term is None:
        beat.tick()
    beat.tick()

    assert beat.elector.term.epoch == 2
    assert beat.schedule["entry"].last_run_at == START - timedelta(days=1)


@pytest.mark.parametrize("then", ["stands by", "is stopped"])
def test_a_deposed_leader_closes_its_file_as_it_is(cluster, tmp_path, then):
    """What it knows may be old, and another beat may write there by now."""
    path = tmp_path / "schedule"
    beat = persistent(cluster, path)
    beat.tick()
    beat.schedule["entry"].total_run_count = 77
    shelf = beat._store

    beat.elector.concede("another beat leads")
    if then == "stands by":
        beat.tick()
        beat.tick()
    beat.close()

    assert isinstance(shelf.dict, shelve._ClosedDict)
    with shelve.open(str(path)) as stored:
        assert stored["entries"]["entry"].total_run_count == 0


def test_a_leader_that_is_stopped_writes_its_file(cluster, tmp_path):
    """As a stock scheduler does."""
    path = tmp_path / "schedule"
    beat = persistent(cluster, path)
    beat.tick()
    beat.schedule["entry"].total_run_count = 77

    beat.close()

    with shelve.open(str(path)) as stored:
        assert stored["entries"]["entry"].total_run_count == 77


def test_what_a_stock_tick_sends_is_claimed_stamped_and_marked(cluster):
    """The mixin sits in ``apply_async``, which every scheduler passes."""
    beat = cluster.beat({"entry": {"schedule": 1.0}}, cls=Stock).go(5)

    (message,) = cluster.messages()
    assert message.headers["stamps"]["lease_epoch"] == 1
    assert cluster.runs("id", "state") == [(message.headers["id"], "published")]
    assert beat.schedule["entry"].total_run_count == 1


def test_an_override_of_apply_async_is_called_once_for_each_send(cluster):
    """Before the lease or after it: it may write an audit row, or count."""
    calls = []

    class Audit:
        def apply_async(self, entry, producer=None, advance=True, **kwargs):
            calls.append(entry.name)
            return super().apply_async(entry, producer=producer, advance=advance, **kwargs)

    outside = type("Outside", (Audit, Stock), {})
    inside = type("Inside", (Steered, leased(type("Own", (Audit, Scheduler), {}))), {})
    for name, cls in (("outside", outside), ("inside", inside)):
        cluster.beat({name: DUE["entry"]}, cls=cls).go(5)
        cluster.depose()

    assert calls == ["outside", "inside"]
    assert len(cluster.messages()) == 2


def test_the_same_occurrence_is_not_sent_by_two_leaders(cluster):
    """The second starts from old state; the ledger has the run."""
    daily = {"entry": {"schedule": timedelta(days=1), "last_run_at": START - timedelta(days=1)}}
    cluster.beat(daily, cls=Stock).go(5)
    cluster.depose()

    second = cluster.beat(daily, cls=Stock).go(5)

    assert second.elector.leading
    assert len(cluster.messages()) == 1


def test_a_claim_that_failed_is_made_up_for(cluster):
    """Stock beat has moved the entry on by then, and swallows the error."""
    beat = cluster.beat({"entry": {"schedule": 3600.0}}, cls=Stock)
    beat.app.conf.beat_schedule["entry"]["last_run_at"] = START - timedelta(hours=1)
    ledger = beat.dispatcher.ledger
    claim = ledger.claim
    ledger.claim = lambda *args, **kwargs: fail()
    beat.go(5)
    assert cluster.messages() == []

    ledger.claim = claim
    beat.go(5)

    assert len(cluster.messages()) == 1


def test_a_failed_run_that_could_not_be_recorded_is_made_up_for(cluster):
    """Stock beat swallows that as well; the run would stay claimed until the next term."""
    due = {"entry": {**DUE["entry"], "args": (object(),)}}
    beat = cluster.beat(due, cls=Stock)
    ledger = beat.dispatcher.ledger
    end = ledger.end
    ledger.end = lambda *args: fail()
    beat.go(5)
    assert cluster.runs("state") == [("claimed",)]

    ledger.end = end
    beat.go(5)

    assert cluster.runs("state") == [("failed",)]


def fail():
    """Stand for a database that went away."""
    raise StoreUnavailable("server closed the connection unexpectedly")


def test_a_broker_that_is_away_costs_a_stock_scheduler_nothing(cluster):
    """Its entry has moved on; the claim has not been forgotten."""
    beat = cluster.beat({"entry": {"schedule": timedelta(days=1)}}, cls=Stock)
    beat.app.conf.beat_schedule["entry"]["last_run_at"] = START - timedelta(days=1)
    beat.before_flush = no_broker
    beat.go(5)
    assert cluster.runs("state") == [("claimed",)]

    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    beat.go(5)

    assert len(cluster.messages()) == 1
    assert cluster.runs("state") == [("published",)]


def test_an_entry_with_an_unsent_claim_claims_no_more(cluster):
    """An outage of a day must not leave a day's messages; what is passed over is on record."""
    beat = cluster.beat({"entry": {"schedule": timedelta(days=1)}}, cls=Stock).go(1)
    beat.before_flush = no_broker
    told = []

    def note(occurrence, reason, **_):
        told.append((occurrence.run_id, reason))

    occurrence_skipped.connect(note, weak=False)
    try:
        for hours in (27, 26, 25):
            beat.schedule["entry"].last_run_at = START - timedelta(hours=hours)
            beat._heap = None
            beat.go(3)
    finally:
        occurrence_skipped.disconnect(note)
    reason = "the one before is not sent"
    assert cluster.runs("state", "reason") == [
        ("claimed", None),
        ("skipped", reason),
        ("skipped", reason),
    ]
    assert told == [(run, reason) for (run,) in cluster.runs("id")[1:]]
    assert beat.schedule["entry"].total_run_count == 3

    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    beat.go(3)

    assert len(cluster.messages()) == 1


def test_a_run_that_waits_is_not_taken_for_a_skipped_one(cluster):
    """A scheduler may ask twice for one occurrence: from older state, or by another clock."""
    beat = cluster.beat({"entry": {"schedule": timedelta(days=1)}}, cls=Stock).go(1)
    beat.before_flush = no_broker
    for _ in range(2):
        beat.schedule["entry"].last_run_at = START - timedelta(hours=25)
        beat._heap = None
        beat.go(3)

    assert cluster.runs("state") == [("claimed",)]


@pytest.mark.parametrize("every", [None, 1], ids=["before the send", "after it too"])
def test_a_state_that_cannot_be_stored_does_not_stop_the_sends(cluster, caplog, every):
    """The ledger has the run, so it is not sent twice; and a full disk may last."""

    class Storage(Scheduler):
        full = True

        def sync(self):
            if self.full:
                raise OSError(28, "No space left on device")

    cls = type("Led", (Steered, LeaseMixin, Storage), {})
    beat = cluster.beat(DUE, cls=cls, beat_sync_every=every).go(5)
    beat.full = False

    assert len(cluster.messages()) == 1
    assert cluster.runs("state") == [("published",)]
    assert "could not store its state" in caplog.text
    assert "No space left on device" in caplog.text


def test_an_entry_that_cannot_be_moved_on_is_sent_once(cluster, caplog):
    """RedBeat moves an entry on by writing to Redis, and swallows what that raises."""

    class Storage(Scheduler):
        def tick(self):
            with suppress(OSError):
                self.apply_async(self.schedule["entry"])
            return 0.0

        def reserve(self, entry):
            raise OSError("redis is away")

    cluster.beat(DUE, cls=type("Led", (Steered, LeaseMixin, Storage), {})).go(5)

    assert len(cluster.messages()) == 1
    assert cluster.runs("state") == [("published",)]
    assert "redis is away" in caplog.text


def test_an_entry_that_never_ran_and_cannot_be_moved_on_is_sent_once(cluster):
    """It has no due time but now, and each turn would be another occurrence."""

    class Storage(Scheduler):
        away = True

        def tick(self):
            entry = self.schedule["entry"]
            if entry.last_run_at is None:
                with suppress(OSError):
                    self.apply_async(entry)
            return 0.0

        def reserve(self, entry):
            if self.away:
                raise OSError("redis is away")
            return super().reserve(entry)

    beat = cluster.beat(DUE, cls=type("Led", (Steered, LeaseMixin, Storage), {})).go(1)
    beat.schedule["entry"].last_run_at = None
    beat.go(5)
    assert cluster.runs("state") == [("published",)]

    beat.away = False
    beat.go(5)
    assert cluster.runs("state") == [("published",)]
    beat.schedule["entry"].last_run_at = None  # Another that never ran, under its name.
    beat.go(5)
    assert cluster.runs("state") == [("published",)] * 2


def test_a_tick_that_sends_for_long_is_not_taken_for_one_that_hangs(cluster):
    """RedBeat's sends all that is due, and after an outage that may be much."""

    class Storage(Scheduler):
        def tick(self):
            for entry in list(self.schedule.values()):
                self.apply_async(entry)
            return 60.0

    seconds, late = 0.0, []

    def slowly(runs):
        nonlocal seconds
        seconds += 15.0
        late.append(beat.elector.clock.now() - beat.elector._expected)

    many = {str(number): DUE["entry"] for number in range(3)}
    cls = type("Led", (Steered, LeaseMixin, Storage), {})
    beat = cluster.beat(many, cls=cls, beat_lease_ttl=600, beat_lease_stall_timeout=20).go(1)
    now = beat.elector.clock.now
    beat.elector.clock.now = lambda: now() + seconds
    beat.before_flush = slowly
    for entry in beat.schedule.values():
        entry.last_run_at = START - timedelta(hours=26)
    beat.go(1)

    assert len(late) == 3
    assert max(late) < 20


def test_an_entry_whose_hook_failed_is_looked_at_again(cluster, monkeypatch):
    """A stock tick has it off its heap by then; only the end of beat would bring it back."""
    beat = cluster.beat({"entry": {"schedule": 0.01}}, cls=Stock)
    original = Scheduler.apply_entry
    errors = iter([KeyError("tenant")])

    def hooked(*args, **kwargs):
        for error in errors:
            raise error
        original(*args, **kwargs)

    def sent():
        beat.tick()
        return cluster.runs("state")

    monkeypatch.setattr(Scheduler, "apply_entry", hooked)

    assert wait_until(sent) == [("published",)]


def test_a_deposed_leader_does_not_write_its_state(cluster):
    """Not at the loss, not at the end."""
    written = []

    class Writing(Stock):
        def sync(self):
            written.append(self.elector.leading)
            super().sync()

    class Storage(Scheduler):
        def sync(self):
            stored.append(self)

    stored = []
    cls = type("Led", (LeaseMixin, Storage), {})
    beat = cluster.beat(cls=cls)
    beat.tick()
    stored.clear()
    beat.elector.concede("another beat leads")

    beat.sync()
    beat.close()

    assert stored == []


def test_a_leader_writes_what_it_has_set_up(cluster):
    """When an entry begins is state: a crash before it is first due must not begin it anew."""
    stored = []

    class Storage(Scheduler):
        def sync(self):
            stored.append(dict(self.schedule))

    far = {"entry": {"schedule": timedelta(days=3650)}}
    cluster.beat(far, cls=type("Led", (LeaseMixin, Storage), {})).tick()

    assert [list(each) for each in stored] == [["entry"]]


def test_a_leader_writes_its_state_before_it_releases(cluster):
    """A graceful stop keeps what it knows."""
    stored = []

    class Storage(Scheduler):
        def sync(self):
            stored.append(self.elector.leading)

    beat = cluster.beat(cls=type("Led", (LeaseMixin, Storage), {}))
    beat.tick()
    beat.close()

    assert stored[-1] is True


class Caching(Scheduler):
    """Keeps its entries' last runs in a table, and what it read of that until it is changed."""

    def __init__(self, *args, table, **kwargs):
        self.table = table
        self.dirty = set()
        super().__init__(*args, **kwargs)

    def setup_schedule(self):
        if not hasattr(self, "cache"):
            entries = self.app.conf.beat_schedule.items()
            self.cache = {name: self._maybe_entry(name, entry) for name, entry in entries}
        for name, entry in self.cache.items():
            entry.last_run_at = self.table.setdefault(name, entry.last_run_at)

    def get_schedule(self):
        return self.cache

    schedule = property(get_schedule)

    def reserve(self, entry):
        self.dirty.add(entry.name)
        return super().reserve(entry)

    def sync(self):
        while self.dirty:
            name = self.dirty.pop()
            self.table[name] = self.cache[name].last_run_at


def test_a_scheduler_that_caches_goes_on_from_what_is_stored(cluster):
    """Another beat led meanwhile: to go on from what it read in its last term repeats that."""

    class Led(leased(Caching)):
        ticks = 0

        def _tick(self, *args, **kwargs):
            self.ticks += 1
            return super()._tick(*args, **kwargs)

    table = {"entry": START - timedelta(hours=25)}
    beat = Led(app=cluster.app({"entry": {"schedule": timedelta(days=1)}}), table=table)
    cluster.beats.append(beat)
    beat.tick()
    beat.tick()
    assert len(cluster.messages()) == 1
    dirty, last = beat.dirty, beat.cache["entry"].last_run_at
    beat.dirty.add("entry")

    beat.elector.concede("another beat leads")
    beat.unload()
    assert not hasattr(beat, "cache")
    assert beat.dirty is dirty
    assert dirty == set()
    table["entry"] = last + timedelta(hours=1)
    cluster.depose()
    while not beat.elector.leading:
        beat.tick()
    beat.tick()

    assert beat.cache["entry"].last_run_at == last + timedelta(hours=1)
    assert beat.ticks >= 4, "what a class declares that is made from the leased one stays"


def test_a_scheduler_without_a_storage_goes_on_from_what_it_knows(cluster):
    """It is all there is: to begin anew at each blip, a daily entry would never run."""
    beat = cluster.beat({"entry": {"schedule": timedelta(days=1)}}, cls=Stock).go(2)
    last = beat.schedule["entry"].last_run_at = START - timedelta(hours=3)

    beat.elector.concede("a blip")
    cluster.depose()
    beat.go(5)

    assert beat.elector.term.epoch == 2
    assert beat.schedule["entry"].last_run_at == last


class Picky(Stock):
    """Cannot read its entry "bad"."""

    mended = False

    def find(self, name):
        if name == "bad" and not self.mended:
            raise KeyError("a column that is gone")
        return super().find(name)


def claim(beat, runs):
    """Claim (entry, due in minutes after the start) as the beat's term."""
    found = [
        Run(id=run_id("celery", name, due), entry=name, due_at=due, fenced=True)
        for name, minutes in runs
        for due in [START + timedelta(minutes=minutes)]
    ]
    beat.dispatcher.ledger.claim(beat.elector.term, found)
    return found


def test_many_runs_of_an_entry_that_cannot_be_read_hide_no_other(cluster, caplog, monkeypatch):
    """Rounds are bounded and begin with the oldest; and the turn comes after them."""
    monkeypatch.setattr(recovery, "BATCH", 3)
    far = {name: {"schedule": timedelta(days=3650)} for name in ("bad", "good")}
    first = cluster.beat(far, cls=Stock).go(1)
    claim(first, [("bad", each) for each in range(7)])
    claim(first, [("good", each) for each in range(7, 14)])
    cluster.depose()

    second = cluster.beat(far, cls=Picky).go()
    second.elector.renewals += 1
    second.go()

    states = cluster.runs("entry", "state", "epoch")
    assert states == [("bad", "claimed", 1)] * 7 + [("good", "published", 2)] * 7
    told = [r.levelname for r in caplog.records if getattr(r, "action", "") == "entry-unread"]
    assert told == ["ERROR"]


def test_a_claim_of_this_term_whose_entry_cannot_be_read_waits_for_it(cluster):
    """No later round of the term would find it."""
    far = {"bad": {"schedule": timedelta(days=3650)}}
    beat = cluster.beat(far, cls=Picky).go(1)
    claim(beat, [("bad", 0)])
    beat._forget()  # as after any error of the lease database
    beat.go(5)
    assert cluster.runs("state") == [("claimed",)]

    beat.mended = True
    beat.dispatcher._unmade.clear()
    beat.go(5)

    assert cluster.runs("state") == [("published",)]


def test_a_store_of_entries_that_hangs_is_not_asked_for_each_run(cluster, monkeypatch):
    """Hundreds of time-outs would keep the loop away until the lease is lost."""
    monkeypatch.setattr(recovery, "SLOW", -1.0)
    far = {name: {"schedule": timedelta(days=3650)} for name in ("bad", "good")}
    first = cluster.beat(far, cls=Stock).go(1)
    claim(first, [("bad", 0), ("good", 1)])
    cluster.depose()

    second = cluster.beat(far, cls=Picky).go()
    assert cluster.runs("state") == [("claimed",)] * 2

    second.recovery._away_until = 0.0
    second.mended = True
    second.elector.renewals += 1
    second.go()

    assert cluster.runs("state") == [("published",)] * 2


def test_a_lost_run_whose_entry_cannot_be_read_hides_no_other(cluster):
    """As of those that were left: it is lost yet when it can be read again."""
    far = {name: {"schedule": timedelta(days=3650)} for name in ("bad", "good")}
    first = cluster.beat(far, cls=Stock).go(1)
    term = first.elector.term
    first.dispatcher.send(term, claim(first, [("bad", 0), ("good", 1)]))
    cluster.write(sa.update(run_table).values(published_at=START - timedelta(days=1)))
    cluster.depose()

    cluster.beat(far, cls=Picky).go()

    assert cluster.runs("entry", "attempt") == [("bad", 1), ("good", 2)]


class Ending(schedules.BaseSchedule):
    """Is due once, and then says None, as redbeat's rrule does where its count is reached."""

    def remaining_estimate(self, last_run_at):
        return START - self.now() if last_run_at < START else None

    def is_due(self, last_run_at):
        left = self.remaining_estimate(last_run_at)
        return schedules.schedstate(left is not None and left <= timedelta(0), 3600.0)


class Failing(Ending):
    """Has a bug in what Celery asks only to show it."""

    def remaining_estimate(self, last_run_at):
        raise KeyError("holidays")

    def is_due(self, last_run_at):
        return schedules.schedstate(last_run_at < START, 3600.0)


@pytest.mark.parametrize("kind", [Ending, Failing])
def test_what_a_led_scheduler_says_is_due_is_sent_whatever_its_schedule_raises(
    cluster, caplog, kind
):
    """It has moved the entry on by then: the occurrence would be lost."""
    due = {"entry": {"schedule": kind(), "last_run_at": START - timedelta(hours=1)}}

    cluster.beat(due, cls=Stock).go(5)

    assert cluster.runs("state") == [("published",)]
    told = [
        getattr(each, "action", "")
        for each in caplog.records
        if each.levelname in ("WARNING", "ERROR")
    ]
    assert told == (["due-not-told"] if kind is Failing else [])


@pytest.fixture
def redbeats(cluster, redis_url):
    """Two leased RedBeatSchedulers over one Redis, and an entry there that is due."""
    pytest.importorskip("redbeat")
    from celery_lease.redbeat import LeasedRedBeatScheduler

    cls = type("RedBeat", (Steered, LeasedRedBeatScheduler), {})
    conf = {"redbeat_redis_url": redis_url, "result_expires": None}
    far = {"far": {"schedule": timedelta(days=3650)}}
    first, second = (cluster.beat(far, cls=cls, **conf) for _ in range(2))
    first.tick()
    entry = cls.Entry("entry", "tasks.plain", timedelta(days=1), app=first.app)
    entry.save().reschedule(START - timedelta(days=1))
    return first, second, entry


def test_leased_makes_of_redbeats_scheduler_what_there_is_for_it(cluster, redis_url):
    """A beat would wait for redbeat's lock, and could not find an entry that is not due."""
    pytest.importorskip("redbeat")
    from redbeat import RedBeatScheduler

    from celery_lease.redbeat import RedBeatLeaseMixin

    own = type("Own", (RedBeatScheduler,), {})
    beat = cluster.beat(cls=leased(own), redbeat_redis_url=redis_url, result_expires=None)

    assert isinstance(beat, RedBeatLeaseMixin)
    assert beat.lock_key is None


def test_redbeat_is_led_like_any_other(cluster, redbeats):
    """Its entries live in Redis, and its tick is its own."""
    first, second, entry = redbeats
    first.go(3)
    second.go(3)
    assert len(cluster.messages()) == 1

    first.before_flush = no_broker
    entry.reschedule(START - timedelta(hours=25))
    first.go(3)
    cluster.depose()
    second.go(3)

    assert [m.headers["stamps"]["lease_epoch"] for m in cluster.messages()] == [2]


def test_what_the_broker_did_not_take_from_redbeat_is_sent_when_it_is_back(cluster, redbeats):
    """The schedule has only what is due now, and the entry has moved on by then."""
    beat, _, _ = redbeats
    beat.before_flush = no_broker
    beat.go(3)
    assert cluster.runs("state") == [("claimed",)]

    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    beat.go(3)

    assert len(cluster.messages()) == 1
    assert cluster.runs("state") == [("published",)]


@pytest.mark.parametrize("how", ["deleted", "disabled"])
def test_a_run_whose_redbeat_entry_was_removed_is_skipped(cluster, redbeats, how):
    """Somebody does not want it any more."""
    beat, _, entry = redbeats
    beat.before_flush = no_broker
    beat.go(3)
    if how == "deleted":
        entry.delete()
    else:
        entry.enabled = False
        entry.save()

    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    beat.go(3)

    assert cluster.messages() == []
    assert cluster.runs("state", "reason") == [("skipped", "entry removed")]
