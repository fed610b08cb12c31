"""The stamp: the epoch that travels with every message.

It is four of Celery's own stamps (``stamped_headers``), beside whatever stamps the
user sets. Celery carries stamps through retries by itself; what a stamped task
publishes inherits them through :func:`inherit`, a ``before_task_publish`` receiver.
Threads and greenlets that a task's body starts have no current task, so nothing is
inherited there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from celery import _state
from celery._state import get_current_app

from celery_lease.errors import MissingEpoch
from celery_lease.lease import MAX_EPOCH

__all__ = ["Stamp", "current_stamp", "enclosing_stamp", "inherit", "lend", "running_request"]

_KEYS = ("lease_name", "lease_epoch", "lease_term", "lease_run")
#: A fifth stamp, only on what was published again after a takeover.
_ORIGIN = "lease_origin"

# Not in Celery's type stubs.
_task_stack: Any = _state._task_stack  # type: ignore[attr-defined]  # noqa: SLF001

#: What the worker's parent process publishes has no current task: the stamp it is lent.
_lent: ContextVar[Stamp | None] = ContextVar("celery_lease_lent", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Under which epoch, and as a consequence of which run, a message was published."""

    #: Name of the lease.
    name: str
    #: The fencing epoch.
    epoch: int
    #: The uuid of the term: it tells two grants of one epoch apart.
    term: str
    #: Id of the run. The task whose id this is settles the run.
    run: str
    #: The (epoch, term) that the run was published under, where that was another one.
    origin: tuple[int, str] | None = None

    @classmethod
    def of(cls, request: Any) -> Stamp | None:
        """Return the stamp of a request; None where it has none.

        Args:
            request: A Celery request context, or anything with ``stamps``.

        Raises:
            MissingEpoch: There is a stamp, but it is damaged, or not the whole of it.
        """
        stamps = getattr(request, "stamps", None)
        if not stamps or not any(map(_is_ours, stamps)):
            return None
        # Eager mode wraps each value in a list.
        name, epoch, term, run = (_scalar(stamps.get(key)) for key in _KEYS)
        origin = _parse_origin(_scalar(stamps.get(_ORIGIN)))
        if not (
            all(map(_is_text, (name, term, run)))
            and _is_epoch(epoch)
            and (origin is None or _is_epoch(origin[0]))
        ):
            raise MissingEpoch(f"the lease stamp is damaged or not complete: {dict(stamps)!r}")
        return cls(name=name, epoch=epoch, term=term, run=run, origin=origin)

    @property
    def first(self) -> tuple[int, str]:
        """The (epoch, term) that its run was published under."""
        return self.origin or (self.epoch, self.term)

    def renewed(self, epoch: int, term: str) -> Stamp:
        """Return this stamp under another epoch, remembering where it comes from."""
        return replace(self, epoch=epoch, term=term, origin=self.first)

    def stamps(self) -> dict[str, Any]:
        """Return the stamps of a message, by name."""
        ours = (self.name, self.epoch, self.term, self.run)
        values: dict[str, Any] = dict(zip(_KEYS, ours, strict=True))
        if self.origin is not None:
            values[_ORIGIN] = f"{self.origin[0]}:{self.origin[1]}"
        return values

    def options(self, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return options for ``apply_async`` that carry this stamp and the user's own.

        Args:
            options: The user's options; they are copied, never changed.
        """
        given = dict(options or {})
        names = [each for each in given.get("stamped_headers") or [] if not _is_ours(each)]
        ours = self.stamps()
        return {**given, **ours, "stamped_headers": [*names, *ours]}

    def write(self, headers: dict[str, Any]) -> None:
        """Put this stamp into the headers of a message that is about to be published."""
        names = [each for each in headers.get("stamped_headers") or [] if not _is_ours(each)]
        ours = self.stamps()
        # New containers: Celery's may be the ones of the signature they came from.
        headers["stamped_headers"] = [*names, *ours]
        headers["stamps"] = {**(headers.get("stamps") or {}), **ours}


def current_stamp() -> Stamp | None:
    """Return the stamp that a message published here and now inherits."""
    return _lent.get() or _innermost(0)


def enclosing_stamp() -> Stamp | None:
    """Return what the running task inherits from the task that called it eagerly."""
    return _innermost(1)


def running_request() -> Any:
    """Return the innermost request here that is a message's, not a function call's."""
    for _, request in _running():
        if request is not None and not request.called_directly:
            return request
    return None


@contextmanager
def lend(stamp: Stamp | None) -> Iterator[None]:
    """Have everything published inside inherit *stamp*: there is no current task here."""
    token = _lent.set(stamp)
    try:
        yield
    finally:
        _lent.reset(token)


def inherit(sender: str | None = None, headers: dict[str, Any] | None = None, **_: Any) -> None:
    """Stamp what a stamped task publishes: a receiver of ``before_task_publish``."""
    # Protocol 1 has no stamps at all.
    if headers is None or "stamps" not in headers or any(map(_is_ours, headers["stamps"] or ())):
        return
    stamp = current_stamp()
    if stamp is not None and _inherits(sender):
        stamp.write(headers)


def _innermost(skip: int) -> Stamp | None:
    """Return the stamp of the innermost running task that has one, *skip* tasks left out."""
    for task, request in _running(skip):
        stamp = None if request is None else Stamp.of(request)
        if stamp is not None:
            return stamp
        if getattr(task, "inherit_epoch", True) is False:
            return None
    return None


def _running(skip: int = 0) -> Iterator[tuple[Any, Any]]:
    """Give each running task and its request, the innermost first, *skip* tasks left out."""
    stack = _task_stack.stack
    for place in range(len(stack) - 1 - skip, -1, -1):
        task = stack[place]
        # Each task has a stack of requests of its own.
        deeper = sum(each is task for each in stack[place + 1 :])
        requests = task.request_stack.stack
        yield task, requests[-1 - deeper] if len(requests) > deeper else None


def _inherits(name: str | None) -> bool:
    running = _task_stack.top
    app = running.app if running is not None else get_current_app()
    task = app.tasks.get(name or "")
    return getattr(task, "inherit_epoch", True) is not False


def _is_ours(name: str) -> bool:
    return name in _KEYS or name == _ORIGIN


def _scalar(value: Any) -> Any:
    if isinstance(value, (list, tuple, set)):
        return next(iter(value), None)
    return value


def _is_text(value: Any) -> bool:
    # What no database takes is not compared with anything there.
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_epoch(value: Any) -> bool:
    # True is an int too, and 10**30 is more than any database counts.
    return type(value) is int and 0 < value < MAX_EPOCH


def _parse_origin(value: Any) -> tuple[int, str] | None:
    """Return the origin; one with an epoch of 0, which is none, if it is damaged."""
    if value is None:
        return None
    epoch, _, term = str(value).partition(":")
    return (int(epoch), term) if epoch.isdecimal() and len(epoch) < 17 and term else (0, "")
