"""What a ledger must do, on every kind of database."""

import uuid
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
import sqlalchemy as sa

from celery_lease.errors import LeaseLost
from celery_lease.lease import Holder, Term
from celery_lease.occurrence import Run, RunState, Skipped, run_id
from celery_lease.stores.entries import EntryState, SQLEntries
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.ledger import SQLLedger
from celery_lease.stores.retention import prune
from celery_lease.stores.schema import commit_table, entry_table, run_table, term_table

NOON = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=timezone.utc)
LEASE = "contract"


@pytest.fixture
def store(database_url):
    """A lease store on an empty database, its tables made."""
    store = SQLLeaseStore(database_url)
    store.prepare(create=True)
    store.ensure(LEASE)
    yield store
    store.dispose()


@pytest.fixture
def ledger(store):
    """The ledger under test."""
    return SQLLedger(store.engine, idle=5.0)


@pytest.fixture
def term(store):
    """The term that leads at first."""
    return take_over(store)


def take_over(store):
    """Have a new term lead, whoever led before."""
    lease = store.read(LEASE)
    if lease.held:
        store.raise_epoch(LEASE, lease.epoch + 1)
    term = store.acquire(LEASE, Holder.current(), 60.0, str(uuid.uuid4()))
    assert isinstance(term, Term)
    store.raise_fence(term)
    return term


def runs_of(*entries, hour=0, fenced=True):
    """Return new runs, one for each entry."""
    due = NOON + timedelta(hours=hour)
    return [Run(id=run_id(LEASE, e, due), entry=e, due_at=due, fenced=fenced) for e in entries]


def rows(store, *columns):
    """Return columns of all runs, by entry and due_at."""
    query = sa.select(*(run_table.c[each] for each in columns)).order_by(
        run_table.c.entry, run_table.c.due_at
    )
    with store.engine.connect() as connection:
        return [tuple(row) for row in connection.execute(query)]


def write(store, statement):
    """Run a statement of the test's own."""
    with store.engine.begin() as connection:
        connection.execute(statement)


def commit(store, term, run, outcome="committed"):
    """Settle a run, as a worker does."""
    values = {
        "task_id": run.id,
        "lease": LEASE,
        "epoch": term.epoch,
        "term": term.uuid,
        "execution": str(uuid.uuid4()),
        "outcome": outcome,
        "at": datetime.now(timezone.utc),
    }
    write(store, sa.insert(commit_table).values(values))


def outcomes(store):
    """Return what is settled, by task id."""
    query = sa.select(commit_table.c.task_id, commit_table.c.outcome)
    with store.engine.connect() as connection:
        return dict(tuple(row) for row in connection.execute(query))


def refuse(store, run):
    """Mark a run as refused, as a worker does."""
    write(
        store,
        sa.update(run_table).where(run_table.c.id == run.id).values(state="refused", open=True),
    )


def test_a_claim_is_all_there_before_anything_is_sent(store, ledger, term):
    """A crash right after it leaves what the next leader needs."""
    moved = [EntryState(name="a", first_seen_at=NOON, last_run_at=NOON, total_run_count=7)]
    skipped = Skipped(first=NOON, last=NOON + timedelta(hours=2), count=3, reason="late")

    known = ledger.claim(term, runs_of("a"), skipped=[("b", skipped)], moved=moved)

    assert known == set()
    assert rows(store, "entry", "due_at", "state", "open", "epoch", "attempt") == [
        ("a", NOON, "claimed", True, term.epoch, 1),
        ("b", NOON, "skipped", False, term.epoch, 0),
    ]
    assert rows(store, "reason", "skipped", "skipped_until")[1] == (
        "late",
        3,
        NOON + timedelta(hours=2),
    )
    assert list(SQLEntries(store.engine, idle=5.0).load(LEASE)) == moved


