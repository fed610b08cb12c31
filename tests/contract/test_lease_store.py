"""What every lease database promises."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeout
from datetime import datetime, timedelta

import pytest
import sqlalchemy as sa

from celery_lease.errors import ConfigurationError, SchemaMismatch, StoreContention, StoreError
from celery_lease.lease import MAX_EPOCH, Lease, Term
from celery_lease.stores.base import Raised, Renewal
from celery_lease.stores.dialects import from_now, seconds_until, utcnow
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.schema import (
    commit_table,
    entry_table,
    fence_table,
    lease_table,
    run_table,
    schema_table,
    term_table,
)
from tests.leases import NAME, expire, grant, holder, lock_fence, opened, put_back, take
from tests.races import race, start_together


@pytest.fixture
def store(database_url: str) -> Iterator[SQLLeaseStore]:
    """A store whose tables and rows are there."""
    with opened(database_url) as found:
        yield found


@pytest.fixture
def rival(store: SQLLeaseStore, database_url: str) -> Iterator[SQLLeaseStore]:
    """The same database over connections of its own, as from another process."""
    with opened(database_url) as found:
        yield found


# --- acquire ------------------------------------------------------------------------------


def test_a_free_lease_is_granted_under_a_larger_epoch_each_time(store):
    """The epoch is what everything else hangs on: it must rise at every grant and only there."""
    terms = []
    for _ in range(3):
        terms.append(grant(store))
        store.release(terms[-1])

    assert [each.epoch for each in terms] == [1, 2, 3]
    assert len({each.uuid for each in terms}) == 3


def test_a_valid_lease_is_not_replaced_early(store, rival):
    """Taking a lease that is still good would make two leaders."""
    term = grant(store, "a")

    answer = take(rival, "b")

    assert isinstance(answer, Lease)
    assert answer.epoch == term.epoch
    assert store.renew(term, 30) is Renewal.RENEWED


def test_a_lease_is_not_replaced_at_the_very_end_of_its_ttl(store, rival):
    """The promise holds to the last moment, by the database clock: ask until it is granted."""
    asked = time.monotonic()
    term = grant(store, "a", ttl=0.5)
    taken = term
    while taken.epoch == term.epoch:
        answered = take(rival, "b")
        taken = answered if isinstance(answered, Term) else taken

    with store.engine.connect() as connection:
        began = connection.execute(
            sa.select(term_table.c.acquired_at).where(term_table.c.epoch == taken.epoch)
        ).scalar_one()
    # Two readings of one clock; SQLite's has milliseconds.
    assert (began - term.acquired_at).total_seconds() >= 0.499
    assert time.monotonic() - asked < 5


def test_an_expired_lease_goes_to_whoever_asks_and_says_who_held_it(store, rival):
    """A dead holder cannot say goodbye; the next one says whom it follows."""
    old = grant(store, "a")
    expire(store)

    new = grant(rival, "b")

    assert (new.epoch, new.previous_holder, new.previous_epoch) == (2, old.holder, 1)


def test_a_loser_learns_who_leads_and_for_how_long_but_no_secret(store, rival):
    """A standby says whom it waits for; with the term's uuid it could forge stamps."""
    term = grant(store, "a", ttl=30)

    lost = take(rival, "b")

    assert (lost.name, lost.holder, lost.epoch) == (NAME, term.holder, term.epoch)
    assert lost.acquired_at == term.acquired_at
    assert 25 < lost.remaining <= 30
    assert lost.held
    assert lost.holder_info == {"host": "host"}
    assert term.uuid not in repr(dataclasses.asdict(lost))


def test_one_candidate_wins_an_expired_lease_and_the_epoch_rises_by_one(database_url):
    """Eight processes with connections of their own meet at a barrier, round after round."""
    found = race(database_url, processes=8, rounds=25)

    assert found == {
        "rounds": 25,
        "winners": 25,
        "epochs_gained": 25,
        "losers_with_metadata": 25 * 7,
        "deadlocks_surfaced": 0,
    }


def test_a_grant_writes_the_history_and_ends_the_term_before(store, rival):
    """The history is what people read after an incident: it must have no gap and no overlap."""
    first = grant(store, "a")
    expire(store)
    second = grant(rival, "b")
    store.release(second)

    newer, older = store.history(NAME, 10)

    assert (older.epoch, older.holder, older.ended) == (first.epoch, first.holder, "expired")
    assert older.ended_at <= newer.acquired_at
    assert (newer.epoch, newer.ended) == (second.epoch, "released")


def test_a_lease_without_a_row_is_an_error_that_names_the_way_out(store):
    """Inserting on demand would deadlock InnoDB, and "somebody else leads" would be a lie."""
    with pytest.raises(SchemaMismatch, match="celery lease init"):
        store.acquire("another", holder(), 30, "attempt")


