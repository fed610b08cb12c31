"""How a claimed run becomes a message, through Celery's own methods.

Everything that makes a stock scheduler's message what it is happens here too: the
entry's options, lazy arguments, signals, Sentry's hook in ``apply_entry``. Added are the
run's id and the stamp.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cached_property
from numbers import Real
from time import monotonic
from typing import Any

from celery_lease.agenda import aware
from celery_lease.dispatch import Dispatcher, fields
from celery_lease.due import Ended, due_at, missed
from celery_lease.entry import PLAIN
from celery_lease.errors import CeleryLeaseError, LeaseLost, StoreError
from celery_lease.lease import Term
from celery_lease.occurrence import NEWER, Occurrence, Run, Skipped, run_id
from celery_lease.parts import LeaseParts, logger
from celery_lease.publish import Flushed, Publisher, Remedy, Undelivered, Unsent, said
from celery_lease.recovery import Recovery
from celery_lease.signals import announce_skipped
from celery_lease.stamp import Stamp
from celery_lease.stores.ledger import SQLLedger

__all__ = ["LeasedSends", "Sending", "tell_known", "tell_skipped"]

#: Seconds after which a flush takes no further message.
MAKING = 0.25


@dataclass(slots=True)
class Sending:
    """One run on its way through Celery's own methods."""

    run: Run
    term: Term
    #: Whether it is left to a later flush.
    unreached: bool = False
    #: Whether Celery gave the message to the producer.
    sent: bool = False
    #: Tells whether the broker is known to have it.
    is_taken: Callable[[], bool] | None = None
    #: What making or publishing the message raised; None if nothing did.
    trouble: BaseException | None = None


class _Removed(LookupError):
    """An entry was removed while its run waited: there is nothing to send."""


class _Unread(Exception):
    """An entry cannot be read now: its run waits until it can."""


