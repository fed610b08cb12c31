"""Who leads: standby or leading, and until when a term may be trusted.

::

    standby ── acquire, raise the fence ──> leading
       ^                                       │
       └── lost, released, conceded, conflict ─┘

A term trusts itself until

    the instant before the request was sent + ttl - margin

on a local clock that counts suspended time. The request, not the answer: an answer
may take any time to arrive, and the database began to count when it had the request.
(The same rule: River's elector, the DynamoDB lock client. client-go and etcd's client
begin at the answer, and can trust a lease that has expired.)

Renewing happens on a thread, so that a slow publish does not lose the lease, and stops
when the loop is overdue by ``stall_timeout``, so that a hung beat does not keep it. Each
term has a thread and a state of its own: a thread that wakes up late can end its own
term and no other.

A term that finds its epoch granted to another, or meets a larger epoch while it is
trusted, ends by conflict: this process stays standby until the lease shows an epoch
above its own.
"""

from __future__ import annotations

import os
import random
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace

from celery_lease.clock import Clock, SystemClock
from celery_lease.errors import LeaseConflict, LeaseLost, StoreContention, StoreError
from celery_lease.interrupts import put_off
from celery_lease.lease import Holder, Lease, Term
from celery_lease.settings import Settings
from celery_lease.stores.base import LeaseStore, Raised, Renewal
from celery_lease.transition import Action, Transition

__all__ = ["Elector"]

#: Seconds that closing waits for a renewal that is under way.
_FAREWELL = 2.0

#: Seconds that a release may take: a lease that is not released expires.
_RELEASE = 10.0
#: Why a term is over whose fence could not be raised.
_NOT_RAISED = {
    Raised.SUPERSEDED: "a later takeover has raised the fence",
    Raised.CONFLICT: "the fence shows another term",
}


class _Tenure:
    """A term in this process: how long it is trusted, whether it leads, whether it is over."""

    def __init__(self, term: Term, sent_at: float, trusted_until: float) -> None:
        self.term = term
        self.renewed_at = sent_at
        self.trusted_until = trusted_until
        self.fence_raised = False
        self.stalled = False
        self.over = threading.Event()
        self._pid = os.getpid()

    @property
    def foreign(self) -> bool:
        """Whether this is a copy, in a process that was forked from the one with the term."""
        return self._pid != os.getpid()


