"""The result backend of a fenced task: what a stale attempt reports is not stored.

It is all that sees what the worker's *parent* process reports (a hard time limit, a
lost worker, a revoke, an expiry), so it settles those. There it must never raise:
where it cannot know, it stores nothing.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from celery import Celery, states
from celery.app import trace as celery_trace
from celery.app.task import Context
from celery.backends.rpc import RPCBackend
from celery.exceptions import TimeLimitExceeded

from celery_lease.errors import (
    AlreadySettled,
    CeleryLeaseError,
    MissingEpoch,
    MissingFence,
    StaleEpoch,
    StoreError,
)
from celery_lease.settings import Settings
from celery_lease.signals import refuse
from celery_lease.stamp import Stamp, current_stamp, lend
from celery_lease.stores.fences import FenceStore, Standing, Ticket, refusal

__all__ = [
    "GuardedBackend",
    "fence_store",
    "follows",
    "mark_refused",
    "ticket_of",
    "took_in",
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


def fence_store(app: Celery) -> FenceStore:
    """Return the app's way to its lease database. Nothing is connected yet.

    Raises:
        ConfigurationError: A setting is wrong.
    """
    conf = app.conf
    # Tests set another URL for each: what has not changed is not validated again.
    wanted = tuple(conf.get(name) for name in _STORE_SETTINGS)
    known = _stores.get(app)
    if known is not None and known[0] == wanted:
        return known[1]
    settings = Settings.from_conf(conf)
    store = FenceStore(settings.url, settings.engine_options, idle=settings.guard_idle)
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
    )


def took_in(request: Any, ticket: Ticket) -> None:
    """Note that this request runs here: what its body has committed is its own."""
    _shown[request] = ticket


def vouch(request: Any) -> None:
    """Let the result of this request pass: its outcome is on record."""
    _vouched.add(request)


def follows(stamp: Stamp, standing: Standing) -> bool:
    """Return whether a stale child is a consequence of a run that is over.

    That run is not dispatched again, so nobody would send this child again. A plain
    task's run is never settled, and never dispatched again either.
    """
    return standing.fenced is False or standing.settled_under == stamp.first


def _without_run(request: Any, stamp: Stamp) -> Any:
    """Return a child's request whose failure does not end the run as well.

    After ``replace(chain(…))`` the last step has the run's id, which another attempt ends.
    """
    kept = [each for each in request.chain or () if stamp.run not in _ids(each)]
    chord = request.chord if request.chord and stamp.run not in _ids(request.chord) else None
    return Context(vars(request), chain=kept, chord=chord)


def _ignores_result(task: Any, request: Any) -> bool:
    """Return whether Celery would store no result of this call."""
    # What the call says goes before what the task says, from Celery 5.6 on.
    actual = getattr(celery_trace, "get_actual_ignore_result", None)
    if actual is not None:
        return bool(actual(task, request))
    return bool(request.ignore_result or task.ignore_result)


class GuardedBackend:
    """A result backend that asks the fence first. Everything else is the real one's.

    Args:
        real: The result backend.
        task: The fenced task.
    """

    def __init__(self, real: Any, task: Any) -> None:
        #: The backend that is guarded.
        self.real = real
        self._task = task
        # What every task asks for; __getattr__ takes longer.
        self.mark_as_done = real.mark_as_done
        self.process_cleanup = real.process_cleanup

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # isinstance() is about the real one.
        return type(self.real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __reduce__(self) -> Any:
        return self.real.__reduce__()

    def store_result(
        self,
        task_id: str,
        result: Any,
        state: str,
        traceback: Any = None,
        request: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Store STARTED or a custom state, if the request is current."""
        if self._may_report(task_id, request):
            return self.real.store_result(
                task_id, result, state, traceback=traceback, request=request, **kwargs
            )
        return result

    def mark_as_retry(
        self, task_id: str, exc: Any, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        """Store RETRY, if the request is current."""
        if self._may_report(task_id, request):
            return self.real.mark_as_retry(
                task_id, exc, traceback=traceback, request=request, **kwargs
            )
        return None

    def mark_as_failure(
        self,
        task_id: str,
        exc: Any,
        traceback: Any = None,
        request: Any = None,
        store_result: bool = True,
        call_errbacks: bool = True,
        state: str = states.FAILURE,
    ) -> Any:
        """Settle as failed, then store FAILURE, fail the chain and call the errbacks."""
        if isinstance(exc, TimeLimitExceeded) and self._goes_back():
            return None
        return self._end(
            request,
            "failed",
            lambda ended, errbacks: self.real.mark_as_failure(
                task_id,
                exc,
                traceback=traceback,
                request=ended,
                store_result=store_result,
                call_errbacks=call_errbacks and errbacks,
                state=state,
            ),
            exc,
        )

    def fail_from_current_stack(self, task_id: str, exc: Any = None) -> Any:
        """Fail the body of a chord; settle first where its id is the run's."""
        stamp = current_stamp()
        if stamp is not None and stamp.run == task_id:
            body = Context(id=task_id)
            if self._settle(body, stamp, "failed", _ticket_of_step(stamp)) is not None:
                return None
        return self.real.fail_from_current_stack(task_id, exc=exc)

    def fail_alone(self, request: Any, stamp: Stamp, error: Exception) -> None:
        """Store FAILURE of a child that goes no further, whatever becomes of its run.

        Its id belongs to one attempt: chord, chain and ``get()`` wait for an end. Errbacks
        are not for what may be stale.
        """
        task = self._task
        self.real.mark_as_failure(
            request.id,
            error,
            request=self._alone(request, stamp),
            store_result=not _ignores_result(task, request) or task.store_errors_even_if_ignored,
            call_errbacks=False,
        )

    def mark_as_revoked(
        self, task_id: str, reason: str = "", request: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Settle as expired or revoked, then store REVOKED."""
        return self._end(
            request,
            "expired" if reason == "expired" else "revoked",
            lambda ended, _: self.real.mark_as_revoked(task_id, reason, ended, *args, **kwargs),
        )

    def _may_report(self, task_id: str, request: Any) -> bool:
        stamp = None if request is None or request.id != task_id else _stamp_of(request)
        if stamp is None or request in _vouched:
            return True
        ticket = _shown.get(request) or ticket_of(stamp, task_id)
        try:
            return refusal(ticket, fence_store(self._task.app).look(ticket)) is None
        except CeleryLeaseError as error:
            logger.warning(
                "A state of %s[%s] was not stored: %s",
                self._task.name,
                task_id,
                error,
                extra={"action": "state-withheld", "task_id": task_id},
            )
            return False

    def _end(
        self,
        request: Any,
        outcome: str,
        store: Callable[[Any, bool], Any],
        raised: BaseException | None = None,
    ) -> Any:
        """Store a terminal state whose outcome is on record, now or before."""
        stamp = None if request is None else _stamp_of(request)
        if stamp is None:
            return store(request, True)
        with _lent_to_parent(stamp):
            if request not in _vouched:
                ticket = ticket_of(stamp, request.id)
                refused = self._settle(request, stamp, outcome, ticket, raised)
                if refused is not None:
                    # The id of a child belongs to one attempt: chord and chain wait for an end.
                    child = request.id != stamp.run
                    if child and isinstance(refused, (StaleEpoch, MissingFence)):
                        return store(self._alone(request, stamp), False)
                    return None
            if outcome == "failed" and _ends_run(request, stamp):
                refused = self._settle(request, stamp, outcome, _ticket_of_step(stamp))
                if refused is not None:
                    request = _without_run(request, stamp)
            return store(request, True)

    def _alone(self, request: Any, stamp: Stamp) -> Any:
        """Return the request of a stale child, for its end and no other attempt's.

        Where that leads to the run, it is marked refused, as where its own message is
        turned away; unless it is over, and whoever waits for it waits for this child.
        """
        if not _ends_run(request, stamp):
            return request
        fences, run = fence_store(self._task.app), ticket_of(stamp, stamp.run)
        try:
            over = follows(stamp, fences.look(run))
        except CeleryLeaseError:
            return _without_run(request, stamp)  # In doubt: redispatched later, if at all.
        if over and not self._has_result(request, stamp.run):
            return request
        if not over:
            mark_refused(fences, run)
        return _without_run(request, stamp)

    def _settle(
        self,
        request: Any,
        stamp: Stamp,
        outcome: str,
        ticket: Ticket,
        raised: BaseException | None = None,
    ) -> CeleryLeaseError | None:
        """Record *outcome* of the ticket's task; return why it could not be."""
        if isinstance(raised, MissingFence) and request not in _shown:
            # Never admitted. Where the lease's table alone is away, as in the middle of a
            # migration, settling would still find the fence, and nobody would run it again.
            return self._withhold(request, outcome, raised)
        try:
            fences = fence_store(self._task.app)
            fences.settle(ticket, outcome)
        except (StaleEpoch, AlreadySettled) as error:
            ours = isinstance(error, AlreadySettled) and error.current_epoch == stamp.epoch
            if ours and not self._has_result(request, ticket.task_id):
                # The process died between its commit and its result.
                return None
            if isinstance(error, StaleEpoch):
                mark_refused(fences, ticket)
            refuse(self._task, request, stamp.epoch, error, outcome)
            return error
        except CeleryLeaseError as error:
            return self._withhold(request, outcome, error)
        vouch(request)
        return None

    def _goes_back(self) -> bool:
        """Return whether a message that ran into its hard time limit is delivered again."""
        task = self._task
        acknowledged = getattr(task, "acks_on_timeout", task.acks_on_failure_or_timeout)
        return bool(task.acks_late and not acknowledged)

    def _withhold(self, request: Any, outcome: str, error: CeleryLeaseError) -> CeleryLeaseError:
        logger.error(
            "The end of %s[%s] (%s) was not stored: %s",
            self._task.name,
            request.id,
            outcome,
            error,
            extra={"action": "result-withheld", "task_id": request.id},
        )
        return error

    def _has_result(self, request: Any, task_id: str) -> bool:
        """Return whether the task's end is in the result store; in doubt, it is."""
        # Results of rpc:// lie in the caller's queue, and some are nowhere.
        ignored = task_id == request.id and _ignores_result(self._task, request)
        if ignored or isinstance(self.real, RPCBackend):
            return True
        try:
            return self.real.get_state(task_id) in states.READY_STATES
        except Exception:  # noqa: BLE001 - any backend's, and nothing may be raised here
            return True


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


def _stamp_of(request: Any) -> Stamp | None:
    try:
        return Stamp.of(request)
    except MissingEpoch:
        return None  # Refused at its start, with that error.


def _ticket_of_step(stamp: Stamp) -> Ticket:
    """Return what a child shows that ends its run: the same for each of one attempt.

    A failure is reported in several ways, and each of them finds its own outcome.
    """
    attempt = uuid.uuid5(uuid.NAMESPACE_OID, f"{stamp.run} {stamp.epoch} {stamp.term}")
    return replace(ticket_of(stamp, stamp.run), execution=str(attempt))


def _ends_run(request: Any, stamp: Stamp) -> bool:
    """Return whether what fails with this child has the run's id."""
    if request.id == stamp.run:
        return False
    follow = [*(request.chain or ()), request.chord]
    return any(stamp.run in _ids(each) for each in follow if each)


def _ids(step: Any) -> set[Any]:
    """Return the ids that fail with a step: its own, and of what it is made of and leads to."""
    options, inner = step["options"], step.get("kwargs") or {}
    kind = step.get("subtask_type")
    follow = [*(options.get("chain") or ()), options.get("chord")]
    if kind == "chord":
        follow.append(inner.get("body"))
    elif kind == "chain":
        follow += (inner.get("tasks") or ())[-1:]
    return {options.get("task_id")}.union(*(_ids(each) for each in follow if each))


def _lent_to_parent(stamp: Stamp) -> AbstractContextManager[None]:
    return nullcontext() if current_stamp() is not None else lend(stamp)
