"""The leased scheduler: who ticks, what is sent, and what is left when it is not."""

import os
import signal
import socket
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import celery
import kombu
import pytest
import sqlalchemy as sa
from celery.beat import BeatLazyFunc, EmbeddedService, ScheduleEntry, Scheduler, Service
from celery.result import assert_will_not_block
from celery.schedules import crontab
from celery.schedules import schedule as interval

from celery_lease import leading, recovery
from celery_lease.errors import StoreContention, StoreUnavailable
from celery_lease.publish import Undelivered
from celery_lease.signals import occurrence_skipped
from celery_lease.stores.schema import commit_table, run_table
from tests.integration.beats import START, Beat, Cluster, Crash, crash, no_broker
from tests.services import wait_until


@pytest.fixture
def cluster(sqlite_url):
    """Beats over SQLite."""
    cluster = Cluster(sqlite_url)
    yield cluster
    cluster.close()


@pytest.fixture
def anywhere(database_url):
    """Beats over each kind of database."""
    cluster = Cluster(database_url)
    yield cluster
    cluster.close()


#: The way to have an entry run at once with stock beat.
EVER = datetime.min  # noqa: DTZ901 - as people write it
FENCED = {"entry": {"schedule": 60.0, "fenced": True}}


# --- who ticks --------------------------------------------------------------------------------


def test_of_two_beats_one_sends(anywhere):
    """The reason why this package exists."""
    first, second = anywhere.beat(), anywhere.beat()
    for beat in (first, second):
        beat.at(seconds=61).go()

    assert anywhere.sent() == [("entry", 1, 1)]
    assert (first.elector.leading, second.elector.leading) == (True, False)


def test_a_standby_leads_as_soon_as_the_leader_has_closed(anywhere):
    """A planned handover costs one retry interval and neither loses nor repeats a run."""
    first, second = anywhere.beat(), anywhere.beat()
    first.at(seconds=61).go()
    first.close()

    second.at(seconds=121).go()

    assert anywhere.sent() == [("entry", 1, 1), ("entry", 2, 2)]


def test_a_takeover_replays_nothing_and_keeps_the_phase(anywhere):
    """The state is loaded before a term's first tick; intervals count from due times."""
    first, second = anywhere.beat(), anywhere.beat()
    first.at(seconds=95).go()
    anywhere.depose()

    second.at(seconds=100).go()
    assert anywhere.sent() == [("entry", 1, 1)]
    second.at(seconds=121).go()

    assert anywhere.sent() == [("entry", 2, 2)]


def test_a_deposed_leader_steps_down_in_its_next_claim(anywhere):
    """It trusts its lease by its own clock, wrongly; the claim's transaction finds out."""
    first, second = anywhere.beat(), anywhere.beat()
    first.go()
    anywhere.depose()
    second.at(seconds=61).go()

    first.at(seconds=61).tick()

    assert not first.elector.leading
    assert anywhere.sent() == [("entry", 1, 2)]
    first.tick()  # and stands by, alive


def test_a_leader_whose_trust_ends_in_a_batch_sends_no_further_flush(cluster):
    """The window is checked before each flush; what was claimed is the next leader's."""
    schedule = {f"e{each:03d}": {"schedule": 60.0} for each in range(150)}
    first, second = cluster.beat(schedule), cluster.beat(schedule)
    first.go()
    first.after_flush = lambda runs: first.elector.concede("its trust window closed")
    first.at(seconds=61).tick()
    assert len(cluster.messages()) == 100

    cluster.depose()
    second.at(seconds=62).go()

    assert sorted(entry for entry, _, _ in cluster.sent()) == [
        f"e{e:03d}" for e in range(100, 150)
    ]
    assert {state for (state,) in cluster.runs("state")} == {"published"}


def test_nothing_escapes_from_a_tick(cluster, caplog):
    """Celery ends beat with a traceback at an exception; ours goes on."""
    beat = cluster.beat().go()
    beat.turn = lambda term: 1 / 0

    assert beat.tick() > 0
    assert "ZeroDivisionError" in caplog.text


# --- what is sent -----------------------------------------------------------------------------


def test_a_message_is_stock_beats_with_a_stamp(cluster):
    """Arguments, options, headers and the user's own stamps arrive as they do without us."""
    options = {
        "headers": {"mine": 1},
        "priority": 3,
        "countdown": 30,
        "stamped_headers": ["user"],
        "user": "stamp",
    }
    entry = {"schedule": 60.0, "args": (1,), "kwargs": {"b": 2}, "options": options}
    beat = cluster.beat({"entry": entry}).at(seconds=61).go()
    (message,) = cluster.messages()

    headers = message.headers
    assert message.payload[:2] == [[1], {"b": 2}]
    assert headers.get("celery_beat_task", False) is (celery.VERSION >= (5, 7))
    assert headers["mine"] == 1
    assert headers["eta"] is not None
    assert message.properties["priority"] == 3
    assert headers["stamps"] == {
        "user": "stamp",
        "lease_name": "celery",
        "lease_epoch": 1,
        "lease_term": beat.elector.term.uuid,
        "lease_run": headers["id"],
    }
    assert headers["id"] == cluster.runs("id")[0][0]


def test_an_entrys_options_are_not_touched(cluster):
    """Celery 5.7 writes into the headers it is given; those are the user's."""
    beat = cluster.beat({"entry": {"schedule": 60.0, "options": {"headers": {"mine": 1}}}})
    given = beat.schedule["entry"].options
    headers = given["headers"]

    beat.at(seconds=61).go()

    assert beat.schedule["entry"].options is given
    assert given == {"headers": {"mine": 1}}
    assert given["headers"] is headers


def test_lazy_arguments_are_evaluated_for_each_message(cluster):
    """As stock beat does: they are often the time of day."""
    values = iter(range(10))
    lazy = BeatLazyFunc(lambda: next(values))
    beat = cluster.beat({"entry": {"schedule": 60.0, "args": (lazy,)}})
    beat.at(seconds=61).go().at(seconds=121).go()

    assert [message.payload[0] for message in cluster.messages()] == [[0], [1]]


