"""django-celery-beat's scheduler, with a lease: ``beat -S celery_lease.django:...``.

The schedule stays in Django's database and admin. Any number of beats may run; one leads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.beat import ScheduleEntry
from celery.schedules import schedstate
from django.db import close_old_connections
from django.db.models import F
from django.utils import timezone
from django_celery_beat.models import PeriodicTasks
from django_celery_beat.schedulers import DatabaseScheduler
from django_celery_beat.utils import NEVER_CHECK_TIMEOUT

from celery_lease.leading import LeaseMixin
from celery_lease.lease import Term

__all__ = ["DatabaseLeaseMixin", "LeasedDatabaseScheduler"]


class _LeasedRow(ScheduleEntry):
    """An entry that writes to its row only while its beat leads, and as the row was read.

    django-celery-beat saves the whole row, when it is sent and where it is asked whether it
    is due. It may have been read long ago, and the process may have been stopped meanwhile.
    """

    #: Whether the beat leads at this moment.
    leads: Callable[[], bool]
    #: The row.
    model: Any

    def __init__(self, model: Any, app: Any = None) -> None:
        # The next entry is made of the same object, whose last run has moved on by then.
        if not hasattr(model, "lease_last_run_at"):
            model.lease_last_run_at = model.last_run_at
        super().__init__(model, app=app)

    def is_due(self) -> Any:
        """Return whether it is due, and after how many seconds to ask again."""
        row = self.model
        if not (row.enabled and row.one_off and row.total_run_count > 0):
            return super().is_due()
        if row.start_time is not None and timezone.now() < row.start_time:
            return super().is_due()
        ran = row.total_run_count
        if self._end(row, {"one_off": True, "total_run_count": ran}, total_run_count=0):
            PeriodicTasks.update_changed()
        return schedstate(False, NEVER_CHECK_TIMEOUT)

    def save(self) -> None:
        """Store when it ran, unless another beat has stored a later run of it."""
        row = self.model
        if not self.leads():
            return
        ran = {"last_run_at": row.last_run_at, "total_run_count": row.total_run_count}
        if self._write(row, {"last_run_at": row.lease_last_run_at}, **ran):
            row.lease_last_run_at = row.last_run_at

    def _disable(self, model: Any) -> None:
        """Disable a row that has expired, or that no entry can be made of."""
        self._end(model, {"expires": model.expires})

    def _end(self, row: Any, as_read: dict[str, Any], **values: Any) -> bool:
        """Disable a row of which this is still so; return whether it was."""
        if not self.leads():
            return False
        row.enabled = False
        row.total_run_count = values.get("total_run_count", row.total_run_count)
        values |= {"enabled": False, "last_run_at": None}
        return self._write(row, {"enabled": True, **as_read}, **values)

    def _write(self, row: Any, as_read: dict[str, Any], **values: Any) -> bool:
        """Change a row of which this is still so; return whether it was."""
        rows = type(row).objects.filter(pk=row.pk, **as_read)
        return bool(rows.update(date_changed=timezone.now(), **values))


class DatabaseLeaseMixin(LeaseMixin):
    """Put it before a ``DatabaseScheduler`` or a class that is made from it.

    ``celery_lease.leased(cls)`` does.
    """

    #: The rows of the schedule.
    Model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # An entry writes to its row by itself, and knows of no scheduler.
        leads = staticmethod(lambda: self.elector.leading)
        entry = type(self).Entry
        self.Entry = type(f"Leased{entry.__name__}", (_LeasedRow, entry), {"leads": leads})
        super().__init__(*args, **kwargs)

    def _tick(self, *args: Any, **kwargs: Any) -> float:
        # django-celery-beat drops a connection that has died only where it looks for
        # changes, and a load or a round of recovery that fails never comes to that.
        close_old_connections()
        return super()._tick(*args, **kwargs)

    def load(self, term: Term) -> None:
        """Set up the schedule, in which an entry that never ran goes on from where it began.

        django-celery-beat counts from the last change of its row, and its set-up changes the
        rows of all entries in ``beat_schedule``: each takeover would begin them anew.
        """
        if not self._set_up:
            names = {*self.app.conf.beat_schedule, "celery.backend_cleanup"}
            rows = self.Model.objects.filter(name__in=names, enabled=True, start_time=None)
            rows.filter(last_run_at=None).update(last_run_at=F("date_changed"))
        super().load(term)

    def turn(self, term: Term, *args: Any, **kwargs: Any) -> float:
        """Do one turn; read all rows again in the next one where that fails.

        django-celery-beat takes a change for read before it has read it.
        """
        try:
            return super().turn(term, *args, **kwargs)
        except Exception:
            self._initial_read = True
            raise

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
