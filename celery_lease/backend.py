"""The result backend of a fenced task: what a stale attempt reports is not stored.

It is all that sees what the worker's *parent* process reports (a hard time limit, a
lost worker, a revoke, an expiry), so it settles those. There it must never raise:
where it cannot know, it stores nothing.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from celery import states
from celery.app import trace as celery_trace
from celery.app.task import Context
from celery.backends.rpc import RPCBackend
from celery.exceptions import Reject, TimeLimitExceeded

from celery_lease.canvas import ends, without
from celery_lease.errors import (
    AlreadySettled,
    CeleryLeaseError,
    MissingEpoch,
    MissingFence,
    StaleEpoch,
)
from celery_lease.execution import (
    fence_store,
    is_run_over,
    is_vouched,
    mark_refused,
    ticket_of,
    ticket_of_step,
    ticket_shown,
    vouch,
)
from celery_lease.occurrence import Outcome
from celery_lease.signals import announce_refusal, stage_of
from celery_lease.stamp import Stamp, current_stamp, lend
from celery_lease.stores.fences import Ticket, refusal

__all__ = ["GuardedBackend"]

logger = logging.getLogger("celery_lease.task")


def _ignores_result(task: Any, request: Any) -> bool:
    """Return whether Celery would store no result of this call."""
    # What the call says goes before what the task says, from Celery 5.6 on.
    actual = getattr(celery_trace, "get_actual_ignore_result", None)
    if actual is not None:
        return bool(actual(task, request))
    return bool(request.ignore_result or task.ignore_result)


class _Store(Protocol):
    def __call__(self, request: Any, /, *, errbacks: bool) -> Any:
        """Store a terminal state of *request*; call its errbacks only if they are wanted."""


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
        # Not guarded: a body that returns has settled by then, or ended Ignored. Looked up
        # for every task, so attributes of our own: __getattr__ takes longer.
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
            lambda ended, *, errbacks: self.real.mark_as_failure(
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
        if stamp is not None and stamp.run == task_id and not self._may_fail_run(stamp):
            return None
        return self.real.fail_from_current_stack(task_id, exc=exc)

    def _fail_chain(self, chain: Any, *args: Any, **kwargs: Any) -> None:
        """Fail what follows a chord that has failed; settle first where that is the run.

        Celery 5.7 calls it for a chord that was replaced together with a last step.
        """
        stamp = current_stamp()
        rest = Context(chain=list(chain or ()))
        if stamp is not None and ends(rest, stamp.run) and not self._may_fail_run(stamp):
            rest = without(rest, stamp.run)
        self.real._fail_chain(rest.chain, *args, **kwargs)  # noqa: SLF001 - where it is called

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

        def store(ended: Any, *, errbacks: bool) -> Any:
            return self.real.mark_as_revoked(task_id, reason, ended, *args, **kwargs)

        return self._end(request, "expired" if reason == "expired" else "revoked", store)

    def _may_report(self, task_id: str, request: Any) -> bool:
        stamp = None if request is None else _stamp_of(request)
        if stamp is None or task_id not in {request.id, stamp.run}:
            return True
        own = task_id == request.id
        if own and is_vouched(request):
            return True
        ticket = (ticket_shown(request) if own else None) or ticket_of(stamp, task_id)
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
        outcome: Outcome,
        store: _Store,
        raised: BaseException | None = None,
    ) -> Any:
        """Store a terminal state whose outcome is on record, now or before."""
        stamp = None if request is None else _stamp_of(request)
        if stamp is None:
            return store(request, errbacks=True)
        with _lent_to_parent(stamp):
            if not is_vouched(request):
                ticket = ticket_of(stamp, request.id)
                refused = self._settle(request, stamp, outcome, ticket, raised)
                if refused is not None:
                    if request.id != stamp.run and not isinstance(refused, AlreadySettled):
                        # Nobody sends this child again: chord and chain wait for its end.
                        return store(self._alone(request, stamp), errbacks=False)
                    return None
            if outcome == "failed" and ends(request, stamp.run):
                refused = self._settle(request, stamp, outcome, ticket_of_step(stamp))
                if refused is not None:
                    request = self._alone(request, stamp)
            return store(request, errbacks=True)

    def _alone(self, request: Any, stamp: Stamp) -> Any:
        """Return the request of a stale child, for its end and no other attempt's.

        Where that leads to the run, it is marked refused, as where its own message is
        turned away; unless it is over, and whoever waits for it waits for this child.
        """
        if not ends(request, stamp.run):
            return request
        fences, run = fence_store(self._task.app), ticket_of(stamp, stamp.run)
        try:
            over = is_run_over(stamp, fences.look(run))
        except CeleryLeaseError:
            return without(request, stamp.run)  # In doubt: redispatched later, if at all.
        if over and not self._has_result(request, stamp.run):
            return request
        if not over:
            mark_refused(fences, run)
        return without(request, stamp.run)

    def _settle(
        self,
        request: Any,
        stamp: Stamp,
        outcome: Outcome,
        ticket: Ticket,
        raised: BaseException | None = None,
    ) -> CeleryLeaseError | None:
        """Record *outcome* of the ticket's task; return why it could not be."""
        if isinstance(raised, MissingFence) and ticket_shown(request) is None:
            # Never admitted. Where the lease's table alone is away, as in the middle of a
            # migration, settling would still find the fence, and nobody would run it again.
            return self._withhold(request, outcome, raised)
        try:
            fences = fence_store(self._task.app)
            fences.settle(ticket, outcome)
        except (StaleEpoch, AlreadySettled) as error:
            if isinstance(error, AlreadySettled):
                if isinstance(raised, Reject):
                    return None  # Only a body that has settled gets to reject a message for good.
                ours = error.current_epoch == stamp.epoch
                if ours and not self._has_result(request, ticket.task_id):
                    # The process died between its commit and its result.
                    return None
            if isinstance(error, StaleEpoch):
                mark_refused(fences, ticket)
            announce_refusal(self._task, request, stamp.epoch, error, stage_of(outcome))
            return error
        except CeleryLeaseError as error:
            return self._withhold(request, outcome, error)
        vouch(request)
        return None

    def _may_fail_run(self, stamp: Stamp) -> bool:
        """Settle the run that a failed step ends; return whether it may be failed."""
        run = Context(id=stamp.run)
        return self._settle(run, stamp, "failed", ticket_of_step(stamp)) is None

    def _goes_back(self) -> bool:
        """Return whether a message that ran into its hard time limit is delivered again."""
        task = self._task
        acknowledged = getattr(task, "acks_on_timeout", task.acks_on_failure_or_timeout)
        return bool(task.acks_late and not acknowledged)

    def _withhold(
        self, request: Any, outcome: Outcome, error: CeleryLeaseError
    ) -> CeleryLeaseError:
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


def _stamp_of(request: Any) -> Stamp | None:
    try:
        return Stamp.of(request)
    except MissingEpoch:
        return None  # Refused at its start, with that error.


def _lent_to_parent(stamp: Stamp) -> AbstractContextManager[None]:
    return nullcontext() if current_stamp() is not None else lend(stamp)
