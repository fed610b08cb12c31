"""A message that is delivered twice under one epoch."""

import pytest

from tests.acceptance.cluster import MARIADB, POSTGRESQL, SQLITE, on
from tests.acceptance.ledger import seconds
from tests.services import wait_until


@pytest.mark.slow
@on(MARIADB)
def test_a_message_that_came_back_from_a_lost_connection_is_committed_once(cluster, ledger):
    """The broker gives it to another worker while the first one still works on it."""
    cluster.schedule = {"long": {}}
    cluster.points.arm("long.body", "wait")
    proxy = cluster.proxy(cluster.pair.broker)
    cluster.leader("A")
    first = cluster.worker("first", broker=proxy)
    cluster.points.reached("long.body")
    cluster.worker("second", ready=False)
    proxy.refuse()
    proxy.cut()

    both_start_and_one_commits(cluster, ledger)
    assert first.container.status == "running"


@on(POSTGRESQL, SQLITE)
def test_a_message_whose_visibility_timeout_passed_is_committed_once(cluster, ledger):
    """A task that takes longer than the timeout runs again beside itself."""
    timeout = 3
    cluster.conf = {"broker_transport_options": {"visibility_timeout": timeout}}
    cluster.schedule = {"long": {}}
    cluster.points.arm("long.body", "wait")
    cluster.leader("A")
    cluster.worker("first", ready=False)
    cluster.points.reached("long.body")
    began_at = ledger.now()
    wait_until(lambda: seconds(ledger.now(), began_at) > timeout + 1, message="the timeout")
    # A worker that starts looks for such messages; later it does so every now and then.
    cluster.worker("second", ready=False)

    both_start_and_one_commits(cluster, ledger)


def both_start_and_one_commits(cluster, ledger):
    """Let the first go on when the second has committed."""
    [(run_id, epoch), second] = ledger.started("long", count=2, timeout=45)
    assert second == (run_id, epoch)
    assert [(run, under) for run, under, _ in ledger.committed("long")] == [(run_id, epoch)]
    cluster.points.release("long.body")
    assert ledger.refused(run_id) == [(epoch, "commit", "duplicate")]
    assert ledger.rows("SELECT run_id FROM target") == [(run_id,)]
    workers = {worker for (worker,) in ledger.rows("SELECT worker FROM started")}
    assert len(workers) == 2
    assert cluster.result(run_id) == ("SUCCESS", "epoch 1")
    ledger.assert_sound()