def test_a_deposed_leader_claims_nothing(store, ledger, term):
    """It may not know yet; the transaction that would write does."""
    take_over(store)
    moved = [EntryState(name="a", first_seen_at=NOON, last_run_at=NOON, total_run_count=1)]

    with pytest.raises(LeaseLost):
        ledger.claim(term, runs_of("a"), moved=moved)

    assert rows(store, "id") == []
    assert list(SQLEntries(store.engine, idle=5.0).load(LEASE)) == []


def test_a_term_with_the_same_epoch_claims_nothing_either(store, ledger, term):
    """A lossy failover can hand one epoch out twice."""
    with pytest.raises(LeaseLost):
        ledger.claim(replace(term, uuid=str(uuid.uuid4())), runs_of("a"))


def test_an_occurrence_is_claimed_once(store, ledger, term):
    """The second claim says which it was not given, and gives the others."""
    ledger.claim(term, runs_of("a"))

    known = ledger.claim(term, runs_of("a", "b"))

    assert known == {run_id(LEASE, "a", NOON)}
    assert rows(store, "entry", "attempt") == [("a", 1), ("b", 1)]


def test_a_series_that_begins_with_what_is_known_leaves_a_trace(store, ledger, term):
    """A clock went back, or an entry has its old last run: the rest is recorded under its last."""
    ledger.claim(term, [*runs_of("a"), *runs_of("a", hour=1), *runs_of("all")])
    last = NOON + timedelta(hours=5)
    series = Skipped(first=NOON, last=last, count=6, reason="late")
    known = Skipped(first=NOON, last=NOON, count=1, reason="late")

    ledger.claim(term, [], skipped=[("a", series), ("all", known), ("b", series)])

    assert rows(store, "entry", "due_at", "state", "skipped", "skipped_until") == [
        ("a", NOON, "claimed", None, None),
        ("a", NOON + timedelta(hours=1), "claimed", None, None),
        ("a", last, "skipped", 4, last),
        ("all", NOON, "claimed", None, None),
        ("b", NOON, "skipped", 6, last),
    ]


def test_more_runs_than_fit_into_one_list_of_ids(store, ledger, term):
    """A batch is larger than what some databases take in one IN."""
    names = [f"e{each:04d}" for each in range(1201)]
    runs = runs_of(*names, fenced=False)

    assert ledger.claim(term, runs) == set()
    assert ledger.claim(term, runs) == {each.id for each in runs}
    assert ledger.mark(term, [each.id for each in runs]) == len(names)


def test_a_mark_closes_plain_runs_and_keeps_fenced_ones(store, ledger, term):
    """Of a plain task nothing more is known; of a fenced one, how it ended."""
    runs = [*runs_of("fenced"), *runs_of("plain", fenced=False)]
    ledger.claim(term, runs)

    assert ledger.mark(term, [each.id for each in runs]) == 2

    assert rows(store, "entry", "state", "open") == [
        ("fenced", "published", True),
        ("plain", "published", False),
    ]


def test_a_refusal_that_was_faster_than_the_mark_stands(store, ledger, term):
    """The worker may have the message before the leader is told that it was sent."""
    (run,) = runs_of("a")
    ledger.claim(term, [run])
    refuse(store, run)

    assert ledger.mark(term, [run.id]) == 0
    assert rows(store, "state") == [("refused",)]


def test_a_late_mark_does_not_touch_the_next_leaders_claim(store, ledger, term):
    """A frozen leader wakes up between its publish and its mark."""
    runs = runs_of("a")
    ledger.claim(term, runs)
    later = take_over(store)
    left = ledger.to_recover(later, limit=10, own=False)
    assert ledger.reclaim(later, left) == {runs[0].id}

    assert ledger.mark(term, [runs[0].id]) == 0
    assert rows(store, "state", "epoch", "attempt") == [("claimed", later.epoch, 2)]


