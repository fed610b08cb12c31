"""What makes a Celery scheduler a leased one: it ticks only while it holds the lease.

::

    class HighlyAvailable(LeaseMixin, SomeScheduler): ...

The mixin gates ``tick``, claims and stamps in ``apply_async``, releases on ``close``
and waits as a standby inside ``tick``, where it can be woken.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import cached_property
from numbers import Real
from typing import Any, NoReturn

from celery_lease.dispatch import Dispatcher
from celery_lease.due import due_at, missed
from celery_lease.elector import Elector
from celery_lease.entry import PLAIN
from celery_lease.errors import (
    CeleryLeaseError,
    ConfigurationError,
    LeaseLost,
    StoreContention,
    StoreError,
    StoreUnavailable,
)
from celery_lease.lease import Holder, Term
from celery_lease.logs import TransitionLog
from celery_lease.occurrence import Run, run_id
from celery_lease.publish import Publisher
from celery_lease.settings import Settings
from celery_lease.stamp import Stamp
from celery_lease.stores.dialects import is_certainly_wrong, masked
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.ledger import SQLLedger
from celery_lease.stores.retention import prune

__all__ = ["LeaseMixin"]

logger = logging.getLogger("celery_lease.scheduler")

#: Rows of each kind that one round of housekeeping deletes at most.
PRUNE = 500
#: Seconds to wait after an error that nobody foresaw.
PAUSE = 1.0


@dataclass(slots=True)
class _Sending:
    """One run on its way through Celery's own methods."""

    run: Run
    term: Term
    trouble: BaseException | None = None


