"""What the worker's parent process reports, and the order of results, on real workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import VERSION as celery_version  # noqa: N811 - Celery's name

from tests.integration.floor import Floor
from tests.services import Redis
from tests.services.base import wait_until

pytestmark = pytest.mark.redis

BACKENDS = ["redis", "db", "file", "rpc"]


@pytest.fixture(scope="module", params=BACKENDS)
def floor(
    request: pytest.FixtureRequest,
    redis_server: Redis,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Floor]:
    """A floor with each kind of result backend."""
    floor = Floor(request.param, redis_server, tmp_path_factory.mktemp("floor"))
    try:
        floor.worker.start().ready()
        yield floor
    finally:
        floor.close()


def test_a_hard_time_limit_of_a_current_run_is_settled_by_the_parent(
    floor: Floor, key: str
) -> None:
    """The child is dead, so the parent records the outcome before it stores the result."""
    result = floor.send(key, time_limit=1)
    wait_until(lambda: floor.lease.outcome(result.id) == "failed")
    wait_until(lambda: result.state == "FAILURE")
    # The errback is stamped: the parent, which has no current task, is lent the stamp.
    wait_until(lambda: floor.errbacks(result.id))
    assert floor.errbacks(result.id) == [str(floor.lease.epoch)]


def test_a_hard_time_limit_of_a_stale_run_reports_nothing(floor: Floor, key: str) -> None:
    """Another attempt decides how the run ends."""
    result = floor.send(key, time_limit=2)
    floor.began(key)
    floor.depose()
    floor.said(f"Task refused: work[{result.id}] (at failure)")
    wait_until(lambda: floor.lease.run_state(result.id) == "refused")
    assert floor.lease.outcome(result.id) is None
    assert result.state == "PENDING"
    assert floor.errbacks(result.id) == []


def test_a_hard_time_limit_of_a_message_that_goes_back_is_no_outcome(
    floor: Floor, key: str
) -> None:
    """``acks_on_timeout`` is off: it is delivered again, and that delivery must not be refused."""
    result = floor.lease.dispatch(floor.app.tasks["patient"], (key,), entry=key)
    floor.said(f"Hard time limit (1s) exceeded for patient[{result.id}]")
    floor.go(key)
    assert result.get(timeout=30) == f"{key} in time"
    assert floor.lease.outcome(result.id) == "committed"


def test_a_soft_time_limit_is_a_failure_like_any_other(floor: Floor, key: str) -> None:
    """It is raised in the body, so the child settles it."""
    result = floor.send(key, soft_time_limit=1)
    wait_until(lambda: result.state == "FAILURE")
    assert floor.lease.outcome(result.id) == "failed"


def test_a_soft_time_limit_of_a_stale_run_is_refused(floor: Floor, key: str) -> None:
    """Refused where the failure would be settled."""
    result = floor.send(key, soft_time_limit=2)
    floor.began(key)
    floor.depose()
    floor.said(f"Task refused: work[{result.id}] (at failure)")
    assert result.state == "PENDING"
    assert floor.lease.run_state(result.id) == "refused"


@pytest.mark.parametrize("stale", [False, True])
def test_a_lost_worker_is_settled_by_the_parent(floor: Floor, key: str, stale: bool) -> None:
    """``kill -9`` of a pool process, the out-of-memory killer's way."""
    result = floor.send(key, "die")
    floor.began(key)
    if stale:
        floor.depose()
    floor.go(key)
    if stale:
        floor.said(f"Task refused: work[{result.id}] (at failure)")
        assert floor.lease.outcome(result.id) is None
        if celery_version[:2] != (5, 6):  # There the command itself stores it, on each worker.
            assert result.state == "PENDING"
        assert floor.errbacks(result.id) == []
    else:
        wait_until(lambda: result.state == "FAILURE")
        assert floor.lease.outcome(result.id) == "failed"


def test_a_worker_lost_after_its_commit_leaves_the_run_committed(floor: Floor, key: str) -> None:
    """What is written stands; the result says that the process did not end well."""
    result = floor.send(key, "die", commit=True)
    floor.began(key)
    floor.go(key)
    if floor.kind == "rpc":
        # Its results lie in the caller's queue: nobody can tell whether there is one.
        floor.said(f"Duplicate refused: work[{result.id}]")
    else:
        wait_until(lambda: result.state == "FAILURE")
    assert floor.lease.outcome(result.id) == "committed"


