"""The same lease and guard for anything that must be done by one process at a time.

::

    election = LeaderElection(url, "janitor")
    with election.lead() as leadership:
        while leadership.trusted:
            with leadership.transaction(Session) as session:
                ...  # commits only while this is still the current epoch

The lease says who may act; only the guarded transaction makes acting safe.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, overload

from celery_lease.elector import Elector
from celery_lease.errors import (
    CeleryLeaseError,
    ConfigurationError,
    LeaseLost,
    StoreContention,
    StoreError,
    StoreUnavailable,
)
from celery_lease.guards.sqlalchemy import Guard, guarded
from celery_lease.journal import TransitionLog
from celery_lease.lease import Holder, Term
from celery_lease.settings import PREFIX, Settings, duration
from celery_lease.stores.fences import FenceStore, Ticket
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.retention import PRUNE, prune
from celery_lease.transition import Action, Transition

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.orm import Session, scoped_session, sessionmaker

    S = TypeVar("S", bound=Session)

__all__ = ["LeaderElection", "Leadership"]

logger = logging.getLogger(__name__)

_LOST = {Action.LOST, Action.CONFLICT}
#: What settings of an app are called here.
_PARAMETERS = {name: name.removeprefix(PREFIX) for name in Settings.names()}
_PARAMETERS[f"{PREFIX}auto_init"] = "create"
_SETTINGS = re.compile(rf"\b(?:{'|'.join(_PARAMETERS)})\b")


class Leadership:
    """One term of leading: from a grant until it is lost or given up.

    Args:
        term: The term.
        elector: Who knows whether it may still be trusted.
        fences: The lease database, for the guard.
    """

    def __init__(self, term: Term, elector: Elector, fences: FenceStore) -> None:
        #: The term that was granted.
        self.term = term
        self._elector = elector
        self._fences = fences

    @property
    def epoch(self) -> int:
        """The epoch: put it into what you write where no guard can be."""
        return self.term.epoch

    @property
    def trusted(self) -> bool:
        """Whether the lease may be trusted at this moment, by the local clock."""
        return self._elector.term == self.term

    def check(self) -> None:
        """Call it before each thing that cannot be guarded, and in long loops.

        It also counts as progress, for ``stall_timeout``.

        Raises:
            LeaseLost: The lease may not be trusted any more. It tells the epoch that was held,
                and the current one where the database was asked.
        """
        try:
            self._elector.check()
        except LeaseLost as error:
            # Whoever noticed first, perhaps on another thread, had the elector forget the term.
            error.held_epoch, seen = self.term.epoch, self._elector.seen
            if seen is not None and seen.epoch >= self.term.epoch:
                error.current_epoch = seen.epoch
            raise
        self._elector.progress(0.0)

    @overload
    def transaction(
        self, target: S | sessionmaker[S] | scoped_session[S], *, idle: float | None = None
    ) -> AbstractContextManager[S]: ...

    @overload
    def transaction(
        self, target: sa.Engine | sa.Connection, *, idle: float | None = None
    ) -> AbstractContextManager[sa.Connection]: ...

    @contextmanager
    def transaction(self, target: Any, *, idle: float | None = None) -> Iterator[Any]:
        """Write in one transaction that only commits while this epoch is the current one.

        Args:
            target: A Session, sessionmaker, scoped_session, Engine or Connection of
                SQLAlchemy, in the database that holds the lease tables.
            idle: Seconds of silence after which the server ends the transaction,
                where the server can.

        Yields:
            The session or connection to work with.

        Raises:
            StaleEpoch: Another epoch took over. Nothing was written.
            MissingFence: The target is not in the lease database.
            StoreContention: The fence was moving. Nothing was written; try again.
            UnsafeTransaction: The guard cannot be the last word here.
            ConfigurationError: *idle* is no number of seconds above 0.
            TypeError: *target* is none of these.
        """
        name = f"leader:{self.term.uuid}"
        ticket = Ticket(
            lease=self.term.name,
            epoch=self.term.epoch,
            term=self.term.uuid,
            task_id=name,
            run=name,
            execution=self.term.uuid,
        )
        guard = Guard(ticket, self._fences, final=False, idle=idle)
        with guarded(target, guard) as work:
            yield work


class LeaderElection:
    """Campaigns for a lease of any name, for controllers that are not beat.

    Args:
        url: SQLAlchemy URL of the lease database.
        name: Name of the lease; not the one of your beat.
        ttl: Seconds that a grant or renewal is good for.
        renew_interval: Seconds between renewals; a third of *ttl* if not given.
        margin: Seconds before the expiry from which on the lease is not trusted; a
            tenth of *ttl* if not given.
        retry_interval: Seconds between tries; a sixth of *ttl* if not given.
        stall_timeout: Seconds without :meth:`Leadership.check` after which renewing
            stops, so that a hung body does not keep the lease; None for never.
        on_started_leading: Called with the leadership when this process leads.
        on_stopped_leading: Called once when it does not any more: after the release where the
            block ended first, otherwise perhaps on another thread, and late where the database
            hangs: :attr:`Leadership.trusted` ends on time. An exception in it is logged.
        engine_options: Options for ``sqlalchemy.create_engine``.
        create: Whether missing tables are made.

    Raises:
        ConfigurationError: The name or the durations cannot be used.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        ttl: float = 30.0,
        renew_interval: float | None = None,
        margin: float | None = None,
        retry_interval: float | None = None,
        stall_timeout: float | None = None,
        on_started_leading: Callable[[Leadership], None] | None = None,
        on_stopped_leading: Callable[[], None] | None = None,
        engine_options: Mapping[str, Any] | None = None,
        create: bool = True,
    ) -> None:
        ttl = duration("ttl", ttl)

        def seconds(setting: str, given: float | None, default: float) -> float:
            return default if given is None else duration(setting, given)

        with _named_here():
            self.settings = Settings(
                url=url,
                name=name,
                ttl=ttl,
                renew_interval=seconds("renew_interval", renew_interval, ttl / 3),
                margin=seconds("margin", margin, ttl / 10),
                retry_interval=seconds("retry_interval", retry_interval, ttl / 6),
                stall_timeout=seconds("stall_timeout", stall_timeout, float("inf")),
                engine_options=engine_options or {},
                auto_init=create,
            )
        self._on_started = on_started_leading
        self._on_stopped = on_stopped_leading

    @contextmanager
    def lead(self, timeout: float | None = None) -> Iterator[Leadership]:
        """Wait until this process leads; release the lease at the end.

        Args:
            timeout: Seconds to wait at most; None for as long as it takes.

        Raises:
            TimeoutError: Somebody else led all the time.
            ConfigurationError: The URL, its driver or the options cannot be used.
            SchemaMismatch: The tables are missing, or of another version.
            NotWritable: The database is a replica or read-only.
        """
        settings = self.settings
        stopped = _Once(settings.name, self._on_stopped)
        with ExitStack() as ending:
            # The last that is named goes first, and an interrupt in it skips none of the others.
            ending.callback(stopped.call)
            with _named_here():
                store = SQLLeaseStore.of(settings)
                ending.callback(store.dispose)
                fences = FenceStore.of(settings)
                ending.callback(fences.dispose)
                holder = Holder.current()
                elector = Elector(store, settings, holder=holder, observe=stopped.observe)
                ending.callback(elector.close)
                ending.callback(stopped.leave)
                term = self._campaign(store, elector, timeout)
            with suppress(StoreError):  # What led often leaves a long history.
                prune(store.engine, term.name, retention=settings.retention, limit=PRUNE)
            elector.progress(0.0)
            leadership = Leadership(term, elector, fences)
            stopped.arm()
            if self._on_started is not None:
                self._on_started(leadership)
            yield leadership

    def _campaign(self, store: SQLLeaseStore, elector: Elector, timeout: float | None) -> Term:
        end = None if timeout is None else time.monotonic() + timeout
        prepared = False
        while True:
            try:
                if not prepared:
                    store.prepare(create=self.settings.auto_init)
                    store.ensure(self.settings.name)
                    prepared = True
                if elector.campaign() and (term := elector.term) is not None:
                    return term  # Otherwise lost again in between: by a pause of this process.
            except (StoreUnavailable, StoreContention) as error:
                logger.warning(
                    "lease %r: the lease database does not answer: %s",
                    self.settings.name,
                    error,
                    extra={"action": "lease-unavailable", "lease_name": self.settings.name},
                )
            wait = elector.next_try()
            if end is not None:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"the lease {self.settings.name!r} was not to be had")
                wait = min(wait, left)
            elector.wait(wait)


