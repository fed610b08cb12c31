"""A lease store in memory, on a clock that tests move, with faults on order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from celery_lease.errors import ConfigurationError, SchemaMismatch, StoreError
from celery_lease.lease import MAX_EPOCH, Fence, Holder, Lease, Term, TermRecord
from celery_lease.stores.base import Raised, Renewal


class ManualClock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def now(self) -> float:
        """Return the time."""
        return self.seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += seconds


@dataclass
class Row:
    """A row of the lease table."""

    epoch: int = 0
    holder: Holder | None = None
    term: str | None = None
    acquired_at: float | None = None
    renewed_at: float | None = None
    expires_at: float | None = None


def _nothing() -> None:
    """No fault."""


class MemoryStore:
    """
    A :class:`~celery_lease.stores.base.LeaseStore`, and the rule book of the others.

    `before` and `after` hold what happens on the way to the database and back, by verb: time
    that passes, or an error. What raises in `before` never arrived; what raises in `after` was
    done, and the answer is lost.
    """

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[], None]] = {}
        self.calls: list[str] = []
        self.rows: dict[str, Row] = {}
        self.fences: dict[str, Fence] = {}
        self.terms: list[TermRecord] = []
        #: Epochs that runs and commits show, by lease.
        self.left_behind: dict[str, int] = {}

    @contextmanager
    def _call(self, verb: str):
        self.calls.append(verb)
        self.before.get(verb, _nothing)()
        yield
        self.after.get(verb, _nothing)()

    # --- the verbs

    def prepare(self, *, create: bool) -> None:
        """Nothing to make."""

    def ensure(self, name: str) -> None:
        """Make the rows."""
        self.rows.setdefault(name, Row())
        self.fences.setdefault(name, Fence(name=name, epoch=0, term=None))

    def acquire(self, name: str, holder: Holder, ttl: float, attempt: str) -> Term | Lease:
        """Take a free or expired lease."""
        with self._call("acquire"):
            return self._acquire(name, holder, ttl, attempt)

    def _acquire(self, name: str, holder: Holder, ttl: float, attempt: str) -> Term | Lease:
        row, now = self.rows.get(name), self.clock.now()
        if row is None:
            raise SchemaMismatch(f"no row for {name}; celery lease init", found=None, expected=1)
        if row.holder is not None and row.expires_at > now:
            return self._seen(name)
        before, known = row, [each.epoch for each in self.terms if each.name == name]
        epoch = max(row.epoch, *known, 0) + 1
        self._end_open(name, "expired", before.expires_at or now)
        self.rows[name] = Row(epoch, holder, attempt, now, now, now + ttl)
        record = TermRecord(
            name=name, epoch=epoch, holder=str(holder), acquired_at=_at(now), ended_at=None,
            ended=None,
        )  # fmt: skip
        self.terms.append(record)
        return Term(
            name=name,
            epoch=epoch,
            uuid=attempt,
            holder=str(holder),
            acquired_at=_at(now),
            previous_holder=str(before.holder) if before.holder else None,
            previous_epoch=before.epoch,
        )

    def renew(self, term: Term, ttl: float) -> Renewal:
        """Extend exactly this unexpired term."""
        with self._call("renew"):
            row, now = self.rows[term.name], self.clock.now()
            if self._is(row, term) and row.holder is not None and row.expires_at > now:
                row.renewed_at, row.expires_at = now, now + ttl
                answer = Renewal.RENEWED
            else:
                twice = row.epoch == term.epoch and row.term != term.uuid
                went_back = row.epoch < term.epoch
                answer = Renewal.CONFLICT if twice or went_back else Renewal.LOST
        return answer

    def release(self, term: Term) -> bool:
        """Free exactly this term."""
        with self._call("release"):
            row = self.rows[term.name]
            released = self._is(row, term) and row.holder is not None
            if released:
                row.holder, row.expires_at = None, self.clock.now()
                self._end_open(term.name, "released", self.clock.now())
        return released

    def raise_fence(self, term: Term) -> Raised:
        """Raise the fence, never lower it."""
        with self._call("raise_fence"):
            return self._raise_fence(term)

    def _raise_fence(self, term: Term) -> Raised:
        fence = self.fences[term.name]
        if fence.epoch < term.epoch:
            self.fences[term.name] = Fence(name=term.name, epoch=term.epoch, term=term.uuid)
            return Raised.RAISED
        if fence.epoch == term.epoch:
            return Raised.RAISED if fence.term == term.uuid else Raised.CONFLICT
        later = self.rows[term.name].epoch > term.epoch
        return Raised.SUPERSEDED if later else Raised.CONFLICT

    def read(self, name: str) -> Lease | None:
        """Return what anybody may know."""
        with self._call("read"):
            return self._seen(name) if name in self.rows else None

    def read_fence(self, name: str) -> Fence | None:
        """Return the fence."""
        return self.fences.get(name)

    def read_all(self) -> Sequence[Lease]:
        """Return all leases."""
        return [self._seen(name) for name in sorted(self.rows)]

    def history(self, name: str, limit: int) -> Sequence[TermRecord]:
        """Return the newest terms."""
        mine = [each for each in self.terms if each.name == name]
        return sorted(mine, key=lambda each: -each.epoch)[:limit]

    def floor(self, term: Term) -> int:
        """Return the largest epoch that others left behind."""
        with self._call("floor"):
            fence = self.fences[term.name]
            seen = [self.left_behind.get(term.name, 0)]
            seen += [fence.epoch] if fence.term != term.uuid else []
            seen += [
                each.epoch
                for each in self.terms
                if each.name == term.name and each.epoch != term.epoch
            ]
        return max(seen)

    def jump(self, term: Term, floor: int) -> Term | None:
        """Move exactly this unexpired term above *floor*."""
        with self._call("jump"):
            row = self.rows[term.name]
            there = self._is(row, term) and row.holder is not None
            if not there or row.expires_at <= self.clock.now():
                return None
            epoch = max(floor, term.epoch) + 1
            if epoch >= MAX_EPOCH:
                raise StoreError("no epoch is left")
            row.epoch = epoch
            self.terms = [
                replace(each, epoch=epoch) if each.epoch == term.epoch else each
                for each in self.terms
            ]
        return replace(term, epoch=epoch)

    def end_by_conflict(self, term: Term) -> None:
        """Record how it ended."""
        with self._call("end_by_conflict"):
            self._end_open(term.name, "conflict", self.clock.now(), epoch=term.epoch)

    def raise_epoch(self, name: str, to: int) -> Lease | None:
        """Move the lease row up."""
        if not 0 < to < MAX_EPOCH:
            raise ConfigurationError("out of range", setting="to")
        row = self.rows[name]
        if row.epoch >= to:
            return None
        self._end_open(name, "conflict", self.clock.now())
        self.rows[name] = replace(row, epoch=to, holder=None, term=None)
        return self._seen(name)

    # --- inside

    @staticmethod
    def _is(row: Row, term: Term) -> bool:
        return (row.epoch, row.term) == (term.epoch, term.uuid)

    def _end_open(self, name: str, how: str, at: float, epoch: int | None = None) -> None:
        self.terms = [
            replace(each, ended=how, ended_at=_at(at))
            if each.name == name and each.ended is None and epoch in (None, each.epoch)
            else each
            for each in self.terms
        ]

    def _seen(self, name: str) -> Lease:
        row = self.rows[name]
        left = (row.expires_at or 0.0) - self.clock.now()
        return Lease(
            name=name,
            holder=str(row.holder) if row.holder else None,
            epoch=row.epoch,
            acquired_at=_at(row.acquired_at),
            renewed_at=_at(row.renewed_at),
            expires_at=_at(row.expires_at),
            remaining=max(0.0, left) if row.holder else 0.0,
            holder_info=row.holder.info if row.holder else {},
        )


def _at(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)
