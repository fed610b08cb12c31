"""The epoch on every log line of a stamped task.

The fields come from a filter on the handlers. A log record factory would break
``extra={"lease_epoch": …}``, in the user's code and in ours.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import signals
from celery.app import defaults
from celery.app.log import TaskFormatter
from celery.utils.log import ColorFormatter

from celery_lease.errors import FencingError
from celery_lease.stamp import current_stamp
from celery_lease.stores.dialects import file_of

__all__ = ["LeaseFilter", "install", "warn_of_file"]

# Not in Celery's type stubs.
_PROCESS: str = defaults.DEFAULT_PROCESS_LOG_FMT  # type: ignore[attr-defined]
_TASK: str = defaults.DEFAULT_TASK_LOG_FMT  # type: ignore[attr-defined]

#: Those that can be made again with another format: a class of the user's may take no such
#: argument, or have more to it.
_KNOWN = (logging.Formatter, ColorFormatter, TaskFormatter)
#: Celery's default formats, with room for the epoch where there is one.
_TAGGED = {
    _PROCESS: _PROCESS.replace("] ", "]%(lease_tag)s ", 1),
    _TASK: _TASK.replace("]: ", "]%(lease_tag)s: ", 1),
}


def warn_of_file(url: Any, logger: logging.Logger) -> None:
    """Say which file it is that was not named in full: each directory has its own.

    Args:
        url: The URL of the lease database.
        logger: Whose line it is.
    """
    file = file_of(url)
    if file is not None and not file.is_absolute():
        logger.warning(
            "beat_lease_url names the file %s, in the directory in which this process was "
            "started: a beat of another directory or host has another lease, and sends "
            "everything as well; a worker there finds no fence; name one database for all beats "
            "and workers, or this file in full",
            file.absolute(),
            extra={"action": "lease-in-a-relative-file"},
        )


class LeaseFilter(logging.Filter):
    """Gives every record ``lease_epoch``, ``lease_name``, ``lease_run`` and ``lease_tag``.

    They are those of the stamped task that logs, or ``-``; ``lease_tag`` is
    ``" epoch=N"`` or nothing. A field that the record has already is left alone.
    For ``dictConfig``: ``"filters": {"lease": {"()": "celery_lease.LeaseFilter"}}``,
    and name it on the handler whose format uses the fields.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields; let everything pass."""
        if not hasattr(record, "lease_tag"):
            fields = _fields()
            for key, value in fields.items():
                if not hasattr(record, key):
                    setattr(record, key, value)
            epoch = getattr(record, "lease_epoch", "-")
            record.lease_tag = "" if epoch == "-" else f" epoch={epoch}"
        return True


def _fields() -> dict[str, Any]:
    try:
        stamp = current_stamp()
    except FencingError:
        stamp = None  # A broken stamp is refused elsewhere; a log line must not fail.
    if stamp is None:
        return {"lease_name": "-", "lease_epoch": "-", "lease_run": "-"}
    return {"lease_name": stamp.name, "lease_epoch": stamp.epoch, "lease_run": stamp.run}


def install() -> None:
    """Have Celery's log set-up add the filter, and the epoch to its default formats."""
    for signal in (signals.after_setup_logger, signals.after_setup_task_logger):
        signal.connect(_equip, weak=False, dispatch_uid="celery_lease.logs")


def _equip(logger: logging.Logger | None = None, **_: Any) -> None:
    """Give each handler the filter and, where the user set no format, one with the epoch.

    Both go onto the same handler together: a format whose field is missing prints a
    traceback instead of each line.
    """
    for handler in logger.handlers if logger is not None else ():
        if not any(isinstance(each, LeaseFilter) for each in handler.filters):
            handler.addFilter(LeaseFilter())
        old = handler.formatter
        tagged = _TAGGED.get(getattr(old, "_fmt", None) or "")
        if old is not None and tagged is not None and type(old) in _KNOWN:
            options = {"use_color": old.use_color} if hasattr(old, "use_color") else {}
            new = type(old)(tagged, **options)
            new.datefmt = old.datefmt  # No argument for it before Celery 5.6.
            handler.setFormatter(new)
