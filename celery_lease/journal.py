"""Each transition of a lease as a line in the log: a sentence for people, fields for machines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery_lease.transition import Action, Transition

__all__ = ["LEVELS", "TransitionLog", "fields", "sentence"]

#: How loudly each transition is told.
LEVELS = {
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
        level = LEVELS[transition.action]
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
        f"{t.holder} stops renewing epoch {t.epoch}: its loop is {t.seconds:.1f} s overdue"
    ),
    Action.RESUMED: lambda t: f"{t.holder} renews epoch {t.epoch} again: its loop is back",
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
