"""What the fence costs a task: each figure beside that of a plain task, in the same run.

The worker is started for this module's app (``celery -A benchmarks.fence worker``); the
broker and the database come from the environment.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa
from celery import Celery, Task, signals
from celery.app.trace import build_tracer
from sqlalchemy.orm import Session, declarative_base, sessionmaker

from celery_lease import FencedTask
from celery_lease.testing import HeldLease, hold
from tests.services.base import wait_until

#: Seconds that a body takes where throughput is measured.
BODY = 0.005
#: Child processes of the worker there.
PROCESSES = 2

app = Celery("fence", broker=os.environ.get("BENCH_BROKER", "memory://"), set_as_current=False)
app.conf.update(
    beat_lease_url=os.environ.get("BENCH_DATABASE", "sqlite:///unused"),
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    broker_connection_retry_on_startup=True,
)

Base = declarative_base()


class Row(Base):
    """What each task writes."""

    __tablename__ = "benchmark_row"
    id = sa.Column(sa.Integer, primary_key=True)
    kind = sa.Column(sa.String(10), index=True)
    at = sa.Column(sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"))


_sessions: dict[int, sessionmaker[Session]] = {}


def sessions() -> sessionmaker[Session]:
    """Return this process's sessionmaker."""
    pid = os.getpid()
    if pid not in _sessions:
        _sessions[pid] = sessionmaker(sa.create_engine(app.conf.beat_lease_url))
    return _sessions[pid]


@app.task(name="plain")
def plain(pause: float) -> None:
    """Write a row in a transaction."""
    time.sleep(pause)
    with sessions().begin() as session:
        session.add(Row(kind="plain"))


@app.task(base=FencedTask, bind=True, name="fenced")
def fenced(self: FencedTask, pause: float) -> None:
    """Write a row in a guarded transaction."""
    time.sleep(pause)
    with self.fence.transaction(sessions()) as session:
        session.add(Row(kind="fenced"))


# --- in the worker ------------------------------------------------------------------------

_began: dict[str, float] = {}
_took: dict[str, list[float]] = {"plain": [], "fenced": []}


@signals.task_prerun.connect
def _note_begin(task_id: str, **_: object) -> None:
    _began[task_id] = time.perf_counter()


@signals.task_postrun.connect
def _note_end(task_id: str, task: Task, **_: object) -> None:
    _took[task.name].append(time.perf_counter() - _began.pop(task_id))


@signals.worker_shutdown.connect
def _write(**_: object) -> None:
    if "BENCH_OUTPUT" in os.environ:  # of a solo worker: children keep theirs to themselves
        Path(os.environ["BENCH_OUTPUT"]).write_text(json.dumps(_took))


# --- measuring ----------------------------------------------------------------------------


class Bench:
    """A queue of tasks, a worker that empties it, and the rows that show how fast."""

    def __init__(self, broker: str, database: str) -> None:
        app.conf.update(broker_url=broker, beat_lease_url=database)
        self._environment = {**os.environ, "BENCH_BROKER": broker, "BENCH_DATABASE": database}
        self._lease: HeldLease = hold(database)
        self._engine = sa.create_engine(database)
        Base.metadata.create_all(self._engine)

    def close(self) -> None:
        """Close the connections."""
        self._lease.close()
        self._engine.dispose()

    def empty(
        self, kinds: list[str], pause: float, *options: str
    ) -> tuple[float, dict[str, list[float]]]:
        """Have a worker run tasks of these kinds, one after the other.

        Returns:
            Tasks per second, and for each kind the seconds that each took in a solo worker.
        """
        for each, kind in enumerate(kinds):
            if kind == "plain":
                plain.apply_async((pause,))
            else:
                self._lease.dispatch(fenced, (pause,), entry=f"{each}-{uuid.uuid4()}")
        directory = Path(tempfile.mkdtemp())
        output, log = directory / "took.json", directory / "worker.log"
        command = [sys.executable, "-m", "celery", "-A", "benchmarks.fence", "worker"]
        command += ["--loglevel", "ERROR", "--without-gossip", "--without-mingle", *options]
        environment = {**self._environment, "BENCH_OUTPUT": str(output)}
        with (
            log.open("wb") as said,
            subprocess.Popen(
                command, env=environment, stdout=said, stderr=subprocess.STDOUT
            ) as worker,
        ):
            try:
                wait_until(lambda: self._count() >= len(kinds), timeout=300, interval=0.2)
            except TimeoutError:
                raise SystemExit(f"the worker is stuck:\n{log.read_text()[-3000:]}") from None
            finally:
                worker.terminate()
        with self._engine.begin() as connection:
            first, last = connection.execute(
                sa.select(sa.func.min(Row.at), sa.func.max(Row.at))
            ).one()
            if self._count() != len(kinds):
                raise SystemExit(f"{self._count()} rows of {len(kinds)} tasks")
            connection.execute(sa.delete(Row))
        rate = len(kinds) / (last - first).total_seconds()
        return rate, json.loads(output.read_text())

    def _count(self) -> int:
        with self._engine.connect() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(Row))

    def added(self, n: int, rounds: int) -> tuple[float, float]:
        """Return a plain task's median seconds, and what the fence adds to it.

        The two take turns in one worker: a moment in which the host is slow is slow for both.
        """
        took = self.empty(["plain", "fenced"] * n * rounds, 0.0, "--pool", "solo")[1]
        alone, behind = (statistics.median(took[kind][n // 10 :]) for kind in ("plain", "fenced"))
        return alone, behind - alone

    def throughput(self, n: int, rounds: int) -> float:
        """Return the rate of fenced tasks over that of plain ones."""
        ratios = []
        for _ in range(rounds):
            plain_rate, fenced_rate = (
                self.empty([kind] * n, BODY, "--concurrency", str(PROCESSES))[0]
                for kind in ("plain", "fenced")
            )
            ratios.append(fenced_rate / plain_rate)
        return statistics.median(ratios)


def unstamped(calls: int, rounds: int) -> float:
    """Return the seconds that an unstamped call of a fenced task takes longer than a plain one."""
    bare = Celery("unstamped", broker="memory://", set_as_current=False)
    bare.conf.update(task_ignore_result=True)

    @bare.task(name="p", bind=True)
    def p(self: object) -> None:
        """Do nothing."""

    @bare.task(name="f", base=FencedTask, bind=True)
    def f(self: object) -> None:
        """Do nothing."""

    bare.finalize()
    # The registered tasks, as a worker takes them: p and f are only promises of them.
    tracers: dict[str, Callable[..., object]] = {
        task.name: build_tracer(task.name, bare.tasks[task.name], app=bare) for task in (p, f)
    }
    best = dict.fromkeys(tracers, float("inf"))
    for _ in range(rounds):
        for name, tracer in tracers.items():
            request = {"id": "x", "is_eager": False, "delivery_info": {}}
            began = time.perf_counter()
            for _ in range(calls):
                tracer("x", (), {}, request)
            best[name] = min(best[name], (time.perf_counter() - began) / calls)
    return best["f"] - best["p"]