# --- renew --------------------------------------------------------------------------------


def test_a_renewal_makes_the_lease_good_for_another_ttl(store):
    """Renewing is all that keeps a leader leading."""
    term = grant(store, ttl=5)

    assert store.renew(term, 60) is Renewal.RENEWED
    assert 55 < store.read(NAME).remaining <= 60


def test_a_renewal_after_the_expiry_is_refused_even_where_nobody_else_asked(store):
    """What expired may be granted at any moment; extending it would revive a dead term."""
    term = grant(store)
    expire(store)

    assert store.renew(term, 30) is Renewal.LOST
    assert grant(store).epoch == term.epoch + 1


def test_a_renewal_of_a_released_term_is_refused(store):
    """A renewal that was under way when the term was given up must not take it back."""
    term = grant(store)
    store.release(term)

    assert store.renew(term, 30) is Renewal.LOST


def test_a_renewal_of_an_older_term_of_the_same_holder_is_refused(store):
    """A thread that wakes up late must not keep a term alive that is not its own."""
    old = grant(store, "a")
    expire(store)
    new = grant(store, "a")

    assert store.renew(old, 30) is Renewal.LOST
    assert store.renew(new, 30) is Renewal.RENEWED


@pytest.mark.parametrize("epoch", [2, 1], ids=["same epoch", "older epoch"])
def test_a_renewal_says_conflict_where_the_database_went_back(store, epoch):
    """A failover that lost our grant hands our epoch out again: going on would make two."""
    store.release(grant(store, "a"))
    term = grant(store, "a")
    assert term.epoch == 2
    put_back(store, epoch, "another-term")

    assert store.renew(term, 30) is Renewal.CONFLICT


# --- release ------------------------------------------------------------------------------


def test_a_released_lease_is_free_at_once_and_keeps_its_epoch(store):
    """A graceful stop hands over at once; a deleted row would start again at epoch 1."""
    term = grant(store)

    assert store.release(term)

    lease = store.read(NAME)
    assert (lease.holder, lease.epoch, lease.remaining, lease.held) == (None, 1, 0.0, False)


def test_a_late_release_cannot_end_a_newer_term_of_the_same_holder(store):
    """Matching by name or holder would let an old thread throw its successor out."""
    old = grant(store, "a")
    expire(store)
    new = grant(store, "a")

    assert not store.release(old)
    assert store.read(NAME).holder == new.holder
    assert store.renew(new, 30) is Renewal.RENEWED


# --- the fence ----------------------------------------------------------------------------


def test_acquiring_does_not_touch_the_fence_and_raising_it_does(store):
    """The two are apart so that no worker can hold up an acquire."""
    term = grant(store)
    assert store.read_fence(NAME).epoch == 0

    assert store.raise_fence(term) is Raised.RAISED
    fence = store.read_fence(NAME)
    assert (fence.epoch, fence.term) == (term.epoch, term.uuid)


def test_raising_the_fence_again_is_the_same_yes(store):
    """An answer that was lost is settled by asking again."""
    term = grant(store)
    store.raise_fence(term)

    assert store.raise_fence(term) is Raised.RAISED


def test_a_late_takeover_cannot_lower_the_fence(store):
    """A winner that was paused before it raised the fence was overtaken meanwhile."""
    paused = grant(store)
    expire(store)
    later = grant(store)
    store.raise_fence(later)

    assert store.raise_fence(paused) is Raised.SUPERSEDED
    assert store.read_fence(NAME).term == later.uuid


def test_a_fence_with_this_epoch_and_another_term_is_a_conflict(store):
    """Guarded writes compare both: the epoch alone would let a lost leader's writes through."""
    term = grant(store)
    twin = dataclasses.replace(term, uuid="another-term")
    store.raise_fence(twin)

    assert store.raise_fence(term) is Raised.CONFLICT
    assert store.read_fence(NAME).term == "another-term"


def test_raising_the_fence_waits_for_a_guard_and_not_for_longer_than_the_lock_wait(database_url):
    """A guard in its last round trip comes first, but a frozen one cannot hang the leader."""
    with opened(database_url, lock_wait=1.0) as store, opened(database_url) as worker:
        term = grant(store)
        with worker.engine.begin() as connection:
            lock_fence(connection)
            began = time.monotonic()
            with pytest.raises(StoreContention):
                store.raise_fence(term)
            waited = time.monotonic() - began

        # Tried twice.
        assert 0.9 < waited < 6
        assert store.raise_fence(term) is Raised.RAISED


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_a_guard_holds_up_neither_acquire_nor_renewal(database_url):
    """A busy or a frozen worker must not cost a healthy leader its lease. (SQLite: one writer.)

    What had to wait for the guard would raise StoreContention, as it does not end.
    """
    with opened(database_url) as store, opened(database_url) as worker:
        term = grant(store)
        with worker.engine.begin() as connection:
            lock_fence(connection)
            assert store.renew(term, 30) is Renewal.RENEWED
            store.release(term)
            grant(store)