def test_each_send_passes_apply_entry_once(cluster, monkeypatch):
    """Sentry's cron monitoring hooks in there, on Celery's own class."""
    seen = []
    original = Scheduler.apply_entry

    def hooked(*args, **kwargs):
        _scheduler, entry = args
        seen.append(entry.name)
        return original(*args, **kwargs)

    monkeypatch.setattr(Scheduler, "apply_entry", hooked)
    cluster.beat().at(seconds=61).go()

    assert seen == ["entry"]


def test_what_is_due_together_is_one_claim(cluster):
    """Speed is a batch: 1,200 entries are three claims, not 1,200."""
    schedule = {f"e{each:04d}": {"schedule": 60.0} for each in range(1200)}
    beat = cluster.beat(schedule).go()
    claims = []
    claim = beat.dispatcher.ledger.claim
    beat.dispatcher.ledger.claim = lambda term, runs, **more: (
        claims.append(len(runs)) or claim(term, runs, **more)
    )

    beat.at(seconds=61).go()

    assert claims == [500, 500, 200]
    assert len({message.headers["id"] for message in cluster.messages()}) == 1200


# --- what is left on the way --------------------------------------------------------------------


def test_a_crash_between_claim_and_publish_loses_nothing(anywhere):
    """The next leader sends it, under its own epoch and the same id."""
    first, second = anywhere.beat(), anywhere.beat()
    first.go()
    first.before_flush = crash
    with pytest.raises(Crash):
        first.at(seconds=61).tick()
    (claimed,) = anywhere.runs("id", "state")
    anywhere.depose()

    second.at(seconds=62).go()

    (message,) = anywhere.messages()
    assert (message.headers["id"], "claimed") == claimed
    assert message.headers["stamps"]["lease_epoch"] == 2
    assert anywhere.runs("state", "attempt", "epoch") == [("published", 2, 2)]


def test_a_crash_between_publish_and_mark_sends_the_same_id_once_more(anywhere):
    """The worker's commit row tells the two apart; later occurrences are not held up."""
    first, second = anywhere.beat(), anywhere.beat()
    first.go()
    first.dispatcher.ledger.mark = lambda term, ids: crash(ids)
    with pytest.raises(Crash):
        first.at(seconds=61).tick()
    anywhere.depose()

    second.at(seconds=121).go()

    ids = [message.headers["id"] for message in anywhere.messages()]
    assert len(ids) == 3
    assert len(set(ids)) == 2


def test_a_broker_that_is_away_leaves_a_claim_that_is_sent_when_it_is_back(cluster):
    """Stock beat loses this occurrence for good."""
    beat = cluster.beat().go()
    beat.before_flush = no_broker
    beat.at(seconds=61).tick()
    (claimed,) = cluster.runs("id", "due", "state")
    assert claimed[1:] == (1, "claimed")

    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    beat.at(seconds=90).go()

    (message,) = cluster.messages()
    assert message.headers["id"] == claimed[0]
    assert cluster.runs("due", "state", "attempt") == [(1, "published", 1)]


def test_an_entry_with_an_unsent_claim_claims_no_more(cluster):
    """An outage of a day must not leave a day's messages; what was missed is a misfire."""
    beat = cluster.beat().go()
    beat.before_flush = no_broker
    for minutes in range(1, 6):
        beat.at(minutes=minutes, seconds=1).tick()
    assert cluster.runs("due", "state") == [(1, "claimed")]

    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    beat.at(minutes=5, seconds=30).go().at(minutes=5, seconds=40).go()

    assert [due for _, due, _ in cluster.sent()] == [1, 5]
    assert cluster.runs("due", "state", "skipped") == [
        (1, "published", None),
        (2, "skipped", 3),
        (5, "published", None),
    ]


def test_a_broker_that_is_away_does_not_block_the_loop(cluster):
    """One try, then a pause that is the loop's own: renewals and other entries go on."""
    beat = cluster.beat({"a": {"schedule": 60.0}, "b": {"schedule": 120.0}}).go()
    tries = []

    def away(runs):
        tries.append([run.entry for run in runs])
        no_broker(runs)

    beat.before_flush = away
    beat.at(seconds=61).tick()
    beat.at(seconds=121).tick()

    assert tries == [["a"]], "within the pause the broker is left alone"
    assert cluster.runs("entry", "state") == [("a", "claimed"), ("b", "claimed")]


def test_the_next_leader_sends_what_a_broker_did_not_take(cluster):
    """The broker comes back after the leader has changed."""
    first, second = cluster.beat(), cluster.beat()
    first.go()
    first.before_flush = no_broker
    first.at(seconds=61).tick()
    first.close()

    second.at(seconds=62).go()

    assert cluster.sent() == [("entry", 1, 2)]


def test_a_message_that_cannot_be_built_is_settled_as_failed(cluster):
    """It would never succeed; it must hold up neither its entry nor the others."""
    bad = {"schedule": 60.0, "args": (object(),)}
    beat = cluster.beat({"bad": bad, "good": {"schedule": 60.0}})
    beat.at(seconds=61).go()

    assert [entry for entry, _, _ in cluster.sent()] == ["good"]
    reasons = dict(cluster.runs("entry", "reason"))
    assert "not sent: EncodeError" in reasons["bad"]
    assert dict(cluster.runs("entry", "state"))["bad"] == "failed"
    assert [row.outcome for row in cluster.rows(commit_table)] == ["failed"]

    beat.at(seconds=121).go()
    assert [entry for entry, _, _ in cluster.sent()] == ["good"]


def test_an_error_of_the_users_own_code_holds_up_its_entry_alone(cluster, caplog):
    """A lazy argument may raise a broker's kind of error; the broker is well all the same."""
    files = iter([FileNotFoundError("today.csv"), FileNotFoundError("today.csv"), "today"])

    def read():
        found = next(files)
        if isinstance(found, Exception):
            raise found
        return found

    lazy = {"schedule": 60.0, "args": (BeatLazyFunc(read),)}
    beat = cluster.beat({"a": {"schedule": 60.0}, "lazy": lazy, "z": {"schedule": 60.0}})
    beat.at(seconds=61).go()
    assert [entry for entry, _, _ in cluster.sent()] == ["a", "z"]
    assert "no message can be made now" in caplog.text
    assert "FileNotFoundError: today.csv" in caplog.text

    for delay in (1.0, 2.0):
        assert beat.dispatcher.retry_in == pytest.approx(delay, abs=0.5)
        beat.dispatcher._unmade = dict.fromkeys(beat.dispatcher._unmade, (1, 0.0))
        beat.go()
    assert [entry for entry, _, _ in cluster.sent()] == ["lazy"]
    assert not beat.dispatcher.busy