@pytest.mark.skipif(celery_version < (5, 7), reason="retry_on_worker_lost is new in Celery 5.7")
@pytest.mark.parametrize("stale", [False, True])
def test_the_parent_retries_a_lost_worker_only_while_current(
    floor: Floor, key: str, stale: bool
) -> None:
    """The parent sends that retry by itself, without ``Task.retry``."""
    result = floor.lease.dispatch(floor.app.tasks["fragile"], (key,), entry=key)
    floor.began(key)
    if stale:
        floor.depose()
    floor.go(key)
    if stale:
        floor.said(f"Task refused: fragile[{result.id}] (at failure)")
        assert floor.lease.outcome(result.id) is None
        assert result.state == "PENDING"
    else:
        # Not polled for: rpc:// puts the RETRY that a poll found back behind what came meanwhile,
        # and the next poll takes it for the latest.
        assert result.get(timeout=30) == f"{key} at attempt 1"
        assert result.state == "SUCCESS"
        assert floor.lease.outcome(result.id) == "committed"


@pytest.mark.parametrize("stale", [False, True])
def test_an_expired_message_is_settled_as_expired(floor: Floor, key: str, stale: bool) -> None:
    """So that it is not dispatched again; unless it was stale anyway."""
    old = floor.lease
    if stale:
        floor.depose()
        floor.lease, new = old, floor.lease
    result = floor.send(key, expires=-1)
    if stale:
        floor.lease = new
        floor.said(f"Task refused: work[{result.id}] (at expired)")
        wait_until(lambda: floor.lease.run_state(result.id) == "refused")
        assert result.state == "PENDING"
    else:
        wait_until(lambda: result.state == "REVOKED")
        assert floor.lease.outcome(result.id) == "expired"


@pytest.mark.parametrize("stale", [False, True])
def test_a_terminated_task_is_settled_as_revoked(floor: Floor, key: str, stale: bool) -> None:
    """Whoever revokes the current attempt means the run; a stale one is over already."""
    result = floor.send(key)
    floor.began(key)
    if stale:
        floor.depose()
    floor.app.control.revoke(result.id, terminate=True, signal="SIGKILL")
    if stale:
        floor.said(f"Task refused: work[{result.id}] (at revoked)")
        assert floor.lease.outcome(result.id) is None
        assert result.state == "PENDING"
    else:
        wait_until(lambda: floor.lease.outcome(result.id) == "revoked")
        wait_until(lambda: result.state == "REVOKED")


@pytest.mark.parametrize("then", ["return", "fail"])
def test_the_current_attempts_result_stands_when_a_stale_one_ends_later(
    floor: Floor, key: str, then: str
) -> None:
    """The current one succeeds or fails, then the stale one succeeds: it changes nothing."""
    result = floor.send(key)
    floor.began(key)
    floor.depose()
    again = f"{key}-again"
    floor.go(again)
    current = floor.send_again(result.id, again, then)
    state = "SUCCESS" if then == "return" else "FAILURE"
    wait_until(lambda: current.state == state)
    floor.go(key)
    floor.said(f"refused: work[{result.id}]")
    assert current.state == state
    assert floor.lease.outcome(result.id) == ("committed" if then == "return" else "failed")
    if then == "return":
        assert current.get(timeout=10) == f"{again} under {floor.lease.epoch}"


@pytest.mark.parametrize("then", ["return", "fail"])
def test_the_current_attempts_result_stands_when_a_stale_one_ended_before(
    floor: Floor, key: str, then: str
) -> None:
    """The stale one stores nothing, so there is nothing for the current one to overwrite."""
    result = floor.send(key, then)
    floor.began(key)
    floor.depose()
    floor.go(key)
    floor.said(f"Task refused: work[{result.id}]")
    again = f"{key}-again"
    floor.go(again)
    current = floor.send_again(result.id, again)
    wait_until(lambda: current.state == "SUCCESS")
    assert current.get(timeout=10) == f"{again} under {floor.lease.epoch}"
