"""Who leads, and until when: the elector on a clock and a database that tests move."""

from __future__ import annotations

import signal
import threading

import pytest

from celery_lease import elector as elector_module
from celery_lease.elector import Elector
from celery_lease.errors import LeaseConflict, LeaseLost, StoreContention, StoreUnavailable
from celery_lease.lease import Fence
from celery_lease.settings import Settings
from celery_lease.transition import Action
from tests.leases import NAME, holder
from tests.memory import MemoryStore

SETTINGS = Settings(ttl=30, renew_interval=10, margin=3, retry_interval=5, stall_timeout=60)
#: What is left of a ttl to be trusted.
WINDOW = 27


class Beat(Elector):
    """An elector whose renewing thread is the test."""

    def __init__(self, store: MemoryStore, who: str = "a", settings: Settings = SETTINGS) -> None:
        self.told = []
        self.tenures = []
        super().__init__(
            store, settings, holder=holder(who), clock=store.clock, observe=self.told.append
        )

    def _start(self, tenure) -> None:
        self.tenures.append(tenure)

    def step(self, which: int = -1) -> float:
        """Let the renewing thread of a term wake up."""
        return self._step(self.tenures[which])

    @property
    def actions(self) -> list[Action]:
        """What was told."""
        return [each.action for each in self.told]


@pytest.fixture
def store():
    """A database with one free lease."""
    made = MemoryStore()
    made.ensure(NAME)
    return made


@pytest.fixture
def clock(store):
    """The clock of the database and of all processes."""
    return store.clock


@pytest.fixture
def beat(store):
    """A process that may lead."""
    return Beat(store)


@pytest.fixture
def rival(store):
    """Another one."""
    return Beat(store, "b")


def away() -> None:
    """A database that does not answer."""
    raise StoreUnavailable("away")


# --- the trust window ---------------------------------------------------------------------


def test_a_term_is_trusted_from_before_the_request_was_sent(store, clock, beat):
    """The database began to count when it had the request, not when the answer arrived."""
    store.after["acquire"] = lambda: clock.advance(5)

    assert beat.campaign()
    assert beat.trust_left == WINDOW - 5


def test_a_request_that_was_long_on_its_way_is_trusted_no_longer_for_it(store, clock, beat):
    """Where the time went cannot be told from here: it is all counted against the term."""
    store.before["acquire"] = lambda: clock.advance(5)

    assert beat.campaign()
    assert beat.trust_left == WINDOW - 5


def test_a_grant_that_arrives_after_its_window_is_given_back(store, clock, beat):
    """Leading on it for an instant would be leading beside the next one."""
    store.after["acquire"] = lambda: clock.advance(WINDOW)

    assert not beat.campaign()
    assert not beat.leading
    assert beat.actions == [Action.LOST]
    assert store.read(NAME).holder is None


def test_the_window_closes_before_the_lease_expires(store, clock, beat, rival):
    """Between the two nobody leads: that is what the margin is for."""
    beat.campaign()
    clock.advance(WINDOW)

    assert not beat.leading
    assert not rival.campaign()
    clock.advance(SETTINGS.margin)
    assert rival.campaign()


def test_a_renewal_is_trusted_from_before_it_was_sent(store, clock, beat):
    """The same rule as for a grant."""
    beat.campaign()
    clock.advance(10)
    store.after["renew"] = lambda: clock.advance(4)

    beat.step()

    assert beat.trust_left == WINDOW - 4


def test_a_renewal_whose_yes_comes_too_late_ends_the_term(store, clock, beat):
    """The lease may be another's by the time the yes arrives."""
    beat.campaign()
    clock.advance(10)
    store.after["renew"] = lambda: clock.advance(WINDOW)

    beat.step()

    assert not beat.leading
    assert beat.actions[-1] is Action.LOST


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_renewal_without_an_answer_extends_nothing(store, clock, beat, side):
    """Whether it was done cannot be known: hope is not trust."""
    beat.campaign()
    clock.advance(10)
    getattr(store, side)["renew"] = away

    delay = beat.step()

    assert beat.leading
    assert beat.trust_left == WINDOW - 10
    assert beat.told[-1].action is Action.RENEWAL_FAILED
    assert 0 < delay <= (WINDOW - 10) / 4


