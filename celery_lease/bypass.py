"""What would by-pass the fence without a word, found when a task is bound to its app.

Settings may still change after that, so a worker looks at them again when it starts.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any
from weakref import WeakSet

from celery import Celery, Task, signals

from celery_lease.errors import ConfigurationError
from celery_lease.execution import fence_store, unproxied
from celery_lease.logs import warn_of_file

__all__ = ["refuse_bypass"]

logger = logging.getLogger("celery_lease.task")

#: Apps that have fenced tasks.
_apps: WeakSet[Celery] = WeakSet()


def refuse_bypass(cls: type[Any], base: type[Any], app: Celery) -> None:
    """Refuse a task class, or an app, that would store or send what the fence cannot see.

    Args:
        cls: The class of the task.
        base: The base class that fences it.
        app: The app it is bound to.

    Raises:
        ConfigurationError: It would; the message says what to change.
    """
    place = cls.__mro__.index(base)
    for each in cls.__mro__[:place]:
        if "backend" in vars(each):
            raise ConfigurationError(
                f"{cls.name}: a backend of its own would store what stale attempts report; "
                f"remove backend=… and set result_backend",
                setting="backend",
            )
        call = vars(each).get("__call__")
        if call is not None and not _reaches(call, base):
            raise ConfigurationError(
                f"{cls.name}: {each.__name__}.__call__ calls that of another class, in which "
                f"the body has no request; have it call super().__call__(*args, **kwargs), or "
                f"self.run(*args, **kwargs)",
                setting="__call__",
            )
    for each in cls.__mro__[place + 1 :]:
        if "__call__" in vars(each) and each is not Task:
            raise ConfigurationError(
                f"{cls.name}: {each.__name__}.__call__ would not be called, as "
                f"{base.__name__} runs the body; name {base.__name__} last among the bases",
                setting="__call__",
            )
    _refuse_settings(app)
    _apps.add(unproxied(app))
    signals.worker_init.connect(_on_start, weak=False, dispatch_uid="celery_lease.bypass")


def _on_start(sender: Any = None, **_: Any) -> None:
    """End a worker that would take in messages only to fail over its own settings."""
    app = getattr(sender, "app", None)
    if app is None or app not in _apps:
        return
    try:
        _refuse_settings(app)
        warn_of_file(fence_store(app).engine.url, logger)
    except ConfigurationError as error:
        logger.critical("worker cannot start: %s", error, extra={"action": "worker-cannot-start"})
        # Any other exception of a receiver is logged, and the worker goes on.
        raise SystemExit(1) from error


def _refuse_settings(app: Celery) -> None:
    if app.conf.get("worker_deduplicate_successful_tasks"):
        raise ConfigurationError(
            "worker_deduplicate_successful_tasks sends callbacks of stale messages before any "
            "fence; remove it: a fenced task is settled once anyway",
            setting="worker_deduplicate_successful_tasks",
        )
    if app.conf.get("task_protocol") == 1:
        raise ConfigurationError(
            "task_protocol = 1 cannot carry stamps; remove the setting or set task_protocol = 2",
            setting="task_protocol",
        )


def _reaches(function: Any, base: type[Any]) -> bool:
    """Return whether code that names a ``__call__``, or what it wraps, means that of *base*.

    By ``super()``, or by a class that it names: another base would be called past it.
    """
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and "__call__" in code.co_names:
            try:
                names = inspect.getclosurevars(function)
            except ValueError:  # It is assigned later, in the function around it.
                return bool({"super", base.__name__} & {*code.co_names})
            found = [*names.nonlocals.values(), *names.globals.values()]
            return (
                "super" in names.builtins
                or base.__name__ in names.unbound
                or any(isinstance(each, type) and issubclass(each, base) for each in found)
            )
        function = getattr(function, "__wrapped__", None)
    return True
