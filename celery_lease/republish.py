"""The same message again: later, or under a newer epoch."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from celery import Task
from celery.exceptions import Ignore, Reject

from celery_lease.clock import rising
from celery_lease.errors import StoreError
from celery_lease.stamp import Stamp
from celery_lease.stores.fences import Standing

__all__ = ["carry_on", "follows", "try_later"]

logger = logging.getLogger("celery_lease.task")

#: Seconds until a message is tried again: at first, and at most.
FIRST_COUNTDOWN, LAST_COUNTDOWN = 5.0, 60.0
#: Message header: how often this message has waited for the lease database.
_WAITS = "lease_waits"


def try_later(task: Any, request: Any, error: StoreError) -> NoReturn:
    """Publish a message again, with a rising countdown: nothing can be known now.

    Args:
        task: The task.
        request: Its request.
        error: Why nothing can be known.

    Raises:
        Ignore: Always; an eager task raises *error* itself.
    """
    if request.is_eager:
        raise error
    headers = request.headers or {}
    waits = int(headers.get(_WAITS, 0))
    countdown = rising(FIRST_COUNTDOWN, waits, LAST_COUNTDOWN)
    _publish(task, request, countdown=countdown, headers={**headers, _WAITS: waits + 1})
    logger.warning(
        "Task postponed: %s[%s] is tried again in %g s: %s",
        task.name,
        request.id,
        countdown,
        error,
        extra={"action": "task-postponed", "task_name": task.name, "task_id": request.id},
    )
    raise Ignore(f"postponed: {error}") from error


def follows(stamp: Stamp, standing: Standing) -> bool:
    """Return whether a stale child is a consequence of a run that is over.

    That run is not dispatched again, so nobody would send this child again. A plain
    task's run is never settled, and never dispatched again either.
    """
    return standing.fenced is False or standing.settled_under == stamp.first


def carry_on(task: Any, request: Any, stamp: Stamp) -> None:
    """Publish a message again under another epoch: same id, arguments and callbacks.

    Args:
        task: The task.
        request: Its request.
        stamp: The new stamp.
    """
    old = Stamp.of(request)
    _publish(task, request, stamp)
    logger.info(
        "Task carried on: %s[%s] follows a run that is settled, so it goes on under epoch %s",
        task.name,
        request.id,
        stamp.epoch,
        extra={
            "action": "task-carried-on",
            "task_name": task.name,
            "task_id": request.id,
            "lease_name": stamp.name,
            "lease_epoch": old.epoch if old is not None else None,
            "current_epoch": stamp.epoch,
        },
    )


def _publish(task: Any, request: Any, stamp: Stamp | None = None, **options: Any) -> None:
    # Celery's own way to build a retry, without counting one.
    signature = Task.signature_from_request(task, request, retries=request.retries, **options)
    if stamp is not None:
        signature.options.update(stamp.options(signature.options))
    try:
        signature.apply_async(add_to_parent=False)
    except Exception as error:
        # Neither database nor broker: all that is left is the message as it is.
        raise Reject(error, requeue=True) from error
