"""The life of one fenced task: admitted, run, settled, or turned away."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from billiard.exceptions import WorkerLostError
from celery import VERSION as celery_version  # noqa: N811 - Celery's name
from celery import Task, _state
from celery.app.task import Context
from celery.contrib.abortable import AbortableTask
from celery.exceptions import Ignore, Reject
from kombu.exceptions import OperationalError

from celery_lease import (
    ConfigurationError,
    FencedTask,
    MissingEpoch,
    NotWritable,
    StoreError,
    StoreUnavailable,
)
from celery_lease import backend as backends
from celery_lease.execution import fence_store
from celery_lease.testing import run
from tests.integration.workshop import Workshop
from tests.services.base import wait_until

# --- before the body ----------------------------------------------------------------------


def test_a_current_task_runs_and_is_settled_before_its_result(workshop: Workshop) -> None:
    """The ledger knows first: no other attempt is dispatched once a result can be seen."""
    seen: list[str | None] = []

    @workshop.task(name="write")
    def write(self: FencedTask) -> str:
        workshop.write(self, "once")
        seen.append(workshop.lease.outcome(self.request.id))
        return "done"

    with workshop.worker():
        result = workshop.lease.dispatch(write)
        assert workshop.wait(result.id) == "SUCCESS"
    assert seen == ["committed"]
    assert workshop.notes() == [("once", 1)]
    assert workshop.result_state(result.id) == "SUCCESS"


def test_a_task_without_a_guarded_block_is_settled_after_its_body(workshop: Workshop) -> None:
    """Settled all the same, and before its callbacks are sent."""
    seen: list[str | None] = []

    @workshop.plain(name="then")
    def then(value: str, task_id: str) -> None:
        seen.append(workshop.lease.outcome(task_id))

    @workshop.task(name="plain")
    def plain(self: FencedTask) -> str:
        seen.append(workshop.lease.outcome(self.request.id))
        return self.request.id

    with workshop.worker():
        result = workshop.lease.dispatch(plain, link=then.s("x"))
        workshop.wait(result.id)
        follow_up = next(each for name, each, _ in workshop.published if name == "then")
        workshop.wait(follow_up)
    assert seen == [None, None]
    assert workshop.lease.outcome(result.id) == "committed"


def test_a_stale_message_is_refused_before_its_body(workshop: Workshop) -> None:
    """No body, no result, no callback; the run is marked, so that it is dispatched again."""
    bodies: list[str] = []

    @workshop.plain(name="then")
    def then(value: str) -> None:
        bodies.append("then")

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        bodies.append("write")

    result = workshop.lease.dispatch(write, link=then.s(), link_error=then.s())
    workshop.lease.depose()
    with workshop.worker():
        assert workshop.wait(result.id) == "IGNORED"
    assert bodies == []
    assert workshop.result_state(result.id) == "PENDING"
    assert workshop.lease.run_state(result.id) == "refused"
    assert [name for name, _, _ in workshop.published] == ["write"]
    (record,) = workshop.logged("task-refused")
    assert "epoch 1 is stale, the current epoch is 2" in record.getMessage()
    assert (record.lease_epoch, record.current_epoch) == (1, 2)
    (refusal,) = workshop.refusals
    assert (refusal["stage"], refusal["reason"]) == ("start", "stale")
    assert (refusal["epoch"], refusal["current_epoch"]) == (1, 2)


def test_a_redelivered_message_is_ignored_as_a_duplicate(workshop: Workshop) -> None:
    """The first delivery's outcome stands, and the run is not marked as refused."""
    bodies: list[str] = []

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        bodies.append(self.request.id)
        workshop.write(self, "once")

    with workshop.worker():
        result = workshop.lease.dispatch(write)
        assert workshop.wait(result.id) == "SUCCESS"
        write.apply_async(**workshop.lease.options(result.id))
        assert workshop.wait(result.id, times=2) == "IGNORED"
    assert bodies == [result.id]
    assert workshop.notes() == [("once", 1)]
    assert workshop.lease.run_state(result.id) == "published"
    assert workshop.result_state(result.id) == "SUCCESS"
    assert workshop.refusals[0]["reason"] == "duplicate"


def test_a_settled_run_stays_settled_when_its_message_comes_again_stale(
    workshop: Workshop,
) -> None:
    """It is a duplicate first: marking it refused would have it dispatched again."""

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        workshop.write(self, "once")

    with workshop.worker():
        result = workshop.lease.dispatch(write)
        workshop.wait(result.id)
        workshop.lease.depose()
        write.apply_async(**workshop.lease.options(result.id))
        assert workshop.wait(result.id, times=2) == "IGNORED"
    assert workshop.lease.run_state(result.id) == "published"
    assert workshop.notes() == [("once", 1)]


