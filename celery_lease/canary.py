"""``celery lease check``: does this very database keep what a lease relies on?

Two clients with connections of their own try it, under a lease name of their own, and
clean up. A rule that a lease rests on and that does not hold here is a failure: two
beats on such a database would both lead, or none.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from enum import Enum
from typing import Any

from celery_lease.errors import (
    CeleryLeaseError,
    NotWritable,
    StoreContention,
    StoreError,
)
from celery_lease.lease import Holder, Lease, Term
from celery_lease.stores.base import Raised, Renewal
from celery_lease.stores.dialects import file_of
from celery_lease.stores.leases import SCRATCH
from celery_lease.stores.probe import Probe

__all__ = ["UNKNOWN", "Status", "run"]

#: What no check from here can know.
UNKNOWN = (
    (
        "whether a failover keeps every commit: with asynchronous replication the newest epochs "
        "can be lost and granted again; then only the term's uuid tells the two apart"
    ),
    (
        "whether all beats and workers reach this same server: a proxy that splits reads from "
        "writes, or two addresses of two servers, look the same from here"
    ),
    "whether the disk keeps what it acknowledged",
    "whether the database's clock will be stepped",
    "what a pooler does that was not in the way of these two clients",
)

_WRITABLE = "writable primary"

#: Seconds of a lease that is left to expire.
_SHORT = 0.5
#: Seconds of a lease that must not expire meanwhile.
_LONG = 60.0
#: Seconds that are given to what must not happen.
_PATIENCE = 0.3
#: Seconds of difference between two clocks that are worth a warning.
_SKEW = 1.0


class Status(str, Enum):
    """What became of one check."""

    #: It holds.
    OK = "ok"
    #: It holds, and something beside it is worth knowing.
    WARNING = "warning"
    #: It does not hold, or could not be tried.
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    #: What was checked.
    check: str
    #: What became of it.
    status: Status
    #: What was seen.
    detail: str


class _Conflict(Exception):
    """The database did something that a lease cannot live with."""


class _Warning(Exception):
    """Nothing that breaks a lease, but worth knowing."""


def run(url: str, options: Mapping[str, Any], *, rounds: int, create: bool) -> list[Finding]:
    """Try a database out.

    Args:
        url: SQLAlchemy URL.
        options: Options for ``create_engine``.
        rounds: How many times the two clients race.
        create: Whether missing tables are made first.

    Raises:
        ConfigurationError: The URL or the options cannot be used.
        SchemaMismatch: The tables are missing, or of another version.
        StoreUnavailable: The database cannot be reached.
        NotWritable: This role lacks a privilege that beats need.
    """
    ours, theirs = Probe(url, options), Probe(url, options)
    try:
        try:
            ours.prepare(create=create)
        except NotWritable as error:
            if error.forbidden:
                raise
            return [Finding(check=_WRITABLE, status=Status.FAILED, detail=str(error))]
        return Canary(ours, theirs, rounds).run()
    finally:
        ours.dispose()
        theirs.dispose()


class Canary:
    """The checks, in the order in which they are told.

    Args:
        ours: One client.
        theirs: Another one.
        rounds: How many times they race.
    """

    def __init__(self, ours: Probe, theirs: Probe, rounds: int) -> None:
        self.ours = ours
        self.theirs = theirs
        self.rounds = rounds
        self.name = f"{SCRATCH}{uuid.uuid4()}"
        self._us, self._them = Holder.current(), Holder.current()

    def run(self) -> list[Finding]:
        """Run all checks; the first that cannot write is the last that is tried."""
        writable = self._try(_WRITABLE, self._writable)
        if writable.status is Status.FAILED:
            return [writable]
        try:
            return [writable, *(self._try(name, check) for name, check in self._checks())]
        finally:
            self.remove()

    def _checks(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("epochs survive a crash", self._durable),
            ("one winner, epoch + 1", self._race),
            ("no early replacement", self._no_early_replacement),
            ("expiry by the database's clock", self._expiry),
            ("late renewal and release are harmless", self._late),
            ("a stale guarded write is refused", self._stale),
            ("a takeover waits for a guard under way", self._waits),
            ("clocks agree", self._skew),
            ("no pooler in transaction mode", self._pooler),
        ]

    def _try(self, name: str, check: Callable[[], str]) -> Finding:
        try:
            return Finding(check=name, status=Status.OK, detail=check())
        except _Warning as warning:
            return Finding(check=name, status=Status.WARNING, detail=str(warning))
        except (_Conflict, CeleryLeaseError) as error:
            if isinstance(error, NotWritable) and error.forbidden:
                raise  # Of the database that says nothing.
            return Finding(check=name, status=Status.FAILED, detail=str(error))

    def remove(self) -> None:
        """Remove what was made; a role that may not delete leaves a lease nobody asks for."""
        try:
            self.ours.remove(self.name)
        except StoreError:
            pass  # Said in the documentation of the command: two small rows.

    # --- the checks ---------------------------------------------------------------------

    def _writable(self) -> str:
        self.ours.ensure(self.name)
        file = file_of(self.ours.engine.url)
        if file is None:
            return self.ours.shown
        if not file.is_absolute():
            raise _Warning(
                f"{file.absolute()}: it is not named in full, so a beat or a worker that is "
                f"started in another directory has another one"
            )
        return f"{self.ours.shown}, of this host only"

    def _durable(self) -> str:
        found = self.ours.weaknesses()
        text = "; ".join(each.text for each in found)
        if any(each.certain for each in found):
            raise _Conflict(text)
        if found:
            raise _Warning(text)
        return "nothing in the server's settings speaks against it"

    def _race(self) -> str:
        before = self._epoch()
        with ThreadPoolExecutor(2) as pool:
            for _ in range(self.rounds):
                self.ours.expire(self.name)
                before = self._round(pool, before)
        return f"{self.rounds} rounds of two clients"

    def _round(self, pool: ThreadPoolExecutor, before: int) -> int:
        barrier = threading.Barrier(2)

        def compete(probe: Probe, holder: Holder) -> Term | Lease:
            barrier.wait(_LONG)
            return probe.acquire(self.name, holder, _LONG, str(uuid.uuid4()))

        tries = [
            pool.submit(compete, self.ours, self._us),
            pool.submit(compete, self.theirs, self._them),
        ]
        answers = [each.result() for each in tries]
        won = [each for each in answers if isinstance(each, Term)]
        lost = [each for each in answers if isinstance(each, Lease)]
        if len(won) != 1:
            raise _Conflict(f"{len(won)} of 2 clients were granted one expired lease")
        if won[0].epoch != before + 1:
            raise _Conflict(f"a grant moved the epoch from {before} to {won[0].epoch}")
        if self._epoch() != won[0].epoch:
            raise _Conflict(f"epoch {won[0].epoch} was granted, {self._epoch()} is stored")
        if (lost[0].holder, lost[0].epoch) != (won[0].holder, won[0].epoch):
            raise _Conflict(f"the loser was told of {lost[0].holder} and epoch {lost[0].epoch}")
        return won[0].epoch

    def _no_early_replacement(self) -> str:
        term = self._take(self.ours, self._us, _LONG)
        if isinstance(self._ask(self.theirs, self._them), Term):
            raise _Conflict("a lease with a minute to go was granted to somebody else")
        if self.ours.renew(term, _LONG) is not Renewal.RENEWED:
            raise _Conflict("a valid lease could not be renewed")
        return "a valid lease is refused, and renewed by its holder"

    def _expiry(self) -> str:
        old = self._take(self.ours, self._us, _SHORT)
        end = time.monotonic() + 10 * _SHORT
        answer = self._ask(self.theirs, self._them)
        while isinstance(answer, Lease):
            if time.monotonic() > end:
                raise _Conflict(f"a lease of {_SHORT:g} s has not expired after {10 * _SHORT:g} s")
            time.sleep(0.02)
            answer = self._ask(self.theirs, self._them)
        lasted = (answer.acquired_at - old.acquired_at).total_seconds()
        # The clock of SQLite has milliseconds.
        if lasted < _SHORT - 0.001:
            raise _Conflict(f"a lease of {_SHORT:g} s was granted again after {lasted:.3f} s")
        return f"a lease of {_SHORT:g} s was granted again after {lasted:.3f} s"

    def _late(self) -> str:
        old = self._take(self.ours, self._us, _LONG)
        new = self._take(self.theirs, self._them, _LONG)
        if self.ours.renew(old, _LONG) is Renewal.RENEWED:
            raise _Conflict("a term that was over could be renewed")
        if self.ours.release(old):
            raise _Conflict("a term that was over could release its successor")
        if self.theirs.renew(new, _LONG) is not Renewal.RENEWED:
            raise _Conflict("a late release ended a newer term")
        return "the newer term goes on"

    def _stale(self) -> str:
        old = self._lead(self.ours, self._us)
        if not self.ours.write(old, self._task("current")):
            raise _Conflict("a write under the current epoch was refused")
        new = self._lead(self.theirs, self._them)
        if self.ours.write(old, self._task("stale")) or self.ours.written(self._task("stale")):
            raise _Conflict(f"a write under epoch {old.epoch} passed epoch {new.epoch}")
        return f"a write under epoch {old.epoch} does not pass epoch {new.epoch}"

    def _waits(self) -> str:
        old = self._lead(self.ours, self._us)
        with ThreadPoolExecutor(1) as pool:
            with self.ours.writing(old, self._task("in flight")) as passed:
                if not passed:
                    raise _Conflict("a write under the current epoch was refused")
                takeover = pool.submit(self._lead_at_last)
                wait([takeover], _PATIENCE)
                if takeover.done():
                    takeover.result()
                    raise _Conflict("a takeover did not wait for a guarded write under way")
            began = time.monotonic()
            takeover.result()
        return f"it was over {time.monotonic() - began:.3f} s after the guarded write"

    def _lead_at_last(self) -> None:
        """Take over, however long a guard is in the way."""
        end = time.monotonic() + _LONG
        while time.monotonic() < end:
            try:
                self._lead(self.theirs, self._them)
            except StoreContention:
                continue  # The lock wait is over; the guard is not.
            return
        raise _Conflict("a takeover could not raise the fence in a minute")

    def _skew(self) -> str:
        ahead, doubt = self.ours.skew()
        text = f"this host is {ahead:+.3f} s ahead of the database, within {doubt:.3f} s"
        if abs(ahead) - doubt > _SKEW:
            raise _Warning(f"{text}; leases do not depend on it, entries fall due by this clock")
        return text

    def _pooler(self) -> str:
        if self.ours.is_pooled(self.theirs):
            raise _Warning(
                "transactions of one connection run in several sessions: the limits on waiting "
                "must be set on the role, and psycopg needs prepare_threshold = None"
            )
        return "each connection keeps its session"

    # --- what they are made of ----------------------------------------------------------

    def _ask(self, probe: Probe, holder: Holder, ttl: float = _LONG) -> Term | Lease:
        return probe.acquire(self.name, holder, ttl, str(uuid.uuid4()))

    def _take(self, probe: Probe, holder: Holder, ttl: float) -> Term:
        probe.expire(self.name)
        answer = self._ask(probe, holder, ttl)
        if isinstance(answer, Lease):
            raise _Conflict("an expired lease was not granted")
        return answer

    def _lead(self, probe: Probe, holder: Holder) -> Term:
        term = self._take(probe, holder, _LONG)
        raised = probe.raise_fence(term)
        if raised is not Raised.RAISED:
            raise _Conflict(f"the fence could not be raised: {raised.value}")
        return term

    def _task(self, what: str) -> str:
        return f"{self.name} {what}"

    def _epoch(self) -> int:
        lease = self.ours.read(self.name)
        return -1 if lease is None else lease.epoch
