"""Planned handovers: the leader is stopped with SIGTERM while work is going on."""

import itertools

import pytest

from tests.acceptance.cluster import MARIADB, POSTGRESQL, RETRY, SQLITE, on
from tests.acceptance.ledger import seconds
from tests.services import wait_until


@pytest.mark.slow
@on(MARIADB, POSTGRESQL, SQLITE)
@pytest.mark.parametrize(("work", "stopped_after"), [(3, 1), (300, 60)])
@pytest.mark.timeout(800)
def test_a_task_that_runs_across_a_handover_is_refused_and_done_again_once(
    cluster, ledger, work, stopped_after
):
    """Strict fencing costs a long task its work, once a handover, and never its outcome."""
    cluster.schedule = {"long": {"kwargs": {"work": work}}, "often": {"every": 1.0}}
    beat_a, _ = cluster.beats()
    cluster.worker(concurrency=2, ready=False)
    [(run_id, _)] = ledger.started("long")
    began_at = ledger.now()
    wait_until(
        lambda: seconds(ledger.now(), began_at) >= stopped_after,
        timeout=stopped_after + 5,
        message="the work to be under way",
    )
    status, _ = cluster.stop(beat_a)

    assert status == 0
    assert ledger.refused(run_id, timeout=work + 10) == [(1, "commit", "stale")]
    committed = ledger.committed("long", timeout=work + 20)
    assert [(run, epoch) for run, epoch, _ in committed] == [(run_id, 2)]
    assert ledger.started("long") == [(run_id, 1), (run_id, 2)]
    attempts = "SELECT attempt FROM celery_lease_run WHERE id = :id"
    assert ledger.rows(attempts, id=run_id) == [(2,)]
    assert cluster.result(run_id) == ("SUCCESS", "epoch 2")
    ledger.assert_sound()


@on(POSTGRESQL, MARIADB, SQLITE)
@pytest.mark.parametrize("handovers", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_rolling_restarts_lose_nothing_and_do_nothing_twice(cluster, ledger, handovers):
    """A standby leads within one retry interval each time; epochs rise, the row stays."""
    cluster.schedule = {
        "often": {"every": 1.0},
        "working": {"every": 2.0, "kwargs": {"work": 0.5}},
        "plain": {"every": 1.0, "task": "plain"},
    }
    leader = cluster.leader("A")
    cluster.worker(concurrency=2, ready=False)
    for epoch in range(1, handovers + 1):
        standby = cluster.standby(f"B{epoch}")
        ledger.first_claim(epoch)
        status, _ = cluster.stop(leader)
        assert status == 0
        standby.wait_for_log(f"leads under epoch {epoch + 1}")
        leader = standby

    terms = ledger.rows("SELECT epoch, ended, acquired_at, ended_at FROM celery_lease_term")
    terms.sort()
    assert [epoch for epoch, *_ in terms] == list(range(1, handovers + 2))
    assert {ended for _, ended, *_ in terms[:-1]} == {"released"}
    waits = [seconds(after[2], before[3]) for before, after in itertools.pairwise(terms)]
    print(f"handovers: {sorted(waits)[len(waits) // 2]:.2f} s median, {max(waits):.2f} s longest")
    assert max(waits) <= RETRY + 0.5
    assert ledger.rows("SELECT epoch FROM celery_lease") == [(handovers + 1,)]

    stopped_at = ledger.now()
    ledger.assert_accounted(cluster.schedule, before=stopped_at)
    plain = (
        "SELECT task_id FROM started WHERE entry = 'plain' GROUP BY task_id HAVING COUNT(*) > 1"
    )
    assert ledger.rows(plain) == [], "no plain task was sent twice either"
    ledger.assert_sound()


@on(SQLITE, POSTGRESQL, MARIADB)
@pytest.mark.parametrize("point", ["in a turn", "between ticks"])
def test_a_sigterm_whose_exception_is_lost_ends_beat_all_the_same(cluster, ledger, point):
    """Python drops what a signal handler raises inside a callback of the garbage collector."""
    cluster.schedule = {"often": {"every": 1.0}}
    beat = cluster.leader("A")
    ledger.first_claim(1)
    cluster.points.arm(point, "be told to end in vain")
    cluster.points.reached(point)

    assert beat.container.wait(15) == 0
    assert "SystemExit" in beat.logs(), "it was lost"
    assert ledger.rows("SELECT ended FROM celery_lease_term") == [("released",)]
