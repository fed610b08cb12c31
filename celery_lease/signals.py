"""What happens, as Celery signals, and what has to be installed in a Celery app."""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery, signals
from celery.utils.dispatch import Signal

from celery_lease import logs
from celery_lease.errors import AlreadySettled, FencingError, StaleEpoch
from celery_lease.stamp import inherit

__all__ = [
    "install",
    "lease_acquired",
    "lease_lost",
    "lease_released",
    "occurrence_skipped",
    "refuse",
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

#: A worker turned a task away. The sender is the task; sent with ``request``, ``error``
#: (StaleEpoch or AlreadySettled) and ``at``: start, commit, settle, failure or retry.
task_refused = Signal(name="task_refused", providing_args=["request", "error", "at"])

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


def refuse(task: Any, request: Any, error: FencingError, at: str) -> None:
    """Tell the log, the signal's receivers and the event stream that a task was turned away.

    Args:
        task: The task.
        request: Its request.
        error: Why: StaleEpoch or AlreadySettled.
        at: Where: start, commit, settle, failure, retry or state.
    """
    duplicate = isinstance(error, AlreadySettled)
    fields = {
        "action": "task-refused",
        "reason": "duplicate" if duplicate else "stale",
        "refused_at": at,
        "task_name": task.name,
        "task_id": request.id,
        "lease_name": error.name,
    }
    if isinstance(error, StaleEpoch):
        fields |= {"lease_epoch": error.epoch, "current_epoch": error.current_epoch}
    what = "Duplicate refused" if duplicate else "Task refused"
    logger.warning("%s: %s[%s] (at %s): %s", what, task.name, request.id, at, error, extra=fields)
    task_refused.send(sender=task, request=request, error=error, at=at)
    if task.send_events and not request.is_eager:
        _send_event(task, request, fields)


def _send_event(task: Any, request: Any, fields: dict[str, Any]) -> None:
    told = {key: value for key, value in fields.items() if key not in ("action", "task_id")}
    try:
        with task.app.events.default_dispatcher(hostname=request.hostname) as dispatcher:
            dispatcher.send("task-refused", uuid=request.id, retry=False, **told)
    except Exception as error:  # noqa: BLE001 - any transport's; the refusal itself is done
        logger.debug("the event task-refused was not sent: %r", error)
