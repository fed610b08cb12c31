"""Signals and worker events: what others can hear of leases and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import signals as celery_signals
from kombu import Consumer

from celery_lease import FencedTask, install, signals
from celery_lease.stamp import inherit
from tests.integration.beats import Cluster
from tests.integration.workshop import Workshop
from tests.services.base import wait_until

NAMES = ("lease_acquired", "lease_lost", "lease_released", "occurrence_skipped", "task_refused")


@pytest.fixture
def heard() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Everything that the package's signals say."""
    said: list[tuple[str, dict[str, Any]]] = []
    receivers = []
    for name in NAMES:

        def note(sender: Any = None, signal: Any = None, **what: Any) -> None:
            said.append((signal.name, what))

        getattr(signals, name).connect(note)
        receivers.append((name, note))
    yield said
    for name, note in receivers:
        getattr(signals, name).disconnect(note)


@pytest.fixture
def cluster(sqlite_url: str) -> Iterator[Cluster]:
    """Beats over SQLite."""
    cluster = Cluster(sqlite_url)
    yield cluster
    cluster.close()


def names(heard: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return which signals were sent, in order."""
    return [name for name, _ in heard]


def test_a_term_is_announced_from_its_grant_to_its_release(
    cluster: Cluster, heard: list[tuple[str, dict[str, Any]]]
) -> None:
    """For pagers and dashboards: who leads, and since when nobody does."""
    beat = cluster.beat().go()
    beat.close()
    assert names(heard) == ["lease_acquired", "lease_released"]
    (_, acquired), (_, released) = heard
    assert acquired == {
        "name": "celery",
        "epoch": 1,
        "holder": str(beat.elector.holder),
        "previous_holder": None,
    }
    assert released["epoch"] == 1


def test_a_lost_lease_is_announced_with_the_reason(
    cluster: Cluster, heard: list[tuple[str, dict[str, Any]]]
) -> None:
    """Lost is not released: somebody should look."""
    first, second = cluster.beat(), cluster.beat()
    first.go()
    cluster.depose()
    second.go()
    first.at(seconds=61).tick()
    assert names(heard) == ["lease_acquired", "lease_acquired", "lease_lost"]
    assert heard[1][1]["previous_holder"] == str(first.elector.holder)
    assert heard[2][1]["epoch"] == 1
    assert heard[2][1]["reason"]


def test_skipped_occurrences_are_announced_as_one_series(
    cluster: Cluster, heard: list[tuple[str, dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    """What is not dispatched is a decision that can be heard of."""
    beat = cluster.beat({"entry": {"schedule": 60.0, "misfire": "latest"}})
    with caplog.at_level("INFO"):
        beat.at(seconds=605).go()
    ((name, what),) = [each for each in heard if each[0] == "occurrence_skipped"]
    assert name == "occurrence_skipped"
    assert what["occurrence"].entry == "entry"
    assert what["count"] == 9
    assert what["until"] > what["occurrence"].due_at
    (line,) = [each for each in caplog.records if getattr(each, "action", "") == "run-skipped"]
    assert line.lease_run == what["occurrence"].run_id == cluster.runs("id")[0][0]


def test_a_refusal_reaches_the_event_stream(workshop: Workshop) -> None:
    """Flower and exporters see it, beside Celery's own task events."""
    events: list[dict[str, Any]] = []

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        raise AssertionError("the body ran")

    result = workshop.lease.dispatch(write)
    workshop.lease.depose()
    with workshop.app.connection() as connection:
        receiver = workshop.app.events.Receiver(
            connection, handlers={"task-refused": events.append}
        )
        consume = Consumer(
            connection.channel(),
            [receiver.queue],
            on_message=lambda m: receiver._receive(m.decode(), m),
            accept=["json"],
        )
        with consume, workshop.worker():
            wait_until(lambda: _drain(connection) or events, timeout=10)
    (event,) = events
    assert event["uuid"] == result.id
    assert event["name"] == "write"
    assert (event["reason"], event["stage"]) == ("stale", "start")
    assert (event["epoch"], event["current_epoch"]) == (1, 2)


def _drain(connection: Any) -> None:
    """Take what has arrived."""
    try:
        connection.drain_events(timeout=0.2)
    except TimeoutError:
        return


def test_a_receiver_that_fails_changes_nothing(workshop: Workshop) -> None:
    """Celery logs and drops what receivers raise, and so the refusal stands."""

    @workshop.task(name="write")
    def write(self: FencedTask) -> None:
        pass

    def fail(**what: Any) -> None:
        raise RuntimeError("a receiver of the user's")

    signals.task_refused.connect(fail)
    try:
        result = workshop.lease.dispatch(write)
        workshop.lease.depose()
        with workshop.worker():
            assert workshop.wait(result.id) == "IGNORED"
    finally:
        signals.task_refused.disconnect(fail)
    assert workshop.lease.run_state(result.id) == "refused"


def test_installing_twice_is_installing_once(workshop: Workshop) -> None:
    """Each task that is bound installs it, and people call it by hand too."""
    install(workshop.app)
    before = len(celery_signals.before_task_publish.receivers)
    install(workshop.app)
    assert len(celery_signals.before_task_publish.receivers) == before
    assert any(receiver is inherit for _, receiver in celery_signals.before_task_publish.receivers)
