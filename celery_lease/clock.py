"""The local clock that trust is measured on, and how long to wait between tries.

Only the database says when a lease expires. A process needs a clock of its own
for one question, "may I still trust what the database told me?", and that clock
has to keep counting while the machine is suspended: ``time.monotonic()`` is
CLOCK_MONOTONIC on Linux, which does not.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock", "rising"]


class Clock(Protocol):
    """A clock that never goes back."""

    def now(self) -> float:
        """Return seconds since an arbitrary instant."""


class SystemClock:
    """CLOCK_BOOTTIME where the system has one, else the monotonic clock."""

    _id: int | None = getattr(time, "CLOCK_BOOTTIME", None)

    def now(self) -> float:
        """Return seconds since boot, suspended time included where it can be known."""
        return time.monotonic() if self._id is None else time.clock_gettime(self._id)


def rising(first: float, times: int, last: float) -> float:
    """Return *first* seconds, doubled so many *times*, but never more than *last*.

    Something may be tried for days: two to the power of 1024 is no float any more.
    """
    return min(first * 2.0 ** min(times, 64), last)
