"""
Takeovers and renewals under full load: ``python -m tests.guard_load``.

Workers commit guarded writes as fast as they can, with fsync on, while the lease is renewed
and taken over again and again. The leader's process goes before theirs where they want the same
core (they are nice): what is measured is its wait for the database, and not for a core of a
machine that they fill. Beside it goes a lease that nobody works under: what a takeover of that
one takes is the load's, what the other takes longer is the guard's. A twin that locks the fence
first and works under the lock, the obvious design, shows what the order of the statements is
worth. Writes ``guard-load.json``; exit status 1 if the guard's bars are not met.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from celery_lease.errors import StoreContention
from celery_lease.lease import Term
from celery_lease.stores.base import Raised
from celery_lease.stores.dialects import Direct, database_of, direct
from celery_lease.stores.dialects.direct import compiled
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.schema import commit_table, fence_table
from tests.leases import NAME, expire, grant, opened
from tests.services import MariaDB, PostgreSQL

#: Seconds from one takeover to the next, with a renewal between them.
PACE = 0.05
#: What a renewal and a takeover may take at the 99th percentile, in seconds.
BAR = 0.05
#: A lease that nobody works under.
IDLE = "idle"

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.leases"])

target_table = sa.Table(
    "guard_load_target",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    mysql_engine="InnoDB",
    mariadb_engine="InnoDB",
)


class Stale(Exception):
    """The block is of an older epoch."""


@dataclass
class Figures:
    """What one run showed; times in milliseconds."""

    workers: int
    commits_per_s: int
    takeovers: int
    takeover_median: float
    takeover_p99: float
    takeover_max: float
    renewal_p99: float
    idle_takeover_median: float
    idle_takeover_p99: float
    idle_renewal_p99: float
    out_of_order: int

    @property
    def good(self) -> bool:
        """Whether it meets the bars."""
        fast = max(self.takeover_p99, self.renewal_p99) < BAR * 1000
        return fast and self.takeovers > 10 and self.out_of_order == 0


# --- the workers --------------------------------------------------------------------------


class Shared:
    """What the leader tells its workers, in memory that they share."""

    def __init__(self, workers: int) -> None:
        self.running = _processes.Value("b", 1)
        #: Everybody meets there before it begins.
        self.start = _processes.Barrier(workers + 1)
        self._term = _processes.Array("c", 64)

    @property
    def term(self) -> tuple[int, str]:
        """Epoch and uuid of the current term."""
        epoch, uuid_ = self._term.value.decode().split()
        return int(epoch), uuid_

    @term.setter
    def term(self, term: Term) -> None:
        self._term.value = f"{term.epoch} {term.uuid}".encode()


class Script:
    """
    A guarded transaction as the package sends it, compiled once and then repeated.

    Building statements costs a worker more time than the database needs for them. Where all
    share two cores, that would be the load, and not the guarded writes.

    `first`: for the twin that locks the fence first, and works under the lock.
    """

    def __init__(self, engine: sa.Engine, *, first: bool) -> None:
        lock = sa.select(fence_table.c.epoch).where(fence_table.c.name == NAME)
        work = sa.insert(target_table).inline().values(epoch=0)
        self._first = first
        self._lock = compiled(lock.with_for_update(read=True), engine.dialect, ())
        self._work = compiled(work, engine.dialect, ())
        self._database = database_of(engine.dialect)

    def run(self, way: Direct, epoch: int, term: str) -> None:
        """
        Commit one transaction.

        Raises Stale if the guard says no.
        """
        dbapi = way.dbapi_connection
        cursor = dbapi.cursor()
        if self._first:
            cursor.execute(self._lock.sql, self._lock.parameters({"name_1": NAME}))
        cursor.execute(self._work.sql, self._work.parameters({"epoch": epoch}))
        cursor.close()
        if self._passes(way, _values(str(uuid.uuid4()), epoch, term)):
            dbapi.commit()  # Nothing is left of it where the guard brought it.
        else:
            dbapi.rollback()
            raise Stale

    def _passes(self, way: Direct, values: dict[str, Any]) -> bool:
        """Run the guard: the lock that it takes lasts one round trip at most."""
        if self._database.brings_commit(way):
            return self._database.settle_and_commit(way, **values)
        return self._database.settle(way, idle=5.0, **values)


def _values(task: str, epoch: int, term: str) -> dict[str, Any]:
    return {
        "task_id": task,
        "lease": NAME,
        "epoch": epoch,
        "term": term,
        "execution": task,
        "origin": "",
        "outcome": "committed",
    }


def _work(url: str, first: bool, shared: Shared, committed: Any) -> None:
    os.nice(19)
    engine = sa.create_engine(url, pool_size=1)
    script = Script(engine, first=first)
    count = 0
    leader = multiprocessing.parent_process()
    with direct(engine) as way:
        shared.start.wait(300)
        while shared.running.value and leader.is_alive():
            try:
                script.run(way, *shared.term)
            except Stale:
                continue  # Ask for the current term.
            count += 1
    engine.dispose()
    committed.put(count)


# --- the leader ---------------------------------------------------------------------------


def load(
    url: str, *, workers: int, seconds: float, first: bool, enough: float = math.inf
) -> Figures:
    """
    Load one database for so many seconds, or until there were enough takeovers.

    `first`: with the twin that locks first.
    """
    with opened(url, lock_wait=30.0, statement_wait=60.0) as store:
        target_table.create(store.engine, checkfirst=True)
        shared, committed = Shared(workers), _processes.Queue()
        store.ensure(IDLE)
        busy, idle = Led(store, NAME), Led(store, IDLE)
        shared.term = busy.term
        crew = [
            _processes.Process(target=_work, args=(url, first, shared, committed))
            for _ in range(workers)
        ]
        for each in crew:
            each.start()
        shared.start.wait(300)
        # From outside: a takeover that starves does not come back to look at the time.
        end = threading.Timer(seconds, lambda: setattr(shared.running, "value", 0))
        end.start()
        began = time.perf_counter()
        _lead(busy, idle, shared, enough)
        took = time.perf_counter() - began
        end.cancel()
        commits = sum(committed.get(timeout=60) for _ in crew)
        for each in crew:
            each.join(60)
        return Figures(
            workers=workers,
            commits_per_s=round(commits / took),
            takeovers=len(busy.takeovers),
            takeover_median=_ms(statistics.median(busy.takeovers)),
            takeover_p99=_ms(_p99(busy.takeovers)),
            takeover_max=_ms(max(busy.takeovers)),
            renewal_p99=_ms(_p99(busy.renewals)),
            idle_takeover_median=_ms(statistics.median(idle.takeovers)),
            idle_takeover_p99=_ms(_p99(idle.takeovers)),
            idle_renewal_p99=_ms(_p99(idle.renewals)),
            out_of_order=_out_of_order(store),
        )


class Led:
    """One lease, and how long its renewals and takeovers took, in seconds."""

    def __init__(self, store: SQLLeaseStore, name: str) -> None:
        self._store, self._name = store, name
        self.takeovers: list[float] = []
        self.renewals: list[float] = []
        self.term = self._take_over()

    def renew(self) -> None:
        """Renew it."""
        began = time.perf_counter()
        self._store.renew(self.term, 60)
        self.renewals.append(time.perf_counter() - began)

    def take_over(self) -> None:
        """Let it expire, and take it over."""
        expire(self._store, self._name)
        began = time.perf_counter()
        self.term = self._take_over()
        self.takeovers.append(time.perf_counter() - began)

    def _take_over(self) -> Term:
        term = grant(self._store, ttl=120, name=self._name)
        while True:
            try:
                raised = self._store.raise_fence(term)
            except StoreContention:
                continue
            if raised is not Raised.RAISED:
                raise AssertionError(f"the fence is {raised}")
            return term


def _lead(busy: Led, idle: Led, shared: Shared, enough: float) -> None:
    pause = threading.Event()
    while shared.running.value and len(busy.takeovers) < enough:
        pause.wait(PACE / 2)
        busy.renew()
        idle.renew()
        pause.wait(PACE / 2)
        idle.take_over()
        busy.take_over()
        # Only now: so a commit's instant is never earlier than its fence.
        shared.term = busy.term
    shared.running.value = 0


def _out_of_order(store: SQLLeaseStore) -> int:
    """How many commits came after one of a larger epoch, by the database's clock."""
    order = sa.select(commit_table.c.epoch).order_by(commit_table.c.at)
    with store.engine.connect() as connection:
        largest = wrong = 0
        for epoch in connection.execute(order).scalars():
            wrong += epoch < largest
            largest = max(largest, epoch)
        return wrong


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


def main() -> int:
    """Load each database with the guard and with its twin, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--output", type=Path, default=Path("guard-load.json"))
    options = parser.parse_args()
    # As Ctrl-C: with the servers stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: dict[str, dict[str, Any]] = {}
    ok = True
    with PostgreSQL(fsync=True) as postgresql, MariaDB(fsync=True) as mariadb:
        for server in (postgresql, mariadb):
            for workers in options.workers:
                for first in (False, True):
                    url = server.create_database()
                    figures = load(url, workers=workers, seconds=options.seconds, first=first)
                    server.drop_database(url)
                    kind = "lock first (twin)" if first else "guard last"
                    good = first or figures.good
                    found[f"{server.name}, {workers} workers, {kind}"] = asdict(figures)
                    print(
                        f"{'ok  ' if good else 'FAIL'} {server.name} {kind}: {figures}", flush=True
                    )
                    ok &= good
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
