"""The stamp on everything that a stamped task sends, in real workers."""

from tests.acceptance.cluster import MARIADB, POSTGRESQL, SQLITE, on

#: What a "family" task has started in the end, by name, and how many times at least: Celery
#: sends the errbacks of a hard time limit twice.
CHILDREN = {
    "delay": 1,
    "chain 1": 1,
    "chain 2": 1,
    "group": 2,
    "chord": 2,
    "chord's body": 1,
    "linking": 1,
    "linked": 1,
    "failing": 1,
    "errback": 1,
    "retry": 2,
    "autoretry": 2,
    "replaced": 1,
    "too long": 1,
    "errback of too long": 1,
    "lost": 1,
    "errback of lost": 1,
}


@on(POSTGRESQL, MARIADB, SQLITE)
def test_everything_that_a_stamped_task_sends_carries_its_stamp(cluster, ledger):
    """Also what the worker's parent process sends, for a task whose process is gone."""
    cluster.schedule = {"fenced": {"task": "family"}, "plain": {"task": "plain_family"}}
    cluster.worker(concurrency=2, ready=False)
    cluster.beat("A")

    for family in cluster.schedule:
        for child, times in CHILDREN.items():
            seen = ledger.started(f"{family}: {child}", count=times)
            assert {epoch for _, epoch in seen} == {1}, child
    # Called by hand: nothing to inherit.
    cluster.send("acceptance.family", "unstamped")
    for child, times in CHILDREN.items():
        seen = ledger.started(f"unstamped: {child}", count=times)
        assert {epoch for _, epoch in seen} == {None}, child
