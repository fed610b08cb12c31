"""A task whose work only counts under the current epoch: admit, run, settle.

What hooks where: ``__call__`` is all that runs after the message is known and before
callbacks and result; ``signature_from_request`` is what every kind of retry passes;
``on_replace`` sees the task's id being handed on; the ``backend`` property sees what
the worker's parent process reports.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import OperationalError

from celery_lease.backend import GuardedBackend
from celery_lease.bypass import refuse_bypass
from celery_lease.canvas import free_steps, with_id
from celery_lease.errors import (
    AlreadySettled,
    FencingError,
    MissingEpoch,
    NotWritable,
    StaleEpoch,
    StoreContention,
    StoreError,
    StoreUnavailable,
    UnsafeTransaction,
)
from celery_lease.execution import (
    fence_store,
    is_run_over,
    mark_refused,
    ticket_of,
    took_in,
    vouch,
)
from celery_lease.guards.fence import TaskFence, Unfenced
from celery_lease.occurrence import Occurrence, Outcome
from celery_lease.republish import carry_on, try_later
from celery_lease.signals import Stage, announce_refusal, install, stage_of
from celery_lease.stamp import Stamp, current_stamp, enclosing_stamp, running_request
from celery_lease.stores.fences import Standing, Ticket, refusal
from celery_lease.wrapping import replace_once, stay_plain

__all__ = ["FencedTask"]

logger = logging.getLogger("celery_lease.task")

if TYPE_CHECKING:
    _Task = Task[Any, Any]
else:
    _Task = Task  # Generic to type checkers alone, before Celery 5.6.

T = TypeVar("T")

#: Polls for the end of a chord where the result backend does not count. It writes nothing,
#: and whoever waits for the chord waits for it: no fence, even where all tasks have one.
_POLLER = "celery.chord_unlock"


@dataclass(slots=True)
class _Body:
    fence: TaskFence
    #: What its request is marked with, and the copies of it where a body calls itself.
    mark: int
    #: Whether ``run`` has begun, and not only a ``__call__`` of the user's own around it.
    begun: bool = False


#: The body that runs here and now. A task that is called directly in that body works
#: behind the same fence.
_running: ContextVar[_Body | None] = ContextVar("celery_lease_fence", default=None)
#: The marks of all fenced bodies that run in this process.
_bodies: set[int] = set()

#: What was admitted before its body was called.
_admitted: WeakKeyDictionary[Any, TaskFence] = WeakKeyDictionary()

_UNFENCED = Unfenced()
#: What passes by itself, or once somebody mends it. "Not writable" is among it: during a
#: switchover the database answers, and takes no outcome.
_AWAY = (StoreUnavailable, StoreContention, NotWritable)


class FencedTask(_Task):
    """Base class: ``@app.task(base=FencedTask, bind=True)``.

    A message under an older epoch than the stored one is refused before the body;
    what is written in ``self.fence.transaction(…)`` is refused at its commit; and
    how the body ends is recorded under the fence before any callback or result.
    A call without a stamp runs unfenced and touches no database.
    """

    abstract = True

    #: Refuse calls that no lease scheduler sent, instead of running them unfenced.
    require_epoch: bool = False
    #: Take over the stamp of the task that sends this one.
    inherit_epoch: bool = True
    #: Seconds to wait for a lease database that does not answer. After that the
    #: message is published again, to be tried later.
    lease_patience: float = 3.0

    _guarded_backend: GuardedBackend | None = None

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Refuse what would by-pass the fence; install what it needs.

        Raises:
            ConfigurationError: The class or the app would by-pass it.
        """
        super().on_bound(app)
        if cls.name == _POLLER:
            stay_plain(cls, FencedTask)
            return
        refuse_bypass(cls, FencedTask, app)
        if cls.__call__ is not FencedTask.__call__:
            replace_once(cls, "__call__", _fenced_call)
        if cls.before_start is not Task.before_start:
            replace_once(cls, "before_start", _fenced_hook)
        install(app)

    @property
    def fence(self) -> TaskFence | Unfenced:
        """The way to the fence for this execution, and in what its body calls directly.

        Raises:
            UnsafeTransaction: There is a stamp, but no fence here: this is a hook, a
                thread, or a call like a function from a stamped task that is not fenced.
            MissingEpoch: There is no stamp, and ``require_epoch`` is set.
        """
        return _fence_here() or self._unfenced()

    @property
    def epoch(self) -> int | None:
        """The epoch that this was dispatched under; None where there is no stamp."""
        fence = _fence_here()
        if fence is not None:
            return fence.epoch
        try:
            stamp = self._stamp()
        except MissingEpoch:
            return None  # Half a stamp. Reading must not fail in a receiver of a signal.
        return None if stamp is None else stamp.epoch

    @property
    def occurrence(self) -> Occurrence | None:
        """The planned firing that this is, or is a consequence of; None where unknown."""
        fence = _fence_here()
        return None if fence is None else fence.occurrence

    def _unfenced(self) -> Unfenced:
        """Say that there is no fence, but only where none is due: else it writes unguarded."""
        stamp = self._stamp()
        if stamp is not None:
            raise UnsafeTransaction(
                f"{self.name}: self.fence is only in the body of a fenced task that was sent "
                f"or applied, and this is not one: a hook (before_start, on_success, …), or a "
                f"call like a function from a stamped task that is not fenced (map, starmap, "
                f"chunks, an errback, a plain task); write in the body, and send "
                f"{self.name} as a task of its own",
                name=stamp.name,
            )
        if self.require_epoch:
            raise self._missing_epoch()
        if _bodies and self.request_stack.top is None and running_request() is None:
            raise UnsafeTransaction(
                f"{self.name}: no task runs in this thread, so self.fence cannot be found; take "
                f"fence = self.fence in the body, and give it to the thread"
            )
        return _UNFENCED

    def _stamp(self) -> Stamp | None:
        """Return the stamp of this call, or of what it is called from."""
        own = Stamp.of(self.request)
        return current_stamp() if own is None and self.inherit_epoch else own

    # --- admit, run, settle -------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body behind the fence if the message is stamped."""
        request: Any = self.request_stack.top
        # First what most calls are: this line is all that an unstamped one pays for.
        if not (
            request is None
            or request.stamps
            or request.is_eager
            or request.called_directly
            or self.require_epoch
        ):
            return self.run(*args, **kwargs)
        request = self.request
        if request.called_directly or _is_running(request):
            body = _running.get()
            if body is not None and not body.begun and _mark_of(request) == body.mark:
                # By a __call__ of the user's own, which is behind the fence as a whole.
                return self._begin(*args, **kwargs)
            fence = _fence_here()
            if fence is None and not request.called_directly:
                raise UnsafeTransaction(
                    f"{self.name}: the body of this message has run, and how it ended is on "
                    f"record: a hook that comes after it cannot call it again; retry() in the body"
                )
            if fence is None and self.require_epoch:
                self._unfenced()
            return super().__call__(*args, **kwargs)
        return self._run_fenced(self._begin, args, kwargs)

    def _run_fenced(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run all that a message asks for, behind the fence if it is stamped."""
        request = self.request
        stamp = self._stamp_of_message(request)
        if stamp is None:
            return self._run_unfenced(call, args, kwargs)
        mark = _mark_running(request)
        fence = self._admit(request, stamp)
        with _behind(_Body(fence, mark)):
            try:
                result = call(*args, **kwargs)
            except Exception as error:
                self._ended(fence, request, stamp, error)
                raise
            self._ended(fence, request, stamp, None)
            return result

    def _run_unfenced(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.require_epoch:
            raise self._missing_epoch()
        if _running.get() is None:
            return call(*args, **kwargs)
        # Called eagerly by a fenced body whose stamp it must not inherit.
        with _behind(None):
            return call(*args, **kwargs)

    def _begin(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body itself. Whoever calls this task from there means another call."""
        body = _running.get()
        if body is None:
            return self.run(*args, **kwargs)
        body.begun = True
        try:
            return self.run(*args, **kwargs)
        finally:
            body.begun = False

    def _stamp_of_message(self, request: Any) -> Stamp | None:
        stamp = Stamp.of(request)
        if stamp is None and request.is_eager and self.inherit_epoch:
            return enclosing_stamp()
        return stamp

    def _admit(self, request: Any, stamp: Stamp) -> TaskFence:
        """Ask, before anything of the user's runs, whether the message is current.

        Raises:
            Ignore: It is not, or the database does not answer.
            MissingFence: The lease is not known there.
        """
        admitted = _admitted.pop(request, None)
        if admitted is not None:
            return admitted
        store = fence_store(self.app)
        ticket = ticket_of(stamp, request.id)
        try:
            standing = self._patiently(lambda: store.look(ticket))
        except StoreError as error:
            # Whatever it is: nothing of the user's has run, so there is no outcome yet.
            try_later(self, request, error)
        refused = refusal(ticket, standing)
        if refused is not None:
            renewed = self._follow(request, stamp, ticket, standing)
            if renewed is not None:
                return self._admit(request, renewed)
            self._turn_away(request, stamp, ticket, refused, "start")
        took_in(request, ticket)
        return TaskFence(ticket, store, standing)

    def _follow(
        self, request: Any, stamp: Stamp, ticket: Ticket, standing: Standing
    ) -> Stamp | None:
        """Return the current stamp of an eager consequence of a run that is over.

        It has no message that could be carried on, and nobody calls it again.
        """
        child, fence = ticket.task_id != ticket.run, standing.fence
        if not (child and request.is_eager and is_run_over(stamp, standing)):
            return None
        if standing.outcome is not None or fence is None or fence.term is None:
            return None
        return stamp.renewed(fence.epoch, fence.term)

    def _ended(
        self, fence: TaskFence, request: Any, stamp: Stamp, error: Exception | None
    ) -> None:
        """Settle how the body ended, before anybody hears of it.

        Raises:
            Ignore: It ended stale, as a duplicate, or the database does not answer.
        """
        if fence.refused is not None:
            # Even if the body swallowed it.
            self._turn_away(request, stamp, fence.ticket, fence.refused, "commit")
        outcome = _outcome(fence, error)
        if fence.settled:
            if outcome == "failed":
                self._tell_late_failure(request, error)
            vouch(request)
            return
        if isinstance(error, _AWAY):
            try_later(self, request, error)
        # An eager retry or replacement ran inside this body, and its failure comes up here.
        heirs_failure = fence.handed_on and request.is_eager and outcome == "failed"
        if heirs_failure or (fence.handed_on and error is None):
            self._let_pass(fence, request, stamp)
        if outcome is None or heirs_failure:
            return
        self._settle(fence, request, stamp, outcome)
        vouch(request)

    def _settle(self, fence: TaskFence, request: Any, stamp: Stamp, outcome: Outcome) -> None:
        """Put the outcome on record.

        Raises:
            Ignore: It is stale, a duplicate, or the database does not answer.
        """
        try:
            self._patiently(lambda: fence.settle(outcome))
        except (StaleEpoch, AlreadySettled) as refused:
            self._turn_away(request, stamp, fence.ticket, refused, stage_of(outcome))
        except _AWAY as away:
            try_later(self, request, away)

    def _let_pass(self, fence: TaskFence, request: Any, stamp: Stamp) -> None:
        """Let a result be stored, though the id goes on: ``retry(throw=False)`` and a return.

        Raises:
            Ignore: It is stale, or the database does not answer.
        """
        try:
            self._patiently(fence.check)
        except (StaleEpoch, AlreadySettled) as refused:
            # An eager replacement ran in place, and settled the run.
            if isinstance(refused, StaleEpoch) or not request.is_eager:
                self._turn_away(request, stamp, fence.ticket, refused, "settle")
        except _AWAY as error:
            # Not to be tried later: the next attempt is on its way already.
            raise Ignore(str(error)) from error

    def _patiently(self, verb: Callable[[], T]) -> T:
        """Wait a little for a lease database that is away."""
        end = time.monotonic() + self.lease_patience
        pause = 0.05
        while True:
            try:
                return verb()
            except _AWAY:
                if time.monotonic() + pause > end:
                    raise
            time.sleep(pause)
            pause = min(pause * 2, 0.5)

    def _turn_away(
        self, request: Any, stamp: Stamp, ticket: Ticket, error: FencingError, stage: Stage
    ) -> NoReturn:
        """End without a result: it would be another attempt's."""
        if isinstance(error, StaleEpoch) and not request.is_eager:
            if ticket.task_id == ticket.run:
                mark_refused(fence_store(self.app), ticket)
                announce_refusal(self, request, ticket.epoch, error, stage)
            elif not self._carry_on(request, stamp, ticket):
                announce_refusal(self, request, ticket.epoch, error, stage)
                self.backend.fail_alone(request, stamp, error)
        else:
            announce_refusal(self, request, ticket.epoch, error, stage)
        raise Ignore(str(error)) from error

    def _carry_on(self, request: Any, stamp: Stamp, ticket: Ticket) -> bool:
        """Send a consequence of a settled run on under the current epoch; False if it is none."""
        try:
            standing = self._patiently(lambda: fence_store(self.app).look(ticket))
        except _AWAY as error:
            try_later(self, request, error)
        fence = standing.fence
        if fence is None or fence.term is None:
            # Until the fence is raised, the run's own commit may still be on its way.
            try_later(self, request, StoreContention("a takeover is raising the fence"))
        if not is_run_over(stamp, standing):
            return False
        carry_on(self, request, stamp.renewed(fence.epoch, fence.term))
        return True

    # --- the task's id is handed on -----------------------------------------------------

    def signature_from_request(
        self,
        request: Any = None,
        args: Any = None,
        kwargs: Any = None,
        queue: str | None = None,
        **extra_options: Any,
    ) -> Any:
        """Build a retry's message, if the task may still go on.

        Raises:
            StaleEpoch: A newer epoch took over: no retry is published.
            AlreadySettled: Another delivery of this message was faster.
            UnsafeTransaction: The run was committed by its final block.
        """
        request = self.request if request is None else request
        self._hand_on(request, "retry()")
        return super().signature_from_request(request, args, kwargs, queue, **extra_options)

    def retry(self, *args: Any, **kwargs: Any) -> Any:
        """Retry as Celery does; without a message, the outcome is this attempt's.

        Raises:
            StaleEpoch: As :meth:`signature_from_request`, which says what else.
        """
        with self._handing_on():
            try:
                return super().retry(*args, **kwargs)
            except Reject as error:
                raise self._unsent(error) from error

    def _unsent(self, error: Reject) -> Reject:
        """Return what becomes of a retry that Celery gives up for lost.

        That the broker was away is no outcome: the message goes back to its queue, or
        the leader dispatches the run again.
        """
        fence = self._own_fence(self.request)
        reason = getattr(error, "reason", None)
        if fence is None or not isinstance(reason, OperationalError):
            return error
        if not self.acks_late:
            if fence.ticket.task_id != fence.ticket.run:
                return error
            mark_refused(fence_store(self.app), fence.ticket)
        return Reject(reason, requeue=True)

    def on_replace(self, sig: Any) -> Any:
        """Settle here what the replacement will not settle.

        Raises:
            UnsafeTransaction: This worker does not know which of the two it is.
        """
        if self.request.is_eager:
            # Here and now, under this id: how that ends is the end of the run.
            free_steps(sig)
            self._settle_for(sig)
            return super().on_replace(sig)
        with self._handing_on():
            self._settle_for(sig)
            return super().on_replace(sig)

    @contextmanager
    def _handing_on(self) -> Iterator[None]:
        """Take back that the id goes on where no message went out: too many retries, say."""
        fence = self._own_fence(self.request)
        before = fence is not None and fence.handed_on
        try:
            yield
        except (Retry, Ignore):
            raise
        except Exception:
            if fence is not None:
                fence.handed_on = before
            raise

    def _settle_for(self, sig: Any) -> None:
        request = self.request
        fence = self._own_fence(request)
        if fence is not None:
            heir = with_id(sig, fence.ticket.task_id)
            if heir is not None and heir.task not in self.app.tasks:
                # Settled here, a fenced one would be refused as a duplicate; not settled,
                # a plain one's run would be sent again.
                raise UnsafeTransaction(
                    f"{self.name}: replace() with {heir.task!r}, which is not registered here, so "
                    f"it is not known whether it settles the run; import its module in this "
                    f"worker, or send it with app.send_task() and return",
                    name=fence.ticket.lease,
                )
            if fence.open:
                raise UnsafeTransaction(
                    f"{self.name}: replace() inside a guarded block, which it would roll back; "
                    f"call it after the block",
                    name=fence.ticket.lease,
                )
            if self._is_fenced(heir):
                self._hand_on(request, "replace()")
            elif not fence.settled:
                self._patiently(lambda: fence.settle("committed"))

    def _hand_on(self, request: Any, what: str) -> None:
        fence = self._own_fence(request)
        if fence is not None:
            if fence.settled:
                # With autoretry_for: what the body raised is what somebody has to mend.
                cause = sys.exc_info()[1]
                after = "" if cause is None else f" (after {cause!r})"
                raise UnsafeTransaction(
                    f"{what} after the final guarded block{after}: the next attempt would be "
                    f"refused as a duplicate; say final=False on that block",
                    name=fence.ticket.lease,
                ) from cause
            fence.check()
            fence.handed_on = True
            return
        # The worker's parent process retries what was lost with its child process.
        stamp = Stamp.of(request)
        if stamp is not None:
            ticket = ticket_of(stamp, request.id)
            refused = refusal(ticket, fence_store(self.app).look(ticket))
            if refused is not None:
                raise refused

    def _own_fence(self, request: Any) -> TaskFence | None:
        body = _running.get()
        if body is None or body.fence.ticket.task_id != request.id:
            return None
        return body.fence

    def _is_fenced(self, sig: Any) -> bool:
        task = None if sig is None else self.app.tasks.get(sig.task)
        return isinstance(task, FencedTask) and task.inherit_epoch

    # --- the result ---------------------------------------------------------------------

    @property
    def backend(self) -> Any:
        """The result backend, which stores nothing that a stale attempt reports."""
        real = self._backend
        if real is None:
            real = self.app.backend
        guarded = self._guarded_backend
        # Each thread has a backend of its own.
        if guarded is None or guarded.real is not real:
            guarded = self._guarded_backend = GuardedBackend(real, self)
        return guarded

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value

    def AsyncResult(self, task_id: str, **kwargs: Any) -> Any:  # noqa: N802 - Celery's name
        """Return the result of a call: readers need no guard."""
        result = super().AsyncResult(task_id, **kwargs)
        result.backend = getattr(result.backend, "real", result.backend)
        return result

    def _missing_epoch(self) -> MissingEpoch:
        return MissingEpoch(
            f"{self.name} requires an epoch (require_epoch = True), and this call has none: "
            f"it was not sent by a lease scheduler, nor by a task that was; a thread is given "
            f"the fence by the body (fence = self.fence)"
        )

    def _tell_late_failure(self, request: Any, error: Exception | None) -> None:
        logger.error(
            "%s[%s] failed after its final guarded block: what it committed stands, its "
            "result is FAILURE: %r",
            self.name,
            request.id,
            error,
            extra={
                "action": "failure-after-commit",
                "task_name": self.name,
                "task_id": request.id,
            },
        )


def _fence_here() -> TaskFence | None:
    """Return the fence of the body that this is a part of."""
    body = _running.get()
    if body is None:
        return None
    request = running_request()
    # Another one: a task that the body called eagerly, a map of Celery's say, is not the
    # body. None: the context was copied into a thread, as asyncio.to_thread does.
    return body.fence if request is None or _mark_of(request) == body.mark else None


def _fenced_call(own: Callable[[FencedTask], Callable[..., Any]]) -> Callable[..., Any]:
    """Put a ``__call__`` of the user's own behind the fence: it may catch, skip and retry."""

    def __call__(self: FencedTask, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it is one
        request = self.request
        if request.called_directly and self.require_epoch and _fence_here() is None:
            self._unfenced()
        if request.called_directly or _is_running(request):
            return own(self)(*args, **kwargs)
        return self._run_fenced(own(self), args, kwargs)

    return __call__


def _fenced_hook(own: Callable[[FencedTask], Callable[..., Any]]) -> Callable[..., Any]:
    """Admit ahead of a ``before_start`` of the user's own, and settle where it ends the task."""

    def before_start(self: FencedTask, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        stamp = self._stamp_of_message(request)
        if stamp is None or request in _admitted:
            return own(self)(*args, **kwargs)
        fence = _admitted[request] = self._admit(request, stamp)
        # No request has such a mark: it is not the body, and self.fence is not there.
        with _behind(_Body(fence, -id(request))):
            try:
                return own(self)(*args, **kwargs)
            except Exception as error:
                self._ended(fence, request, stamp, error)
                raise

    return before_start


@contextmanager
def _behind(body: _Body | None) -> Iterator[None]:
    token = _running.set(body)
    if body is not None:
        _bodies.add(body.mark)
    try:
        yield
    finally:
        if body is not None:
            _bodies.discard(body.mark)
        _running.reset(token)


def _outcome(fence: TaskFence, error: Exception | None) -> Outcome | None:
    """Return how a body that ended so is recorded; None where it goes on elsewhere."""
    if isinstance(error, Retry) or (
        isinstance(error, Reject) and getattr(error, "requeue", False)
    ):
        return None
    if error is None or isinstance(error, Ignore):
        return None if fence.handed_on else "committed"
    return "failed"


# Celery marks a request whose body runs with ``_protected = 1``, so that a second __call__
# has a request of its own. Ours is a number that also tells *which* body it is. An attribute
# with a name of ours would travel into the headers of a retry.


def _is_running(request: Any) -> bool:
    return bool(_mark_of(request))


def _mark_of(request: Any) -> int:
    return request._protected  # type: ignore[no-any-return]  # noqa: SLF001 - as said


def _mark_running(request: Any) -> int:
    request._protected = id(request)  # noqa: SLF001 - as said
    return id(request)
