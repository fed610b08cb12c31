"""django-celery-beat's scheduler, with a lease: ``beat -S celery_lease.django:...``.

The schedule stays in Django's database and admin. Any number of beats may run; one leads.
"""

from __future__ import annotations

from typing import Any

from django.db import close_old_connections
from django_celery_beat.schedulers import DatabaseScheduler

from celery_lease.leading import LeaseMixin

__all__ = ["DatabaseLeaseMixin", "LeasedDatabaseScheduler"]


class DatabaseLeaseMixin(LeaseMixin):
    """Put it before a ``DatabaseScheduler`` or a class that is made from it.

    ``celery_lease.leased(cls)`` does.
    """

    #: The rows of the schedule.
    Model: Any

    def _tick(self, *args: Any, **kwargs: Any) -> float:
        # django-celery-beat drops a connection that has died only where it looks for
        # changes, and a load or a round of recovery that fails never comes to that.
        close_old_connections()
        return super()._tick(*args, **kwargs)

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
        entry: Any = self.Entry
        return entry(model, app=self.app)


class LeasedDatabaseScheduler(DatabaseLeaseMixin, DatabaseScheduler):  # type: ignore[misc] # no stubs
    """A ``DatabaseScheduler`` that ticks and writes only while it holds the lease.

    Each send is claimed, and the entry's last run saved, before it goes out.
    """