def hook(monkeypatch, before=None, after=None):
    """Patch Celery's class as Sentry does; each is called with the name of the entry."""
    original = Scheduler.apply_entry

    def hooked(self, entry, **kwargs):
        if before is not None:
            before(entry.name)
        original(self, entry, **kwargs)
        if after is not None:
            after(entry.name)

    monkeypatch.setattr(Scheduler, "apply_entry", hooked)


def raising(error, name="m"):
    """Return what raises an error for one entry."""

    def check(entry):
        if entry == name:
            raise error

    return check


@pytest.mark.parametrize(
    ("error", "state"),
    [(KeyError("tenant"), "failed"), (ConnectionRefusedError("statsd"), "claimed")],
    ids=["never", "not now"],
)
def test_a_hook_that_fails_before_the_send_costs_its_run_alone(cluster, monkeypatch, error, state):
    """Those before it in the flush went out again and again, those behind it never."""
    hook(monkeypatch, before=raising(error))
    beat = cluster.beat({each: {"schedule": 60.0} for each in "amz"})
    beat.at(seconds=61).go().at(seconds=62).go()

    assert [entry for entry, _, _ in cluster.sent()] == ["a", "z"]
    assert dict(cluster.runs("entry", "state")) == {"a": "published", "m": state, "z": "published"}


def test_a_hook_that_fails_after_the_send_changes_nothing(cluster, monkeypatch, caplog):
    """The broker has the message: a run that fails or waits would be sent again."""
    hook(monkeypatch, after=raising(ConnectionRefusedError("statsd")))
    beat = cluster.beat({each: {"schedule": 60.0} for each in "amz"})
    beat.at(seconds=61).go().at(seconds=62).go()

    assert [entry for entry, _, _ in cluster.sent()] == ["a", "m", "z"]
    assert {state for (state,) in cluster.runs("state")} == {"published"}
    assert "a hook raised an error after that" in caplog.text
    assert "ConnectionRefusedError: statsd" in caplog.text


def test_a_run_that_waits_while_its_entry_is_removed_is_skipped(cluster):
    """There is nothing to make its message of; that is not the message's fault."""
    beat = cluster.beat().go()
    beat.before_flush = no_broker
    beat.at(seconds=61).tick()
    del beat.schedule["entry"]

    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    beat.at(seconds=62).tick()
    beat.go()

    assert cluster.messages() == []
    assert cluster.runs("state", "reason") == [("skipped", "entry removed")]


def waiting_while_m_is_removed(cluster):
    """Have three runs wait for the broker, the middle one's entry gone; return the beat."""
    beat = cluster.beat({each: {"schedule": 60.0} for each in "amz"}).go()
    beat.before_flush = no_broker
    beat.at(seconds=61).tick()
    del beat.schedule["m"]
    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    return beat.at(seconds=62)


def test_an_entry_that_is_removed_costs_the_others_of_its_flush_nothing(cluster, caplog):
    """Those before it went out a second time, under the same id: a plain task ran twice."""
    told = []

    def note(occurrence, reason, **_):
        told.append((occurrence.entry, reason))

    beat = waiting_while_m_is_removed(cluster)
    occurrence_skipped.connect(note, weak=False)
    try:
        beat.go().go()
    finally:
        occurrence_skipped.disconnect(note)

    assert [entry for entry, _, _ in cluster.sent()] == ["a", "z"]
    assert dict(cluster.runs("entry", "state")) == {
        "a": "published",
        "m": "skipped",
        "z": "published",
    }
    assert told == [("m", "entry removed")]
    assert "beat could not do its turn" not in caplog.text


def test_a_database_that_fails_over_one_run_does_not_cost_the_others_a_second_message(
    cluster, monkeypatch
):
    """What the broker has is marked, whatever becomes of a run that it does not have."""

    def deadlock(*_args):
        raise StoreContention("a deadlock")

    beat = waiting_while_m_is_removed(cluster)
    with monkeypatch.context() as once:
        once.setattr(beat.dispatcher.ledger, "end", deadlock)
        beat.tick()
    beat.go()

    assert [entry for entry, _, _ in cluster.sent()] == ["a", "z"]
    assert cluster.runs("state", "reason")[1] == ("skipped", "entry removed")


def _says_what_no_database_keeps():
    raise ValueError("a \0 and a \ud800")


@pytest.mark.parametrize(
    ("bad", "zone"),
    [
        ({"schedule": 10.0, "last_run_at": EVER}, "UTC"),
        ({"schedule": crontab(), "last_run_at": EVER}, "America/New_York"),
        ({"schedule": 60.0, "args": (BeatLazyFunc(_says_what_no_database_keeps),)}, "UTC"),
    ],
    ids=["more occurrences than a number holds", "before time began", "an unspeakable error"],
)
def test_a_strange_entry_holds_up_no_other(anywhere, bad, zone):
    """One line of a configuration must not silence all the others."""
    beat = anywhere.beat({"bad": bad, "good": {"schedule": 60.0}}, timezone=zone)
    beat.at(seconds=61).go().at(seconds=121).go()

    assert [entry for entry, _, _ in anywhere.sent() if entry == "good"] == ["good"] * 2


def test_what_a_database_does_not_take_of_one_entry_holds_up_no_other(cluster, monkeypatch):
    """The batch is one transaction; its entries are tried one by one then."""
    beat = cluster.beat({each: {"schedule": 60.0} for each in ("a", "bad", "z")})
    claim = beat.dispatcher.ledger.claim

    def refuses(term, runs, **kwargs):
        if any(run.entry == "bad" for run in runs):
            raise sa.exc.DataError("INSERT", {}, Exception("out of range"))
        return claim(term, runs, **kwargs)

    monkeypatch.setattr(beat.dispatcher.ledger, "claim", refuses)
    beat.at(seconds=61).go()

    assert [entry for entry, _, _ in cluster.sent()] == ["a", "z"]


