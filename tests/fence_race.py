"""
Races between fenced tasks and takeovers: ``python -m tests.fence_race``.

Workers run tasks through a pool of connections, each writing a row under its epoch, while
takeovers come at random. Once a takeover has returned, no row of an older epoch may appear
any more: they are counted right then, and again in the end. A twin that writes in a plain
transaction shows that the race would find a leak. A second race is for results: attempts of
one run under several epochs end in any order, and the result has to be the committed one's.

Writes ``fence-race.json``, keeping what another version of SQLAlchemy left there; exit status
1 if anything stale got through, or if a race was too tame to tell.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery
from sqlalchemy.orm import sessionmaker

from celery_lease import FencedTask
from celery_lease.execution import fence_store
from celery_lease.signals import task_refused
from celery_lease.testing import HeldLease, hold, run
from tests.services import MariaDB, PostgreSQL, Redis
from tests.services.base import wait_until

#: Tasks that run at once, all through one pool of as many connections.
WORKERS = 4
#: Seconds between takeovers, and of a body's pauses.
BETWEEN, PAUSE = (0.001, 0.006), (0.0, 0.004)
#: A race that met fewer truly stale commits proves nothing.
ENOUGH = {"postgresql": 1000, "mariadb": 1000, "sqlite": 200}

target_table = sa.Table(
    "fence_race_target",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False, index=True),
)


@dataclass(frozen=True)
class Configuration:
    """What is raced: a database, a way to it, an isolation level."""

    database: str
    access: str
    level: str

    @property
    def name(self) -> str:
        """Its name in the report."""
        return f"{self.database} {self.access} {self.level}"


@dataclass
class Count:
    """What a race found."""

    configuration: str
    sqlalchemy: str = sa.__version__
    attempts: int = 0
    takeovers: int = 0
    #: Attempts whose epoch had gone when they came to their commit.
    stale_at_commit: int = 0
    #: Rows that appeared although their epoch had gone.
    stale_committed: int = 0
    twin_attempts: int = 0
    twin_stale_committed: int = 0
    #: How attempts ended: SUCCESS, IGNORED, FAILURE (locks that were not to be had).
    states: dict[str, int] = field(default_factory=dict)


CONFIGURATIONS = [
    *(
        Configuration("postgresql", "core", level)
        for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
    ),
    Configuration("postgresql", "orm", "READ COMMITTED"),
    *(
        Configuration("mariadb", "core", level)
        for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
    ),
    Configuration("mariadb", "orm", "REPEATABLE READ"),
    Configuration("sqlite", "core", "SERIALIZABLE"),
    Configuration("sqlite", "orm", "SERIALIZABLE"),
]


class Race:
    """One configuration on one empty database."""

    def __init__(self, configuration: Configuration, url: str) -> None:
        self.configuration = configuration
        self.lease: HeldLease = hold(url)
        self.engine = sa.create_engine(
            url,
            isolation_level=configuration.level,
            pool_size=WORKERS,
            max_overflow=0,
        )
        target_table.metadata.create_all(self.engine)
        self.target: Any = (
            self.engine if configuration.access == "core" else sessionmaker(self.engine)
        )
        self.app = Celery("race", set_as_current=False)
        self.app.conf.beat_lease_url = url
        self.refused: Counter[str] = Counter()

        @self.app.task(base=FencedTask, bind=True, shared=False)
        def write(task: FencedTask, fenced: bool) -> None:
            self._write(task, fenced)

        self.task = write
        # Binding a task is not for several threads at once.
        self.app.finalize()

    def _write(self, task: FencedTask, fenced: bool) -> None:
        transaction = task.fence.transaction if fenced else _begin
        with transaction(self.target) as work:
            time.sleep(random.uniform(*PAUSE))
            work.execute(sa.insert(target_table).values(epoch=task.epoch))
            # On SQLite the writer holds the file from here on: takeovers have to get in.
            if self.configuration.database != "sqlite":
                time.sleep(random.uniform(*PAUSE))

    def run(self, count: Count, attempts: int, *, fenced: bool, enough: int) -> None:
        """Race until there were so many attempts, and enough of them stale at their commit."""
        baseline: dict[int, int] = {}
        over = threading.Event()
        states: Counter[str] = Counter()
        lock = threading.Lock()

        def work() -> None:
            while not over.is_set():
                state = run(self.task, fenced, under=self.lease).state
                with lock:
                    states[state] += 1

        def note(sender: Any = None, stage: str = "", **_: Any) -> None:
            with lock:
                self.refused[stage] += 1

        self.refused.clear()
        task_refused.connect(note)
        deadline = time.monotonic() + 600
        with ThreadPoolExecutor(WORKERS) as pool:
            futures = [pool.submit(work) for _ in range(WORKERS)]
            try:
                while time.monotonic() < deadline and not all(
                    (states.total() >= attempts, self._stale(baseline, fenced) >= enough)
                ):
                    time.sleep(random.uniform(*BETWEEN))
                    old = self.lease
                    self.lease = old.depose()
                    baseline[old.epoch] = self._rows(old.epoch)
            finally:
                over.set()
            for future in futures:
                future.result()
        task_refused.disconnect(note)
        leaked = self._leaked(baseline)
        if fenced:
            count.attempts, count.takeovers = states.total(), len(baseline)
            count.stale_at_commit = self.refused["commit"]
            count.stale_committed, count.states = leaked, dict(states)
        else:
            count.twin_attempts, count.twin_stale_committed = states.total(), leaked

    def _stale(self, baseline: dict[int, int], fenced: bool) -> int:
        if fenced:
            return self.refused["commit"]
        return self._leaked(baseline) if len(baseline) % 50 == 0 else 0

    def _leaked(self, baseline: dict[int, int]) -> int:
        return sum(self._rows(epoch) - rows for epoch, rows in baseline.items())

    def _rows(self, epoch: int) -> int:
        """Count the rows of an epoch, on a connection that has no snapshot."""
        query = sa.select(sa.func.count()).where(target_table.c.epoch == epoch)
        with self.lease._store.engine.connect() as connection:
            return connection.execution_options(isolation_level="AUTOCOMMIT").scalar(query) or 0

    def close(self) -> None:
        """Close all connections."""
        fence_store(self.app).dispose()
        self.engine.dispose()
        self.lease.close()
        self.app.close()


@contextlib.contextmanager
def _begin(target: Any) -> Iterator[Any]:
    with target.begin() as work:
        yield work


def race(configuration: Configuration, url: str, attempts: int) -> Count:
    """Race one configuration and its twin."""
    count = Count(configuration.name)
    contest = Race(configuration, url)
    try:
        few = configuration.database == "sqlite"
        attempts = attempts // 10 if few else attempts
        contest.run(count, attempts, fenced=True, enough=ENOUGH[configuration.database])
        contest.run(count, 200, fenced=False, enough=1)
    finally:
        contest.close()
    return count


# --- results ------------------------------------------------------------------------------


def race_results(kind: str, redis: Redis, directory: Path, runs: int) -> dict[str, Any]:
    """Have attempts of many runs end in any order; compare results with the ledger."""
    from tests.integration.floor import Floor

    directory.mkdir()
    floor = Floor(kind, redis, directory, concurrency=4)
    task = floor.app.tasks["dash"]
    attempts = 0
    try:
        floor.worker.start().ready()
        results: dict[str, Any] = {}
        while len(results) < runs:
            for _ in range(4):
                pauses = (random.uniform(0, 0.05), random.uniform(0, 0.05))
                result = floor.lease.dispatch(task, pauses, entry=str(uuid.uuid4()))
                results[result.id] = result
                attempts += 1
            time.sleep(random.uniform(0.02, 0.1))
            floor.depose()
            for task_id in [each for each in results if floor.lease.outcome(each) is None]:
                pauses = (random.uniform(0, 0.05), random.uniform(0, 0.05))
                task.apply_async(pauses, **floor.lease.options(task_id))
                attempts += 1
        for task_id, result in results.items():
            wait_until(lambda task_id=task_id: floor.lease.outcome(task_id), timeout=60)
            wait_until(lambda result=result: result.ready(), timeout=60)
        wrong = [
            task_id
            for task_id, result in results.items()
            if result.state != "SUCCESS" or result.result != floor.lease.epoch_of(task_id)
        ]
    finally:
        floor.close()
    return {
        "backend": kind,
        "sqlalchemy": sa.__version__,
        "runs": runs,
        "attempts": attempts,
        "stale_terminal": len(wrong),
    }


# --- the report ---------------------------------------------------------------------------


def report(path: Path, counts: list[Count], results: list[dict[str, Any]]) -> bool:
    """Write what was found beside what another SQLAlchemy found; return if all is well."""
    old = json.loads(path.read_text()) if path.exists() else {}
    rows = [
        *(each for each in old.get("configurations", []) if _other(each)),
        *map(asdict, counts),
    ]
    ends = [*(each for each in old.get("results", []) if _other(each)), *results]
    ok = all(
        row["stale_committed"] == 0
        and row["twin_stale_committed"] > 0
        and row["stale_at_commit"] >= ENOUGH[row["configuration"].split()[0]]
        for row in rows
    ) and all(row["stale_terminal"] == 0 for row in ends)
    summary = {
        "ok": ok,
        "attempts": sum(row["attempts"] for row in rows),
        "stale_at_commit": sum(row["stale_at_commit"] for row in rows),
        "stale_committed": sum(row["stale_committed"] for row in rows),
        "twin_stale_committed": sum(row["twin_stale_committed"] for row in rows),
        "stale_terminal": sum(row["stale_terminal"] for row in ends),
        "configurations": rows,
        "results": ends,
    }
    path.write_text(json.dumps(summary, indent=2) + "\n")
    return ok


def _other(row: dict[str, Any]) -> bool:
    return row["sqlalchemy"].split(".")[:2] != sa.__version__.split(".")[:2]


def main() -> int:
    """Race everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--attempts", type=int, default=3400, help="of each configuration, a tenth on SQLite"
    )
    parser.add_argument("--runs", type=int, default=150, help="of each result backend")
    parser.add_argument("--only", default="", help="configurations whose name has this in it")
    parser.add_argument("--output", type=Path, default=Path("fence-race.json"))
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    counts: list[Count] = []
    results: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = _databases(stack, directory)
        for configuration in CONFIGURATIONS:
            if options.only not in configuration.name:
                continue
            counts.append(race(configuration, urls[configuration.database](), options.attempts))
            print(json.dumps(asdict(counts[-1])), flush=True)
        if options.only in "results":
            redis = stack.enter_context(Redis())
            for kind in ("redis", "db", "file", "rpc"):
                results.append(race_results(kind, redis, directory / kind, options.runs))
                print(json.dumps(results[-1]), flush=True)
    ok = report(options.output, counts, results)
    print("nothing stale got through" if ok else "STALE WORK GOT THROUGH, or too little was raced")
    return 0 if ok else 1


def _databases(stack: contextlib.ExitStack, directory: Path) -> dict[str, Callable[[], str]]:
    """Return what gives an empty database of each kind; servers start when first asked for."""
    started: dict[type, Any] = {}

    def server(cls: Any) -> str:
        if cls not in started:
            started[cls] = stack.enter_context(cls())
        return started[cls].create_database()

    return {
        "postgresql": lambda: server(PostgreSQL),
        "mariadb": lambda: server(MariaDB),
        "sqlite": lambda: f"sqlite:///{directory / f'{uuid.uuid4()}.sqlite3'}",
    }


if __name__ == "__main__":
    sys.exit(main())