def test_raising_the_fence_goes_on_as_soon_as_the_guard_has_committed(database_url):
    """The takeover waits for the guard's COMMIT, not for a time-out."""
    with opened(database_url, lock_wait=5.0) as store, opened(database_url) as worker:
        term = grant(store)
        with ThreadPoolExecutor(1) as pool:
            with worker.engine.begin() as connection:
                lock_fence(connection)
                raising = pool.submit(store.raise_fence, term)
                with pytest.raises(FuturesTimeout):
                    raising.result(timeout=0.2)
            began = time.monotonic()
            assert raising.result(timeout=10) is Raised.RAISED
            assert time.monotonic() - began < 2


# --- preparing ----------------------------------------------------------------------------


def test_ensuring_a_lease_many_times_at_once_makes_one_row(store, database_url):
    """All beats of a new installation start at the same moment."""
    barrier = threading.Barrier(8)

    def ensure(_: int) -> None:
        with opened(database_url) as each:
            barrier.wait()
            each.ensure("fresh")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ensure, range(8)))

    assert store.read("fresh").epoch == 0
    assert store.read_fence("fresh").epoch == 0


def test_many_processes_prepare_an_empty_database_at_once(database_url):
    """A rollout starts them all at the same moment; none may end with an error, and one schema
    must come out of it.
    """
    assert start_together(database_url, processes=32) == []
    with opened(database_url) as store:
        assert grant(store).epoch == 1


def test_ensuring_a_lease_that_is_held_changes_nothing(store):
    """A standby that starts must not touch the leader's row."""
    term = grant(store)
    store.ensure(NAME)

    assert store.read(NAME).epoch == term.epoch
    assert store.renew(term, 30) is Renewal.RENEWED


def test_missing_tables_are_an_error_that_names_the_command(database_url):
    """Where an administrator makes the tables, beat must say what is missing."""
    store = SQLLeaseStore(database_url)
    try:
        with pytest.raises(SchemaMismatch, match=r"celery lease init.*beat_lease_auto_init") as e:
            store.prepare(create=False)
    finally:
        store.dispose()
    assert e.value.found is None


def test_tables_of_another_version_are_an_error(store):
    """Two versions of the package on one schema would misread each other's rows."""
    with store.engine.begin() as connection:
        connection.execute(sa.update(schema_table).values(version=99))

    entry_table.drop(store.engine)
    with pytest.raises(SchemaMismatch, match="version 99") as error:
        store.prepare(create=True)
    assert (error.value.found, error.value.expected) == (99, 1)
    assert not sa.inspect(store.engine).has_table(entry_table.name), "it is another version's"


def test_preparing_twice_is_harmless(store):
    """Every start does it."""
    grant(store)
    store.prepare(create=True)
    assert store.read(NAME).epoch == 1


# --- repair -------------------------------------------------------------------------------


def test_a_lease_row_that_went_back_behind_its_history_is_jumped_over(store):
    """A row restored by itself must not hand out an epoch that the history shows as used."""
    for _ in range(3):
        store.release(grant(store))
    put_back(store, 1)

    term = grant(store)

    assert (term.epoch, term.previous_epoch) == (4, 1)


@pytest.mark.parametrize("where", ["fence", "run", "commit", "term"])
def test_epochs_in_use_elsewhere_are_found(store, where):
    """A restored lease row is betrayed by what later terms left behind."""
    leave = {
        "fence": sa.update(fence_table).values(epoch=42, term="another"),
        "run": sa.insert(run_table).values(
            id="r", lease=NAME, entry="e", due_at=utcnow(), epoch=42, term="another",
            fenced=True, state="published", open=True, claimed_at=utcnow(),
        ),
        "commit": sa.insert(commit_table).values(
            task_id="r", lease=NAME, epoch=42, term="another", execution="x",
            outcome="committed", at=utcnow(),
        ),
        "term": sa.insert(term_table).values(
            name=NAME, epoch=42, term="another", holder="b", acquired_at=utcnow()
        ),
    }  # fmt: skip
    term = grant(store)
    with store.engine.begin() as connection:
        connection.execute(leave[where])

    assert store.floor(term) == 42


def test_the_own_term_is_no_reason_to_jump(store):
    """Otherwise each takeover would jump over itself."""
    for _ in range(2):
        term = grant(store)
        store.raise_fence(term)
        assert store.floor(term) < term.epoch
        store.release(term)


