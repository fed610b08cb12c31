"""django-celery-beat's scheduler, with a lease: ``beat -S celery_lease.django:...``.

The schedule stays in Django's database and admin. Any number of beats may run; one leads.
"""

from __future__ import annotations

from typing import Any

from django.db import close_old_connections
from django_celery_beat.schedulers import DatabaseScheduler

from celery_lease.leading import LeaseMixin

__all__ = ["LeasedDatabaseScheduler"]


class LeasedDatabaseScheduler(LeaseMixin, DatabaseScheduler):  # type: ignore[misc] # no stubs
    """A ``DatabaseScheduler`` that ticks and writes only while it holds the lease.

    Each send is claimed, and the entry's last run saved, before it goes out.
    """

    def _tick(self, *args: Any, **kwargs: Any) -> float:
        # django-celery-beat drops a connection that has died only where it looks for
        # changes, and a load or a round of recovery that fails never comes to that.
        close_old_connections()
        return super()._tick(*args, **kwargs)

    def unload(self) -> None:
        """Forget rows that were read, and above all those that wait to be written."""
        super().unload()
        self._dirty.clear()
        self._schedule = None
        self._initial_read = True
        self._last_timestamp = None

    def find(self, name: str) -> Any:
        """Return the entry of that name, even where the schedule leaves it out for now.

        The schedule has neither crontabs of another time of day nor one-off tasks that
        were sent.

        Raises:
            ValueError: The row cannot be read, so that the schedule leaves it out.
        """
        model = self.Model.objects.filter(name=name).first()
        if model is None or not (model.enabled or model.one_off):
            return None
        return self.Entry(model, app=self.app)
