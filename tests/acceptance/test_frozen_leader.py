"""A leader that is frozen and wakes up when another one has taken over.

The freeze is inside a flush, after its trust check: a proxy keeps the bytes that
have been sent, A itself is stopped, and both go on when B has long taken over. The
``before_task_publish`` signal would be too early: with kombu's batch it fires when a
message is buffered.
"""

import re

import pytest

from tests.acceptance.cluster import MARIADB, POSTGRESQL, SQLITE, TAKEOVER, on
from tests.acceptance.ledger import seconds
from tests.services import hold


@on(POSTGRESQL, MARIADB, SQLITE)
def test_what_a_frozen_leader_publishes_late_is_refused(cluster, ledger):
    """The lease cannot stop a message that is under way; the epoch it carries can."""
    # Out of step with renewals: who is frozen while it writes holds the file of SQLite.
    cluster.schedule = {"often": {"every": 1.0, "ago": 0}}
    proxy = cluster.proxy(cluster.pair.broker)
    worker = cluster.worker(ready=False)
    beat_a, beat_b = cluster.beats(broker=proxy)
    ledger.committed("often")

    proxy.filter = hold(b"acceptance.guarded")
    assert proxy.holding.wait(30), "A flushes once a second"
    beat_a.kill("SIGSTOP")
    frozen_at = ledger.now()

    beat_b.wait_for_log("leads under epoch 2", timeout=TAKEOVER + 5)
    assert seconds(ledger.acquired_at(2), frozen_at) <= TAKEOVER
    assert seconds(ledger.first_claim(2), frozen_at) <= TAKEOVER
    worker.wait_for_log(re.compile(r"epoch=2 Task acceptance\.guarded\[\S+\] succeeded"))

    refused = "SELECT task_id FROM refusal WHERE epoch = 1 AND stage = 'start'"
    assert ledger.rows(refused) == []
    proxy.resume()
    beat_a.kill("SIGCONT")
    [(late,), *_] = ledger.wait(refused)
    worker.wait_for_log(re.compile(rf"epoch=1 .*refused: acceptance\.guarded\[{late}\]"))
    beat_a.wait_for_log("lost epoch 1 and stands by")
    beat_a.wait_for_log(re.compile(r"stands by; \S+ leads under epoch 2"))
    assert beat_a.container.status == "running"
    assert ledger.rows("SELECT epoch FROM target WHERE run_id = :late", late=late) == [(2,)]
    ledger.assert_sound()


@pytest.mark.slow
@on(MARIADB, POSTGRESQL, SQLITE)
def test_a_leader_that_wakes_up_with_no_rival_leads_under_a_new_epoch(cluster, ledger):
    """What happened while it slept is not known: an expired lease is not renewed."""
    cluster.schedule = {"often": {"every": 1.0}}
    beat = cluster.leader("A")
    ledger.first_claim(1)
    [(expires_at,)] = ledger.rows("SELECT expires_at FROM celery_lease")
    beat.kill("SIGSTOP")
    cluster.wait_for_expiry()
    beat.kill("SIGCONT")

    beat.wait_for_log("lost epoch 1 and stands by")
    beat.wait_for_log("leads under epoch 2")
    assert ledger.acquired_at(2) > expires_at
    assert ledger.first_claim(2) >= ledger.acquired_at(2)
    [(last_at,)] = ledger.rows(
        "SELECT MAX(claimed_at) AS at FROM celery_lease_run WHERE epoch = 1"
    )
    assert last_at < expires_at
    assert beat.container.status == "running"