def test_a_jump_moves_lease_and_history_above_the_floor(store):
    """Stamps, fence and history must tell the same epoch."""
    term = grant(store)

    jumped = store.jump(term, 41)

    assert (jumped.epoch, jumped.uuid) == (42, term.uuid)
    assert store.renew(jumped, 30) is Renewal.RENEWED
    assert [each.epoch for each in store.history(NAME, 5)] == [42]


def test_a_term_that_is_over_cannot_jump(store):
    """A paused winner must not move the epoch under its successor."""
    old = grant(store)
    expire(store)
    new = grant(store)

    assert store.jump(old, 41) is None
    assert store.read(NAME).epoch == new.epoch


def test_raising_the_epoch_ends_the_term_and_the_next_grant_is_above_it(store):
    """What an operator does after a lossy failover: nobody leads on as before."""
    term = grant(store)

    raised = store.raise_epoch(NAME, 100)

    assert (raised.epoch, raised.holder) == (100, None)
    assert store.renew(term, 30) is Renewal.LOST
    assert not store.release(term)
    assert store.history(NAME, 1)[0].ended == "conflict"
    assert grant(store).epoch == 101


@pytest.mark.parametrize("to", [1, 5])
def test_the_epoch_is_never_lowered(store, to):
    """Lowering it would hand epochs out twice."""
    store.raise_epoch(NAME, 5)

    assert store.raise_epoch(NAME, to) is None
    assert store.read(NAME).epoch == 5


@pytest.mark.parametrize("to", [0, -1, MAX_EPOCH])
def test_an_epoch_out_of_range_is_refused(store, to):
    """Above 2**53 readers that count in doubles would take two epochs for one."""
    with pytest.raises(ConfigurationError, match="out of range"):
        store.raise_epoch(NAME, to)


def test_a_term_is_not_jumped_out_of_range(store):
    """It cannot lead, and goes on asking as where the database is away."""
    with pytest.raises(StoreError, match="no epoch is left"):
        store.jump(grant(store), MAX_EPOCH - 1)


def test_the_database_itself_keeps_epochs_in_range(store):
    """SQLite turns an integer that overflows into a float without a word."""
    with pytest.raises(sa.exc.DBAPIError), store.engine.begin() as connection:
        connection.execute(sa.update(lease_table).values(epoch=MAX_EPOCH))


def test_a_conflict_is_recorded_as_the_end_of_its_term(store):
    """After the incident, somebody asks why it stopped."""
    term = grant(store)
    store.end_by_conflict(term)

    assert store.history(NAME, 1)[0].ended == "conflict"


# --- the database's clock -----------------------------------------------------------------


def test_instants_keep_their_fractions_and_come_back_in_utc(store):
    """A database that rounds to seconds (MySQL's default) would expire leases early or late."""
    with store.engine.connect() as connection:
        now, later = connection.execute(
            sa.select(utcnow(), from_now(0.25)).select_from(lease_table)
        ).one()

    assert now.utcoffset().total_seconds() == 0
    assert 0.249 <= (later - now).total_seconds() <= 0.26


@pytest.mark.parametrize("seconds", [12.345, -12.345, 0.0])
def test_the_time_that_is_left_is_counted_by_the_database(store, seconds):
    """What a loser is told, and what a retry waits for, must not depend on this host's clock."""
    with store.engine.begin() as connection:
        connection.execute(sa.update(lease_table).values(expires_at=from_now(seconds)))
        left = connection.execute(sa.select(seconds_until(lease_table.c.expires_at))).scalar_one()

    assert seconds - 1 < float(left) <= seconds + 0.002


def test_no_more_time_is_left_than_was_given(store):
    """A leader that goes by it would trust its lease for longer than the others do."""
    left = sa.select(seconds_until(from_now(60))).select_from(lease_table)
    with store.engine.connect() as connection:
        # At many fractions of a second, as they decide how a float is rounded.
        for _ in range(200):
            assert 59 < float(connection.execute(left).scalar_one()) <= 60
            time.sleep(0.001)


def test_how_far_the_hosts_clock_is_ahead_is_measured_within_what_the_question_took(
    store, monkeypatch
):
    """What is due goes by the host's clock; a slow answer must not pass for a wrong one."""

    class Ahead(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(minutes=5)

    monkeypatch.setattr("celery_lease.stores.leases.datetime", Ahead)

    ahead, doubt = store.skew()

    assert ahead - doubt - 0.001 <= 300 <= ahead + doubt + 0.001


def test_names_that_differ_in_case_are_two_leases(store):
    """MySQL's default collation takes "celery" and "Celery" for one."""
    store.ensure("Celery")
    grant(store)

    assert store.read("Celery").epoch == 0
    assert [each.name for each in store.read_all()] == ["Celery", "celery"]