def test_a_call_without_a_stamp_runs_unfenced_and_touches_no_database(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People call their tasks by hand."""

    @workshop.task(name="write")
    def write(self: FencedTask) -> tuple[int | None, dict[str, str]]:
        self.fence.check()
        workshop.write(self, "by hand")
        return self.epoch, self.fence.headers()

    def connect(app: Any) -> None:
        raise AssertionError("the lease database was asked for")

    monkeypatch.setattr(backends, "fence_store", connect)
    monkeypatch.setattr("celery_lease.task.fence_store", connect)
    assert write.apply().get() == (None, {})
    assert write() == (None, {})
    with workshop.worker():
        result = write.delay()
        assert workshop.wait(result.id) == "SUCCESS"
    assert workshop.notes() == [("by hand", 0)] * 3


def test_the_fence_of_a_call_without_a_stamp_has_all_that_a_fence_has(workshop: Workshop) -> None:
    """A body that reads it works by hand, and in a test, too."""

    @workshop.task(name="read")
    def read(self: FencedTask) -> dict[str, Any]:
        names = ("epoch", "occurrence", "idempotency_key", "settled")
        return {each: getattr(self.fence, each) for each in names}

    nothing = {"epoch": None, "occurrence": None, "idempotency_key": None, "settled": False}
    assert read() == read.apply().get() == nothing
    assert set(run(read, under=workshop.lease).get()) == set(nothing)


def test_a_task_that_requires_an_epoch_refuses_calls_without_one(workshop: Workshop) -> None:
    """``require_epoch``: for tasks that must not run but by the schedule."""

    @workshop.task(name="write", require_epoch=True)
    def write(self: FencedTask) -> int | None:
        return self.epoch

    assert isinstance(write.apply().result, MissingEpoch)
    with pytest.raises(MissingEpoch, match="write"):
        write()
    assert run(write, under=workshop.lease).get() == 1


@pytest.mark.parametrize(
    "damage", [{"lease_term": ""}, {"lease_name": None}, {"lease_epoch": 10**30}]
)
def test_half_a_stamp_is_refused(workshop: Workshop, damage: dict[str, Any]) -> None:
    """It cannot be compared, so it cannot be current."""

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        raise AssertionError("the body ran")

    options = {**workshop.lease.options(), **damage}
    assert isinstance(write.apply(**options).result, MissingEpoch)


def test_a_worker_on_another_database_says_so(
    workshop: Workshop, tmp_path: Any, workshops: Callable[..., Workshop]
) -> None:
    """Refused, loudly: the usual cause is beat_lease_url set for beat alone."""
    other = f"sqlite:///{tmp_path / 'other.sqlite3'}"

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        raise AssertionError("the body ran")

    workshop.app.conf.beat_lease_url = other
    with workshop.worker():
        result = workshop.lease.dispatch(write)
        assert workshop.wait(result.id) == "FAILURE"
    # Whoever shares the database with beat decides how this run ends.
    assert workshop.result_state(result.id) == "PENDING"
    assert workshop.lease.outcome(result.id) is None


def test_a_message_that_met_half_the_tables_is_not_settled(
    database_url: str, workshops: Callable[..., Workshop]
) -> None:
    """MariaDB's guard reads the fence alone, and would find it: failed, unrun, and for good."""
    workshop = workshops(database_url)

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        raise AssertionError("the body ran")

    def rename(*names: str) -> None:
        with workshop.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE {} RENAME TO {}".format(*names))

    rename("celery_lease", "celery_lease_away")
    with workshop.worker():
        result = workshop.lease.dispatch(write)
        assert workshop.wait(result.id) == "FAILURE"
    rename("celery_lease_away", "celery_lease")
    assert workshop.result_state(result.id) == "PENDING"
    assert workshop.lease.outcome(result.id) is None


def test_the_body_sees_its_occurrence(workshop: Workshop) -> None:
    """The planned time, not the time it happens to run at."""

    @workshop.task(name="write")
    def write(self: FencedTask) -> tuple[str, int]:
        return self.occurrence.entry, self.occurrence.attempt

    with workshop.worker():
        result = workshop.lease.dispatch(write, entry="daily")
        workshop.wait(result.id)
    assert workshop.app.AsyncResult(result.id).result == ["daily", 1] or (
        workshop.app.AsyncResult(result.id).result == ("daily", 1)
    )


# --- stale in the middle ------------------------------------------------------------------


def test_a_takeover_in_the_body_rolls_the_guarded_block_back(workshop: Workshop) -> None:
    """The rows are gone, the run is marked, and nobody hears of a result."""

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        workshop.lease.depose()
        workshop.write(self, "stale")

    with workshop.worker():
        result = workshop.lease.dispatch(write)
        assert workshop.wait(result.id) == "IGNORED"
    assert workshop.notes() == []
    assert workshop.lease.run_state(result.id) == "refused"
    assert workshop.result_state(result.id) == "PENDING"
    assert workshop.refusals[0]["stage"] == "commit"


def test_a_body_that_swallows_the_refusal_is_refused_all_the_same(workshop: Workshop) -> None:
    """``except Exception: pass`` around a guarded block is common."""

    @workshop.task(name="write")
    def write(self: FencedTask) -> str:
        workshop.lease.depose()
        try:
            workshop.write(self, "stale")
        except Exception:  # noqa: BLE001 - that is the point
            pass
        return "fine"

    with workshop.worker():
        result = workshop.lease.dispatch(write)
        assert workshop.wait(result.id) == "IGNORED"
    assert workshop.lease.outcome(result.id) is None
    assert workshop.result_state(result.id) == "PENDING"
    assert [each["stage"] for each in workshop.refusals] == ["commit"]


def test_a_body_without_a_block_is_refused_when_it_is_settled(workshop: Workshop) -> None:
    """Its result is a stale attempt's."""

    @workshop.task(name="think")
    def think(self: FencedTask) -> str:
        workshop.lease.depose()
        return "fine"

    with workshop.worker():
        result = workshop.lease.dispatch(think)
        assert workshop.wait(result.id) == "IGNORED"
    assert workshop.result_state(result.id) == "PENDING"
    assert workshop.refusals[0]["stage"] == "settle"


def test_a_stale_failure_is_nobodys_failure(workshop: Workshop) -> None:
    """No FAILURE, no errback, no on_failure: another attempt decides."""
    heard: list[str] = []

    class Listening(FencedTask):
        abstract = True

        def on_failure(self, *args: Any) -> None:
            heard.append("on_failure")

    @workshop.plain(name="errback")
    def errback(task_id: str) -> None:
        heard.append("errback")

    @workshop.plain(name="fail", bind=True, base=Listening)
    def fail(self: FencedTask) -> None:
        workshop.lease.depose()
        raise ValueError("stale")

    with workshop.worker():
        result = workshop.lease.dispatch(fail, link_error=errback.si())
        assert workshop.wait(result.id) == "IGNORED"
    assert heard == []
    assert workshop.result_state(result.id) == "PENDING"
    assert workshop.refusals[0]["stage"] == "failure"


@pytest.mark.parametrize("kind", ["retry", "autoretry", "autoretry_of_the_refusal"])
def test_a_stale_task_publishes_no_retry(workshop: Workshop, kind: str) -> None:
    """Every kind of retry passes the same place, and the refusal is not retried either."""

    @workshop.task(name="manual")
    def manual(self: FencedTask) -> None:
        workshop.lease.depose()
        raise self.retry(countdown=0)

    @workshop.task(name="auto", autoretry_for=(Exception,), retry_kwargs={"countdown": 0})
    def auto(self: FencedTask) -> None:
        workshop.lease.depose()
        if kind == "autoretry_of_the_refusal":
            workshop.write(self, "stale")
        raise ValueError("again")

    with workshop.worker():
        result = workshop.lease.dispatch(manual if kind == "retry" else auto)
        assert workshop.wait(result.id) == "IGNORED"
    assert len(workshop.published) == 1
    assert workshop.result_state(result.id) == "PENDING"
    assert workshop.lease.run_state(result.id) == "refused"


def test_a_retry_that_crosses_a_takeover_is_refused_at_its_start(workshop: Workshop) -> None:
    """The retry carries the stamp of the attempt that it continues."""

    @workshop.task(name="again")
    def again(self: FencedTask) -> None:
        raise self.retry(countdown=2.0)

    with workshop.worker():
        result = workshop.lease.dispatch(again)
        assert workshop.wait(result.id) == "RETRY"
        workshop.lease.depose()
        assert workshop.wait(result.id, times=2) == "IGNORED"
    assert workshop.published[0][2] == workshop.published[1][2]
    assert workshop.lease.run_state(result.id) == "refused"


def test_check_stops_a_long_body(workshop: Workshop) -> None:
    """For what cannot check by itself."""

    @workshop.task(name="long")
    def long(self: FencedTask) -> None:
        self.fence.check()
        workshop.lease.depose()
        self.fence.check()
        raise AssertionError("went on")

    assert run(long, under=workshop.lease).state == "IGNORED"


# --- how it ends --------------------------------------------------------------------------


def test_a_failure_is_settled_before_it_is_stored(workshop: Workshop) -> None:
    """So that no other attempt is dispatched; errbacks carry the stamp."""
    seen: list[str | None] = []

    @workshop.plain(name="errback")
    def errback(task_id: str) -> None:
        seen.append(workshop.lease.outcome(task_id))

    @workshop.task(name="fail")
    def fail(self: FencedTask) -> None:
        raise ValueError("wrong")

    with workshop.worker():
        result = workshop.lease.dispatch(fail, link_error=errback.s())
        assert workshop.wait(result.id) == "FAILURE"
    assert seen == ["failed"]
    assert workshop.result_state(result.id) == "FAILURE"


def test_a_retry_settles_once_at_its_last_attempt(workshop: Workshop) -> None:
    """One id, several executions, one outcome."""
    attempts: list[int] = []

    @workshop.task(name="again", max_retries=3)
    def again(self: FencedTask) -> None:
        attempts.append(self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        workshop.write(self, "third time")

    with workshop.worker():
        result = workshop.lease.dispatch(again)
        assert workshop.wait(result.id, times=3) == "SUCCESS"
    assert attempts == [0, 1, 2]
    assert workshop.notes() == [("third time", 1)]
    assert workshop.lease.outcome(result.id) == "committed"


def test_retries_that_run_out_end_as_failed(workshop: Workshop) -> None:
    """The last retry's exception is the outcome."""

    @workshop.task(name="again", max_retries=1)
    def again(self: FencedTask) -> None:
        raise self.retry(countdown=0, exc=ValueError("enough"))

    with workshop.worker():
        result = workshop.lease.dispatch(again)
        assert workshop.wait(result.id, times=2) == "FAILURE"
    assert workshop.lease.outcome(result.id) == "failed"
    assert workshop.result_state(result.id) == "FAILURE"


@pytest.mark.parametrize("stale", [False, True])
def test_a_body_that_goes_on_after_its_last_retry_is_settled(
    workshop: Workshop, stale: bool
) -> None:
    """No message went out with the id, so nobody else would settle it, or refuse its result."""

    @workshop.plain(name="then")
    def then(value: str) -> None:
        raise AssertionError("sent by a stale attempt")

    @workshop.task(name="fall_back", max_retries=0)
    def fall_back(self: FencedTask) -> str:
        try:
            raise self.retry(exc=OSError("away"))
        except OSError:
            if stale:
                workshop.lease.depose()
            return "the second best"

    with workshop.worker():
        result = workshop.lease.dispatch(fall_back, link=then.s() if stale else None)
        assert workshop.wait(result.id) == ("IGNORED" if stale else "SUCCESS")
    assert workshop.lease.outcome(result.id) == (None if stale else "committed")
    assert workshop.result_state(result.id) == ("PENDING" if stale else "SUCCESS")
    assert [name for name, _, _ in workshop.published] == ["fall_back"]


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_retry_that_the_broker_did_not_take_is_no_outcome(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, acks_late: bool
) -> None:
    """The message goes back to its queue; where it is gone, the leader sends the run again."""
    bodies: list[int] = []
    publish = workshop.app.amqp.send_task_message

    def away(*arguments: Any, **options: Any) -> Any:
        if bodies:
            raise OperationalError("the broker is away")
        return publish(*arguments, **options)

    @workshop.task(name="again", acks_late=acks_late)
    def again(self: FencedTask) -> None:
        bodies.append(1)
        if len(bodies) == 1:
            raise self.retry(countdown=0)
        workshop.write(self, "second delivery")

    monkeypatch.setattr(workshop.app.amqp, "send_task_message", away)
    with workshop.worker():
        result = workshop.lease.dispatch(again)
        workshop.wait(result.id, times=2 if acks_late else 1)
    assert workshop.lease.outcome(result.id) == ("committed" if acks_late else None)
    assert workshop.lease.run_state(result.id) == ("published" if acks_late else "refused")


def test_a_retry_that_cannot_be_made_is_a_failure(workshop: Workshop) -> None:
    """Delivered again it would come to the same end, for ever."""

    @workshop.task(name="again")
    def again(self: FencedTask) -> None:
        raise self.retry(args=(object(),))

    with workshop.worker():
        result = workshop.lease.dispatch(again)
        workshop.wait(result.id)
    assert workshop.lease.outcome(result.id) == "failed"


def test_a_failure_after_the_final_block_leaves_the_run_committed(workshop: Workshop) -> None:
    """What is written is written; the result is FAILURE and the log says why they differ."""

    @workshop.task(name="late")
    def late(self: FencedTask) -> None:
        workshop.write(self, "stands")
        raise ValueError("too late")

    with workshop.worker():
        result = workshop.lease.dispatch(late)
        assert workshop.wait(result.id) == "FAILURE"
    assert workshop.notes() == [("stands", 1)]
    assert workshop.lease.outcome(result.id) == "committed"
    assert workshop.result_state(result.id) == "FAILURE"
    assert len(workshop.logged("failure-after-commit")) == 1


def test_a_retry_after_the_final_block_is_an_error(workshop: Workshop) -> None:
    """It could only end as a duplicate."""

    @workshop.task(name="late")
    def late(self: FencedTask) -> None:
        workshop.write(self, "stands")
        raise self.retry(countdown=0)

    with workshop.worker():
        result = workshop.lease.dispatch(late)
        assert workshop.wait(result.id) == "FAILURE"
    assert len(workshop.published) == 1
    assert "final=False" in str(workshop.app.AsyncResult(result.id).result)


def test_an_automatic_retry_after_the_final_block_tells_what_the_body_raised(
    workshop: Workshop,
) -> None:
    """Nobody wrote ``retry()`` there: the error to mend is the body's own."""

    @workshop.task(name="late", autoretry_for=(KeyError,), retry_kwargs={"countdown": 0})
    def late(self: FencedTask) -> None:
        workshop.write(self, "stands")
        raise KeyError("the real one")

    with workshop.worker():
        result = workshop.lease.dispatch(late)
        assert workshop.wait(result.id) == "FAILURE"
    assert len(workshop.published) == 1
    assert "the real one" in str(workshop.app.AsyncResult(result.id).result)
    assert isinstance(run(late, under=workshop.lease).result.__cause__, KeyError)


def test_a_retry_after_an_earlier_block_goes_on(workshop: Workshop) -> None:
    """``final=False`` says that it may be done once per attempt."""

    @workshop.task(name="steps")
    def steps(self: FencedTask) -> None:
        workshop.write(self, "step", final=False)
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        workshop.write(self, "end")

    with workshop.worker():
        result = workshop.lease.dispatch(steps)
        assert workshop.wait(result.id, times=2) == "SUCCESS"
    assert workshop.notes() == [("step", 1), ("step", 1), ("end", 1)]


def test_a_retry_without_throwing_leaves_the_outcome_to_the_next_attempt(
    workshop: Workshop,
) -> None:
    """``throw=False`` goes on after the retry was sent."""

    @workshop.task(name="again")
    def again(self: FencedTask) -> str:
        if self.request.retries == 0:
            self.retry(countdown=0, throw=False)
            return "first"
        workshop.write(self, "second")
        return "second"

    with workshop.worker():
        result = workshop.lease.dispatch(again)
        assert workshop.wait(result.id, times=2) == "SUCCESS"
    assert workshop.notes() == [("second", 1)]


def test_a_result_beside_a_retry_is_not_stored_once_it_is_stale(workshop: Workshop) -> None:
    """The next attempt is on its way, and so is another one under the new epoch."""

    @workshop.task(name="again")
    def again(self: FencedTask) -> str:
        if self.request.retries == 0:
            self.retry(countdown=0, throw=False)
            workshop.lease.depose()
        return "stale"

    with workshop.worker():
        result = workshop.lease.dispatch(again)
        assert workshop.wait(result.id) == "IGNORED"
        assert workshop.wait(result.id, times=2) == "IGNORED"
    assert workshop.result_state(result.id) == "PENDING"
    assert workshop.lease.outcome(result.id) is None


def test_raising_ignore_is_an_outcome(workshop: Workshop) -> None:
    """The body chose to end without a result: it is not dispatched again."""

    @workshop.task(name="skip")
    def skip(self: FencedTask) -> None:
        raise Ignore

    with workshop.worker():
        result = workshop.lease.dispatch(skip)
        assert workshop.wait(result.id) == "IGNORED"
    assert workshop.lease.outcome(result.id) == "committed"
    assert workshop.refusals == []


@pytest.mark.parametrize(("requeue", "outcome"), [(True, None), (False, "failed")])
def test_rejecting_is_final_unless_the_message_goes_back(
    workshop: Workshop, requeue: bool, outcome: str | None
) -> None:
    """A message that goes back to the queue is not over."""
    rejected: list[str] = []

    @workshop.task(name="reject", acks_late=True)
    def reject(self: FencedTask) -> None:
        if not rejected:
            rejected.append(self.request.id)
            raise Reject("not now", requeue=requeue)
        workshop.write(self, "second delivery")

    with workshop.worker():
        result = workshop.lease.dispatch(reject)
        workshop.wait(result.id, times=2 if requeue else 1)
    assert workshop.lease.outcome(result.id) == ("committed" if requeue else outcome)


def test_rejecting_for_good_calls_errbacks_as_often_as_for_a_plain_task(
    workshop: Workshop,
) -> None:
    """From Celery 5.7 on the worker's parent reports it, with a request of its own."""
    called: list[str] = []

    @workshop.plain(name="errback")
    def errback(*arguments: Any) -> None:
        called.append(str(errback.request.parent_id))

    def body(*_: Any) -> None:
        raise Reject("not this one", requeue=False)

    rejecting = [
        workshop.plain(name="plain", ignore_result=True)(body),
        workshop.task(name="fenced", ignore_result=True)(body),
    ]

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        for each in rejecting:
            each.apply_async(link_error=errback.s())

    with workshop.worker():
        workshop.lease.dispatch(parent)
        wait_until(lambda: len(workshop.ended) >= 3)
        wait_until(lambda: len(called) == (2 if celery_version >= (5, 7) else 0))
    assert workshop.refusals == []


def test_an_unencodable_result_is_a_failure_of_a_committed_run(workshop: Workshop) -> None:
    """Celery's order: callbacks are sent, then the result turns out not to fit."""
    workshop.app.conf.result_backend = "cache+memory://"

    @workshop.task(name="odd")
    def odd(self: FencedTask) -> object:
        workshop.write(self, "stands")
        return object()

    with workshop.worker():
        result = workshop.lease.dispatch(odd)
        assert workshop.wait(result.id) == "FAILURE"
    assert workshop.lease.outcome(result.id) == "committed"
    assert workshop.result_state(result.id) == "FAILURE"


def test_states_of_a_stale_attempt_are_not_stored(workshop: Workshop) -> None:
    """Custom states are checked before they are stored."""

    @workshop.task(name="progress")
    def progress(self: FencedTask) -> None:
        self.update_state(state="PROGRESS", meta={"step": 1})
        workshop.lease.depose()
        self.update_state(state="PROGRESS", meta={"step": 2})

    with workshop.worker():
        result = workshop.lease.dispatch(progress)
        assert workshop.wait(result.id) == "IGNORED"
    assert workshop.app.AsyncResult(result.id).info == {"step": 1}


@pytest.mark.parametrize("stale", [False, True])
def test_states_after_the_final_block_are_stored(workshop: Workshop, stale: bool) -> None:
    """The outcome is this execution's own, and stands even where the epoch does not."""

    @workshop.task(name="progress")
    def progress(self: FencedTask) -> None:
        workshop.write(self, "stands")
        if stale:
            workshop.lease.depose()
        self.update_state(state="PROGRESS", meta={"step": 2})
        seen.append(workshop.app.AsyncResult(self.request.id).info)

    seen: list[Any] = []
    with workshop.worker():
        result = workshop.lease.dispatch(progress)
        assert workshop.wait(result.id) == "SUCCESS"
    assert seen == [{"step": 2}]


def test_started_of_a_stale_message_is_not_stored(workshop: Workshop) -> None:
    """Celery stores it before the body, ahead of the admission."""
    workshop.app.conf.task_track_started = True

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        workshop.write(self, "once")

    result = workshop.lease.dispatch(write)
    workshop.lease.depose()
    with workshop.worker():
        assert workshop.wait(result.id) == "IGNORED"
    assert workshop.result_state(result.id) == "PENDING"


def test_ignore_result_settles_all_the_same(workshop: Workshop) -> None:
    """The ledger does not depend on a result store."""

    @workshop.task(name="quiet", ignore_result=True)
    def quiet(self: FencedTask) -> None:
        pass

    with workshop.worker():
        result = workshop.lease.dispatch(quiet)
        assert workshop.wait(result.id) == "SUCCESS"
    assert workshop.lease.outcome(result.id) == "committed"


# --- the lease database is away -----------------------------------------------------------


def fail_first(
    monkeypatch: pytest.MonkeyPatch,
    workshop: Workshop,
    verb: str,
    error: StoreError,
    *,
    times: int,
) -> None:
    """Have a verb of the lease database fail so many times, and then do what it does."""
    store = fence_store(workshop.app)
    real, left = getattr(store, verb), [error] * times

    def failing(*args: Any) -> Any:
        if left:
            raise left.pop()
        return real(*args)

    monkeypatch.setattr(store, verb, failing)


@pytest.mark.parametrize("verb", ["look", "settle"])
@pytest.mark.parametrize("acks_late", [False, True])
@pytest.mark.parametrize("why", [StoreUnavailable, NotWritable])
def test_a_database_that_is_away_postpones_the_message(
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    acks_late: bool,
    why: type[StoreError],
) -> None:
    """Same id, stamps and retries; nothing is lost and nothing is decided.

    Nor where it answers and takes no writes: the message would be gone, its run
    neither settled nor refused, and so not sent again before a takeover.
    """
    monkeypatch.setattr("celery_lease.republish.FIRST_COUNTDOWN", 0.05)
    fail_first(monkeypatch, workshop, verb, why("connection refused"), times=2)

    @workshop.task(name="write", lease_patience=0, acks_late=acks_late)
    def write(self: FencedTask, text: str) -> str:
        return text

    with workshop.worker():
        result = workshop.lease.dispatch(write, ("hello",))
        assert workshop.wait(result.id, times=3) == "SUCCESS"
    assert [state for _, _, state in workshop.ended] == ["IGNORED", "IGNORED", "SUCCESS"]
    assert len({tuple(sorted(stamps.items())) for _, _, stamps in workshop.published}) == 1
    assert workshop.app.AsyncResult(result.id).get() == "hello"


def test_no_error_of_the_database_before_the_body_is_an_outcome(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: settled as failed, the run would never be sent again."""
    monkeypatch.setattr("celery_lease.republish.FIRST_COUNTDOWN", 0.05)
    fail_first(monkeypatch, workshop, "look", StoreError("nobody has seen this before"), times=1)

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        pass

    with workshop.worker():
        result = workshop.lease.dispatch(write)
        assert workshop.wait(result.id, times=2) == "SUCCESS"
    assert workshop.lease.outcome(result.id) == "committed"


def test_a_short_absence_is_waited_for(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failover of the database takes seconds: no need to publish anything."""
    fail_first(monkeypatch, workshop, "look", StoreUnavailable("connection refused"), times=2)

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        pass

    with workshop.worker():
        result = workshop.lease.dispatch(write)
        assert workshop.wait(result.id) == "SUCCESS"
    assert len(workshop.published) == 1


# --- eager and direct calls ---------------------------------------------------------------


def test_an_eager_task_under_a_stamp_is_fenced(workshop: Workshop) -> None:
    """Eager mode wraps stamps in lists."""

    @workshop.task(name="write")
    def write(self: FencedTask) -> int | None:
        workshop.write(self, "eager")
        return self.epoch

    workshop.app.conf.task_always_eager = True
    assert write.apply_async(**workshop.lease.options()).get() == 1
    new = workshop.lease.depose()
    assert write.apply_async(**workshop.lease.options()).state == "IGNORED"
    assert run(write, under=new).get() == 2
    assert workshop.notes() == [("eager", 1), ("eager", 2)]


def test_a_task_called_eagerly_in_a_body_inherits_the_stamp(workshop: Workshop) -> None:
    """Celery publishes nothing there, so the running tasks are asked."""
    stamps: list[int | None] = []

    @workshop.task(name="child")
    def child(self: FencedTask) -> str:
        stamps.append(self.epoch)
        workshop.write(self, "child")
        return self.request.id

    @workshop.task(name="stranger", inherit_epoch=False)
    def stranger(self: FencedTask) -> None:
        stamps.append(self.epoch)

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> str:
        stranger.apply()
        return child.apply().get(disable_sync_subtasks=False)

    result = run(parent, under=workshop.lease)
    assert stamps == [None, 1]
    assert workshop.lease.outcome(result.get()) == "committed"
    assert workshop.lease.outcome(result.id) == "committed"


def test_a_task_called_like_a_function_works_behind_the_callers_fence(
    workshop: Workshop,
) -> None:
    """Else its guarded block would write unguarded, in silence."""

    @workshop.task(name="helper")
    def helper(self: FencedTask) -> None:
        workshop.write(self, "helped")

    @workshop.task(name="parent")
    def parent(self: FencedTask, depose: bool) -> None:
        if depose:
            workshop.lease.depose()
        helper()

    assert run(parent, False, under=workshop.lease).state == "SUCCESS"
    assert run(parent, True, under=workshop.lease).state == "IGNORED"
    assert workshop.notes() == [("helped", 1)]


def test_a_body_that_calls_itself_is_admitted_once(workshop: Workshop) -> None:
    """Recursion is a function call."""

    @workshop.task(name="count")
    def count(self: FencedTask, down: int) -> int:
        return 0 if down == 0 else 1 + self(down - 1)

    assert run(count, 3, under=workshop.lease).get() == 3
    with workshop.worker():
        result = workshop.lease.dispatch(count, (3,))
        assert workshop.wait(result.id) == "SUCCESS"


# --- what would by-pass the fence ---------------------------------------------------------


def test_a_backend_of_its_own_is_a_configuration_error(workshop: Workshop) -> None:
    """It would replace the guarded one without a word."""
    with pytest.raises(ConfigurationError, match="result_backend"):

        @workshop.plain(base=FencedTask, backend=workshop.app.backend, lazy=False)
        def write() -> None:
            pass


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("how", ["runs it", "swallows", "skips", "ignores"])
def test_a_call_method_of_ones_own_is_behind_the_fence_as_a_whole(
    workshop: Workshop, how: str, stale: bool
) -> None:
    """Whatever it catches, and whether it comes to the body or not."""

    class Timed(FencedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if how == "skips":
                return "skipped"
            if how == "ignores":
                raise Ignore
            if how == "runs it":
                return self.run(*args, **kwargs)
            with contextlib.suppress(Exception):
                return super().__call__(*args, **kwargs)

    @workshop.plain(name="follow")
    def follow(value: Any) -> None:
        pass

    @workshop.plain(base=Timed, bind=True, name="write")
    def write(self: FencedTask) -> None:
        if stale:
            workshop.lease.depose()
        workshop.write(self, "timed")

    deposed = stale and how in {"skips", "ignores"}
    result = workshop.lease.dispatch(write, link=follow.s())
    if deposed:
        workshop.lease.depose()
    with workshop.worker():
        state = workshop.wait(result.id)
    assert state == ("IGNORED" if stale or how == "ignores" else "SUCCESS")
    assert workshop.lease.outcome(result.id) == (None if stale else "committed")
    assert workshop.lease.run_state(result.id) == ("refused" if stale else "published")
    followed = "follow" in {name for name, _, _ in workshop.published}
    assert followed is (state == "SUCCESS")


def test_a_call_method_of_ones_own_is_no_way_past_the_need_of_an_epoch(
    workshop: Workshop,
) -> None:
    """Called like a function there is no message that could have one."""

    class Timed(FencedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    @workshop.plain(base=Timed, bind=True, name="write", require_epoch=True, lazy=False)
    def write(self: FencedTask) -> None:
        raise AssertionError("the body ran")

    with pytest.raises(MissingEpoch):
        write()


def test_a_call_method_of_ones_own_may_retry(workshop: Workshop) -> None:
    """What the body raised is not on record before the whole of it is over."""

    class Patient(FencedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except ValueError as error:
                raise self.retry(exc=error, countdown=0) from error

    @workshop.plain(base=Patient, bind=True, name="write")
    def write(self: FencedTask) -> None:
        workshop.write(self, f"attempt {self.request.retries}", final=False)
        if self.request.retries == 0:
            raise ValueError("not yet")

    with workshop.worker():
        result = workshop.lease.dispatch(write)
        assert workshop.wait(result.id, times=2) == "SUCCESS"
    assert workshop.notes() == [("attempt 0", 1), ("attempt 1", 1)]
    assert workshop.lease.outcome(result.id) == "committed"


def test_a_call_method_that_names_another_base_is_a_configuration_error(
    workshop: Workshop,
) -> None:
    """Flask's old recipe: whatever stands between, it goes straight to that class."""
    plain = workshop.app.Task

    class InContext(plain):  # type: ignore[misc, valid-type] # made by the app
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return plain.__call__(self, *args, **kwargs)

    class Fenced(InContext, FencedTask):
        abstract = True

    with pytest.raises(ConfigurationError, match="calls that of another class"):

        @workshop.plain(base=Fenced, lazy=False)
        def write() -> None:
            pass


def test_a_call_method_behind_the_fence_is_a_configuration_error(workshop: Workshop) -> None:
    """It would be left out without a word: the fence runs the body by itself."""

    class InContext(Task):  # type: ignore[type-arg] # generic to type checkers alone
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    class Fenced(FencedTask, InContext):
        abstract = True

    with pytest.raises(ConfigurationError, match="name FencedTask last among the bases"):

        @workshop.plain(base=Fenced, lazy=False)
        def write() -> None:
            pass


def test_a_call_method_that_names_what_is_assigned_later_is_fine(workshop: Workshop) -> None:
    """As in a factory of apps; nothing is known yet of what it names."""

    class InContext(FencedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            called.append(self.request.id)
            return super().__call__(*args, **kwargs)

    @workshop.plain(base=InContext, bind=True, lazy=False)
    def write(self: FencedTask) -> None:
        pass

    called: list[str] = []
    result = run(write, under=workshop.lease)
    assert called == [result.id]


@pytest.mark.parametrize("how", ["super", "named"])
def test_a_base_with_a_call_method_stands_before_the_fence(workshop: Workshop, how: str) -> None:
    """An application's context is there for messages as well."""
    called: list[str] = []

    class InContext(Task):  # type: ignore[type-arg] # generic to type checkers alone
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            called.append(self.request.id)
            if how == "named":
                return FencedTask.__call__(self, *args, **kwargs)  # type: ignore[arg-type]
            return super().__call__(*args, **kwargs)

    class Fenced(InContext, FencedTask):
        abstract = True

    @workshop.plain(base=Fenced, bind=True, name="write")
    def write(self: FencedTask) -> None:
        workshop.write(self, "in context")

    with workshop.worker():
        result = workshop.lease.dispatch(write)
        assert workshop.wait(result.id) == "SUCCESS"
    assert called == [result.id]
    assert workshop.lease.outcome(result.id) == "committed"


def test_a_call_method_with_super_is_fine(workshop: Workshop) -> None:
    """The stack of requests is the same with and without it."""
    called: list[str] = []

    class Timed(FencedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            called.append(self.request.id)
            return super().__call__(*args, **kwargs)

    @workshop.plain(base=Timed, bind=True, name="timed")
    def write(self: FencedTask) -> None:
        workshop.write(self, "timed")

    with workshop.worker():
        result = workshop.lease.dispatch(write)
        assert workshop.wait(result.id) == "SUCCESS"
    stale = workshop.lease
    stale.depose()
    assert run(write, under=stale).state == "IGNORED"
    assert workshop.notes() == [("timed", 1)]


@pytest.mark.parametrize(
    ("setting", "value"), [("worker_deduplicate_successful_tasks", True), ("task_protocol", 1)]
)
def test_settings_that_by_pass_the_fence_are_configuration_errors(
    workshops: Callable[..., Workshop], sqlite_url: str, setting: str, value: Any
) -> None:
    """One sends callbacks before any fence, the other cannot carry stamps."""
    workshop = workshops(sqlite_url, **{setting: value})
    with pytest.raises(ConfigurationError, match=setting):

        @workshop.plain(base=FencedTask, lazy=False)
        def write() -> None:
            pass

    workshop.app.conf[setting] = None if setting == "task_protocol" else False


@pytest.mark.parametrize(
    ("setting", "value"), [("worker_deduplicate_successful_tasks", True), ("task_protocol", 1)]
)
def test_settings_that_by_pass_the_fence_are_found_when_they_are_set_late(
    workshop: Workshop, setting: str, value: Any
) -> None:
    """After the tasks were bound: the worker ends with one line."""

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        raise AssertionError("the worker runs")

    workshop.app.finalize()
    before = workshop.app.conf[setting]
    workshop.app.conf[setting] = value
    with pytest.raises(SystemExit, match="1"), workshop.worker():
        pass
    workshop.app.conf[setting] = before
    (record,) = workshop.logged("worker-cannot-start")
    assert record.getMessage().startswith(f"worker cannot start: {setting}")


@pytest.mark.parametrize(
    ("setting", "value"),
    [("beat_lease_tt1", 3), ("beat_lease_url", "redis://x"), ("beat_lease_url", "mysql://u@h/d")],
)
def test_a_worker_whose_settings_are_wrong_does_not_start(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, setting: str, value: Any
) -> None:
    """It would take in all messages, and fail over each of them."""
    monkeypatch.setitem(sys.modules, "MySQLdb", None)  # which a machine may have

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        raise AssertionError("the worker runs")

    workshop.app.finalize()
    before = dict(workshop.app.conf.changes)
    workshop.app.conf[setting] = value
    with pytest.raises(SystemExit, match="1"), workshop.worker():
        pass
    workshop.app.conf.changes.clear()
    workshop.app.conf.update(before)
    (record,) = workshop.logged("worker-cannot-start")
    assert setting in record.getMessage()


def test_a_worker_says_which_file_it_takes_for_the_lease_database(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the setting was forgotten it would be ready, and refuse every message."""
    monkeypatch.chdir(tmp_path)

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        raise AssertionError("nobody sends it")

    workshop.app.finalize()
    workshop.app.conf.beat_lease_url = "sqlite:///lease.sqlite3"
    with workshop.worker():
        pass
    (record,) = workshop.logged("lease-in-a-relative-file")
    assert str(tmp_path / "lease.sqlite3") in record.getMessage()


def _words(statements: list[str]) -> list[str]:
    return [each.split()[0] for each in statements if "PRAGMA" not in each]


def _traced(engine: sa.Engine) -> list[str]:
    """Return a list of all that SQLite is told from now on."""
    seen: list[str] = []

    @sa.event.listens_for(engine, "connect")
    def connected(dbapi: Any, record: Any) -> None:
        dbapi.set_trace_callback(seen.append)

    engine.dispose()  # for connections that are listened to from their start
    return seen


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_process_that_is_lost_after_another_delivery_succeeded_is_no_failure(
    workshop: Workshop, stale: bool, ignored: bool
) -> None:
    """Its parent cannot find a result where none is stored, and must not take that for a loss."""

    @workshop.task(name="errback")
    def errback(self: FencedTask, task_id: str) -> None:
        raise AssertionError("the run is committed")

    @workshop.task(name="work", ignore_result=ignored)
    def work(self: FencedTask) -> None:
        pass

    first = workshop.lease
    with workshop.worker():
        result = first.dispatch(work)
        workshop.wait(result.id)
    if stale:
        result = first.dispatch(work)
        again = first.depose()
        with workshop.worker():
            work.apply_async(**again.options(result.id))
            workshop.wait(result.id, times=2)
    stamps = first.stamp(result.id).stamps()
    lost = Context(id=result.id, stamps=stamps, errbacks=[errback.s()])
    work.backend.mark_as_failure(result.id, WorkerLostError("killed"), request=lost)
    assert "errback" not in {name for name, _, _ in workshop.published}
    refusal = workshop.refusals[-1]
    assert (refusal["stage"], refusal["reason"]) == ("failure", "stale" if stale else "duplicate")


def test_a_process_that_is_lost_under_a_grant_that_was_made_twice_is_no_failure(
    workshop: Workshop,
) -> None:
    """Its epoch is the current one, and its term is not."""

    @workshop.task(name="work")
    def work(self: FencedTask) -> None:
        pass

    result = workshop.lease.dispatch(work)
    stamps = {**workshop.lease.stamp(result.id).stamps(), "lease_term": "another"}
    lost = Context(id=result.id, stamps=stamps)
    work.backend.mark_as_failure(result.id, WorkerLostError("killed"), request=lost)
    assert workshop.result_state(result.id) == "PENDING"
    assert workshop.lease.outcome(result.id) is None


@pytest.mark.parametrize("first", [False, True])
def test_a_base_with_results_of_its_own_keeps_them(workshop: Workshop, first: bool) -> None:
    """An abortable task finds out that it was aborted, whichever base is named first."""
    bases = (FencedTask, AbortableTask) if first else (AbortableTask, FencedTask)
    seen: list[bool] = []

    @workshop.plain(base=type("Both", bases, {"abstract": True}), bind=True, name="stop")
    def stop(self: Any) -> None:
        self.AsyncResult(self.request.id).abort()
        seen.append(self.is_aborted())

    with workshop.worker():
        workshop.wait(workshop.lease.dispatch(stop).id)
    assert seen == [True]


def test_statements_are_counted_not_timed(workshop: Workshop) -> None:
    """One for the admission, and one more than the user's own: all that the database sees."""
    own, users = _traced(fence_store(workshop.app).engine), _traced(workshop.engine)

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        workshop.write(self, "counted")

    assert run(write, under=workshop.lease).state == "SUCCESS"
    assert _words(own) == ["SELECT"]
    assert _words(users) == ["BEGIN", "INSERT", "INSERT", "COMMIT"]


def test_a_failure_is_settled_once_and_then_believed(workshop: Workshop) -> None:
    """The backend, which is told of it next, need not ask whether it may be stored."""
    own = _traced(fence_store(workshop.app).engine)

    @workshop.task(name="fail")
    def fail(self: FencedTask) -> None:
        raise RuntimeError("no")

    assert run(fail, under=workshop.lease).state == "FAILURE"
    assert _words(own) == ["SELECT", "INSERT"]


def test_a_class_that_no_app_has_bound_yet_can_be_sent(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds its app when it is used first, by way of a proxy."""
    monkeypatch.setattr(_state._tls, "current_app", workshop.app)

    class Write(FencedTask):
        name = "write"

        def run(self) -> None:
            pass

    Write().apply_async(**workshop.lease.options())
    assert [name for name, _, _ in workshop.published] == ["write"]


# --- around the body ----------------------------------------------------------------------


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("how", ["raises", "ignores", "rejects", "replaces"])
def test_what_ends_a_task_ahead_of_its_body_is_settled_too(
    workshop: Workshop, how: str, stale: bool
) -> None:
    """``before_start`` is a part of the attempt: a stale one must not even begin with it."""
    begun: list[str] = []

    @workshop.plain(name="instead")
    def instead() -> None:
        pass

    class Careful(FencedTask):
        abstract = True

        def before_start(self, *args: Any) -> None:
            begun.append(how)
            if how == "raises":
                raise ValueError("not today")
            if how == "ignores":
                raise Ignore
            if how == "rejects":
                raise Reject("not today", requeue=False)
            self.replace(instead.si())

    @workshop.plain(name="write", base=Careful, bind=True)
    def write(self: FencedTask) -> None:
        raise AssertionError("the body ran")

    result = workshop.lease.dispatch(write)
    if stale:
        workshop.lease.depose()
    with workshop.worker():
        workshop.wait(result.id)
    assert begun == ([] if stale else [how])
    if stale:
        assert workshop.lease.run_state(result.id) == "refused"
        assert workshop.lease.outcome(result.id) is None
        assert workshop.result_state(result.id) == "PENDING"
    else:
        expected = "failed" if how in {"raises", "rejects"} else "committed"
        assert workshop.lease.outcome(result.id) == expected
    sent = [name for name, _, _ in workshop.published]
    assert ("instead" in sent) is (how == "replaces" and not stale)


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
@pytest.mark.parametrize("stamped", [False, True])
def test_a_hook_may_be_static(workshop: Workshop, kind: Any, stamped: bool) -> None:
    """Celery calls whatever the task has under that name."""
    seen: list[Any] = []

    def listen(*args: Any) -> None:
        seen.append(args[-3:])

    listening = type("Listening", (FencedTask,), {"abstract": True, "before_start": kind(listen)})

    @workshop.plain(name="write", base=listening, bind=True)
    def write(self: FencedTask) -> None:
        pass

    with workshop.worker():
        result = workshop.lease.dispatch(write) if stamped else write.delay()
        assert workshop.wait(result.id) == "SUCCESS"
    assert seen == [(result.id, [], {})]


def test_a_message_is_admitted_once_though_something_goes_before_its_body(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement for admission, whoever asks first."""
    asked: list[str] = []
    store = fence_store(workshop.app)
    look = store.look

    def counting(ticket: Any) -> Any:
        asked.append(ticket.task_id)
        return look(ticket)

    monkeypatch.setattr(store, "look", counting)

    class Careful(FencedTask):
        abstract = True

        def before_start(self, *args: Any) -> None:
            pass

    @workshop.plain(name="write", base=Careful, bind=True)
    def write(self: FencedTask) -> None:
        workshop.write(self, "once")

    with workshop.worker():
        result = workshop.lease.dispatch(write)
        assert workshop.wait(result.id) == "SUCCESS"
    assert asked == [result.id]


def test_the_idempotency_key_is_the_same_on_every_attempt(workshop: Workshop) -> None:
    """For services that can tell duplicates, or that keep the largest epoch they saw."""
    seen: list[dict[str, str]] = []

    @workshop.task(name="call")
    def call(self: FencedTask) -> None:
        seen.append(self.fence.headers())

    first = run(call, under=workshop.lease, task_id="one")
    new = workshop.lease.depose()
    assert first.state == "SUCCESS"
    run(call, under=new, task_id="two")
    assert seen == [
        {"Idempotency-Key": "one", "Lease-Name": "celery", "Lease-Epoch": "1"},
        {"Idempotency-Key": "two", "Lease-Name": "celery", "Lease-Epoch": "2"},
    ]