def test_an_error_that_nobody_foresaw_does_not_end_the_renewing(store, clock, beat):
    """Whatever a driver or a token library raises once, the database is there at the next try."""
    beat.campaign()

    def unforeseen() -> None:
        del store.before["renew"]
        raise LookupError("a token library's own")

    store.before["renew"] = unforeseen
    clock.advance(10)
    clock.advance(beat.step())

    assert beat.told[-1].action is Action.RENEWAL_FAILED
    assert "LookupError" in beat.told[-1].reason
    beat.step()
    assert beat.trust_left == WINDOW


def test_a_leader_goes_on_until_its_window_closes_when_the_database_is_away(store, clock, beat):
    """A blip of the database must not stop the schedule, and a long one must."""
    beat.campaign()
    store.before["renew"] = away
    while clock.now() + 1 < beat.tenures[0].trusted_until:
        clock.advance(1)
        beat.step()
        assert beat.leading

    clock.advance(1)
    beat.step()

    assert not beat.leading
    assert beat.actions[-1] is Action.LOST


def test_a_leader_without_a_database_does_not_fill_the_log(store, clock, beat):
    """The time between two tries shrinks with what is left of the window, not to nothing."""
    beat.campaign()
    store.before["renew"] = away
    while beat.leading:
        clock.advance(beat.step())

    assert beat.actions.count(Action.RENEWAL_FAILED) < 15
    assert all(each.seconds > 0 for each in beat.told if each.action is Action.RENEWAL_FAILED)


def test_a_renewal_that_fails_after_the_end_of_its_term_is_not_told(store, clock, beat):
    """That it leads and could not renew, told after it stood by, reads like a second leader."""
    beat.campaign()

    def late() -> None:
        clock.advance(WINDOW)
        with pytest.raises(LeaseLost):
            beat.check()
        away()

    store.before["renew"] = late
    beat.step()

    assert beat.actions == [Action.ACQUIRED, Action.LOST]


def test_checking_raises_once_the_window_has_closed_even_if_no_thread_noticed(clock, beat):
    """The check before each publish must not depend on a thread that was frozen too."""
    beat.campaign()
    assert beat.check().epoch == 1
    clock.advance(WINDOW)

    with pytest.raises(LeaseLost) as lost:
        beat.check()

    assert lost.value.held_epoch == 1
    assert beat.actions == [Action.ACQUIRED, Action.LOST]


def test_the_end_of_a_term_is_told_once(clock, beat):
    """Loop and thread both notice; a log that tells it twice reads like two events."""
    beat.campaign()
    clock.advance(WINDOW)

    beat.step()
    with pytest.raises(LeaseLost):
        beat.check()
    beat.close()

    assert beat.actions.count(Action.LOST) == 1


def test_a_late_renewal_is_told(store, clock, beat):
    """Operators see a slow database before it costs a lease."""
    beat.campaign()
    clock.advance(21)
    beat.step()

    assert beat.told[-1].action is Action.RENEWED_LATE
    assert beat.told[-1].seconds == 21


# --- standing by --------------------------------------------------------------------------


def test_a_standby_tells_whom_it_waits_for(beat, rival):
    """Nobody should have to query a database to learn who leads."""
    rival.campaign()

    assert not beat.campaign()
    assert beat.told[-1].action is Action.STANDING_BY
    assert beat.told[-1].lease.holder == str(holder("b"))


def test_a_standby_tries_again_right_after_the_expiry_it_knows_of(clock, beat, rival):
    """A takeover takes ttl plus a moment, not ttl plus a whole interval."""
    rival.campaign()
    clock.advance(28)
    beat.campaign()

    assert 2.0 <= beat.next_try() <= 2.5


