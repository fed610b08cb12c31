"""A message that is to be published again, and cannot be as it was."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import signals
from celery.app.task import Context
from celery.worker.request import Request
from kombu.exceptions import OperationalError

from celery_lease import FencedTask, Occurrence, StoreUnavailable
from celery_lease.execution import fence_store
from celery_lease.republish import carry_on
from tests.integration.workshop import Workshop

#: What JSON has no word for.
NO_JSON = 1j
PICKLE = "application/x-python-serialize"
BOTH = {"accept_content": ["json", "pickle"]}


@pytest.fixture
def workshop(sqlite_url: str, workshops: Callable[..., Workshop]) -> Workshop:
    """A workshop that takes pickle too, and sends JSON."""
    return workshops(sqlite_url, **BOTH)


@pytest.fixture
def broker_errors(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What the next messages raise, once each, the last one first."""
    errors: list[Exception] = []
    publish = workshop.app.amqp.send_task_message

    def failing(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return publish(*arguments, **options)

    monkeypatch.setattr(workshop.app.amqp, "send_task_message", failing)
    return errors


def writing(workshop: Workshop, **options: Any) -> Any:
    """Return a task that writes what it is given."""

    @workshop.task(name="write", **options)
    def write(self: FencedTask, value: Any) -> None:
        workshop.write(self, repr(value))

    return write


def send_consequence(workshop: Workshop, task: Any, value: Any, **options: Any) -> str:
    """Send a child of a plain task's run, and have a takeover before it comes; return its id."""
    run = Occurrence(lease="celery", entry="plain", due_at=datetime.now(timezone.utc))
    workshop.lease.record(run, fenced=False)
    stamped = workshop.lease.stamp(run.run_id).options(options)
    child_id: str = task.apply_async((value,), **stamped).id
    workshop.lease.depose()
    return child_id


def lease_database_away(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, *, times: int
) -> None:
    """Have the lease database not answer so many questions about the fence."""
    store = fence_store(workshop.app)
    look, away = store.look, [True] * times

    def failing(*arguments: Any) -> Any:
        if away:
            away.pop()
            raise StoreUnavailable("connection refused")
        return look(*arguments)

    monkeypatch.setattr(store, "look", failing)


# --- how it is serialised -----------------------------------------------------------------


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_consequence_is_carried_on_though_its_call_named_another_serializer(
    workshop: Workshop, acks_late: bool
) -> None:
    """With late acknowledgement it was requeued without end, and lost without a trace else."""
    write = writing(workshop, acks_late=acks_late)
    child = send_consequence(workshop, write, NO_JSON, serializer="pickle")
    with workshop.worker():
        assert workshop.wait(child, times=2) == "SUCCESS"
    assert [state for _, _, state in workshop.ended] == ["IGNORED", "SUCCESS"]
    assert workshop.notes() == [(repr(NO_JSON), 2)]


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_message_of_another_serializer_is_postponed(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, acks_late: bool
) -> None:
    """A database that is away for a moment costs no run."""
    monkeypatch.setattr("celery_lease.republish.FIRST_COUNTDOWN", 0.05)
    lease_database_away(workshop, monkeypatch, times=1)
    write = writing(workshop, acks_late=acks_late, lease_patience=0)
    run = workshop.lease.dispatch(write, (NO_JSON,), serializer="pickle").id
    with workshop.worker():
        assert workshop.wait(run, times=2) == "SUCCESS"
    assert workshop.notes() == [(repr(NO_JSON), 1)]
    assert workshop.logged("task-not-published") == []


def test_a_message_that_is_published_again_does_not_say_where_it_has_died_before(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ before 4.0.1 drops one that goes through the same delay queue again."""
    monkeypatch.setattr("celery_lease.republish.FIRST_COUNTDOWN", 0.05)
    lease_database_away(workshop, monkeypatch, times=1)
    seen: list[dict[str, Any]] = []
    write = writing(workshop, lease_patience=0)
    died = {"x-death": [{"queue": "delayed"}], "x-first-death-queue": "delayed", "mine": "kept"}

    def note(headers: Any = None, **_: Any) -> None:
        seen.append(headers)

    signals.before_task_publish.connect(note)
    with workshop.worker():
        run = workshop.lease.dispatch(write, (1,), headers=died).id
        assert workshop.wait(run, times=2) == "SUCCESS"
    signals.before_task_publish.disconnect(note)
    assert set(died) <= set(seen[0])
    assert set(died) & set(seen[1]) == {"mine"}


@pytest.mark.rabbitmq
def test_rabbitmq_tells_how_a_message_was_serialised(
    sqlite_url: str, rabbitmq_url: str, workshops: Callable[..., Workshop]
) -> None:
    """JSON would do for a tuple, and make a list of it."""
    workshop = workshops(sqlite_url, broker_url=rabbitmq_url, **BOTH)
    write = writing(workshop)
    send_consequence(workshop, write, ("a", 1), serializer="pickle")
    with workshop.app.connection_for_read() as connection:
        queue = connection.SimpleQueue(workshop.app.conf.task_default_queue)
        queue.consumer.accept = {PICKLE}
        came = queue.get(timeout=10)
        args, kwargs, _ = came.payload
        known = Request(came, app=workshop.app, task=write, on_ack=came.ack).request_dict
        request = Context(known, args=args, kwargs=kwargs)
        carry_on(write, request, workshop.lease.stamp(request.id))
        again = queue.get(timeout=10)
    assert again.content_type == PICKLE
    assert again.payload[0] == (("a", 1),)


# --- where it cannot be published ---------------------------------------------------------


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_consequence_of_which_no_message_can_be_made_ends_as_failed(
    workshop: Workshop, broker_errors: list[Exception], acks_late: bool
) -> None:
    """Delivered again it would come to the same end, and somebody waits for its result."""
    child = send_consequence(workshop, writing(workshop, acks_late=acks_late), "x")
    broker_errors.append(ValueError("no such queue"))
    with workshop.worker():
        assert workshop.wait(child) == "IGNORED"
    assert workshop.result_state(child) == "FAILURE"
    assert "no such queue" in str(workshop.app.AsyncResult(child).result)
    (record,) = workshop.logged("task-not-published")
    assert f"write[{child}] ends here, and its result is FAILURE" in record.getMessage()
    assert len(workshop.ended) == 1


@pytest.mark.parametrize("acks_late", [False, True])
def test_a_consequence_that_the_broker_does_not_take_goes_back_or_ends(
    workshop: Workshop, broker_errors: list[Exception], acks_late: bool
) -> None:
    """Acknowledged early it is nowhere any more: its chord would wait for ever."""
    child = send_consequence(workshop, writing(workshop, acks_late=acks_late), "x")
    broker_errors.append(OperationalError("the broker is away"))
    with workshop.worker():
        workshop.wait(child, times=3 if acks_late else 1)
    states = [state for _, _, state in workshop.ended]
    assert states == (["REJECTED", "IGNORED", "SUCCESS"] if acks_late else ["IGNORED"])
    assert workshop.result_state(child) == ("SUCCESS" if acks_late else "FAILURE")


@pytest.mark.parametrize("error", [OperationalError("away"), ValueError("no such queue")])
@pytest.mark.parametrize("acks_late", [False, True])
def test_a_run_that_cannot_be_postponed_goes_back_or_is_dispatched_again(
    workshop: Workshop,
    monkeypatch: pytest.MonkeyPatch,
    broker_errors: list[Exception],
    acks_late: bool,
    error: Exception,
) -> None:
    """Once the lease database is back the message as it is will do; else the leader sends it."""
    lease_database_away(workshop, monkeypatch, times=1)
    write = writing(workshop, acks_late=acks_late, lease_patience=0)
    run = workshop.lease.dispatch(write, ("x",)).id
    broker_errors.append(error)
    with workshop.worker():
        workshop.wait(run, times=2 if acks_late else 1)
    states = [state for _, _, state in workshop.ended]
    assert states == (["REJECTED", "SUCCESS"] if acks_late else ["IGNORED"])
    assert workshop.lease.run_state(run) == ("published" if acks_late else "refused")
    assert workshop.lease.outcome(run) == ("committed" if acks_late else None)
    assert len(workshop.logged("task-not-published")) == (not acks_late)
