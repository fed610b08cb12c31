"""What is written to logs: the epoch on every line of a stamped task, a sentence a transition.

The fields come from a filter on the handlers. A log record factory would break
``extra={"lease_epoch": …}``, in the user's code and in ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery import signals
from celery.app import defaults

from celery_lease.elector import Action, Transition
from celery_lease.errors import FencingError
from celery_lease.stamp import current_stamp

__all__ = ["LeaseFilter", "TransitionLog", "install"]

# Not in Celery's type stubs.
_PROCESS: str = defaults.DEFAULT_PROCESS_LOG_FMT  # type: ignore[attr-defined]
_TASK: str = defaults.DEFAULT_TASK_LOG_FMT  # type: ignore[attr-defined]

#: Celery's default formats, with room for the epoch where there is one.
_TAGGED = {
    _PROCESS: _PROCESS.replace("] ", "]%(lease_tag)s ", 1),
    _TASK: _TASK.replace("]: ", "]%(lease_tag)s: ", 1),
}


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
        if old is not None and tagged is not None:
            options = {"use_color": old.use_color} if hasattr(old, "use_color") else {}
            new = type(old)(tagged, **options)
            new.datefmt = old.datefmt  # No argument for it before Celery 5.6.
            handler.setFormatter(new)


#: How loudly each transition is told.
_LEVELS = {
    Action.ACQUIRED: logging.INFO,
    Action.JUMPED: logging.CRITICAL,
    Action.RAISING: logging.WARNING,
    Action.RENEWED_LATE: logging.WARNING,
    Action.RENEWAL_FAILED: logging.WARNING,
    Action.STALLED: logging.ERROR,
    Action.RESUMED: logging.WARNING,
    Action.LOST: logging.WARNING,
    Action.RELEASED: logging.INFO,
    Action.CONFLICT: logging.CRITICAL,
    Action.STANDING_BY: logging.INFO,
    Action.UNAVAILABLE: logging.ERROR,
}


class TransitionLog:
    """Tells each transition in one sentence, with ``action`` and its fields in ``extra``.

    What only repeats itself (standing by behind the same holder, a database that is
    still away) is told at DEBUG.

    Args:
        logger: Where to.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._last: tuple[object, ...] | None = None

    def __call__(self, transition: Transition) -> None:
        """Log one transition."""
        level = _LEVELS[transition.action]
        lease = transition.lease
        told = (
            transition.action,
            transition.epoch,
            lease.holder if lease is not None else None,
            lease.held if lease is not None else None,
        )
        if told == self._last and transition.action in (Action.STANDING_BY, Action.UNAVAILABLE):
            level = logging.DEBUG
        self._last = told
        self.logger.log(level, sentence(transition), extra=fields(transition))


def fields(transition: Transition) -> dict[str, Any]:
    """Return the ``extra`` of a transition: stable names for log processors."""
    return {
        "action": f"lease-{transition.action.value}",
        "lease_name": transition.name,
        "lease_epoch": transition.epoch if transition.epoch is not None else "-",
        "lease_holder": transition.holder,
        "lease_state": "leading" if transition.action in _STILL_LEADING else "standby",
        "lease_reason": transition.reason,
        "lease_seconds": transition.seconds,
    }


_STILL_LEADING = {
    Action.ACQUIRED,
    Action.RENEWED_LATE,
    Action.RENEWAL_FAILED,
    Action.STALLED,
    Action.RESUMED,
}


def sentence(transition: Transition) -> str:
    """Return what happened, in words: who, which state, which epoch."""
    said = _SENTENCES[transition.action](transition)
    return f"lease {transition.name!r}: {said}"


def _acquired(t: Transition) -> str:
    before = f", after {t.previous_holder}" if t.previous_holder else ""
    return f"{t.holder} leads under epoch {t.epoch}{before}"


def _standing_by(t: Transition) -> str:
    lease = t.lease
    if lease is None or lease.holder is None:
        return f"{t.holder} stands by; nobody leads"
    if not lease.held:
        return f"{t.holder} stands by; {lease.holder}'s epoch {lease.epoch} has expired"
    since = f" since {lease.acquired_at:%Y-%m-%d %H:%M:%S}Z" if lease.acquired_at else ""
    return (
        f"{t.holder} stands by; {lease.holder} leads under epoch {lease.epoch}{since}, "
        f"for {lease.remaining:.1f} s more unless renewed"
    )


_SENTENCES: dict[Action, Callable[[Transition], str]] = {
    Action.ACQUIRED: _acquired,
    Action.JUMPED: lambda t: (
        f"epochs had gone back in the database: {t.reason}; {t.holder} jumped to epoch {t.epoch}"
    ),
    Action.RAISING: lambda t: (
        f"{t.holder} waits to raise the fence to epoch {t.epoch}: {t.reason}"
    ),
    Action.RENEWED_LATE: lambda t: (
        f"{t.holder} leads under epoch {t.epoch}, renewed late: {t.seconds:.1f} s after the last"
    ),
    Action.RENEWAL_FAILED: lambda t: (
        f"{t.holder} leads under epoch {t.epoch}, but could not renew: {t.reason}; "
        f"it is trusted for {t.seconds:.1f} s more"
    ),
    Action.STALLED: lambda t: (
        f"{t.holder} stops renewing epoch {t.epoch}: the beat loop is {t.seconds:.1f} s overdue"
    ),
    Action.RESUMED: lambda t: f"{t.holder} renews epoch {t.epoch} again: the beat loop is back",
    Action.LOST: lambda t: f"{t.holder} lost epoch {t.epoch} and stands by: {t.reason}",
    Action.RELEASED: lambda t: f"{t.holder} released epoch {t.epoch}",
    Action.CONFLICT: lambda t: (
        f"{t.holder} stops scheduling under epoch {t.epoch}: {t.reason}; it stands by until the "
        f"epoch is jumped (celery lease raise --to N, with N above every epoch ever used)"
    ),
    Action.STANDING_BY: _standing_by,
    Action.UNAVAILABLE: lambda t: (
        f"{t.holder} stands by; the lease database does not answer: {t.reason}"
    ),
}