def test_a_standby_does_not_hurry_because_of_what_it_once_knew(store, clock, beat, rival):
    """An expiry that was near when the database went away must not make a busy loop of it."""
    rival.campaign()
    clock.advance(29.99)
    beat.campaign()
    store.before["acquire"] = away
    beat.campaign()

    assert beat.next_try() >= 0.8 * SETTINGS.retry_interval


def test_a_database_that_is_away_is_a_no_and_not_an_error(store, beat):
    """A standby waits for it; an exception out of the loop would end beat."""
    store.before["acquire"] = away

    assert not beat.campaign()
    assert beat.actions == [Action.UNAVAILABLE]


def test_a_leader_that_campaigns_again_just_leads(store, beat):
    """The loop calls it at every pass."""
    beat.campaign()

    assert beat.campaign()
    assert store.calls.count("acquire") == 1


def test_conceding_ends_the_term_without_a_release(store, beat):
    """Somebody else is known to lead: there is nothing of ours to release."""
    beat.campaign()

    beat.concede("refused")

    assert not beat.leading
    assert beat.told[-1].reason == "refused"
    assert "release" not in store.calls


def test_the_end_of_a_term_wakes_the_loop(beat):
    """A loop that waits for its next entry should campaign at once."""
    beat.campaign()
    beat.concede("refused")

    woken = threading.Thread(target=beat.wait, args=(60,))
    woken.start()
    woken.join(5)

    assert not woken.is_alive()


# --- taking over --------------------------------------------------------------------------


def test_nobody_leads_before_the_fence_is_raised(store, clock, beat):
    """Between acquire and fence, the old leader's tasks still pass it."""
    seen = []
    store.before["raise_fence"] = lambda: seen.append(beat.leading)

    assert beat.campaign()
    assert seen == [False]
    assert store.read_fence(NAME) == Fence(name=NAME, epoch=1, term=beat.term.uuid)


def test_a_takeover_waits_for_guards_and_goes_on(store, clock, beat):
    """A guard in its last round trip is waited for, as long as the term is trusted."""
    waits = iter([StoreContention("locked"), StoreContention("locked")])

    def contended() -> None:
        clock.advance(1)
        for error in waits:
            raise error

    store.before["raise_fence"] = contended

    assert beat.campaign()
    assert beat.actions == [Action.RAISING, Action.RAISING, Action.ACQUIRED]


def test_a_takeover_that_waits_too_long_for_a_guard_stands_by(store, clock, beat):
    """A frozen guard must not make it lead on trust that is gone."""

    def contended() -> None:
        clock.advance(5)
        raise StoreContention("locked")

    store.before["raise_fence"] = contended

    assert not beat.campaign()
    assert beat.actions[-1] is Action.LOST
    assert not beat.leading


def test_the_lease_is_renewed_while_the_takeover_waits(store, clock, beat):
    """A guard's idle limit may be longer than the ttl."""

    def contended() -> None:
        clock.advance(5)
        beat.step()
        if clock.now() < 1_000_100:
            raise StoreContention("locked")

    store.before["raise_fence"] = contended

    assert beat.campaign()


def test_a_winner_that_was_overtaken_before_it_raised_the_fence_stands_by(
    store, clock, beat, rival
):
    """It was paused there; the fence is a later one's."""

    def paused() -> None:
        store.before.clear()
        clock.advance(WINDOW - 1)
        store.rows[NAME].expires_at = clock.now()
        assert rival.campaign()

    store.before["raise_fence"] = paused

    assert not beat.campaign()
    assert rival.leading
    assert beat.actions == [Action.LOST]


def test_a_fence_with_the_same_epoch_and_another_term_is_a_conflict(store, beat):
    """One epoch was granted twice: both would pass a comparison of epochs."""
    store.before["raise_fence"] = lambda: store.fences.update(
        {NAME: Fence(name=NAME, epoch=1, term="another")}
    )

    assert not beat.campaign()
    assert beat.actions == [Action.CONFLICT]


