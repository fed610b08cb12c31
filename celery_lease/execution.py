"""What one execution of a task shows at the fence, and what this process knows of it."""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from celery import Celery

from celery_lease.errors import StoreError
from celery_lease.settings import Settings
from celery_lease.stamp import Stamp
from celery_lease.stores.fences import FenceStore, Standing, Ticket

__all__ = [
    "fence_store",
    "is_run_over",
    "is_vouched",
    "mark_refused",
    "ticket_of",
    "ticket_of_step",
    "ticket_shown",
    "took_in",
    "unproxied",
    "vouch",
]

logger = logging.getLogger("celery_lease.task")

#: Each app's store, and the settings it was made of.
_stores: WeakKeyDictionary[Celery, tuple[tuple[Any, ...], FenceStore]] = WeakKeyDictionary()
_STORE_SETTINGS = ("beat_lease_url", "beat_lease_engine_options", "beat_lease_guard_idle")
#: What the requests that run in this process show at the fence.
_shown: WeakKeyDictionary[Any, Ticket] = WeakKeyDictionary()
#: Requests whose outcome is on record by this process: their result may be stored.
_vouched: WeakSet[Any] = WeakSet()


def unproxied(app: Celery) -> Celery:
    """Return an app itself: a class that is used before it is bound has a proxy of one."""
    found: Celery = getattr(app, "_get_current_object", lambda: app)()
    return found


def fence_store(app: Celery) -> FenceStore:
    """Return the app's way to its lease database. Nothing is connected yet.

    Raises:
        ConfigurationError: A setting is wrong.
    """
    app, conf = unproxied(app), app.conf
    # Tests set another URL for each: what has not changed is not validated again.
    wanted = tuple(conf.get(name) for name in _STORE_SETTINGS)
    known = _stores.get(app)
    if known is not None and known[0] == wanted:
        return known[1]
    store = FenceStore.of(Settings.from_conf(conf))
    _stores[app] = (wanted, store)
    if known is not None:
        known[1].dispose()
    return store


def ticket_of(stamp: Stamp, task_id: str) -> Ticket:
    """Return what a new execution of a task shows at the fence."""
    return Ticket(
        lease=stamp.name,
        epoch=stamp.epoch,
        term=stamp.term,
        task_id=task_id,
        run=stamp.run,
        execution=str(uuid.uuid4()),
        origin="" if task_id == stamp.run else _attempt(stamp),
    )


def ticket_of_step(stamp: Stamp) -> Ticket:
    """Return what a child shows that ends its run: the same for each of one attempt.

    A failure is reported in several ways, and each of them finds its own outcome.
    """
    return replace(ticket_of(stamp, stamp.run), execution=_attempt(stamp))


def _attempt(stamp: Stamp) -> str:
    """Return a uuid of the run, and of the term under which it was dispatched."""
    epoch, term = stamp.first
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{stamp.run} {epoch} {term}"))


def took_in(request: Any, ticket: Ticket) -> None:
    """Note that this request runs here: what its body has committed is its own."""
    _shown[request] = ticket


def ticket_shown(request: Any) -> Ticket | None:
    """Return what this request shows at the fence, where it runs in this process."""
    return _shown.get(request)


def vouch(request: Any) -> None:
    """Let the result of this request pass: its outcome is on record."""
    _vouched.add(request)


def is_vouched(request: Any) -> bool:
    """Return whether the outcome of this request is on record by this process."""
    return request in _vouched


def is_run_over(stamp: Stamp, standing: Standing) -> bool:
    """Return whether a stale child is a consequence of a run that is over.

    That run is not dispatched again, so nobody would send this child again. A plain
    task's run is never settled, and never dispatched again either; and a run that is still
    to be dispatched is never deleted, so one of which nothing is on record is over, too.
    """
    if standing.settled_under is not None:
        return standing.settled_under == stamp.first
    return standing.fenced is not True


def mark_refused(fences: FenceStore, ticket: Ticket) -> None:
    """Have a refused run dispatched again soon; later it would be anyway."""
    if ticket.task_id != ticket.run:
        return
    try:
        fences.refuse(ticket)
    except StoreError as error:
        logger.warning(
            "The run %s was not marked as refused: %s",
            ticket.run,
            error,
            extra={"action": "refusal-unmarked", "task_id": ticket.run},
        )
