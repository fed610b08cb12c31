"""What operators do: probe, embed beat in workers, run large schedules."""

import json
import os
import signal

import celery
import pytest
import sqlalchemy as sa

from tests.acceptance.cluster import (
    MARIADB,
    POSTGRESQL,
    RENEW,
    RETRY,
    SQLITE,
    TAKEOVER,
    on,
)
from tests.acceptance.ledger import seconds
from tests.services import wait_until

#: What gives a worker a beat of its own.
EMBEDDED = ("-B", "--scheduler", "celery_lease:LeasedScheduler")


@on(MARIADB, POSTGRESQL, SQLITE)
def test_the_probe_tells_a_leader_from_a_lease_that_nobody_holds(cluster):
    """Red while the leader is frozen and nobody leads, green when the standby does."""
    cluster.schedule = {"often": {"every": 1.0}}
    beat_a, beat_b = cluster.beats()

    def status():
        exit_status, said = cluster.celery("lease", "status", "--name", "celery", "--json")
        [lease] = json.loads(said[said.index("{") :])["leases"]
        holder = int(lease["holder"].split(":")[1])
        return exit_status, lease["held"], lease["epoch"], holder

    assert status() == (0, True, 1, beat_a.container.pid)
    beat_a.kill("SIGSTOP")
    beat_b.kill("SIGSTOP")  # Else it would lead before the probe can look.
    cluster.wait_for_expiry()
    assert status() == (1, False, 1, beat_a.container.pid)

    # With no rival, the lease that has expired is not renewed all the same.
    beat_a.kill("SIGCONT")
    beat_a.wait_for_log("lost epoch 1 and stands by")
    beat_a.wait_for_log("leads under epoch 2")
    cluster.stop(beat_a)
    beat_b.kill("SIGCONT")
    beat_b.wait_for_log("leads under epoch 3")
    assert status() == (0, True, 3, beat_b.container.pid)


@pytest.mark.slow
@pytest.mark.skipif(celery.VERSION < (5, 7), reason="beat answers since Celery 5.7")
@on(POSTGRESQL, MARIADB, SQLITE)
def test_a_standby_answers_celerys_own_ping(cluster):
    """Else a rollout would wait for ever for it to become ready."""
    cluster.schedule = {"often": {"every": 1.0}}
    for start, name in ((cluster.leader, "a"), (cluster.standby, "b")):
        beat = start(name, "--enable-remote-control", "--hostname", f"{name}@here")
        wait_until(
            lambda name=name: f"{name}@here: OK" in ping(cluster, name),
            timeout=40,
            interval=0.5,
            message=f"the pong of {name}",
        )
        assert beat.container.status == "running"
    assert "leads under" not in beat.logs().partition(" stands by")[0]


def ping(cluster, name):
    """Return what Celery's own probe prints about a beat."""
    return cluster.celery("inspect", "ping", "--destination", f"{name}@here", "--timeout", "3")[1]


@on(POSTGRESQL, MARIADB, SQLITE)
def test_beats_embedded_in_workers_step_down_and_leave_them_running(cluster, ledger):
    """Each of three workers has a beat of its own (``-B``); losing the lease ends none of them."""
    cluster.schedule = {"often": {"every": 1.0}}
    workers = [cluster.worker(name, *EMBEDDED, ready=False) for name in ("one", "two", "three")]
    for worker in workers:
        worker.ready()
    ledger.committed("often")
    leader = cluster.pid_of_leader()
    [home] = [worker for worker in workers if leader in worker.container.children]

    os.kill(leader, signal.SIGSTOP)
    frozen_at = ledger.now()
    assert seconds(ledger.first_claim(2), frozen_at) <= TAKEOVER
    os.kill(leader, signal.SIGCONT)
    home.wait_for_log("lost epoch 1 and stands by")
    assert cluster.pid_of_leader() != leader
    committed = len(ledger.committed("often"))
    ledger.committed("often", count=committed + 2)
    assert leader in home.container.children
    _, said = cluster.celery("inspect", "ping", "--timeout", "5")
    assert "3 nodes online" in said
    for worker in workers:
        assert worker.container.status == "running"
    ledger.assert_sound()


@on(SQLITE, POSTGRESQL, MARIADB)
@pytest.mark.parametrize("pool", ["prefork", "solo", "threads"])
def test_a_worker_that_ends_hands_over_the_lease_of_its_beat(cluster, ledger, pool):
    """In each pool that may embed one: it is not left to expire, as after a crash."""
    cluster.schedule = {"often": {"every": 1.0}}
    leaving = cluster.worker("leaving", *EMBEDDED, pool=pool)
    leaving.wait_for_log("leads under epoch 1")
    assert cluster.pid_of_leader() in leaving.container.children
    staying = cluster.standby("staying")
    ledger.committed("often")

    leaving.kill("SIGTERM")
    assert leaving.container.wait() == 0
    staying.wait_for_log("leads under epoch 2")
    [(ended, ended_at)] = ledger.rows(
        "SELECT ended, ended_at FROM celery_lease_term WHERE epoch = 1"
    )
    assert ended == "released"
    assert seconds(ledger.acquired_at(2), ended_at) <= RETRY + 0.5
    ledger.assert_sound()


@on(SQLITE)
def test_celery_embeds_no_beat_in_a_worker_of_greenlets(cluster, ledger):
    """It ends with one of its own errors, so the lease is not touched; our pages say the same."""
    status, said = cluster.celery("worker", *EMBEDDED, "--pool", "gevent")
    assert status == 1
    assert "-B option doesn't work with eventlet/gevent pools" in said
    assert not sa.inspect(ledger.engine).has_table("celery_lease")


@on(MARIADB, POSTGRESQL, SQLITE)
def test_twenty_thousand_entries_delay_no_renewal(cluster, ledger):
    """Neither when they are stored for the first time nor when a standby loads them."""
    cluster.schedule = {"often": {"every": 1.0, "task": "plain"}}
    cluster.many = 20_000
    beat_a, _ = cluster.beats()
    assert max(ledger.renewals(2)) <= RENEW + 1
    wait_until(
        lambda: ledger.number("SELECT COUNT(*) FROM celery_lease_entry") > cluster.many,
        timeout=60,
        message="the entries to be stored",
    )
    ledger.first_claim(1, timeout=60)
    _, stopped_at = cluster.stop(beat_a)
    leads_at = ledger.first_claim(2, timeout=60)
    print(f"the first claim came {seconds(leads_at, stopped_at):.1f} s after the stop")
    assert max(ledger.renewals(2)) <= RENEW + 1
    for node in cluster.nodes:
        assert "renewed late" not in node.logs()
        assert "lost epoch" not in node.logs()
    assert ledger.gaps("often", 1.0) == []