def test_a_term_behind_what_others_left_is_moved_above_it(store, beat):
    """A restored backup shows old epochs; the stamps of the lost ones must stay stale."""
    store.left_behind[NAME] = 41

    assert beat.campaign()
    assert beat.term.epoch == 42
    assert store.read_fence(NAME).epoch == 42
    assert beat.actions == [Action.JUMPED, Action.ACQUIRED]


def test_a_lease_row_behind_its_history_is_told_as_a_jump(store, beat, rival):
    """The store passes it by itself, but an operator has to hear of it."""
    for _ in range(3):
        rival.campaign()
        rival.close()
    store.rows[NAME].epoch = 1

    assert beat.campaign()
    assert beat.term.epoch == 4
    assert beat.actions == [Action.JUMPED, Action.ACQUIRED]


def test_an_ordinary_takeover_is_no_jump(clock, beat, rival):
    """A warning at every takeover would be one that nobody reads."""
    rival.campaign()
    clock.advance(30)

    beat.campaign()

    assert beat.actions == [Action.ACQUIRED]
    assert beat.told[-1].previous_holder == str(holder("b"))


def test_a_takeover_whose_checks_fail_gives_the_lease_back(store, beat):
    """Otherwise everybody waits a whole ttl for a leader that is none."""
    store.before["floor"] = away

    assert not beat.campaign()
    assert store.read(NAME).holder is None


def test_a_process_that_ends_while_the_fence_waits_releases_the_lease(store, beat):
    """SIGTERM raises SystemExit wherever the loop is; the next one must not wait for a ttl."""

    def terminated() -> None:
        raise SystemExit

    store.before["raise_fence"] = terminated
    with pytest.raises(SystemExit):
        beat.campaign()

    beat.close()

    assert store.read(NAME).holder is None