def test_an_unknown_queue_fails_its_run_alone(cluster):
    """kombu counts a KeyError among Redis's connection errors; this one is ours."""
    entry = {"schedule": 60.0, "options": {"queue": "nowhere"}}
    cluster.beat({"bad": entry, "good": {"schedule": 60.0}}, task_create_missing_queues=False).at(
        seconds=61
    ).go()

    assert [entry for entry, _, _ in cluster.sent()] == ["good"]


def test_what_the_broker_turns_away_is_found_out_and_given_up(cluster):
    """One bad exchange closes the channel for all: it is sent alone, and then not at all."""
    beat = cluster.beat({e: {"schedule": 60.0} for e in "abc"}, beat_lease_max_attempts=2).go()

    def picky(runs):
        if any(run.entry == "b" for run in runs):
            raise Undelivered("no such exchange", turned_away=True, lasting=True)

    beat.before_flush = picky
    beat.at(seconds=61).tick()
    for _ in range(6):
        beat.dispatcher._retry_at = 0.0
        beat.at(seconds=62).tick()

    assert sorted(entry for entry, _, _ in cluster.sent()) == ["a", "c"]
    assert dict(cluster.runs("entry", "state")) == {
        "a": "published",
        "b": "failed",
        "c": "published",
    }


def test_an_entry_whose_message_was_turned_away_goes_alone_from_then_on(cluster):
    """In company it would have the others of its flush sent twice, at each of its firings."""
    beat = cluster.beat({e: {"schedule": 60.0} for e in "abc"}, beat_lease_max_attempts=1).go()
    flushes = []

    def picky(runs):
        flushes.append([run.entry for run in runs])
        if "b" in flushes[-1]:
            raise Undelivered("no such exchange", turned_away=True, lasting=True)

    beat.before_flush = picky
    for seconds in (61, 62, 63):
        beat.dispatcher._retry_at = 0.0
        beat.at(seconds=seconds).go()
    flushes.clear()
    beat.at(seconds=121).go()

    assert flushes == [["a"], ["b"], ["c"]]
    assert sorted(entry for entry, _, _ in cluster.sent()) == ["a", "a", "c", "c"]


def test_what_the_broker_is_known_to_have_is_not_sent_again(cluster, monkeypatch):
    """Most brokers take each message at once: a reset in a flush leaves only the rest."""
    beat = cluster.beat({e: {"schedule": 60.0} for e in "abcde"}).go()
    publish = kombu.Producer.publish
    tries = []

    def reset(self, *args, **kwargs):
        tries.append(kwargs["headers"]["id"])
        if len(tries) == 4:
            raise ConnectionResetError("connection reset by peer")
        return publish(self, *args, **kwargs)

    monkeypatch.setattr(kombu.Producer, "publish", reset)
    beat.at(seconds=61).tick()
    assert [state for (state,) in cluster.runs("state")].count("published") == 3
    beat.dispatcher._retry_at = 0.0
    beat.at(seconds=62).go()

    assert sorted(entry for entry, _, _ in cluster.sent()) == list("abcde")
    assert len(tries) == 6


@pytest.mark.parametrize("limit", ["sending.MAKING", "dispatch.SENDING"])
def test_messages_that_take_long_to_make_are_sent_in_smaller_helpings(cluster, monkeypatch, limit):
    """The trust is checked again, and the loop, which signals wait for, is not away for long."""
    monkeypatch.setattr(f"celery_lease.{limit}", -1.0)
    beat = cluster.beat({f"e{each}": {"schedule": 60.0} for each in range(150)}).go()
    flushes = []
    beat.after_flush = lambda runs: flushes.append(len(runs))

    beat.at(seconds=61).tick()
    first = len(flushes)
    beat.go()

    assert first == (150 if limit == "sending.MAKING" else 1)
    assert len(cluster.sent()) == 150
    assert {state for (state,) in cluster.runs("state")} == {"published"}


def test_a_flush_that_is_cut_short_knows_what_it_left(cluster, monkeypatch):
    """Whatever order an override of ``flush`` gives them."""
    monkeypatch.setattr("celery_lease.sending.MAKING", -1.0)

    class Backwards(Beat):
        def flush(self, sendings):
            super().flush(list(reversed(sendings)))

    cluster.beat({e: {"schedule": 60.0} for e in "abcd"}, cls=Backwards).at(seconds=61).go()

    assert sorted(entry for entry, _, _ in cluster.sent()) == list("abcd")


def test_what_is_turned_away_alone_does_not_keep_the_loop_away_either(cluster, monkeypatch):
    """Each one costs a connection: a turn ends in time, and the others wait for the next."""
    monkeypatch.setattr("celery_lease.dispatch.SENDING", -1.0)
    beat = cluster.beat({e: {"schedule": 60.0} for e in "abcd"}).go()
    flushes = []

    def full(runs):
        flushes.append([run.entry for run in runs])
        raise Undelivered("the queue is full", turned_away=True)

    beat.before_flush = full
    beat.at(seconds=61).tick()
    for _ in range(3):
        beat.dispatcher._retry_at = 0.0
        beat.at(seconds=62).tick()

    assert flushes == [["a", "b", "c", "d"], ["a"], ["b"], ["c"]]


def test_what_waited_for_the_broker_for_longer_than_its_grace_is_not_sent(cluster):
    """Under the leader that claimed it, as under the next."""
    beat = cluster.beat({"entry": {"schedule": 3600.0, "grace": 60}}).go()
    beat.before_flush = no_broker
    beat.at(hours=1, seconds=1).tick()
    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    beat.at(hours=1, minutes=30).go()

    assert cluster.messages() == []
    assert cluster.runs("state", "reason") == [("skipped", "more than 60 s late")]


def test_a_lazy_argument_may_wait_for_a_result(cluster):
    """As with stock beat, which does not say whether it is wise."""
    lazy = {"schedule": 60.0, "args": [BeatLazyFunc(assert_will_not_block)]}
    cluster.beat({"lazy": lazy}).at(seconds=61).go()

    assert [entry for entry, _, _ in cluster.sent()] == ["lazy"]


def test_a_result_store_that_is_away_holds_up_nothing(cluster):
    """Celery's would listen for each result, and try for twenty seconds to begin with it."""
    cluster.conf["result_backend"] = "redis://127.0.0.1:1/0"
    cluster.beat({"a": {"schedule": 60.0}, "b": {"schedule": 60.0}}).at(seconds=61).go()

    assert sorted(entry for entry, _, _ in cluster.sent()) == ["a", "b"]