class LeasedSends(LeaseParts):
    """The half of :class:`~celery_lease.leading.LeaseMixin` that sends."""

    _parts = {  # noqa: RUF012 - declared where it begins
        **LeaseParts._parts,  # noqa: SLF001 - of the class itself
        "publisher": Publisher,
        "dispatcher": Dispatcher,
        "recovery": Recovery,
    }

    #: The run that is being sent.
    _sending: Sending | None = None
    #: The entry whose ``apply_async`` the scheduler itself called; None in a batch.
    _alone: Any = None
    #: Why that send could not be claimed: the scheduler has moved its entry on already.
    unclaimed: CeleryLeaseError | None = None

    @cached_property
    def _due_now(self) -> dict[str, tuple[str, datetime]]:
        """Entries that counted as due now and have not moved on: in which term, and since when."""
        return {}

    @cached_property
    def publisher(self) -> Publisher:
        """The connection to the broker."""
        return Publisher(
            lambda options: self.app.connection_for_write(transport_options=options),
            self.Producer,  # type: ignore[attr-defined] # the stubs forget it
            timeout=max(1.0, self.settings.margin),
        )

    @cached_property
    def dispatcher(self) -> Dispatcher:
        """What sends claimed runs."""
        return Dispatcher(
            SQLLedger(self.store.engine, idle=self.settings.guard_idle),
            self.elector,
            self._flush_runs,
            max_attempts=self.settings.max_attempts,
        )

    @cached_property
    def recovery(self) -> Recovery:
        """What sends again what was left."""
        return Recovery(
            self.dispatcher,
            self.settings,
            find=self.find,
            is_fenced=self.is_fenced,
            now=self.now,
            deadline=self.app.conf.beat_cron_starting_deadline,
        )

    def now(self) -> datetime:
        """Return the instant at which to look for what is due, in UTC."""
        return datetime.now(timezone.utc)

    @property
    def producer(self) -> None:  # type: ignore[override] # see below
        """Nothing: a scheduler's tick hands it on to ``apply_async``, which has its own.

        Connecting here would let a broker that is away end the tick between the
        entry's advance and its send.
        """
        return

    def apply_async(
        self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any
    ) -> Any:
        """Send an entry's task, stamped, as the run that was claimed for it.

        Called on its own, by the tick of a scheduler that knows nothing of leases, it
        claims first.
        """
        sending = self._sending
        if sending is None:
            return self._apply_alone(entry, advance=advance)
        try:
            with self._stamped(entry, sending):
                result = super().apply_async(entry, producer=producer, advance=False, **kwargs)
        except Exception as error:  # noqa: BLE001 - told apart by `is_delivery`
            # `apply_entry` would log it and forget it. A SchedulingError hides the cause.
            sending.trouble = error.__cause__ or error.__context__ or error
            return None
        sending.sent = True
        sending.is_taken = self.publisher.receipt()
        return result

    def _apply_alone(self, entry: Any, *, advance: bool) -> None:
        try:
            term = self.elector.check()
            # A tick may send any number of entries: redbeat's sends all that are due.
            self.elector.progress(0.0)
            run = self._run_of(entry, term)
            claimed = self._claim_alone(term, run)
        except (LeaseLost, StoreError) as error:
            # `apply_entry` would swallow it, though a stock tick has moved the entry on.
            self.unclaimed = error
            self.schedule[entry.name] = entry
            return
        self._move_on(entry, advance=advance)
        if not claimed:
            return
        self._alone = entry
        try:
            self.dispatcher.send(term, [run])
        except (LeaseLost, StoreError) as error:
            # Swallowed too; recovery looks at the claim when the turn is broken off.
            self.unclaimed = error
        finally:
            self._alone = None

    def _claim_alone(self, term: Term, run: Run) -> bool:
        """Claim a run; record it as skipped where the entry has one that is not sent."""
        ledger, waiting = self.dispatcher.ledger, self.dispatcher.waiting.get(run.entry, ())
        if waiting and run.id not in {each.id for each in waiting}:
            # A broker that was away for a day must not get a day's messages.
            skipped = Skipped(
                first=run.due_at, last=run.due_at, count=1, reason="the one before is not sent"
            )
            ledger.claim(term, [], skipped=[(run.entry, skipped)])
            tell_skipped(term, run.entry, skipped)
            return False
        if run.id in ledger.claim(term, [run]):
            # Another leader, or this one, had it already; recovery sends it if need be.
            tell_known(term, run)
            return False
        return True

    def _move_on(self, entry: Any, *, advance: bool) -> None:
        """Store that the entry ran, before it is sent: a crash must not send it again.

        Where that fails it is sent all the same: what is due again is in the ledger.
        """
        try:
            if advance:
                self.reserve(entry)
            self._due_now.pop(entry.name, None)
        except Exception:  # noqa: BLE001 - whatever a scheduler's own store raises
            self._tell_not_stored()
        self._do_sync()

    def _do_sync(self) -> None:
        """Have the scheduler write its state; say so where it cannot, and go on.

        Celery calls it after a send, too, which must not fail for it then.
        """
        try:
            super()._do_sync()  # type: ignore[misc] # the stubs forget it
        except Exception:  # noqa: BLE001 - whatever a scheduler's own store raises
            self._tell_not_stored()

    def _tell_not_stored(self) -> None:
        logger.exception(
            "lease %r: the scheduler could not store its state; what is due is sent all the same",
            self.settings.name,
            extra={"action": "state-not-stored", "lease_name": self.settings.name},
        )

    def _run_of(self, entry: Any, term: Term) -> Run:
        """Return the run for the occurrence that a scheduler found due."""
        now = self.now()
        due = self._due_of(entry, now)
        if due is None:
            due = self._first_asked(entry, term, now)
        return Run(
            id=run_id(term.name, entry.name, due),
            entry=entry.name,
            due_at=due,
            fenced=self.is_fenced(entry),
        )

    def _due_of(self, entry: Any, now: datetime) -> datetime | None:
        """Return since when an entry is due that its scheduler says is due; None in doubt."""
        if entry.last_run_at is None:
            return None
        try:
            first = due_at(entry.schedule, aware(entry.last_run_at))
            return missed(entry.schedule, first, now, 1).newest[-1] if first <= now else None
        except Ended:
            return None
        except Exception as error:  # noqa: BLE001 - a user's schedule may raise anything
            logger.warning(
                "lease %r: when %r was due cannot be told (%s); it counts as due now",
                self.settings.name,
                entry.name,
                said(error),
                extra={
                    "action": "due-not-told",
                    "lease_name": self.settings.name,
                    "lease_entry": entry.name,
                },
            )
            return None

    def _first_asked(self, entry: Any, term: Term, now: datetime) -> datetime:
        """Return when an entry counted as due first, until it has moved on.

        Where its scheduler cannot store that it ran, each turn would be another occurrence.
        """
        asked = self._due_now.get(entry.name)
        if asked is None or asked[0] != term.uuid:
            asked = self._due_now[entry.name] = (term.uuid, now)
        return asked[1]

    def _flush_runs(self, term: Term, runs: Sequence[Run]) -> Flushed:
        """Flush, and return what became of it.

        Raises:
            Undelivered: With the runs whose messages the broker is known to have.
        """
        sendings = [Sending(run, term) for run in runs]
        try:
            self.flush(sendings)
        except Undelivered as error:
            error.taken = frozenset(
                each.run.id for each in sendings if each.is_taken is not None and each.is_taken()
            )
            raise
        return Flushed(
            unreached=frozenset(each.run.id for each in sendings if each.unreached),
            unsent={
                each.run.id: Unsent(reason=said(each.trouble), remedy=self._remedy(each.trouble))
                for each in sendings
                if each.trouble is not None
            },
        )

    def _remedy(self, trouble: BaseException) -> Remedy:
        if isinstance(trouble, _Removed):
            return Remedy.SKIP
        return Remedy.RETRY if self.publisher.is_delivery(trouble) else Remedy.FAIL

    def flush(self, sendings: Sequence[Sending]) -> None:
        """Give the broker the messages of some runs, right after the trust was checked.

        Between the check and the broker having the messages a process can be stopped
        for any time: override this to try that out. Where messages take long to make, in
        code of the user's, it ends early: the trust is to be checked again.

        Raises:
            Undelivered: The broker may have all of them, some, or none.
        """
        until = monotonic() + MAKING
        with self._unheard(), self.publisher.flush() as producer:
            for place, each in enumerate(sendings, 1):
                self._send(each, producer)
                if monotonic() > until:
                    for late in sendings[place:]:
                        late.unreached = True
                    break

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        """Keep the result backend from listening for the result of each message.

        Nobody reads results here, and a store that is away would hold up each of them for long.
        """
        try:
            backend: Any = self.app.backend
        except Exception:  # noqa: BLE001 - whatever it is, each message meets it as well
            yield
            return
        backend.on_task_call = lambda *_: {}
        try:
            yield
        finally:
            del backend.on_task_call

    def _send(self, sending: Sending, producer: Any) -> None:
        """Send one run. An error that is not the broker's is this run's alone."""
        self._sending = sending
        try:
            self._apply(sending.run, producer)
        except Exception as error:  # noqa: BLE001 - whatever a hook raises
            if sending.sent:
                _tell_hook(sending)
            elif sending.trouble is None:
                sending.trouble = error
        finally:
            self._sending = None
        trouble = sending.trouble
        if trouble is None:
            return
        if self.publisher.raised(trouble) and self.publisher.is_delivery(trouble):
            raise trouble

    def _apply(self, run: Run, producer: Any) -> None:
        if self._alone is not None:
            # Not by its name: a subclass that overrides it has been called for this send.
            LeasedSends.apply_async(self, self._alone, producer=producer, advance=False)
            return
        try:
            entry = self.find(run.entry)
        except Exception as error:
            raise _Unread(f"the entry {run.entry!r} cannot be read: {said(error)}") from error
        if entry is None:
            raise _Removed(f"the entry {run.entry!r} was removed")
        # Once for each real send: Sentry's cron monitoring hooks in here.
        self.apply_entry(entry, producer=producer)

    @contextmanager
    def _stamped(self, entry: Any, sending: Sending) -> Iterator[None]:
        """Lend the entry options that carry the stamp; its own stay as they are."""
        run, term = sending.run, sending.term
        stamp = Stamp(name=term.name, epoch=term.epoch, term=term.uuid, run=run.id)
        given = entry.options
        options = stamp.options(given)
        options["task_id"] = run.id
        # The ledger is what sends again. Celery's own retries would wait in the loop.
        options["retry"] = False
        if "headers" in options:
            options["headers"] = dict(options["headers"] or {})  # Celery 5.7 writes into it
        if run.epoch is not None:
            _expire_from(options, run.due_at, self.app.tasks.get(entry.task))
        entry.options = options
        try:
            yield
        finally:
            entry.options = given

    def find(self, name: str) -> Any:
        """Return the entry of that name as it is now; None if there is none.

        Where it cannot be read it raises an error, whatever that is: its runs wait.
        """
        return self.schedule.get(name)

    def is_fenced(self, entry: Any) -> bool:
        """Return whether an entry's task is fenced; not, where nobody knows."""
        wish = getattr(entry, "wishes", PLAIN).fenced
        if wish is not None:
            return bool(wish)
        # FencedTask is the workers' side, which beat does not import.
        return hasattr(type(self.app.tasks.get(entry.task)), "require_epoch")