@pytest.fixture
def interruptible():
    """Have SIGINT raise, as on a terminal: what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("verb", ["acquire", "floor"])
def test_an_interrupt_right_after_the_grant_leaves_nothing_held(store, beat, verb):
    """Ctrl-C between the row and what knows of it: the next one would wait for a whole ttl."""
    store.after[verb] = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        beat.campaign()

    beat.close()

    assert store.read(NAME).holder is None
    assert beat.actions == [Action.RELEASED]


@pytest.mark.usefixtures("interruptible")
def test_a_signal_need_not_wait_for_a_database_that_is_known_to_be_away(store, beat):
    """Its time-outs add up to half a minute, after which whoever wants it to end kills it."""
    store.before["acquire"] = away
    assert not beat.campaign()

    store.before["read"] = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        beat.campaign()

    assert store.calls.count("acquire") == 1


def test_a_takeover_that_was_broken_off_is_cleared_away_by_the_next_campaign(store, beat):
    """A term that is renewed and never leads would silence the schedule for ever."""

    def broken() -> None:
        raise RuntimeError("a bug")

    store.before["raise_fence"] = broken
    with pytest.raises(RuntimeError):
        beat.campaign()
    store.before.clear()

    assert beat.campaign()
    assert beat.term.epoch == 2


# --- stalling -----------------------------------------------------------------------------


def test_a_loop_that_is_overdue_is_not_renewed_for(store, clock, beat):
    """A hung beat that keeps its lease sends nothing and lets nobody else."""
    beat.campaign()
    beat.progress(5)
    clock.advance(26)
    beat.step()
    assert beat.renewals == 1

    for _ in range(4):
        clock.advance(10)
        beat.step()
    assert beat.told[-1].action is Action.STALLED
    clock.advance(WINDOW)
    beat.step()

    assert not beat.leading
    assert beat.actions[-1] is Action.LOST
    assert beat.renewals == 4


def test_a_loop_that_waits_as_long_as_it_said_is_not_overdue(clock, beat):
    """Beat sleeps for minutes when nothing is due."""
    beat.campaign()
    beat.progress(600)
    for _ in range(60):
        clock.advance(10)
        beat.step()

    assert beat.leading
    assert beat.renewals == 60


def test_a_loop_that_hangs_in_its_first_turn_is_overdue_as_early_as_in_any_other(clock, beat):
    """Loading the schedule, and the first send, hang as well as a later one."""
    beat.campaign()
    for _ in range(6):
        clock.advance(10)
        beat.step()
    assert Action.STALLED not in beat.actions

    clock.advance(5)
    beat.step()

    assert beat.told[-1].action is Action.STALLED


def test_renewing_goes_on_when_the_loop_comes_back_in_time(clock, beat):
    """A publish that was slow, not hung."""
    beat.campaign()
    beat.progress(0)
    for _ in range(7):
        clock.advance(10)
        beat.step()
    assert beat.told[-1].action is Action.STALLED
    beat.progress(5)
    beat.step()

    assert beat.told[-1].action is Action.RESUMED
    assert beat.trust_left == WINDOW


# --- conflict -----------------------------------------------------------------------------


@pytest.fixture
def conflicted(store, beat):
    """A leader whose epoch was granted again, by a database that had lost the first grant."""
    beat.campaign()
    store.rows[NAME].term = "another"
    store.rows[NAME].holder = holder("b")
    beat.step()
    return beat


def test_an_epoch_that_was_granted_twice_stops_the_leader(store, conflicted):
    """Two terms of one epoch cannot be told apart by the epoch: neither waits for expiry."""
    assert not conflicted.leading
    assert conflicted.actions[-1] is Action.CONFLICT
    assert store.history(NAME, 1)[0].ended == "conflict"
    with pytest.raises(LeaseConflict, match="celery lease raise --to N"):
        conflicted.check()


def test_after_a_conflict_it_stands_by_until_the_epoch_was_jumped(store, clock, conflicted):
    """Even where the lease is free: its epoch is one that stamps of two terms carry."""
    clock.advance(3600)
    assert not conflicted.campaign()
    assert "acquire" not in store.calls[store.calls.index("end_by_conflict") :]

    store.raise_epoch(NAME, 2)

    assert conflicted.campaign()
    assert conflicted.term.epoch == 3


def test_a_takeover_by_another_ends_the_conflict(clock, conflicted, rival):
    """It went above the epoch that was granted twice."""
    clock.advance(3600)
    rival.campaign()
    rival.close()

    assert conflicted.campaign()


def test_a_larger_epoch_in_a_trusted_term_is_a_conflict(store, beat):
    """Nobody may be granted a lease that is good: clocks or a database went wrong."""
    beat.campaign()
    store.raise_epoch(NAME, 7)

    beat.step()

    assert beat.actions[-1] is Action.CONFLICT


def test_a_conflict_stands_before_the_loop_is_woken(store, beat, monkeypatch):
    """A loop that campaigned in between would lead under the epoch in doubt."""
    beat.campaign()
    store.rows[NAME].term = "another"
    known = []
    monkeypatch.setattr(beat._wake, "set", lambda: known.append(beat._conflict))

    beat.step()

    assert known == [1]


# --- terms of one process -----------------------------------------------------------------


def test_a_thread_that_wakes_up_late_cannot_end_a_newer_term(store, clock, beat):
    """The process was suspended, led again, and then its old thread went on."""
    beat.campaign()
    clock.advance(40)
    assert beat.campaign()
    assert beat.term.epoch == 2

    beat.step(0)

    assert beat.term.epoch == 2
    assert beat.step(1) > 0
    assert beat.leading


def test_a_renewal_that_was_under_way_cannot_end_a_newer_term(store, clock, beat):
    """Its no arrives when the process leads again."""
    beat.campaign()
    clock.advance(10)

    def meanwhile() -> None:
        store.before.clear()
        clock.advance(40)
        assert beat.campaign()

    store.before["renew"] = meanwhile
    beat.step(0)

    assert beat.term.epoch == 2


def test_a_forked_process_neither_has_the_term_nor_ends_it(store, clock, beat, monkeypatch):
    """It has no renewing thread, and what it ended would be its parent's."""
    beat.campaign()
    with monkeypatch.context() as child:
        child.setattr("os.getpid", lambda: -1)
        assert not beat.leading
        with pytest.raises(LeaseLost, match="belongs to the one that got it"):
            beat.check()
        beat.concede("refused")
        beat.close()

    assert beat.actions == [Action.ACQUIRED]
    assert "release" not in store.calls
    assert beat.leading