def test_a_claim_whose_answer_was_lost_is_read_again(cluster):
    """The COMMIT may have arrived: the ledger tells, and it is sent once."""
    beat = cluster.beat().go()
    claim = beat.dispatcher.ledger.claim

    def lose_the_answer(*args, **kwargs):
        claim(*args, **kwargs)
        raise StoreUnavailable("server closed the connection unexpectedly")

    beat.dispatcher.ledger.claim = lose_the_answer
    beat.at(seconds=61).tick()
    beat.dispatcher.ledger.claim = claim
    beat.go()

    assert cluster.sent() == [("entry", 1, 1)]
    assert cluster.runs("state", "attempt") == [("published", 1)]


def test_what_could_not_be_marked_is_marked_later_and_not_sent_again(cluster):
    """The broker has it: a database that was away for the mark costs no second message."""
    beat = cluster.beat().go()
    ledger = beat.dispatcher.ledger
    mark = ledger.mark

    def away(term, ids):
        raise StoreUnavailable("server closed the connection unexpectedly")

    ledger.mark = away
    assert beat.at(seconds=61).tick() <= 1.0, "and soon"
    assert cluster.runs("state") == [("claimed",)]

    ledger.mark = mark
    beat.go()

    assert len(cluster.messages()) == 1
    assert cluster.runs("state", "attempt") == [("published", 1)]


def test_more_lost_track_of_than_fits_into_one_round_is_all_sent(cluster):
    """Broker away, then the database: the ledger is read again, in bounded rounds."""
    schedule = {f"e{each:04d}": {"schedule": 60.0} for each in range(1200)}
    beat = cluster.beat(schedule).go()
    beat.before_flush = no_broker
    while len(cluster.runs("id")) < 1200:
        beat.at(seconds=61).tick()

    beat._forget()  # as after any error of the lease database
    beat.go()
    assert cluster.messages() == []
    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    beat.at(seconds=62).go()  # as many turns as it takes, and no pause between them

    ids = [message.headers["id"] for message in cluster.messages()]
    assert len(ids) == len(set(ids)) == 1200


# --- runs that were refused or lost -------------------------------------------------------------


def published(cluster, beat, **schedule):
    """Have one run published, and return its id."""
    beat.at(seconds=61).go()
    (message,) = cluster.messages()
    return message.headers["id"]


def test_a_refused_run_is_sent_again_under_the_current_epoch(anywhere):
    """Strict fencing costs an attempt, never the occurrence."""
    first, second = anywhere.beat(FENCED), anywhere.beat(FENCED)
    run = published(anywhere, first)
    anywhere.depose()
    second.at(seconds=70).go()
    anywhere.refuse(run)

    second._renewals -= 1  # the next renewal
    second.at(seconds=80).go()

    assert anywhere.sent() == [("entry", 1, 2)]
    assert anywhere.runs("state", "attempt", "epoch", "open") == [("published", 2, 2, True)]


def test_a_run_is_sent_again_from_the_entry_as_it_is_now(cluster):
    """Neither task nor arguments are stored: a fixed deployment fixes the run."""
    old = cluster.beat(FENCED)
    run = published(cluster, old)
    old.close()
    cluster.refuse(run)

    cluster.beat({"entry": {**FENCED["entry"], "args": ("new",)}}).at(seconds=70).go()

    (message,) = cluster.messages()
    assert (message.headers["id"], message.payload[0]) == (run, ["new"])


def test_a_run_of_an_entry_that_is_gone_is_skipped_with_that_reason(cluster):
    """There is nothing to send any more, and somebody may ask why."""
    old = cluster.beat(FENCED)
    run = published(cluster, old)
    cluster.refuse(run)
    old.close()
    told = []

    def note(occurrence, reason, **_):
        told.append((occurrence.run_id, reason))

    occurrence_skipped.connect(note, weak=False)
    try:
        cluster.beat({"other": {"schedule": 3600.0}}).at(seconds=70).go()
    finally:
        occurrence_skipped.disconnect(note)

    assert told == [(run, "entry removed")]
    assert cluster.messages() == []
    assert cluster.runs("entry", "state", "reason") == [("entry", "skipped", "entry removed")]


def test_a_run_that_was_refused_too_often_is_given_up(cluster, caplog):
    """A task longer than the time between takeovers never commits: warn, then settle."""
    beat = cluster.beat(FENCED, beat_lease_max_attempts=3)
    run = published(cluster, beat)
    for _ in range(3):
        cluster.refuse(run)
        beat._renewals -= 1
        beat.go()

    assert len(cluster.messages()) == 2
    assert cluster.runs("state", "reason") == [("failed", "gave up after 3 attempts")]
    assert [row.outcome for row in cluster.rows(commit_table)] == ["failed"]
    assert "attempt 3" in caplog.text


def test_the_last_attempt_is_not_given_up_before_the_broker_has_taken_it(cluster):
    """It is claimed, and the broker is away: what was not sent is no attempt."""
    beat = cluster.beat(FENCED, beat_lease_max_attempts=2)
    run = published(cluster, beat)
    cluster.refuse(run)
    beat.before_flush = no_broker
    beat._renewals -= 1
    beat.go()

    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    beat.go()

    assert cluster.sent() == [("entry", 1, 1)]
    assert cluster.runs("state", "attempt") == [("published", 2)]


def test_leaders_that_come_and_go_while_the_broker_is_away_use_up_no_attempts(cluster):
    """A rolling restart is enough for five of them, and none has sent anything."""
    beat = cluster.beat(FENCED)
    run = published(cluster, beat)
    cluster.refuse(run)
    for _ in range(6):
        beat.close()
        beat = cluster.beat(FENCED)
        beat.before_flush = no_broker
        beat.at(seconds=70).go()

    beat.before_flush = lambda runs: None
    for _ in range(4):
        beat.dispatcher._retry_at = 0.0
        beat._renewals -= 1
        beat.go()
        cluster.refuse(run)
    beat._renewals -= 1
    beat.go()

    assert len(cluster.messages()) == 4, "and five with the first one"
    assert cluster.runs("state", "reason") == [("failed", "gave up after 5 attempts")]


