"""What happens, as Celery signals, and what has to be installed in a Celery app."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any, Literal

from celery import Celery, signals
from celery.utils.dispatch import Signal

from celery_lease import logs
from celery_lease.errors import AlreadySettled, FencingError
from celery_lease.occurrence import Occurrence, Outcome
from celery_lease.stamp import inherit
from celery_lease.transition import Action, Transition

__all__ = [
    "Stage",
    "announce",
    "install",
    "lease_acquired",
    "lease_lost",
    "lease_released",
    "occurrence_skipped",
    "announce_refusal",
    "announce_skipped",
    "stage_of",
    "task_refused",
]

logger = logging.getLogger("celery_lease.task")

#: A beat leads. Sent with ``name``, ``epoch``, ``holder`` and ``previous_holder``.
lease_acquired = Signal(
    name="lease_acquired", providing_args=["name", "epoch", "holder", "previous_holder"]
)

#: A beat stopped leading against its will. Sent with ``name``, ``epoch``, ``holder``, ``reason``.
lease_lost = Signal(name="lease_lost", providing_args=["name", "epoch", "holder", "reason"])

#: A beat let go of its lease. Sent with ``name``, ``epoch`` and ``holder``.
lease_released = Signal(name="lease_released", providing_args=["name", "epoch", "holder"])

#: Where a task was turned away.
Stage = Literal["start", "commit", "settle", "failure", "expired", "revoked"]

_STAGES: dict[Outcome, Stage] = {
    "committed": "settle",
    "failed": "failure",
    "expired": "expired",
    "revoked": "revoked",
}

#: A worker turned a task away. The sender is the task. Sent with ``task_id``, ``request``,
#: ``epoch`` and ``current_epoch``, ``reason``: stale or duplicate,
#: ``stage``: start, commit, settle, failure, expired or revoked, and the ``error``.
task_refused = Signal(
    name="task_refused",
    providing_args=[
        "task_id",
        "request",
        "epoch",
        "current_epoch",
        "reason",
        "stage",
        "error",
    ],
)

#: A beat decided not to dispatch an occurrence. Sent with ``occurrence``, ``reason``,
#: ``count`` and ``until``, the last of a series that was skipped as one.
occurrence_skipped = Signal(
    name="occurrence_skipped", providing_args=["occurrence", "reason", "count", "until"]
)


def install(app: Celery) -> None:
    """Have what stamped tasks publish inherit their stamp, and log lines show the epoch.

    Done for you where a FencedTask is bound to *app*; call it for a worker that has
    plain tasks only. Doing it twice changes nothing. Celery's signals are those of
    the process, so one app is enough.

    Args:
        app: The Celery app of the worker.
    """
    signals.before_task_publish.connect(inherit, weak=False, dispatch_uid="celery_lease.stamp")
    logs.install()


def announce(transition: Transition) -> None:
    """Send the signal of a transition of a lease, if it has one.

    Args:
        transition: What the elector saw. It may come from the thread that renews.
    """
    told = {"name": transition.name, "epoch": transition.epoch, "holder": transition.holder}
    if transition.action is Action.ACQUIRED:
        previous = transition.previous_holder
        lease_acquired.send(sender=transition.name, previous_holder=previous, **told)
    elif transition.action in (Action.LOST, Action.CONFLICT):
        lease_lost.send(sender=transition.name, reason=transition.reason, **told)
    elif transition.action is Action.RELEASED:
        lease_released.send(sender=transition.name, **told)


def announce_skipped(
    occurrence: Occurrence, *, reason: str, count: int | None, until: datetime
) -> None:
    """Tell the signal's receivers that occurrences are not dispatched.

    Args:
        occurrence: The first of them.
        reason: Why, in words.
        count: How many there are; None where it is not known.
        until: When the last of them was due.
    """
    occurrence_skipped.send(
        sender=occurrence.lease, occurrence=occurrence, reason=reason, count=count, until=until
    )


def stage_of(outcome: Outcome) -> Stage:
    """Return where a task is turned away whose *outcome* is not recorded."""
    return _STAGES[outcome]


def announce_refusal(
    task: Any, request: Any, epoch: int, error: FencingError, stage: Stage
) -> None:
    """Tell the log, the signal's receivers and the event stream that a task was turned away.

    Args:
        task: The task.
        request: Its request.
        epoch: The epoch of its stamp.
        error: Why: StaleEpoch or AlreadySettled.
        stage: Where: start, commit, settle, failure, expired or revoked.
    """
    current_epoch = getattr(error, "current_epoch", None)
    # Of a late message whose run was committed meanwhile, the first thing to know is
    # that it is stale.
    twice = isinstance(error, AlreadySettled) and current_epoch in (None, epoch)
    reason = "duplicate" if twice else "stale"
    told = {"reason": reason, "stage": stage, "epoch": epoch, "current_epoch": current_epoch}
    logger.warning(
        "%s refused: %s[%s] (at %s): %s",
        "Duplicate" if reason == "duplicate" else "Task",
        task.name,
        request.id,
        stage,
        error,
        extra={
            "action": "task-refused",
            "task_name": task.name,
            "task_id": request.id,
            "lease_name": error.name,
            "lease_epoch": epoch,
            "current_epoch": current_epoch,
            "reason": reason,
            "stage": stage,
        },
    )
    task_refused.send(sender=task, task_id=request.id, request=request, error=error, **told)
    if task.send_events and not request.is_eager:
        _send_event(task, request, {"name": task.name, **told})


def _send_event(task: Any, request: Any, fields: dict[str, Any]) -> None:
    try:
        with task.app.events.default_dispatcher(hostname=request.hostname) as dispatcher:
            dispatcher.send("task-refused", uuid=request.id, retry=False, **fields)
    except Exception as error:  # noqa: BLE001 - any transport's; the refusal itself is done
        logger.debug("the event task-refused was not sent: %r", error)
