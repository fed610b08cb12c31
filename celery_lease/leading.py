"""What makes a Celery scheduler a leased one: it ticks only while it holds the lease.

::

    class HighlyAvailable(LeaseMixin, SomeScheduler): ...

The mixin gates ``tick``, claims and stamps in ``apply_async``, releases on ``close``
and waits as a standby inside ``tick``, where it can be woken.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from shelve import Shelf
from typing import Any, NoReturn

from celery.beat import Scheduler

from celery_lease.entry import LeasedEntry, refuse_wishes
from celery_lease.errors import (
    CeleryLeaseError,
    ConfigurationError,
    LeaseLost,
    StoreContention,
    StoreError,
    StoreUnavailable,
)
from celery_lease.lease import Holder, Term
from celery_lease.logs import warn_of_file
from celery_lease.parts import LeaseParts, logger
from celery_lease.sending import LeasedSends
from celery_lease.stores.dialects import file_of, is_certainly_wrong, masked
from celery_lease.stores.retention import PRUNE, prune

__all__ = ["LeaseMixin"]

#: Seconds until the next round, where one did not delete all that is too old.
PRUNE_AGAIN = 0.5
#: Seconds that two clocks may differ before it is worth a warning.
SKEW = 2.0
#: Seconds to wait after an error that nobody foresaw.
PAUSE = 1.0
#: Kinds of attributes of which the content is put back, too.
_CONTAINERS = (dict, list, set)


class LeaseMixin(LeasedSends):
    """Put it before a Celery scheduler class.

    The scheduler's own set-up is put off until it leads, so that a standby touches
    neither its files nor its tables. When it does not lead any more, its attributes are put
    back to what they were before: another beat goes on from its storage, and it begins its
    next term as a new process would. Each send pays its own claim.
    """

    _ticking = False
    _closing = False
    _closed = False
    _prepared = False
    #: The term that the schedule's state was loaded for.
    _term: Term | None = None
    #: How many renewals there had been at the last round of recovery.
    _renewals = -1
    #: Whether what was left is still being recovered, which goes before any turn.
    _recovering = False
    #: Whether there are more old rows than the last round of housekeeping could delete.
    _untidy = False
    #: Whether the scheduler's own set-up was done.
    _set_up = False
    #: The led scheduler's attributes as they were before its set-up, and what was in them.
    _before: dict[str, tuple[Any, Any]] | None = None
    #: What the log said last about a database that does not answer.
    _complaint = ""

    # --- starting -----------------------------------------------------------------------

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_parts()

    def setup_schedule(self) -> None:
        """Look at the settings and the database once; what is certainly wrong ends beat.

        Raises:
            SystemExit: With one line in the log that names the setting and the way out.
        """
        try:
            if not issubclass(self.Entry, LeasedEntry):
                refuse_wishes(self.app.conf.beat_schedule, self.Entry)
            self._prepare()
            warn_of_file(self.settings.url, logger)
        except (StoreUnavailable, StoreContention) as error:
            if is_certainly_wrong(error, self.settings.url):
                self._refuse(error)
            self._complain(error)
        except CeleryLeaseError as error:
            self._refuse(error)

    def _prepare(self) -> None:
        self.store.prepare(create=self.settings.auto_init)
        self.store.ensure(self.settings.name)
        self._prepared = True

    def _complain(self, error: StoreError) -> None:
        """Say that the database does not answer: loudly once, until it is another error."""
        level = logging.DEBUG if str(error) == self._complaint else logging.ERROR
        self._complaint = str(error)
        logger.log(
            level,
            "lease %r: the lease database does not answer (%s: %s); standing by until it does, "
            "trying about every %g s",
            self.settings.name,
            masked(self.settings.url),
            error,
            self.settings.retry_interval,
            extra={"action": "lease-unavailable", "lease_name": self.settings.name},
        )

    def _refuse(self, error: CeleryLeaseError) -> NoReturn:
        setting = "" if isinstance(error, ConfigurationError) else "beat_lease_url: "
        logger.critical(
            "beat cannot start: %s%s", setting, error, extra={"action": "beat-cannot-start"}
        )
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
        file = file_of(settings.url)
        note = "" if file is None else " (this host only)"
        if file is not None and not file.is_absolute():
            note += f", {file.absolute()}"
        holder = Holder.current()
        durations = f"ttl {settings.ttl:g}s, retry {settings.retry_interval:g}s"
        lines = [
            f"    . lease -> {settings.name} ({durations})",
            f"    . lease holder -> {holder.host}:{holder.pid}",
            f"    . lease database -> {masked(settings.url)}{note}",
        ]
        return "\n".join([*lines, others] if others else lines)

    # --- ticking ------------------------------------------------------------------------

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Stand by, or do one turn. Nothing escapes: an exception would end beat.

        Returns:
            Seconds until the next call.

        Raises:
            SystemExit: Beat was told to end. The signal handler raised it before, but
                Python drops what is raised inside a callback of its garbage collector.
        """
        if self._closed:
            raise SystemExit
        self._ticking = True
        wait = PAUSE
        try:
            wait = self._tick(*args, **kwargs)
        except LeaseLost as error:
            self.elector.concede(str(error))
            wait = 0.0
        except StoreError as error:
            self._forget()
            logger.warning(
                "lease %r: the lease database failed us: %s",
                self.settings.name,
                error,
                extra={"action": "turn-broken-off", "lease_name": self.settings.name},
            )
        except Exception:  # noqa: BLE001 - beat goes on, whatever it was
            self._forget()
            logger.exception(
                "lease %r: beat could not do its turn",
                self.settings.name,
                extra={"action": "turn-failed", "lease_name": self.settings.name},
            )
        finally:
            self._ticking = False
        if self._closing:
            raise SystemExit
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
            self._term, self._recovering = term, True
            # The set-up's own came too early: nothing is written before there is a term.
            self._do_sync()
            self._compare_clocks()
        if self._recovering or self._renewals != self.elector.renewals:
            self._chores(term)
        if self._recovering:
            return 0.0
        if self.dispatcher.busy:
            self.dispatcher.resend(term, self.recovery.over)
        # A run that a worker refused is looked for at each renewal.
        wait = min(self.turn(term, *args, **kwargs), self.settings.renew_interval)
        if self._untidy and wait > 0:
            self._tidy(term)
            wait = min(wait, PRUNE_AGAIN)
        return wait

    def _campaign(self) -> Term | None:
        self._forget()
        self.unload()
        if not self._prepared:
            try:
                self._prepare()
            except StoreError as error:
                self._complain(error)
                return None
        if self.elector.campaign():
            return self.elector.term
        self.stood_by()
        return None

    def _stand_by(self) -> None:
        """Wait here, and not in the service's sleep, which cannot be woken."""
        if not self._closing:
            self.elector.wait(min(self.elector.next_try(), self.longest))

    def _forget(self) -> None:
        """Have the schedule's state loaded again before the next turn."""
        self._term = None
        if "dispatcher" in self.__dict__:
            self.dispatcher.forget()

    def _chores(self, term: Term) -> None:
        """Recover runs and keep house: one bounded round."""
        self._renewals = self.elector.renewals
        self._recovering = self.recovery.round(term, own=self._recovering)
        if not self._recovering:
            self.recovery.retry_lost(term, self.lost_after())
            self._tidy(term)

    def _tidy(self, term: Term) -> None:
        """Delete old rows: one round a renewal, and more of them where one is not enough."""
        deleted = prune(
            self.store.engine, term.name, retention=self.settings.retention, limit=PRUNE
        )
        self._untidy = deleted >= PRUNE

    def _compare_clocks(self) -> None:
        """Warn where this host's clock is not the database's: what is due goes by ours."""
        ahead, doubt = self.store.skew()
        if abs(ahead) - doubt > SKEW:
            logger.warning(
                "lease %r: the clock of this host is %.1f s %s the lease database's: a takeover "
                "by another host would move due times by as much; keep the clocks in step",
                self.settings.name,
                abs(ahead),
                "ahead of" if ahead > 0 else "behind",
                extra={"action": "clock-skew", "lease_seconds": ahead},
            )

    @property
    def longest(self) -> float:
        """Seconds that may pass between two ticks."""
        return float(self.max_interval)  # type: ignore[arg-type] # None is for the class

    # --- for a scheduler to fill in -------------------------------------------------------

    def load(self, term: Term) -> None:
        """Set up the schedule as it is now, before the first turn of a term."""
        if self._set_up:
            return
        self._before = {
            name: (value, type(value)(value) if self._is_its_own(value) else None)
            for name, value in self._led().items()
        }
        try:
            super().setup_schedule()
        except Exception:
            # A scheduler may take half a set-up for a whole one when it is asked again.
            self.unload()
            raise
        self._set_up = True

    def stood_by(self) -> None:
        """Look at who leads instead: another beat was faster."""

    def unload(self) -> None:
        """Let go of the schedule: somebody else may lead. Called while standing by, often.

        A scheduler that keeps what it read elsewhere than in its attributes forgets it here.
        """
        self._set_up, self._heap = False, None
        shelf = getattr(self, "_store", None)
        if isinstance(shelf, Shelf):
            # Celery deletes a file that it cannot open, as one that is open already.
            self._store = None
            # What was not written is not ours to write any more.
            shelf.cache.clear()  # type: ignore[attr-defined] # the stubs forget it
            shelf.close()
        self._put_back()

    def _put_back(self) -> None:
        """Make of the led scheduler what it was before its set-up."""
        before, self._before = self._before, None
        if before is None:
            return
        for name in self._led().keys() - before.keys():
            del self.__dict__[name]
        for name, (value, content) in before.items():
            self.__dict__[name] = value
            if content is not None:
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(content)

    def _is_its_own(self, value: Any) -> bool:
        """Return whether an attribute is a container that nobody else goes on filling."""
        return type(value) in _CONTAINERS and value is not self.app.conf.beat_schedule

    def _led(self) -> dict[str, Any]:
        """Return the attributes that are the led scheduler's own to set.

        Not ours, and not those that a class declares which is made from the leased one.
        """
        ours = {
            name
            for each in type(self).__mro__
            if issubclass(each, LeaseParts)
            for name in vars(each)
        }
        if getattr(super().setup_schedule, "__func__", None) is Scheduler.setup_schedule:
            # Without a storage this is where entries know when they ran.
            ours.add("data")
        return {name: value for name, value in vars(self).items() if name not in ours}

    def turn(self, term: Term, *args: Any, **kwargs: Any) -> float:
        """Do one turn under *term*; return seconds until the next."""
        self.unclaimed = None
        try:
            wait = float(super().tick(*args, **kwargs) or 0.0)
        except Exception:
            # A stock tick has taken the entry off its heap by then, and would not miss it.
            self._heap = None
            raise
        if self.unclaimed is not None:
            self.unload()
            raise self.unclaimed
        return wait

    def lost_after(self) -> dict[str, float]:
        """Return the entries that want lost runs sent again, and after how many seconds."""
        return {}

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
        with ExitStack() as parts:
            # Only what was made: to ask for another would make it here. The last that is
            # named goes first: the elector releases the lease in the store.
            if "store" in self.__dict__:
                parts.callback(self.store.dispose)
            if "publisher" in self.__dict__:
                parts.callback(self.publisher.close)
            if "elector" in self.__dict__:
                parts.callback(self.elector.close)
            if self._set_up and not self.elector.leading:
                self.unload()
            if self._set_up:  # Celery 5.5 would close a file that was never opened
                super().close()
