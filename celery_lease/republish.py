"""The same message again: later, or under a newer epoch."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NoReturn, cast

from celery import Task
from celery.exceptions import Ignore, Reject
from kombu import exceptions
from kombu.serialization import registry  # type: ignore[attr-defined] # the stubs forget it

from celery_lease.clock import rising
from celery_lease.errors import StoreError
from celery_lease.execution import fence_store, mark_refused, ticket_of
from celery_lease.stamp import Stamp

__all__ = ["carry_on", "try_later"]

logger = logging.getLogger("celery_lease.task")

#: Seconds until a message is tried again: at first, and at most.
FIRST_COUNTDOWN, LAST_COUNTDOWN = 5.0, 60.0
#: Message header: how often this message has waited for the lease database.
_WAITS = "lease_waits"
#: What a serializer raises that does not do for a message.
_UNFIT = (exceptions.EncodeError, exceptions.SerializerNotInstalled)
#: What a broker raises that is away.
_BROKER_AWAY = (exceptions.OperationalError, OSError)


def try_later(task: Any, request: Any, error: StoreError) -> NoReturn:
    """Publish a message again, with a rising countdown: nothing can be known now.

    Args:
        task: The task.
        request: Its request.
        error: Why nothing can be known.

    Raises:
        Ignore: It is published again, or cannot be; an eager task raises *error* itself.
        Reject: It cannot be now, and goes back to its queue.
    """
    if request.is_eager:
        raise error
    headers = _own_headers(request)
    waits = int(headers.get(_WAITS, 0))
    countdown = rising(FIRST_COUNTDOWN, waits, LAST_COUNTDOWN)
    _publish(task, request, {**headers, _WAITS: waits + 1}, countdown=countdown)
    logger.warning(
        "Task postponed: %s[%s] is tried again in %g s: %s",
        task.name,
        request.id,
        countdown,
        error,
        extra={"action": "task-postponed", "task_name": task.name, "task_id": request.id},
    )
    raise Ignore(f"postponed: {error}") from error


def carry_on(task: Any, request: Any, stamp: Stamp) -> None:
    """Publish a message again under another epoch: same id, arguments and callbacks.

    Args:
        task: The task.
        request: Its request.
        stamp: The new stamp.

    Raises:
        Ignore: It cannot be published.
        Reject: It cannot be now, and goes back to its queue.
    """
    old = Stamp.of(request)
    _publish(task, request, _own_headers(request), stamp)
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


def _publish(
    task: Any,
    request: Any,
    headers: dict[str, Any],
    stamp: Stamp | None = None,
    **options: Any,
) -> None:
    if request.ignore_result:  # Which Celery 5.5 leaves out of a retry.
        options["ignore_result"] = True
    # Celery's own way to build a retry, without counting one.
    signature = Task.signature_from_request(
        task, request, retries=request.retries, headers=headers, **options
    )
    if stamp is not None:
        signature.options.update(stamp.options(signature.options))
    try:
        _send(signature, _serializers(task, request))
    except Exception as error:
        # Without a stamp it only waits for the lease database: the message as it is will do
        # once that is back, and until then each delivery waits for it.
        passes = stamp is None or isinstance(error, _BROKER_AWAY)
        if task.acks_late and passes:
            raise Reject(error, requeue=True) from error
        _end_here(task, request, error)


def _own_headers(request: Any) -> dict[str, Any]:
    """Return the message's headers without what RabbitMQ wrote in as it was delayed.

    A message that says where it has died before is dropped as one that goes in a circle.
    (Celery itself leaves them out of a retry from 5.6 on.)
    """
    return {
        name: value
        for name, value in (request.headers or {}).items()
        if not (name == "x-death" or name.startswith(("x-first-death-", "x-last-death-")))
    }


def _send(signature: Any, serializers: Iterable[str]) -> None:
    """Publish with the first serializer that does for the message."""
    unfit: Exception | None = None
    for each in serializers:
        try:
            signature.apply_async(add_to_parent=False, serializer=each)
        except _UNFIT as error:
            unfit = unfit or error
        else:
            return
    if unfit is not None:
        raise unfit


def _serializers(task: Any, request: Any) -> list[str]:
    """Return the serializers to try: the call may have named another one than the task's.

    Only AMQP tells a task which one it came with.
    """
    came_with = (request.properties or {}).get("content_type")
    types = [came_with, task.serializer, *(task.app.conf.accept_content or ())]
    names = (registry.type_to_name.get(each, each) for each in types if each)
    return list(dict.fromkeys(names))


def _end_here(task: Any, request: Any, error: Exception) -> NoReturn:
    """End a message that goes no further: its run is sent again, who waits for a child is told."""
    stamp = cast("Stamp", Stamp.of(request))  # nothing else is published again
    child = request.id != stamp.run
    logger.error(
        "Task not published again: %s[%s] ends here, and its %s: %r",
        task.name,
        request.id,
        "result is FAILURE" if child else "run is to be dispatched again",
        error,
        extra={"action": "task-not-published", "task_name": task.name, "task_id": request.id},
    )
    if child:
        task.backend.fail_alone(request, stamp, error)
    else:
        mark_refused(fence_store(task.app), ticket_of(stamp, request.id))
    raise Ignore(f"not published again: {error}") from error