@contextmanager
def _named_here() -> Iterator[None]:
    """Have errors name parameters of :class:`LeaderElection`, and not settings of an app."""
    try:
        yield
    except CeleryLeaseError as error:
        error.args = (_named(str(error)),)
        if isinstance(error, ConfigurationError):
            error.setting = _named(error.setting)
        raise


def _named(text: str) -> str:
    return _SETTINGS.sub(lambda found: _PARAMETERS[found[0]], text)


class _Once:
    """Tells transitions, and calls back when a term that was started is over, once.

    Never inside a step of the protocol that somebody waits for: what ends at the end of the
    block is told after it.
    """

    def __init__(self, name: str, callback: Callable[[], None] | None) -> None:
        self._name = name
        self._callback = callback
        self._owed = False
        self._leaving = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._tell = TransitionLog(logger)

    def observe(self, transition: Transition) -> None:
        self._tell(transition)
        if transition.action in _LOST and not self._leaving:
            self.call()

    def arm(self) -> None:
        """Owe a call from now on: a term was started."""
        self._owed = True

    def leave(self) -> None:
        """Leave the call to the end of the block: a release does not wait for it."""
        self._leaving = True

    def call(self) -> None:
        """Call back, if a term was started and its end was not told yet."""
        if self._pid != os.getpid():
            return  # A fork left the block: the term goes on in the parent.
        with self._lock:
            owed, self._owed = self._owed, False
        if not owed or self._callback is None:
            return
        try:
            self._callback()
        except Exception:
            logger.exception(
                "lease %r: on_stopped_leading failed",
                self._name,
                extra={"action": "callback-failed", "lease_name": self._name},
            )