def test_the_next_leader_finds_what_was_left_oldest_first(store, ledger, term):
    """Claimed and never sent, or refused; not what is published or settled."""
    old, refused, published, settled = runs_of("a", "b", "c", "d")
    ledger.claim(term, [old, refused, published, settled])
    ledger.mark(term, [refused.id, published.id])
    refuse(store, refused)
    commit(store, term, settled)
    later = take_over(store)

    left = ledger.to_recover(later, limit=10, own=False)

    assert {each.entry: each.state for each in left} == {
        "a": RunState.CLAIMED,
        "b": RunState.REFUSED,
    }
    assert len(ledger.to_recover(later, limit=1, own=False)) == 1


def test_a_terms_own_claims_are_left_only_when_it_lost_track(store, ledger, term):
    """It sends them itself, unless a COMMIT's answer was lost."""
    ledger.claim(term, runs_of("a"))

    assert ledger.to_recover(term, limit=10, own=False) == []
    assert [each.entry for each in ledger.to_recover(term, limit=10, own=True)] == ["a"]


def test_a_run_is_claimed_again_only_as_it_was_read(store, ledger, term):
    """What somebody else changed in the meantime is theirs."""
    (run,) = runs_of("a")
    ledger.claim(term, [run])
    later = take_over(store)
    left = ledger.to_recover(later, limit=10, own=False)
    assert ledger.reclaim(later, left) == {run.id}

    assert ledger.reclaim(later, left) == set()


def test_lost_runs_of_older_epochs_are_found_by_age(store, ledger, term):
    """A worker that died cannot say so; its epoch can no longer commit."""
    fresh, lost, done, plain = (*runs_of("a", "b", "c"), *runs_of("d", fenced=False))
    ledger.claim(term, [fresh, lost, done, plain])
    ledger.mark(term, [fresh.id, lost.id, done.id, plain.id])
    age(store, lost, done, plain)
    commit(store, term, done)
    later = take_over(store)

    (found,) = ledger.unsettled(later, age=600, limit=10)
    assert (found.entry, found.published_for) == ("b", pytest.approx(3600, abs=60))
    assert ledger.unsettled(term, age=600, limit=10) == [], "its own epoch may still commit"
    wanted = ledger.unsettled(term, age=600, limit=10, entries=["b", "c"])
    assert [each.entry for each in wanted] == ["b"], "but an entry can ask for it"


def age(store, *runs):
    """Have runs been claimed and published an hour ago."""
    hour_ago = datetime.now(timezone.utc) - timedelta(hours=1)
    write(
        store,
        sa.update(run_table)
        .where(run_table.c.id.in_([each.id for each in runs]))
        .values(published_at=hour_ago, claimed_at=hour_ago),
    )


def test_a_run_that_fails_for_good_is_settled(store, ledger, term):
    """No later attempt may commit: "gave up" is an outcome like any other."""
    (run,) = runs_of("a")
    ledger.claim(term, [run])

    ledger.end(term, [run], RunState.FAILED, "gave up after 5 attempts")

    assert rows(store, "state", "open", "reason") == [
        ("failed", False, "gave up after 5 attempts")
    ]
    assert outcomes(store) == {run.id: "failed"}


def test_giving_up_does_not_undo_a_commit(store, ledger, term):
    """The worker was faster by a moment."""
    (run,) = runs_of("a")
    ledger.claim(term, [run])
    commit(store, term, run)

    ledger.end(term, [run], RunState.FAILED, "gave up")

    assert outcomes(store) == {run.id: "committed"}


def test_a_skipped_run_is_closed_without_an_outcome(store, ledger, term):
    """Nothing ran; the reason is the record."""
    (run,) = runs_of("a")
    ledger.claim(term, [run])

    ledger.end(term, [run], RunState.SKIPPED, "x" * 400)

    assert rows(store, "state", "open", "reason") == [("skipped", False, "x" * 255)]
    assert outcomes(store) == {}


def test_settled_runs_are_closed_in_batches(store, ledger, term):
    """Recovery always looks at a small set, whatever the history."""
    runs = runs_of("a", "b", "c")
    ledger.claim(term, runs)
    ledger.mark(term, [each.id for each in runs])
    for each in runs[:2]:
        commit(store, term, each)

    assert [ledger.close_settled(term, limit=1) for _ in range(3)] == [1, 1, 0]
    assert rows(store, "entry", "open") == [("a", False), ("b", False), ("c", True)]


