"""A leader that is frozen inside a publish, on PostgreSQL and Redis.

The freeze is inside a flush, after its trust check: a proxy keeps the bytes that beat A
has sent, A itself is stopped, and both go on when B has long taken over. The
``before_task_publish`` signal would be too early: with kombu's batch it fires when a
message is buffered.
"""

import re
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa

from tests.services import TCPProxy, hold, wait_until
from tests.services.cluster import BeatNode, ProcessCluster, WorkerNode
from tests.services.processes import CeleryProcess

pytestmark = [pytest.mark.postgresql, pytest.mark.redis]

TTL, RETRY = 6, 1


@pytest.fixture
def proxy(redis_url):
    """A proxy between beat A and the broker."""
    with TCPProxy(urlsplit(redis_url).port) as proxy:
        yield proxy


@pytest.fixture
def environment(postgresql_url, redis_url):
    """The example project on PostgreSQL and Redis."""
    return {
        "EXAMPLE_DATABASE_URL": postgresql_url,
        "EXAMPLE_BROKER_URL": redis_url,
        "EXAMPLE_RESULT_BACKEND": redis_url,
        "EXAMPLE_TTL": str(TTL),
        "EXAMPLE_RENEW": "2",
        "EXAMPLE_MARGIN": "1",
        "EXAMPLE_RETRY": str(RETRY),
        "EXAMPLE_SUMMARY_EVERY": "1",
        "EXAMPLE_PLANNING_EVERY": "5",
    }


@pytest.fixture
def cluster(environment, redis_url, proxy, tmp_path):
    """Beat A behind the proxy, beat B, and a worker; A leads."""
    through = redis_url.replace(str(urlsplit(redis_url).port), str(proxy.port), 1)
    options = {"directory": tmp_path, "env": environment}
    scheduler = {"scheduler": "celery_lease:LeasedScheduler", "loglevel": "INFO"}
    behind = {**options, "env": {**environment, "EXAMPLE_BROKER_URL": through}}
    nodes = ProcessCluster(
        WorkerNode(CeleryProcess.worker("example_project", **options)),
        BeatNode(CeleryProcess.beat("example_project", name="A", **behind, **scheduler)),
        BeatNode(CeleryProcess.beat("example_project", name="B", **options, **scheduler)),
    )
    worker, beat_a, beat_b = nodes
    try:
        worker.start().ready()
        beat_a.start().wait_for_log("leads under epoch 1")
        beat_b.start().wait_for_log("stands by")
        yield nodes
    finally:
        nodes.teardown()


@pytest.fixture
def rows(postgresql_url):
    """Ask the database."""
    engine = sa.create_engine(postgresql_url)

    def ask(query, **values):
        with engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(query), values)]

    yield ask
    engine.dispose()


@pytest.mark.timeout(180)
def test_what_a_frozen_leader_publishes_late_is_refused(cluster, proxy, rows):
    """The lease cannot stop a message that is under way; the epoch it carries can."""
    worker, beat_a, beat_b = cluster
    worker.wait_for_log(re.compile(r"epoch=1 Task documents\.summarise\[\S+\] succeeded"))

    proxy.filter = hold(b"documents.")
    assert proxy.holding.wait(30), "beat A flushes within a second or two"
    beat_a.kill("SIGSTOP")
    [(frozen_at,)] = rows("SELECT clock_timestamp()")

    beat_b.wait_for_log("leads under epoch 2", timeout=TTL + RETRY + 5)
    [(acquired_at,)] = rows("SELECT acquired_at FROM celery_lease_term WHERE epoch = 2")
    assert (acquired_at - frozen_at).total_seconds() <= TTL + RETRY + 1
    worker.wait_for_log(re.compile(r"epoch=2 Task documents\.summarise\[\S+\] succeeded"))

    refused = "SELECT task_id FROM refusal WHERE epoch = 1 AND stage = 'start'"
    assert rows(refused) == []
    proxy.resume()
    beat_a.kill("SIGCONT")
    wait_until(lambda: rows(refused), timeout=30, message="the late message to be refused")
    worker.wait_for_log(re.compile(r"epoch=1 .*refused"))
    beat_a.wait_for_log("lost epoch 1 and stands by")
    beat_a.wait_for_log(re.compile(r"stands by; \S+ leads under epoch 2"))
    assert beat_a.container.status == "running"

    stale = (
        "SELECT s.run_id FROM summary s LEFT JOIN celery_lease_commit c ON c.task_id = s.run_id "
        "WHERE c.task_id IS NULL OR c.epoch <> s.epoch"
    )
    assert rows(stale) == []
    twice = "SELECT run_id FROM summary GROUP BY run_id HAVING COUNT(*) > 1"
    assert rows(twice) == []