# --- closing ------------------------------------------------------------------------------


def test_closing_releases_the_lease(store, beat, rival):
    """A standby leads within one retry interval of a graceful stop."""
    beat.campaign()
    beat.close()

    assert not beat.leading
    assert beat.actions[-1] is Action.RELEASED
    assert rival.campaign()


def test_closing_twice_releases_once(store, beat, rival):
    """Celery closes a scheduler twice; the second must not touch the next one's lease."""
    beat.campaign()
    beat.close()
    rival.campaign()
    beat.close()

    assert rival.leading
    assert store.calls.count("release") == 1


def test_closing_a_standby_does_nothing(store, beat):
    """There is nothing to give up."""
    beat.close()
    assert store.calls == []


def test_closing_a_term_that_was_lost_leaves_the_lease_alone(store, clock, beat, rival):
    """It is another's."""
    beat.campaign()
    clock.advance(30)
    beat.step()
    rival.campaign()
    beat.close()

    assert rival.leading
    assert "release" not in store.calls


def test_closing_while_the_database_is_away_ends_all_the_same(store, beat):
    """The lease expires by itself."""
    beat.campaign()
    store.before["release"] = away

    beat.close()

    assert beat.actions[-1] is Action.LOST
    assert not beat.leading


def test_closing_ends_even_if_the_database_says_nothing(store, beat, monkeypatch):
    """A process that does not end is killed, by somebody who waits for it."""
    monkeypatch.setattr(elector_module, "_RELEASE", 0.05)
    answer = threading.Event()
    store.before["release"] = answer.wait
    beat.campaign()

    beat.close()

    assert beat.told[-1].reason == "not released in time; it expires"
    told = list(beat.told)
    answer.set()
    for thread in threading.enumerate():
        if thread.name == "lease-release":
            thread.join()
    assert beat.told == told, "one end, told once"


def test_a_second_interrupt_does_not_cut_the_release_short(store, beat, monkeypatch):
    """Who presses Ctrl-C twice wants it to end, and not to have the others wait for a ttl."""
    handled, seen = threading.Event(), []

    def end(*_) -> None:
        seen.extend(beat.actions)
        handled.set()
        raise SystemExit

    def interrupted() -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        handled.wait(0.2)  # As long as an interrupt that is not put off would need.

    before = signal.signal(signal.SIGTERM, end)
    try:
        beat.campaign()
        store.before["release"] = interrupted
        with pytest.raises(SystemExit):
            beat.close()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert seen == [Action.ACQUIRED, Action.RELEASED]


def test_a_renewal_that_was_under_way_does_not_bring_a_closed_term_back(store, beat):
    """The thread asked before the release and is answered after it."""
    beat.campaign()
    store.before["renew"] = beat.close

    beat.step()

    assert not beat.leading
    assert store.read(NAME).holder is None
    assert beat.actions == [Action.ACQUIRED, Action.RELEASED]


# --- the thread ---------------------------------------------------------------------------


def test_a_thread_renews_while_the_loop_does_something_else():
    """Renewing inside the loop would lose the lease to a slow publish."""
    store = MemoryStore()
    store.ensure(NAME)
    renewed = threading.Semaphore(0)
    store.after["renew"] = renewed.release
    quick = Settings(ttl=30, renew_interval=0.001, margin=3)
    elector = Elector(store, quick, holder=holder(), clock=store.clock)
    before = set(threading.enumerate())

    elector.campaign()
    try:
        for _ in range(3):
            assert renewed.acquire(timeout=10)
    finally:
        elector.close()

    assert set(threading.enumerate()) <= before