def test_running_tells_for_how_long_an_entry_is_not_settled(store, ledger, term):
    """Entries that must not overlap wait for this; of two runs the newest counts."""
    runs = runs_of("a", "b", "old")
    ledger.claim(term, [*runs, *runs_of("a", hour=-1)])
    age(store, runs[2], *runs_of("a", hour=-1))
    commit(store, term, runs[1])

    running = ledger.running(LEASE, ["a", "b", "c", "old"])

    assert running == {"a": pytest.approx(0, abs=60), "old": pytest.approx(3600, abs=60)}


def test_entries_are_stored_kept_and_forgotten(store, ledger, term):
    """First seen stays; an entry that left the schedule starts anew when it is back."""
    entries = SQLEntries(store.engine, idle=5.0)
    new = [
        EntryState(name=each, first_seen_at=NOON, last_run_at=None, total_run_count=0)
        for each in ("a", "b")
    ]
    entries.reconcile(term, added=new, removed=[])
    later = NOON + timedelta(hours=1)
    ledger.claim(
        term,
        [],
        moved=[EntryState(name="a", first_seen_at=later, last_run_at=later, total_run_count=1)],
    )

    entries.reconcile(term, added=[], removed=["b"])

    assert list(entries.load(LEASE)) == [
        EntryState(name="a", first_seen_at=NOON, last_run_at=later, total_run_count=1)
    ]
    with store.engine.connect() as connection:
        assert connection.execute(sa.select(entry_table.c.epoch)).scalars().all() == [term.epoch]


def test_a_deposed_leader_does_not_touch_the_entries(store, term):
    """Writing old state back is how takeovers go wrong elsewhere."""
    take_over(store)

    with pytest.raises(LeaseLost):
        SQLEntries(store.engine, idle=5.0).reconcile(
            term,
            added=[EntryState(name="a", first_seen_at=NOON, last_run_at=None, total_run_count=0)],
            removed=[],
        )

    assert list(SQLEntries(store.engine, idle=5.0).load(LEASE)) == []


def test_old_records_are_deleted_but_not_what_is_open(store, ledger, term):
    """Retention must never lose an occurrence; a commit outlives its run."""
    done, waiting, fresh = runs_of("done", "waiting", "fresh")
    ledger.claim(term, [done, waiting, fresh])
    ledger.mark(term, [done.id, waiting.id, fresh.id])
    age(store, done, waiting)
    commit(store, term, done)
    ledger.close_settled(term, limit=10)
    write(store, sa.update(commit_table).values(at=NOON - timedelta(days=365)))
    take_over(store)
    write(
        store,
        sa.update(term_table)
        .where(term_table.c.epoch == term.epoch)
        .values(ended_at=NOON - timedelta(days=365)),
    )

    deleted = [prune(store.engine, LEASE, retention=1800, limit=10) for _ in range(3)]

    assert [row[0] for row in rows(store, "entry")] == ["fresh", "waiting"]
    assert outcomes(store) == {}
    assert sum(deleted) == 3
    assert deleted[-1] == 0


def test_a_child_of_another_lease_is_not_deleted_with_ours(store, term):
    """Its id may be the same, and it is kept for as long as its own lease says."""
    for origin, lease in (("ours", LEASE), ("theirs", "another")):
        values = {"task_id": "child", "origin": origin, "lease": lease, "epoch": term.epoch}
        values |= {"term": term.uuid, "execution": origin, "outcome": "committed"}
        write(store, sa.insert(commit_table).values(**values, at=NOON - timedelta(days=365)))

    prune(store.engine, LEASE, retention=1800, limit=10)

    with store.engine.connect() as connection:
        assert connection.scalars(sa.select(commit_table.c.origin)).all() == ["theirs"]