class Elector:
    """Campaigns for one lease, renews it, and knows whether it may be trusted.

    Args:
        store: The lease database.
        settings: Name and durations.
        holder: This process.
        clock: The local clock.
        observe: Called with each transition, on whichever thread it happens.
    """

    def __init__(
        self,
        store: LeaseStore,
        settings: Settings,
        *,
        holder: Holder,
        clock: Clock | None = None,
        observe: Callable[[Transition], None] = lambda _transition: None,
    ) -> None:
        self.store = store
        self.settings = settings
        self.holder = holder
        self.clock = clock or SystemClock()
        #: How many times the current and earlier terms were renewed.
        self.renewals = 0
        #: What the last lost campaign saw, or the renewal that found the term lost.
        self.seen: Lease | None = None
        self._observe = observe
        self._tenure: _Tenure | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Lock()
        self._wake = threading.Event()
        self._expected = self.clock.now()
        self._conflict: int | None = None

    # --- asking -------------------------------------------------------------------------

    @property
    def leading(self) -> bool:
        """Whether this process holds a term that it may trust at this moment."""
        return self.term is not None

    @property
    def term(self) -> Term | None:
        """The term, while it may be trusted."""
        tenure = self._tenure
        leads = tenure is not None and tenure.fence_raised and self._trusts(tenure)
        return tenure.term if tenure is not None and leads else None

    @property
    def trust_left(self) -> float:
        """Seconds that the term may still be trusted."""
        tenure = self._tenure
        return 0.0 if tenure is None else max(0.0, tenure.trusted_until - self.clock.now())

    def check(self) -> Term:
        """Return the term; call it before each thing that can put messages on the wire.

        Raises:
            LeaseLost: There is no term, or it may not be trusted any more.
            LeaseConflict: The last one ended by conflict.
        """
        tenure = self._tenure
        if tenure is not None and tenure.fence_raised and self._trusts(tenure):
            return tenure.term
        if tenure is not None and not self._trusts(tenure):
            self._end(tenure, Action.LOST, "its trust window closed")
        if self._conflict is not None:
            raise LeaseConflict(
                f"the lease {self.settings.name!r} is in conflict over epoch {self._conflict}; "
                f"compare `celery lease history`, and jump with `celery lease raise --to N`",
                name=self.settings.name,
                held_epoch=self._conflict,
            )
        whose = f"is not held by {self.holder}"
        if tenure is not None and tenure.foreign:
            whose += " in this process: a term belongs to the one that got it"
        raise LeaseLost(
            f"the lease {self.settings.name!r} {whose}",
            name=self.settings.name,
            held_epoch=tenure.term.epoch if tenure is not None else 0,
        )

    def next_try(self) -> float:
        """Return seconds until a standby should campaign again: jittered, sooner at an expiry."""
        interval = self.settings.retry_interval
        wait = interval * random.uniform(0.8, 1.0)
        if self.seen is not None and self.seen.held:
            # One try right after the expiry that is known of.
            wait = min(wait, self.seen.remaining + interval * random.uniform(0.0, 0.1))
        return max(wait, 0.05)

    # --- the loop's side ----------------------------------------------------------------

    def progress(self, wait: float) -> None:
        """Tell that the loop passed and will be back.

        Args:
            wait: Seconds until it is expected again.
        """
        self._expected = self.clock.now() + wait

    def wait(self, timeout: float) -> None:
        """Wait, at most *timeout* seconds, for something to do."""
        self._wake.wait(timeout)
        self._wake.clear()

    def campaign(self) -> bool:
        """Try once to lead: acquire, then raise the fence. A database that is down is a no.

        Returns:
            Whether this process leads.
        """
        if self.leading:
            return True
        self._end_unfinished()
        self.progress(self.settings.ttl)
        try:
            if not self._may_campaign():
                return False
            with put_off():  # A grant that nobody here knows of would be held for a whole ttl.
                tenure = self._acquire()
        except StoreError as error:
            self.seen = None
            self._tell(Action.UNAVAILABLE, reason=str(error))
            return False
        return tenure is not None and self._take_over(tenure)

    def concede(self, reason: str) -> None:
        """Step down at once: somebody else is known to lead."""
        tenure = self._tenure
        if tenure is not None:
            self._end(tenure, Action.LOST, reason)

    def close(self) -> None:
        """Release the lease and stop the thread. Safe to call again; bounded in time."""
        tenure = self._tenure
        if tenure is not None and tenure.foreign:
            return
        self._wake.set()
        if tenure is not None:
            with put_off():
                self._give_up(tenure)
        self._join()

    def _give_up(self, tenure: _Tenure) -> None:
        if not self._retire(tenure):
            return
        # An answer that comes later is not told: the end of this term has been.
        answers: list[tuple[Action, str | None]] = []
        # On a thread: a database that takes a statement and says nothing has no end.
        release = threading.Thread(
            target=lambda: answers.append(self._release(tenure.term)),
            name="lease-release",
            daemon=True,
        )
        release.start()
        release.join(min(_RELEASE, self.settings.ttl))
        late = (Action.LOST, "not released in time; it expires")
        action, reason = answers[0] if answers else late
        self._tell(action, epoch=tenure.term.epoch, reason=reason)

    def _release(self, term: Term) -> tuple[Action, str | None]:
        try:
            released = self.store.release(term)
        except StoreError as error:
            return Action.LOST, f"not released: {error}"
        if released:
            return Action.RELEASED, None
        return Action.LOST, "it was over before it was released"

    # --- taking over --------------------------------------------------------------------

    def _may_campaign(self) -> bool:
        """After a conflict, stay standby until the epoch has been jumped.

        Where nothing is known of the database, it has to answer first, while a signal still
        ends the waiting.
        """
        if self._conflict is None and self.seen is not None:
            return True
        lease = self.store.read(self.settings.name)
        if self._conflict is None:
            return True
        if lease is None or lease.epoch <= self._conflict:
            self.seen = lease
            why = f"until the lease shows an epoch above {self._conflict}"
            self._tell(Action.STANDING_BY, lease=lease, epoch=self._conflict, reason=why)
            return False
        self._conflict = None
        return True

    def _acquire(self) -> _Tenure | None:
        """Ask for the lease; return the tenure that :meth:`close` releases from then on."""
        sent_at = self.clock.now()
        answer = self.store.acquire(
            self.settings.name, self.holder, self.settings.ttl, str(uuid.uuid4())
        )
        if isinstance(answer, Lease):
            self.seen = answer
            self._tell(Action.STANDING_BY, lease=answer, epoch=answer.epoch)
            return None
        return self._accept(answer, sent_at)

    def _accept(self, term: Term, sent_at: float) -> _Tenure | None:
        tenure = _Tenure(term, sent_at, self._trusted_until(sent_at))
        if not self._trusts(tenure):
            late = "the grant arrived after its trust window had closed"
            self._tell(Action.LOST, epoch=term.epoch, reason=late)
            self._give_back(term)
            return None
        try:
            if not self._jump_if_behind(tenure):
                return None
        except StoreError as error:
            self._tell(Action.LOST, epoch=term.epoch, reason=str(error))
            self._give_back(tenure.term)
            return None
        self._tenure = tenure
        self._start(tenure)
        return tenure

    def _take_over(self, tenure: _Tenure) -> bool:
        if not self._raise_fence(tenure):
            return False
        tenure.fence_raised = True
        self.progress(0.0)  # As much time for the first turn as for any other.
        self._tell(
            Action.ACQUIRED,
            epoch=tenure.term.epoch,
            seconds=tenure.trusted_until - self.clock.now(),
            previous_holder=tenure.term.previous_holder,
        )
        return True

    def _jump_if_behind(self, tenure: _Tenure) -> bool:
        term = tenure.term
        shown = term.epoch - 1 if term.previous_epoch is None else term.previous_epoch
        floor = self.store.floor(term)
        if floor >= term.epoch:
            jumped = self.store.jump(term, floor)
            if jumped is None:
                self._tell(Action.LOST, epoch=term.epoch, reason="it was over before it began")
                return False
            tenure.term = jumped
        if tenure.term.epoch > shown + 1:
            self._tell(
                Action.JUMPED,
                epoch=tenure.term.epoch,
                reason=f"the lease row said {shown}, and later epochs were in use",
            )
        return True

    def _raise_fence(self, tenure: _Tenure) -> bool:
        """Raise the fence, waiting for guards in their last round trip while the term is ours."""
        while self._trusts(tenure):
            self.progress(self.settings.ttl)
            try:
                raised = self.store.raise_fence(tenure.term)
            except StoreError as error:
                waits = isinstance(error, StoreContention)
                self._tell(Action.RAISING, epoch=tenure.term.epoch, reason=str(error))
                tenure.over.wait(0.0 if waits else 0.2)
                continue
            if raised is Raised.RAISED:
                return True
            action = Action.CONFLICT if raised is Raised.CONFLICT else Action.LOST
            self._end(tenure, action, _NOT_RAISED[raised])
            return False
        self._end(tenure, Action.LOST, "the fence could not be raised in time")
        return False

    def _give_back(self, term: Term) -> None:
        try:
            self.store.release(term)
        except StoreError:
            return  # It expires by itself.

    # --- renewing -----------------------------------------------------------------------

    def _start(self, tenure: _Tenure) -> None:
        self._thread = threading.Thread(
            target=self._keep, args=(tenure,), name=f"lease-{tenure.term.epoch}", daemon=True
        )
        self._thread.start()

    def _join(self) -> None:
        """Wait a moment for the last renewing thread, so that it leaves no connection open."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_FAREWELL)

    def _keep(self, tenure: _Tenure) -> None:
        delay = self.settings.renew_interval
        while not tenure.over.wait(delay):
            delay = self._step(tenure)

    def _step(self, tenure: _Tenure) -> float:
        """Do what the renewing thread has to do now; return seconds until it has to again."""
        if not self._trusts(tenure):
            self._end(tenure, Action.LOST, "its trust window closed")
            return 0.0
        return self._pause(tenure) if self._overdue(tenure) else self._renew(tenure)

    def _overdue(self, tenure: _Tenure) -> bool:
        """Whether the loop is late by more than the stall timeout."""
        late = self.clock.now() - self._expected
        stalled = late > self.settings.stall_timeout
        if stalled != tenure.stalled:
            tenure.stalled = stalled
            action = Action.STALLED if stalled else Action.RESUMED
            self._tell(action, epoch=tenure.term.epoch, seconds=max(0.0, late))
        return stalled

    def _pause(self, tenure: _Tenure) -> float:
        """Return how long to wait while renewing is stopped."""
        left = tenure.trusted_until - self.clock.now()
        return max(0.01, min(self.settings.renew_interval / 4, left))

    def _renew(self, tenure: _Tenure) -> float:
        """Renew once; return seconds until the next try."""
        sent_at = self.clock.now()
        try:
            answer = self.store.renew(tenure.term, self.settings.ttl)
        except Exception as error:  # noqa: BLE001 - this thread's end would be the term's
            if tenure.over.is_set():
                return 0.0  # Its end was told: "leads, but could not renew" would be no more true.
            interval = self.settings.renew_interval
            left = max(0.0, tenure.trusted_until - self.clock.now())
            reason = str(error) if isinstance(error, StoreError) else repr(error)
            self._tell(Action.RENEWAL_FAILED, epoch=tenure.term.epoch, reason=reason, seconds=left)
            # Ever more often, but not without end: each try is a line in the log.
            return min(max(interval / 20, min(interval, left / 4)), left)
        if answer is Renewal.RENEWED:
            return self._renewed(tenure, sent_at)
        if answer is Renewal.CONFLICT:
            self._end(tenure, Action.CONFLICT, "the epoch was granted to another term")
        else:
            self._end_lost(tenure)
        return 0.0

    def _renewed(self, tenure: _Tenure, sent_at: float) -> float:
        until = self._trusted_until(sent_at)
        if self.clock.now() >= until:
            self._end(tenure, Action.LOST, "the renewal's answer came after its trust window")
            return 0.0
        gap = sent_at - tenure.renewed_at
        tenure.renewed_at, tenure.trusted_until = sent_at, until
        self.renewals += 1
        if gap > 2 * self.settings.renew_interval:
            self._tell(Action.RENEWED_LATE, epoch=tenure.term.epoch, seconds=gap)
        spent = self.clock.now() - sent_at
        return max(0.01, self.settings.renew_interval - spent)

    def _end_lost(self, tenure: _Tenure) -> None:
        """End a term that the database does not know any more, and say why where it tells."""
        try:
            lease = self.store.read(self.settings.name)
        except Exception:  # noqa: BLE001 - it is over, whatever this was
            lease = None
        self.seen = lease
        if lease is not None and lease.epoch > tenure.term.epoch:
            # Whoever took it cannot have waited for our expiry, if we still trust it.
            early = self._trusts(tenure)
            action = Action.CONFLICT if early else Action.LOST
            self._end(
                tenure, action, f"{lease.holder or 'nobody'} leads under epoch {lease.epoch}"
            )
        else:
            self._end(tenure, Action.LOST, "it expired before it was renewed")

    # --- ending -------------------------------------------------------------------------

    def _end_unfinished(self) -> None:
        """Before a campaign: end a term that is not trusted any more, or never came to lead."""
        tenure = self._tenure
        if tenure is None:
            return
        if not self._trusts(tenure):
            self._end(tenure, Action.LOST, "its trust window closed")
        else:
            self._end(tenure, Action.LOST, "its takeover was broken off")
            self._give_back(tenure.term)

    def _end(self, tenure: _Tenure, action: Action, reason: str) -> None:
        """End a term once, whoever notices first, and say so."""
        conflict = action is Action.CONFLICT
        if not self._retire(tenure, conflict=conflict):
            return
        self._tell(action, epoch=tenure.term.epoch, reason=reason)
        if conflict:
            try:
                self.store.end_by_conflict(tenure.term)
            except StoreError as error:
                self._tell(Action.UNAVAILABLE, reason=str(error))

    def _retire(self, tenure: _Tenure, *, conflict: bool = False) -> bool:
        """Stop a term's thread and forget the term; False where that was done before."""
        if tenure.foreign:
            return False  # The parent's: so may be the lock that this copy was made with.
        with self._ending:
            if tenure.over.is_set():
                return False
            if conflict:
                # Before anybody is woken up who would campaign.
                self._conflict = tenure.term.epoch
            tenure.over.set()
            if self._tenure is tenure:
                self._tenure = None
        self._wake.set()
        return True

    def _trusts(self, tenure: _Tenure) -> bool:
        in_time = self.clock.now() < tenure.trusted_until
        return in_time and not tenure.over.is_set() and not tenure.foreign

    def _trusted_until(self, sent_at: float) -> float:
        return sent_at + self.settings.ttl - self.settings.margin

    def _tell(self, action: Action, **details: object) -> None:
        blank = Transition(action=action, name=self.settings.name, holder=str(self.holder))
        self._observe(replace(blank, **details))  # type: ignore[arg-type] # checked by the dataclass