def test_a_lost_run_of_an_older_epoch_is_sent_again_after_a_while(cluster):
    """A worker can die before it records its refusal, and that attempt cannot commit."""
    first, second = cluster.beat(FENCED), cluster.beat(FENCED)
    published(cluster, first)
    cluster.depose()
    second.at(seconds=70).go()
    assert cluster.messages() == []

    cluster.write(sa.text("UPDATE celery_lease_run SET published_at = '2020-01-01 00:00:00'"))
    second._renewals -= 1
    second.at(seconds=80).go()

    assert cluster.sent() == [("entry", 1, 2)]


def test_a_lost_run_of_this_epoch_is_sent_again_where_the_entry_asks(cluster):
    """Off by default: under the current epoch the worker may merely be slow."""
    asking = {"schedule": 60.0, "fenced": True, "retry_lost_after": 30}
    beat = cluster.beat({"asks": asking, "not": FENCED["entry"]})
    beat.at(seconds=61).go()
    cluster.messages()
    cluster.write(sa.text("UPDATE celery_lease_run SET published_at = '2020-01-01 00:00:00'"))

    beat._renewals -= 1
    beat.go()

    assert [entry for entry, _, _ in cluster.sent()] == ["asks"]


def test_runs_that_have_time_yet_do_not_hide_a_lost_one(cluster, monkeypatch):
    """What a round reads is bounded, and a countdown of a day is no loss."""
    monkeypatch.setattr(recovery, "BATCH", 2)
    slow = {"schedule": 60.0, "fenced": True, "misfire": "all", "options": {"countdown": 86400}}
    schedule = {"a-slow": slow, "lost": {"schedule": 240.0, "fenced": True}}
    first, second = (cluster.beat(schedule, beat_lease_redispatch_after=60) for _ in range(2))
    first.at(seconds=181).go().at(seconds=241).go()
    assert len(cluster.messages()) == 5
    two_minutes_ago = datetime.now(timezone.utc) - timedelta(minutes=2)
    cluster.write(sa.update(run_table).values(published_at=two_minutes_ago))
    cluster.depose()

    second.turn = lambda term: 1.0  # Nothing new, whatever the hour is.
    second.go()

    assert [entry for entry, _, epoch in cluster.sent() if epoch == 2] == ["lost"]


class Nowhere(ScheduleEntry):
    """An entry whose options ask somebody who does not answer."""

    options = property(lambda self: 1 / 0, lambda self, value: None)


@pytest.mark.parametrize(
    ("wrong", "state"),
    [
        ({"options": {"countdown": timedelta(minutes=5)}}, "failed"),
        ({"options": {"countdown": "soon"}}, "failed"),
        ({"cls": Nowhere}, "published"),
    ],
)
def test_an_entry_that_was_edited_to_nonsense_does_not_hold_up_recovery(cluster, wrong, state):
    """Neither that of the others nor the turns after it: nothing would be sent any more."""
    both = {name: {"schedule": 3600.0, "fenced": True} for name in ("bad", "good")}
    first = cluster.beat(both, beat_lease_redispatch_after=60)
    first.at(hours=1, seconds=1).go()
    cluster.messages()
    cluster.write(sa.text("UPDATE celery_lease_run SET published_at = '2020-01-01 00:00:00'"))
    cluster.depose()

    second = cluster.beat(both, beat_lease_redispatch_after=60)
    entry = second.schedule["bad"]
    entry.__class__ = wrong.get("cls", type(entry))
    entry.options = wrong.get("options")
    second.at(hours=1, seconds=2).go().at(hours=2, seconds=1).go()

    sent = [(entry, due) for entry, due, _ in cluster.sent()]
    assert [each for each in sent if each[0] == "good"] == [("good", 60), ("good", 120)]
    states = {(entry, due): state for entry, due, state in cluster.runs("entry", "due", "state")}
    assert states["bad", 60] == state


def test_each_attempt_at_a_lost_run_gets_twice_the_time(cluster):
    """Messages that only wait in a long queue must not make it longer and longer."""
    hourly = {"schedule": 3600.0, "last_run_at": START - timedelta(hours=1)}
    beat = cluster.beat({"asks": {**hourly, "fenced": True, "retry_lost_after": 30}})
    beat.go()
    cluster.messages()

    def published_before(seconds):
        instant = datetime.now(timezone.utc) - timedelta(seconds=seconds)
        cluster.write(sa.update(run_table).values(published_at=instant))
        beat._renewals -= 1
        beat.go()
        return len(cluster.sent())

    sent = [published_before(seconds) for seconds in (31, 59, 61, 119, 121)]

    assert sent == [1, 0, 1, 0, 1]


def test_a_settled_run_is_left_alone_and_closed(cluster):
    """What settled is read from the commits, whatever the run's state says."""
    beat = cluster.beat(FENCED)
    run = published(cluster, beat)
    cluster.refuse(run)
    cluster.commit(run)

    beat._renewals -= 1
    beat.go()

    assert cluster.messages() == []
    assert cluster.runs("open") == [(False,)]


def test_expires_counts_from_the_due_time_when_a_run_is_sent_again(cluster):
    """A day's "good for an hour" must not begin anew with each attempt."""
    entry = {**FENCED["entry"], "options": {"expires": 3600}}
    beat = cluster.beat({"entry": entry})
    run = published(cluster, beat)
    cluster.refuse(run)

    beat._renewals -= 1
    beat.at(minutes=20).go()

    (message, _later) = cluster.messages()
    due = START + timedelta(minutes=1)
    assert message.headers["expires"] == (due + timedelta(hours=1)).isoformat()


# --- beginning and ending -----------------------------------------------------------------------


def test_a_lazy_scheduler_touches_nothing(tmp_path):
    """Celery makes one for its banner, in whatever process prints it."""
    cluster = Cluster(f"sqlite:///{tmp_path}/lease.sqlite3")
    beat = Beat(app=cluster.app({}), lazy=True)

    info = beat.info
    beat.close()

    assert "lease -> celery (ttl 60s, retry 0.05s)" in info
    assert "(this host only)" in info
    assert list(tmp_path.iterdir()) == []