def tell_known(term: Term, run: Run) -> None:
    """Say why a run that is due is not sent."""
    logger.info(
        "lease %r: %r, due %s, was claimed before",
        term.name,
        run.entry,
        run.due_at.isoformat(),
        extra={"action": "run-known", **fields(term, run)},
    )


def tell_skipped(term: Term, name: str, skipped: Skipped) -> None:
    """Tell the log and the signal's receivers that occurrences were recorded as skipped."""
    occurrence = Occurrence(lease=term.name, entry=name, due_at=skipped.first)
    due = skipped.first.isoformat()
    if skipped.last != skipped.first:
        due += f" to {skipped.last.isoformat()}"
    # That one makes up for what was missed is the rule, at each takeover.
    logger.log(
        logging.INFO if skipped.reason == NEWER else logging.WARNING,
        "lease %r: %s of %r skipped, due %s: %s",
        term.name,
        "some" if skipped.count is None else skipped.count,
        name,
        due,
        skipped.reason,
        extra={
            "action": "run-skipped",
            "lease_name": term.name,
            "lease_epoch": term.epoch,
            "lease_run": occurrence.run_id,
            "lease_entry": name,
        },
    )
    announce_skipped(occurrence, reason=skipped.reason, count=skipped.count, until=skipped.last)


def _tell_hook(sending: Sending) -> None:
    """Say that a hook failed after the send: a run that failed would be sent again."""
    term, run = sending.term, sending.run
    logger.exception(
        "lease %r: %s of %r, due %s, is sent; a hook raised an error after that",
        term.name,
        run.id,
        run.entry,
        run.due_at.isoformat(),
        extra={"action": "hook-failed", **fields(term, run)},
    )


def _expire_from(options: dict[str, Any], due: datetime, task: Any) -> None:
    """Have ``expires`` count from when the run was due, however late it is sent again."""
    expires = options.get("expires", getattr(task, "expires", None))
    if isinstance(expires, Real):
        options["expires"] = due + timedelta(seconds=float(expires))
