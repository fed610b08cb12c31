"""What stands around methods of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

from celery import Task

__all__ = ["replace_once", "stay_plain"]

#: The methods that replace_once() made.
_wrapped: WeakSet[Any] = WeakSet()


def replace_once(
    cls: type[Any], name: str, wrap: Callable[[Callable[[Any], Any]], Callable[..., Any]]
) -> None:
    """Have *wrap* stand around a method of the user's own, unless a base of *cls* has it.

    Args:
        cls: The class of the task.
        name: Name of the method.
        wrap: Given what returns the method of a task, returns what takes its place.
    """
    own = inspect.getattr_static(cls, name)
    if own not in _wrapped:
        # It may be a static method, or one of the class.
        wrapped = wraps(getattr(cls, name))(wrap(lambda task: own.__get__(task, type(task))))
        _wrapped.add(wrapped)
        setattr(cls, name, wrapped)


def stay_plain(cls: type[Any], base: type[Any]) -> None:
    """Give a class back what *base* overrides of Celery's own task.

    Args:
        cls: The class of the task.
        base: The base class that fences it.
    """
    for name, ours in vars(base).items():
        if hasattr(Task, name) and (inspect.isfunction(ours) or isinstance(ours, property)):
            setattr(cls, name, inspect.getattr_static(Task, name))