def test_the_banner_masks_the_password():
    """It ends up in logs that many can read."""
    cluster = Cluster("postgresql+psycopg://beat:secret@db/lease")

    info = Beat(app=cluster.app({}), lazy=True).info

    assert "beat:***@db/lease" in info
    assert "secret" not in info


def test_a_lease_in_a_file_that_is_not_named_in_full_is_warned_of(
    cluster, caplog, tmp_path, monkeypatch
):
    """Two beats that were started in two places would both lead."""
    monkeypatch.chdir(tmp_path)
    relative = cluster.beat(beat_lease_url="sqlite:///lease.sqlite3")
    cluster.beat()

    assert str(tmp_path / "lease.sqlite3") in relative.info
    (warning,) = [
        each
        for each in caplog.records
        if getattr(each, "action", "") == "lease-in-a-relative-file"
    ]
    assert str(tmp_path / "lease.sqlite3") in warning.getMessage()


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"beat_lease_url": "nosuch://host/db"}, ["beat_lease_url", "postgresql+psycopg://"]),
        ({"beat_lease_ttl": 20, "beat_lease_renew_interval": 19}, ["renew_interval", "ttl"]),
        ({"beat_lease_tll": 20}, ["beat_lease_tll", "beat_lease_ttl"]),
        ({"beat_lease_misfire": "sometimes"}, ["beat_lease_misfire", "'latest'"]),
        ({"beat_max_loop_interval": 120}, ["beat_max_loop_interval", "beat_lease_ttl"]),
        ({"task_protocol": 1}, ["task_protocol", "2"]),
        ({"beat_lease_auto_init": False}, ["beat_lease_url", "celery lease init"]),
        ({"beat_lease_url": "sqlite:////nowhere/l.sqlite3"}, ["/nowhere/l", "unable to open"]),
    ],
)
def test_what_is_certainly_wrong_ends_beat_with_one_line(cluster, caplog, conf, words):
    """The line names the setting and the way out; a traceback would bury it."""
    with pytest.raises(SystemExit) as ended:
        cluster.beat(**conf)

    (line,) = [each for each in caplog.records if each.levelname == "CRITICAL"]
    assert all(word in line.getMessage() for word in words)
    assert "\n" not in line.getMessage()
    assert line.exc_info is None
    assert ended.value.code == 1


def test_a_wrong_wish_of_an_entry_ends_beat_too(cluster, caplog):
    """The line names entry and key."""
    with pytest.raises(SystemExit):
        cluster.beat({"entry": {"schedule": 60.0, "misfire": "sometimes"}})

    assert "beat_schedule['entry']['misfire']" in caplog.text


class Own(Beat):
    """A user's scheduler with Celery's entries."""

    Entry = ScheduleEntry


def _no_clock():
    raise OSError("ntp:\nno answer")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"task": "t", "schedule": 60.0, "missfire": "all"}, "['missfire'] is not a key"),
        ({"task": "t", "schedule": "*/5 * * * *"}, "['schedule'] = '*/5 * * * *' is not a sch"),
        ({"task": "t"}, "['schedule'] = None is not a schedule"),
        ({"task": "t", "schedule": 0}, "['schedule'] = 0 is no interval that comes round"),
        ({"task": "t", "schedule": -1.0}, "['schedule'] = -1.0 is no interval"),
        ({"task": "t", "schedule": float("nan")}, "['schedule'] = nan is no interval"),
        ({"task": "t", "schedule": float("inf")}, "['schedule'] = inf is no interval"),
        ({"task": "t", "schedule": interval(0)}, "['schedule'] = <freq: "),
        ({"task": "t", "schedule": timedelta.max}, "['schedule'] = datetime.timedelta(days=9"),
        ({"schedule": 60.0}, "['task'] = None is not the name of a task"),
        ({"task": object, "schedule": 60.0}, "['task'] = <class 'object'> is not the name"),
        ({"task": "t", "schedule": 60.0, "options": ["x"]}, "['options'] = ['x'] is not a dict"),
        ({"task": "t", "schedule": crontab(nowfun=_no_clock)}, ": OSError: ntp: no answer"),
        ("*/5 * * * *", ": ValueError: "),
    ],
)
def test_an_entry_that_cannot_be_made_ends_beat_too(cluster, caplog, wrong, words):
    """The line names it: Celery's traceback does not, and there may be thousands of them."""
    app = cluster.app({"a": {"schedule": 60.0}, "z": {"schedule": 60.0}})
    app.conf.beat_schedule["bad"] = wrong
    with pytest.raises(SystemExit):
        Beat(app=app)

    (line,) = [each for each in caplog.records if each.levelname == "CRITICAL"]
    assert f"beat cannot start: beat_schedule['bad']{words}" in line.getMessage()
    assert "\n" not in line.getMessage()
    assert line.exc_info is None


def test_an_entry_of_another_class_that_cannot_be_made_is_named_too(cluster, caplog):
    """Of whatever class it is: with Celery's own words."""
    with pytest.raises(SystemExit):
        cluster.beat({"bad": {"schedule": 60.0, "enabled": True}}, cls=Own)

    assert "beat cannot start: beat_schedule['bad']: TypeError: " in caplog.text
    assert "'enabled'" in caplog.text


def test_entries_that_are_no_dict_end_beat_too(cluster, caplog):
    """Nothing can be named then but the setting."""
    app = cluster.app({})
    app.conf.beat_schedule = [{"task": "t", "schedule": 60.0}]
    with pytest.raises(SystemExit):
        Beat(app=app)

    assert "beat cannot start: beat_schedule is a list" in caplog.text


@pytest.mark.parametrize("signal", ["on_after_configure", "on_after_finalize"])
def test_a_name_with_the_address_of_an_argument_ends_beat_too(cluster, caplog, signal):
    """``add_periodic_task`` makes it; the next leader would know nothing of that entry."""
    app = cluster.app({})

    def add(sender, **_):
        sender.add_periodic_task(60.0, sender.signature("t.a", args=(BeatLazyFunc(list),)))

    getattr(app, signal).connect(add, weak=False)
    app.finalize()
    with pytest.raises(SystemExit):
        Beat(app)

    (line,) = [each for each in caplog.records if each.levelname == "CRITICAL"]
    assert "add_periodic_task takes a name=" in line.getMessage()
    assert "\n" not in line.getMessage()


