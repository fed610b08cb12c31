"""Guarded transactions that take long, or whose worker is frozen in the middle.

Not on SQLite: there a transaction that writes keeps the whole file, and the documentation
says so.
"""

import os
import signal

import pytest

from tests.acceptance.cluster import MARIADB, POSTGRESQL, RENEW, RETRY, TAKEOVER, TTL, on
from tests.acceptance.ledger import seconds

SCHEDULE = {"long": {}, "often": {"every": 1.0}}


def start(cluster, point, action):
    """Start beats, then a worker; the run of "long" gets to a point. Return A, B and its id."""
    cluster.points.arm(point, action)
    beat_a, beat_b = cluster.beats()
    cluster.worker(concurrency=2, ready=False)
    cluster.points.reached(point)
    [(run_id, _)] = cluster.ledger.started("long")
    return beat_a, beat_b, run_id


@on(MARIADB, POSTGRESQL)
@pytest.mark.parametrize("renewals", [1, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.timeout(200)
def test_an_open_guarded_transaction_holds_up_neither_renewals_nor_a_takeover(
    cluster, ledger, renewals
):
    """The fence is locked for one round trip at the end, not for as long as the work takes."""
    cluster.schedule = SCHEDULE
    beat_a, _, run_id = start(cluster, "long.flushed", "wait")
    assert max(ledger.renewals(renewals, timeout=80)) <= RENEW + 1

    died_at = cluster.crash(beat_a)
    assert seconds(ledger.first_claim(2), died_at) <= TAKEOVER
    assert max(ledger.renewals(1)) <= RENEW + 1

    cluster.points.release("long.flushed")
    assert ledger.refused(run_id) == [(1, "commit", "stale")]
    assert [(run, epoch) for run, epoch, _ in ledger.committed("long")] == [(run_id, 2)]
    assert ledger.started("long") == [(run_id, 1), (run_id, 2)]
    ledger.assert_sound()


@on(POSTGRESQL, MARIADB)
@pytest.mark.parametrize(
    ("end", "idle", "bound"),
    [
        ("SIGTERM", 4, RETRY + 4 + 1),
        pytest.param("SIGKILL", TTL + 4, TAKEOVER + TTL + 4, marks=pytest.mark.slow),
    ],
)
def test_a_worker_frozen_in_the_guards_last_round_trip_delays_a_takeover_by_the_idle_limit(
    cluster, ledger, end, idle, bound
):
    """Whether it committed is open until the server ends its transaction: nobody may lead."""
    cluster.schedule = SCHEDULE
    cluster.conf = {"beat_lease_guard_idle": idle, "beat_lease_redispatch_after": 1}
    beat_a, beat_b, run_id = start(cluster, "long.commit", "stop")
    frozen = cluster.points.reached("long.commit")
    frozen_at = cluster.points.reached_at("long.commit")
    beat_a.kill(end)
    ended_at = ledger.now()

    beat_b.wait_for_log("leads under epoch 2", timeout=bound + 5)
    leads_at = ledger.first_claim(2)
    assert seconds(leads_at, frozen_at) >= idle - 1, "the guard was waited for"
    assert seconds(leads_at, ended_at) <= bound
    assert [(run, epoch) for run, epoch, _ in ledger.committed("long")] == [(run_id, 2)]

    os.kill(frozen, signal.SIGCONT)
    assert ledger.refused(run_id) == [(1, "commit", "stale")]
    assert ledger.rows("SELECT epoch FROM target WHERE run_id = :id", id=run_id) == [(2,)]
    ledger.assert_sound()


@pytest.mark.slow
@on(MARIADB, POSTGRESQL)
def test_a_worker_frozen_with_rows_flushed_delays_its_own_row_and_no_takeover(cluster, ledger):
    """It holds the locks of what it wrote, as any transaction does: ``idle=`` limits that."""
    idle = 6
    cluster.schedule = {**SCHEDULE, "long": {"kwargs": {"idle": idle}}}
    cluster.conf = {"beat_lease_redispatch_after": 1}
    beat_a, _, run_id = start(cluster, "long.flushed", "stop")
    frozen, frozen_at = cluster.points.reached("long.flushed"), ledger.now()
    status, stopped_at = cluster.stop(beat_a)

    assert status == 0
    assert seconds(ledger.first_claim(2), stopped_at) <= RETRY + 1
    assert [(run, epoch) for run, epoch, _ in ledger.committed("long")] == [(run_id, 2)]
    committed = "SELECT at AS committed_at FROM celery_lease_commit WHERE task_id = :id"
    [(committed_at,)] = ledger.rows(committed, id=run_id)
    assert idle - 1 <= seconds(committed_at, frozen_at) <= idle + 3

    os.kill(frozen, signal.SIGCONT)
    # Its session is gone: the body fails, and so wants a retry, before the guard can speak.
    [(epoch, _, reason)] = ledger.refused(run_id)
    assert (epoch, reason) == (1, "stale")
    ledger.assert_sound()
