"""redbeat's scheduler, with a lease: ``beat -S celery_lease.redbeat:LeasedRedBeatScheduler``.

The schedule stays in Redis. Any number of beats may run; one leads.
"""

from __future__ import annotations

from typing import Any

from redbeat import RedBeatScheduler

from celery_lease.leading import LeaseMixin

__all__ = ["LeasedRedBeatScheduler", "RedBeatLeaseMixin"]


class RedBeatLeaseMixin(LeaseMixin):
    """Put it before a ``RedBeatScheduler`` or a class that is made from it.

    ``celery_lease.leased(cls)`` does.
    """

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(app, *args, **kwargs)
        # The lease takes its place: a standby would wait for redbeat's lock before its first
        # tick, and then for the lease.
        self.lock_key = None

    def find(self, name: str) -> Any:
        """Return the entry of that name as it is in Redis.

        The schedule has only those that are due now.
        """
        cls: Any = self.Entry
        try:
            entry = cls.from_key(cls.generate_key(self.app, name), app=self.app)
        except KeyError:
            return None
        return entry if entry.enabled else None


class LeasedRedBeatScheduler(RedBeatLeaseMixin, RedBeatScheduler):  # type: ignore[misc] # no stubs
    """A ``RedBeatScheduler`` that ticks and writes only while it holds the lease.

    Each send is claimed, and the entry's last run stored, before it goes out.
    """