def test_a_schedule_with_a_clock_that_has_no_zone_ends_beat_too(cluster, caplog):
    """What would fire at another hour than it did is told before it does."""
    with pytest.raises(SystemExit):
        cluster.beat({"entry": {"schedule": crontab(hour=9, nowfun=lambda: EVER)}})

    assert "beat cannot start: beat_schedule['entry']: the schedule's nowfun" in caplog.text


def test_a_database_that_is_down_is_waited_for(caplog):
    """In doubt it is down: beat stands by, alive, and says so once."""
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"postgresql+psycopg://nobody@127.0.0.1:{taken.getsockname()[1]}/lease"
        beat = Cluster(url).beat()

        assert [beat.tick() for _ in range(3)] == [0.0] * 3

    loud = [each for each in caplog.records if each.levelname == "ERROR"]
    assert len(loud) == 1
    assert "does not answer" in loud[0].getMessage()
    beat.close()


def test_closing_twice_is_closing_once(cluster):
    """Celery's signal handler and its service both do."""
    beat = cluster.beat().go()

    beat.close()
    beat.close()

    assert beat.store.read("celery").holder is None
    with pytest.raises(SystemExit):
        beat.tick()  # Else a beat whose exit was lost would live on and send nothing.


@pytest.mark.parametrize("broker", ["redis_url", "rabbitmq_url"])
def test_closing_leaves_no_connection_open(request, anywhere, broker):
    """What stays open on a server counts against its limit until the process has ended."""
    before = open_sockets()
    beat = anywhere.beat(broker_url=request.getfixturevalue(broker))
    beat.at(seconds=61).go()
    assert anywhere.runs("state") == [("published",)]
    assert open_sockets() - before

    beat.close()

    assert not open_sockets() - before


def open_sockets():
    """Return this process's sockets, as the kernel names them."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the directory itself was open while it was read
            found.add(str(each.readlink()))
    return {each for each in found if each.startswith("socket:")}


def test_a_close_inside_a_tick_only_takes_note(cluster):
    """The signal handler runs on top of the tick: locks and pools are not safe there."""
    beat = cluster.beat().go()

    def terminated(runs):
        beat.close()
        assert beat.store.read("celery").holder is not None
        raise SystemExit

    beat.before_flush = terminated
    with pytest.raises(SystemExit):
        beat.at(seconds=61).tick()
    assert beat.store.read("celery").holder is not None

    beat.close()
    assert beat.store.read("celery").holder is None
    assert cluster.runs("state") == [("claimed",)], "the next leader sends it"


def test_a_real_sigterm_inside_a_tick_releases_the_lease(cluster):
    """The same through Celery's own service, whose handler this is."""
    beat = cluster.beat().go().at(seconds=61)
    service = Service(app=beat.app)
    service.scheduler = beat

    def handler(signum, frame):
        service.sync()
        raise SystemExit

    before = signal.signal(signal.SIGTERM, handler)
    try:
        beat.after_flush = lambda runs: os.kill(os.getpid(), signal.SIGTERM)
        service.start()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert beat.store.read("celery").holder is None
    # It came between the message and its mark: unmarked, a plain run would be sent twice.
    assert cluster.runs("state") == [("published",)]


def test_a_beat_in_a_thread_leads_sends_and_releases(cluster):
    """What ``worker -B`` does where there are no processes: no signal ever reaches it."""
    embedded = EmbeddedService(
        app=cluster.app({"often": {"schedule": 1.0}}),
        thread=True,
        scheduler_cls="celery_lease:LeasedScheduler",
    )
    embedded.start()
    try:
        # Made in that thread, like all that it is made of.
        scheduler = wait_until(lambda: vars(embedded.service).get("scheduler"))
        cluster.beats.append(scheduler)
        wait_until(lambda: ("published",) in cluster.runs("state"), message="a run to be sent")
        assert scheduler.store.read("celery").epoch == 1
    finally:
        embedded.stop()

    embedded.join(10)
    assert not embedded.is_alive()
    assert scheduler.store.read("celery").holder is None


def test_another_schedule_under_the_same_lease_is_told_loudly(cluster, caplog):
    """Two apps: one of them would silently never run."""
    cluster.beat().go()
    other = cluster.beat({"other": {"schedule": 60.0}})

    other.tick()
    other.tick()

    told = [r for r in caplog.records if getattr(r, "action", "") == "schedule-differs"]
    assert len(told) == 1
    assert "beat_lease_name" in told[0].getMessage()
    assert other.elector.holder.host in told[0].getMessage()


@pytest.mark.parametrize(
    ("measured", "told"),
    [((-300.0, 0.1), "300.0 s behind"), ((300.0, 0.1), "300.0 s ahead of"), ((5.0, 4.0), "")],
)
def test_a_clock_that_is_out_of_step_is_told(cluster, caplog, monkeypatch, measured, told):
    """What is due goes by the host's clock; an answer that came late is no difference."""
    beat = cluster.beat()
    monkeypatch.setattr(beat.store, "skew", lambda: measured)

    beat.go()

    said = [r.getMessage() for r in caplog.records if getattr(r, "action", "") == "clock-skew"]
    assert len(said) == bool(told)
    assert told in caplog.text


def test_old_runs_are_deleted_by_the_leader(cluster):
    """Nobody should have to: a minute's entry leaves half a million rows a year."""
    beat = cluster.beat().at(seconds=61).go()
    cluster.write(sa.text("UPDATE celery_lease_run SET claimed_at = '2020-01-01 00:00:00'"))

    beat._renewals -= 1
    beat.go()

    assert cluster.runs("id") == []


def test_old_runs_are_deleted_as_fast_as_new_ones_come(cluster, monkeypatch):
    """One bounded round a renewal is fifty rows a second: a large schedule makes more."""
    monkeypatch.setattr(leading, "PRUNE", 2)
    schedule = {"entry": {"schedule": 60.0, "misfire": "all"}}
    beat = cluster.beat(schedule, beat_lease_retention=0.001)
    beat.at(seconds=605).go()
    assert len(cluster.runs()) == 10

    beat._renewals -= 1  # the next renewal
    for _ in range(6):
        assert beat.tick() > 0

    assert cluster.runs() == []
    assert not beat._untidy
