"""The values that a lease is spoken of in: who holds it, since when, under which epoch."""

from __future__ import annotations

import os
import platform
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

__all__ = ["MAX_EPOCH", "Fence", "Holder", "Lease", "Term", "TermRecord"]

#: Epochs stay below this, so that they survive JSON readers that count in doubles.
MAX_EPOCH = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One process that may lead. Never a bare host name: two beats can share a host."""

    #: Name of the machine.
    host: str
    #: Process id.
    pid: int
    #: Random part that tells this process from an earlier one with the same pid.
    nonce: str
    #: What a loser may see: host, pid, versions, schedule hash.
    info: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def current(cls, **info: Any) -> Holder:
        """Return the holder that stands for this process, with *info* to show."""
        host, pid = socket.gethostname(), os.getpid()
        known = {"host": host, "pid": pid, "python": platform.python_version()}
        return cls(host=host, pid=pid, nonce=secrets.token_hex(4), info={**known, **info})

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}:{self.nonce}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One holder's time under one epoch. Only the holder knows the uuid."""

    #: Name of the lease.
    name: str
    #: The fencing token: larger at every grant.
    epoch: int
    #: The uuid that tells two grants of one epoch apart.
    uuid: str
    #: Who holds it.
    holder: str
    #: When it was granted, by the database clock, in UTC.
    acquired_at: datetime
    #: Who held it at the time of the grant, expired; None where it was free, or not known.
    previous_holder: str | None = None
    #: The epoch that the lease showed before the grant; None where it is not known.
    previous_epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What anybody may know of a lease: no term uuid, no secret."""

    #: Name of the lease.
    name: str
    #: Who holds it; None when it is free.
    holder: str | None
    #: The epoch of the last grant; 0 before the first.
    epoch: int
    #: When the last grant was made, in UTC.
    acquired_at: datetime | None
    #: When it was last renewed, in UTC.
    renewed_at: datetime | None
    #: When it expires by the database clock, in UTC.
    expires_at: datetime | None
    #: Seconds until it expires, by the database clock; 0 when it has.
    remaining: float
    #: What the holder shows of itself.
    holder_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        """Whether somebody holds it at this moment, by the database clock."""
        return self.holder is not None and self.remaining > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """The (epoch, term) that guarded writes are compared with."""

    #: Name of the lease.
    name: str
    #: Epoch that the last takeover raised it to; 0 before the first.
    epoch: int
    #: The uuid of that term; None before the first.
    term: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TermRecord:
    """One line of a lease's history."""

    #: Name of the lease.
    name: str
    #: Epoch of the term.
    epoch: int
    #: Who held it.
    holder: str
    #: When it began, in UTC.
    acquired_at: datetime
    #: When it ended, in UTC; None while it lasts.
    ended_at: datetime | None
    #: How it ended: released, expired, conflict; None while it lasts.
    ended: str | None