class LeaseMixin:
    """Put it before a Celery scheduler class.

    The scheduler's own set-up is put off until it leads, so that a standby touches
    neither its files nor its tables. Each send pays its own claim.
    """

    _ticking = False
    _closing = False
    _closed = False
    _prepared = False
    #: The term that the schedule's state was loaded for.
    _term: Term | None = None
    #: How many renewals there had been at the last round of recovery.
    _renewals = -1
    #: Whether recovery has more to do at once.
    _recovering = False
    #: The run that is being sent.
    _sending: _Sending | None = None
    #: The entry, where a scheduler of its own called `apply_async` for it.
    _alone: Any = None

    # --- what it is made of: nothing of it before it is needed ---------------------------

    @cached_property
    def settings(self) -> Settings:
        """The ``beat_lease_*`` settings."""
        return Settings.from_conf(self.app.conf)

    @cached_property
    def store(self) -> SQLLeaseStore:
        """The lease database."""
        window = self.settings.ttl - self.settings.margin
        return SQLLeaseStore(
            self.settings.url,
            self.settings.engine_options,
            lock_wait=min(1.0, window / 4),
            statement_wait=max(1.0, min(10.0, window / 2)),
        )

    @cached_property
    def elector(self) -> Elector:
        """Whether this process leads."""
        return Elector(
            self.store,
            self.settings,
            holder=Holder.current(**self.holder_info()),
            observe=TransitionLog(logger),
        )

    @cached_property
    def dispatcher(self) -> Dispatcher:
        """What sends claimed runs."""
        return Dispatcher(
            SQLLedger(self.store.engine, idle=self.settings.guard_idle),
            self.elector,
            self.settings,
            find=self.find,
            flush=self._flush,
            is_fenced=self.is_fenced,
        )

    @cached_property
    def publisher(self) -> Publisher:
        """The connection to the broker."""
        return Publisher(
            lambda options: self.app.connection_for_write(transport_options=options),
            self.Producer,
            timeout=max(1.0, self.settings.margin),
        )

    @property
    def producer(self) -> None:
        """Nothing: a scheduler's tick hands it on to ``apply_async``, which has its own.

        Connecting here would let a broker that is away end the tick between the
        entry's advance and its send.
        """
        return

    def holder_info(self) -> dict[str, Any]:
        """Return what others may see of this process."""
        from celery import __version__ as celery_version

        from celery_lease import __version__

        return {"celery": celery_version, "celery_lease": __version__}

    # --- starting -----------------------------------------------------------------------

    def setup_schedule(self) -> None:
        """Look at the settings and the database once; what is certainly wrong ends beat.

        Raises:
            SystemExit: With one line in the log that names the setting and the way out.
        """
        try:
            self._prepare()
        except (StoreUnavailable, StoreContention) as error:
            if is_certainly_wrong(error):
                self._refuse(error)
            logger.error(
                "lease %r: the lease database does not answer (%s); standing by until it does, "
                "a try each %g s",
                self.settings.name,
                error,
                self.settings.retry_interval,
                extra={"action": "lease-unavailable", "lease_name": self.settings.name},
            )
        except CeleryLeaseError as error:
            self._refuse(error)

    def _prepare(self) -> None:
        self.store.prepare(create=self.settings.auto_init)
        self.store.ensure(self.settings.name)
        self._prepared = True

    def _refuse(self, error: CeleryLeaseError) -> NoReturn:
        setting = "" if isinstance(error, ConfigurationError) else "beat_lease_url: "
        logger.critical("beat cannot start: %s%s", setting, error)
        # Celery prints a traceback for any other exception.
        raise SystemExit(1) from error

    @property
    def info(self) -> str:
        """Lines for beat's banner. Nothing is connected for them."""
        others = super().info
        try:
            settings = self.settings
        except ConfigurationError as error:
            return f"    . lease -> {error}"
        note = " (this host only)" if settings.url.startswith("sqlite") else ""
        holder = Holder.current()
        lines = [
            f"    . lease -> {settings.name} (ttl {settings.ttl:g}s, "
            f"retry {settings.retry_interval:g}s)",
            f"    . lease holder -> {holder.host}:{holder.pid}",
            f"    . lease database -> {masked(settings.url)}{note}",
        ]
        return "\n".join([*lines, others] if others else lines)

    # --- ticking ------------------------------------------------------------------------

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Stand by, or do one turn. Nothing escapes: an exception would end beat.

        Returns:
            Seconds until the next call.
        """
        if self._closed:
            return float(self.max_interval)
        self._ticking = True
        wait = PAUSE
        try:
            wait = self._tick(*args, **kwargs)
        except LeaseLost as error:
            self._step_down(str(error))
            wait = 0.0
        except StoreError as error:
            self._forget()
            logger.warning("lease %r: the lease database failed us: %s", self.settings.name, error)
        except Exception:
            self._forget()
            logger.exception("lease %r: beat could not do its turn", self.settings.name)
        finally:
            self._ticking = False
        self.elector.progress(wait)
        return wait

    def _tick(self, *args: Any, **kwargs: Any) -> float:
        term = self.elector.term
        if term is None:
            term = self._campaign()
            if term is None:
                self._stand_by()
                return 0.0
        if term is not self._term:
            self.load(term)
            self._term, self._renewals, self._recovering = term, -1, True
        if self._recovering or self._renewals != self.elector.renewals:
            self._chores(term)
        if self._recovering:
            return 0.0
        if self.dispatcher.busy:
            self.dispatcher.resend(term)
        # A run that a worker refused is looked for at each renewal.
        return min(self.turn(term, *args, **kwargs), self.settings.renew_interval)

    def _campaign(self) -> Term | None:
        if self._term is not None:
            self._forget()
            self.unload()
        if not self._prepared:
            try:
                self._prepare()
            except StoreError as error:
                logger.error("lease %r: %s", self.settings.name, error)
                return None
        if self.elector.campaign():
            return self.elector.term
        self._warn_of_another_schedule()
        return None

    def _stand_by(self) -> None:
        """Wait here, and not in the service's sleep, which cannot be woken."""
        if not self._closing:
            self.elector.wait(min(self.elector.next_try(), self.max_interval))

    def _step_down(self, reason: str) -> None:
        self.elector.concede(reason)
        self._forget()

    def _forget(self) -> None:
        """Have the schedule's state loaded again before the next turn."""
        self._term = None
        if "dispatcher" in self.__dict__:
            self.dispatcher.forget()

    def _chores(self, term: Term) -> None:
        """Recover runs and keep house: one bounded round."""
        first = self._renewals == -1
        self._renewals = self.elector.renewals
        self._recovering = self.dispatcher.recover(term, own=first)
        if not self._recovering:
            self.dispatcher.retry_lost(term, self.lost_after())
            prune(self.store.engine, term.name, retention=self.settings.retention, limit=PRUNE)

    def _warn_of_another_schedule(self) -> None:
        """Two apps under one lease name: one of them silently never runs."""

    # --- for a scheduler to fill in -------------------------------------------------------

    def load(self, term: Term) -> None:
        """Set up the schedule as it is now, before the first turn of a term."""
        super().setup_schedule()

    def unload(self) -> None:
        """Let go of the schedule: another process leads."""

    def turn(self, term: Term, *args: Any, **kwargs: Any) -> float:
        """Do one turn under *term*; return seconds until the next."""
        return float(super().tick(*args, **kwargs) or 0.0)

    def find(self, name: str) -> Any:
        """Return the entry of that name as it is now; None if there is none."""
        return self.schedule.get(name)

    def lost_after(self) -> dict[str, float]:
        """Return the entries that want lost runs sent again, and after how many seconds."""
        return {}

    def is_fenced(self, entry: Any) -> bool:
        """Return whether an entry's task is fenced; not, where nobody knows."""
        wish = getattr(entry, "wishes", PLAIN).fenced
        if wish is not None:
            return bool(wish)
        # FencedTask is the workers' side, which beat does not import.
        return hasattr(type(self.app.tasks.get(entry.task)), "require_epoch")

    # --- sending ------------------------------------------------------------------------

    def apply_async(
        self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any
    ) -> Any:
        """Send an entry's task, stamped, as the run that was claimed for it.

        Called on its own, by the tick of a scheduler that knows nothing of leases, it
        claims first.
        """
        sending = self._sending
        if sending is None:
            return self._apply_alone(entry, advance)
        try:
            with self._stamped(entry, sending):
                return super().apply_async(entry, producer=producer, advance=False, **kwargs)
        except Exception as error:
            # `apply_entry` would log it and forget it. A SchedulingError hides the cause.
            sending.trouble = error.__cause__ or error.__context__ or error
            return None

    def _apply_alone(self, entry: Any, advance: bool) -> None:
        term = self.elector.check()
        run = self._run_of(entry, term)
        if advance:
            self.reserve(entry)
        if run.id in self.dispatcher.ledger.claim(term, [run]):
            # Another leader, or this one, had it already; recovery sends it if need be.
            logger.info(
                "lease %r: %r, due %s, was claimed before",
                term.name,
                entry.name,
                run.due_at.isoformat(),
                extra={"action": "run-known", "lease_run": run.id},
            )
            return
        self._alone = entry
        try:
            self.dispatcher.send(term, [run])
        finally:
            self._alone = None

    def _run_of(self, entry: Any, term: Term) -> Run:
        """Return the run for the occurrence that a scheduler found due."""
        now = datetime.now(timezone.utc)
        due = now
        last = entry.last_run_at
        if last is not None:
            last = last if last.tzinfo is not None else last.replace(tzinfo=timezone.utc)
            first = due_at(entry.schedule, last)
            if first <= now:
                due = missed(entry.schedule, first, now, 1).newest[-1]
        return Run(
            id=run_id(term.name, entry.name, due),
            entry=entry.name,
            due_at=due,
            fenced=self.is_fenced(entry),
        )

    def _flush(self, term: Term, runs: Sequence[Run]) -> dict[str, str]:
        """Flush, and return why runs that can have no message cannot, by id."""
        sendings = [_Sending(run, term) for run in runs]
        self.flush(sendings)
        return {
            each.run.id: f"{type(each.trouble).__name__}: {each.trouble}"
            for each in sendings
            if each.trouble is not None
        }

    def flush(self, sendings: Sequence[_Sending]) -> None:
        """Give the broker the messages of some runs, right after the trust was checked.

        Between the check and the broker having the messages a process can be stopped
        for any time: override this to try that out.

        Raises:
            Undelivered: The broker may have all of them, some, or none.
        """
        with self.publisher.flush() as producer:
            for each in sendings:
                self._send(each, producer)

    def _send(self, sending: _Sending, producer: Any) -> None:
        self._sending = sending
        try:
            if self._alone is not None:
                self.apply_async(self._alone, producer=producer, advance=False)
            else:
                # Once for each real send: Sentry's cron monitoring hooks in here.
                self.apply_entry(self.find(sending.run.entry), producer=producer)
        finally:
            self._sending = None
        if sending.trouble is not None and self.publisher.is_delivery(sending.trouble):
            raise sending.trouble

    @contextmanager
    def _stamped(self, entry: Any, sending: _Sending) -> Iterator[None]:
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

    # --- ending -------------------------------------------------------------------------

    def sync(self) -> None:
        """Write the schedule's state, if it is ours to write."""
        if self._term is not None and self.elector.leading:
            super().sync()

    def close(self) -> None:
        """Release the lease and let go of everything. Safe to call again.

        Beat's signal handler calls it with ``tick`` on the stack, where neither locks
        nor pools can be touched: that call only takes note. Then SystemExit unwinds
        the tick, and the service calls again.
        """
        if self._ticking:
            self._closing = True
            return
        if self._closed:
            return
        self._closed = True
        try:
            super().close()
        finally:
            for name in ("elector", "publisher", "store"):
                part = self.__dict__.get(name)
                if part is not None:
                    part.dispose() if name == "store" else part.close()


def _expire_from(options: dict[str, Any], due: datetime, task: Any) -> None:
    """Have ``expires`` count from when the run was due, however late it is sent again."""
    expires = options.get("expires", getattr(task, "expires", None))
    if isinstance(expires, Real):
        options["expires"] = due + timedelta(seconds=float(expires))
