"""
Races between processes for one lease: ``python -m tests.races``.

Processes with connections of their own meet at a barrier when the lease has expired, round
after round. Writes ``races.json``; exit status 1 if any round had not exactly one winner.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import tempfile
import uuid
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from celery_lease.errors import StoreError
from celery_lease.lease import Lease, Term
from celery_lease.stores.leases import SQLLeaseStore
from tests.leases import NAME, expire, holder, opened
from tests.services import MariaDB, PostgreSQL

#: Seconds that one round may take.
ROUND_TIMEOUT = 60.0

# A server process that has imported everything once forks the candidates.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.leases"])


@dataclass
class Candidate:
    """What one process saw."""

    #: The epoch it won in each round that it won.
    won: dict[int, int] = field(default_factory=dict)
    #: How often it lost and learned all that a loser may know, and no more.
    informed: int = 0
    #: Errors that reached the caller.
    surfaced: list[str] = field(default_factory=list)


def race(url: str, *, processes: int, rounds: int) -> dict[str, int]:
    """
    Race for one lease.

    Returns the figures of ``races.json`` for one database. A round counts as won when exactly
    one candidate won it, under the next epoch.
    """
    with opened(url) as store:
        before = store.read(NAME).epoch
        found = _run(_compete, url, processes, rounds)
        after = store.read(NAME).epoch
    winners = 0
    for number in range(rounds):
        epochs = [each.won[number] for each in found if number in each.won]
        winners += epochs == [before + number + 1]
    return {
        "rounds": rounds,
        "winners": winners,
        "epochs_gained": after - before,
        "losers_with_metadata": sum(each.informed for each in found),
        "deadlocks_surfaced": sum(len(each.surfaced) for each in found),
    }


def start_together(url: str, *, processes: int) -> list[str]:
    """Have processes prepare one empty database at once; return the errors that surfaced."""
    found = _run(_prepare, url, processes, 1)
    return [error for each in found for error in each.surfaced]


def _run(target: Any, url: str, processes: int, rounds: int) -> list[Candidate]:
    barrier = _processes.Barrier(processes)
    results = _processes.Queue()
    candidates = [
        _processes.Process(target=target, args=(url, number, rounds, barrier, results))
        for number in range(processes)
    ]
    for each in candidates:
        each.start()
    found = [results.get(timeout=ROUND_TIMEOUT + rounds) for _ in candidates]
    for each in candidates:
        each.join(ROUND_TIMEOUT)
    return found


def _compete(url: str, number: int, rounds: int, barrier: Barrier, results: Any) -> None:
    seen = Candidate()
    with opened(url) as store:
        for each in range(rounds):
            barrier.wait(ROUND_TIMEOUT)
            if number == 0:
                expire(store)
            barrier.wait(ROUND_TIMEOUT)
            attempt = str(uuid.uuid4())
            try:
                answer = store.acquire(NAME, holder(str(number)), 60.0, attempt)
            except StoreError as error:
                seen.surfaced.append(repr(error))
                continue
            if isinstance(answer, Term):
                seen.won[each] = answer.epoch
            else:
                seen.informed += _is_informed(answer, str(holder(str(number))))
    results.put(seen)


def _is_informed(lease: Lease, me: str) -> bool:
    known = lease.holder is not None and lease.expires_at is not None and lease.remaining > 0
    return known and lease.epoch > 0 and lease.holder != me and not hasattr(lease, "term")


def _prepare(url: str, number: int, rounds: int, barrier: Barrier, results: Any) -> None:
    seen = Candidate()
    store = SQLLeaseStore(url)
    barrier.wait(ROUND_TIMEOUT)
    try:
        store.prepare(create=True)
        store.ensure(NAME)
    except Exception as error:  # noqa: BLE001 - any error is what we look for
        seen.surfaced.append(repr(error))
    store.dispose()
    results.put(seen)


def main() -> int:
    """Race on each database and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=Path("races.json"))
    options = parser.parse_args()
    # As Ctrl-C: with the servers stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sizes = {"processes": options.processes, "rounds": options.rounds}
    with PostgreSQL() as server:
        found = {"postgresql": race(server.create_database(), **sizes)}
    with MariaDB() as server:
        found["mariadb"] = race(server.create_database(), **sizes)
    with tempfile.TemporaryDirectory() as folder:
        found["sqlite"] = race(f"sqlite:///{folder}/lease.sqlite3", **sizes)
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    losers = options.rounds * (options.processes - 1)
    ok = True
    for database, figures in found.items():
        good = figures["rounds"] == figures["winners"] == figures["epochs_gained"]
        good &= figures["losers_with_metadata"] == losers and not figures["deadlocks_surfaced"]
        print(f"{'ok  ' if good else 'FAIL'} {database}: {figures}")
        ok &= good
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
