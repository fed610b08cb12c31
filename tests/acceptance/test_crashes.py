"""A leader that is killed: between claim, publish and mark, and after its work was done."""

import pytest

from tests.acceptance.cluster import MARIADB, POSTGRESQL, SQLITE, TAKEOVER, on
from tests.acceptance.ledger import seconds
from tests.services import wait_until


def claimed(ledger):
    """Return the one run that a dead leader left claimed."""
    [(run_id,)] = ledger.rows("SELECT id FROM celery_lease_run WHERE state = 'claimed'")
    return run_id


@on(POSTGRESQL, MARIADB, SQLITE)
def test_a_run_that_was_claimed_and_never_published_is_sent_by_the_next_leader(cluster, ledger):
    """The claim is what the next leader finds; the message never was. All else is not replayed."""
    cluster.schedule = {"often": {"every": 1.0}, "once": {}}
    worker = cluster.worker(ready=False)
    beat_a, beat_b = cluster.beats()
    ledger.committed("once")
    ledger.committed("often")
    worker.ready()

    cluster.points.arm("claimed", "exit")
    cluster.points.reached("claimed")
    beat_a.container.wait()
    died_at, left = ledger.now(), claimed(ledger)

    beat_b.wait_for_log("leads under epoch 2", timeout=TAKEOVER + 5)
    assert seconds(ledger.first_claim(2), died_at) <= TAKEOVER
    committed = "SELECT epoch FROM celery_lease_commit WHERE task_id = :left"
    assert ledger.wait(committed, left=left) == [(2,)]
    started = "SELECT epoch FROM started WHERE task_id = :left"
    assert ledger.rows(started, left=left) == [(2,)], "one message for it"
    later = "SELECT id FROM target WHERE epoch = 2 AND run_id <> :left"
    ledger.wait(later, count=2, left=left)
    [(once, _)] = ledger.started("once")
    assert [(run, epoch) for run, epoch, _ in ledger.committed("once")] == [(once, 1)]
    ledger.assert_sound()
    assert ledger.gaps("often", 1.0) == [], "in phase"
    ledger.assert_settled(died_at)


@pytest.mark.slow
@on(MARIADB, POSTGRESQL, SQLITE)
def test_a_run_that_was_published_and_never_marked_is_committed_once(cluster, ledger):
    """The next leader cannot know that the broker has it: one message more, under the same id."""
    cluster.schedule = {"often": {"every": 1.0}}
    worker = cluster.worker(ready=False)
    beat_a, beat_b = cluster.beats()
    ledger.committed("often")
    worker.ready()

    # The worker is busy, so that both messages are there when it goes on.
    cluster.points.arm("often.body", "wait")
    cluster.points.reached("often.body")
    cluster.points.arm("published", "exit")
    cluster.points.reached("published")
    beat_a.container.wait()
    left, died_at = claimed(ledger), ledger.now()
    beat_b.wait_for_log("leads under epoch 2", timeout=TAKEOVER + 5)
    again = "SELECT state FROM celery_lease_run WHERE id = :left AND attempt = 2 AND epoch = 2"
    ledger.wait(again, left=left)
    cluster.points.release("often.body")

    committed = "SELECT epoch FROM celery_lease_commit WHERE task_id = :left"
    assert ledger.wait(committed, left=left) == [(2,)]
    refused = "SELECT epoch, stage, reason FROM refusal WHERE task_id = :left"
    assert ledger.wait(refused, left=left) == [(1, "start", "stale")]
    assert ledger.rows("SELECT epoch FROM started WHERE task_id = :left", left=left) == [(2,)]
    later = "SELECT id FROM target WHERE epoch = 2 AND run_id <> :left"
    ledger.wait(later, count=2, left=left)
    ledger.assert_sound()
    ledger.assert_accounted(cluster.schedule, before=died_at)


@pytest.mark.slow
@on(POSTGRESQL, MARIADB, SQLITE)
def test_a_takeover_replays_nothing(cluster, ledger):
    """A standby that was there all along starts from the shared state, not from its own."""
    minute = cluster.began.minute
    cluster.schedule = {
        "hourly": {"cron": {"minute": str(minute)}, "ago": 3000},
        "interval": {"every": 2.0},
    }
    cluster.worker(ready=False)
    beat_a, beat_b = cluster.beats()
    [(fired, _, due_at)] = ledger.committed("hourly")
    ledger.committed("interval", count=2)

    died_at = cluster.crash(beat_a)
    beat_b.wait_for_log("leads under epoch 2", timeout=TAKEOVER + 5)
    wait_until(
        lambda: [row for row in ledger.committed("interval") if row[1] == 2][1:],
        message="two committed runs of B's",
    )

    assert ledger.committed("hourly") == [(fired, 1, due_at)]
    assert (due_at.minute, due_at.second) == (minute, 0)
    assert ledger.started("hourly") == [(fired, 1)]
    assert ledger.gaps("interval", 2.0) == [], "in phase"
    assert seconds(ledger.first_claim(2), died_at) <= TAKEOVER
    ledger.assert_sound()


@pytest.mark.slow
@pytest.mark.timeout(240)
@on(POSTGRESQL, MARIADB, SQLITE)
def test_a_crontab_that_fired_six_seconds_before_a_crash_does_not_fire_again(cluster, ledger):
    """The same with a live crontab: the next minute is the next occurrence."""
    cluster.schedule = {"minutely": {"cron": {}}}
    cluster.worker(ready=False)
    beat_a = cluster.leader("A")
    cluster.standby("B")
    [(fired, _, due_at), *_] = ledger.committed("minutely", timeout=75)
    wait_until(lambda: seconds(ledger.now(), due_at) >= 6, message="six seconds")
    cluster.crash(beat_a)

    [_, (_, epoch, next_at)] = ledger.committed("minutely", count=2, timeout=90)
    assert (epoch, seconds(next_at, due_at)) == (2, 60)
    assert [task for task, _ in ledger.started("minutely")].count(fired) == 1
