"""In whichever order a current and a stale attempt end, the current one's result stands."""

from tests.acceptance.cluster import MARIADB, POSTGRESQL, on
from tests.services import wait_until


@on(POSTGRESQL, MARIADB)
def test_the_current_attempts_result_stands_in_every_order(cluster, ledger):
    """Redis as the result backend in the one pair, the database in the other.

    Without a guard these keep the first SUCCESS of a task id, or the last FAILURE.
    """
    cluster.schedule = {
        "current-first": {},
        "stale-first": {},
        "current-fails": {"kwargs": {"failing_epochs": [2]}},
    }
    cluster.conf = {"beat_lease_redispatch_after": 1, "task_track_started": True}
    for entry in cluster.schedule:
        cluster.points.arm(f"{entry}.1.body", "wait")
    cluster.points.arm("stale-first.2.body", "wait")
    cluster.worker(concurrency=6, ready=False)
    beat_a, _ = cluster.beats()
    for entry in cluster.schedule:
        cluster.points.reached(f"{entry}.1.body")
    ids = {entry: ledger.started(entry)[0][0] for entry in cluster.schedule}
    cluster.stop(beat_a)

    def ends(entry, result):
        """Wait until a task has this result."""
        wait_until(lambda: shown(entry) == result, message=f"{result} of {entry}")

    def shown(entry):
        state, result = cluster.result(ids[entry])
        return state, str(result)

    def goes_stale(entry):
        """Let the first attempt end, and wait until it was turned away."""
        cluster.points.release(f"{entry}.1.body")
        [(epoch, _, reason)] = ledger.refused(ids[entry])
        assert (epoch, reason) == (1, "stale")

    ends("current-first", ("SUCCESS", "epoch 2"))
    goes_stale("current-first")
    assert shown("current-first") == ("SUCCESS", "epoch 2")

    cluster.points.reached("stale-first.2.body")
    goes_stale("stale-first")
    assert shown("stale-first")[0] in ("PENDING", "STARTED")
    cluster.points.release("stale-first.2.body")
    ends("stale-first", ("SUCCESS", "epoch 2"))

    ends("current-fails", ("FAILURE", "epoch 2 fails"))
    goes_stale("current-fails")
    assert shown("current-fails") == ("FAILURE", "epoch 2 fails")
    outcomes = ledger.rows("SELECT task_id, epoch, outcome FROM celery_lease_commit")
    assert {(task_id, (epoch, outcome)) for task_id, epoch, outcome in outcomes} == {
        (ids["current-first"], (2, "committed")),
        (ids["stale-first"], (2, "committed")),
        (ids["current-fails"], (2, "failed")),
    }
    ledger.assert_sound()
