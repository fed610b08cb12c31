"""What is due next, known without looking at every entry on every tick."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable
from datetime import datetime
from typing import Any

__all__ = ["DueHeap", "ScheduleDict"]


class DueHeap:
    """Names of entries, ordered by when they are due.

    The key is an instant that every process computes alike, so nothing has to be
    weighed again as time goes by.
    """

    def __init__(self, items: Iterable[tuple[datetime, str]] = ()) -> None:
        self._items = list(items)
        heapq.heapify(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def next_due(self) -> datetime | None:
        """When the first one is due; None if there is none."""
        return self._items[0][0] if self._items else None

    def push(self, due_at: datetime, name: str) -> None:
        """Add an entry."""
        heapq.heappush(self._items, (due_at, name))

    def pop(self, now: datetime) -> tuple[datetime, str] | None:
        """Take out the first entry that is due by *now*; None if none is."""
        if self._items and self._items[0][0] <= now:
            return heapq.heappop(self._items)
        return None


def _counted(name: str) -> Any:
    method = getattr(dict, name)

    @functools.wraps(method)
    def counted(self: ScheduleDict, *args: Any, **kwargs: Any) -> Any:
        self.changes += 1
        return method(self, *args, **kwargs)

    return counted


class ScheduleDict(dict[str, Any]):
    """The entries by name, counting every change, so that "did it change?" costs nothing."""

    #: How many times it was changed.
    changes = 0

    __setitem__ = _counted("__setitem__")
    __delitem__ = _counted("__delitem__")
    __ior__ = _counted("__ior__")
    clear = _counted("clear")
    pop = _counted("pop")
    popitem = _counted("popitem")
    setdefault = _counted("setdefault")
    update = _counted("update")
