"""Run the benchmarks and print them as ratios, each measured in turn in the same run.

A rate is that of a bare ``apply_async`` loop on the same broker, a moment before or
after: machines differ, ratios less so. Every dispatch is checked: n distinct task ids at
the broker, and n published runs in the ledger.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks import fence
from tests.services import MariaDB, PostgreSQL, RabbitMQ, Redis, ServiceMissing, TCPProxy

#: Seconds that one added round trip to the broker takes in the last comparison.
FAR = 0.001


def measure(what: str, kind: str, n: int, **environment: str) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.one", what, kind, str(n)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{what} {kind} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Servers:
    """The servers of this run, started when they are asked for."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._running: dict[type, object] = {}
        self._directory = Path(tempfile.mkdtemp())

    def get(self, cls: type):
        """Return a running server."""
        if cls not in self._running:
            self._running[cls] = self._stack.enter_context(cls())
        return self._running[cls]

    def database(self, kind: str) -> str:
        """Return the URL of an empty database."""
        if kind == "sqlite":
            return f"sqlite:///{tempfile.mkdtemp(dir=self._directory)}/lease.sqlite3"
        return self.get({"postgresql": PostgreSQL, "mariadb": MariaDB}[kind]).create_database()

    def redis(self) -> str:
        """Return the URL of a Redis database that is empty."""
        return self.get(Redis).create_database()


def checked(result: dict[str, float], *, complete: bool) -> float:
    """Return the rate, after making sure that nothing is missing or there twice."""
    if result["distinct"] != result["sent"]:
        raise SystemExit(f"{result}: a task id is there twice")
    if complete and not result["distinct"] == result["published"] == result["n"]:
        raise SystemExit(f"{result}: not all was sent and marked")
    return result["per_s"]


def compare(
    servers: Servers, kind: str, n: int, rounds: int, *, database: str = "", far: bool = False
) -> float:
    """Return a scheduler's rate over the bare loop's: the median of some rounds in turn."""
    ratios = []
    for _ in range(rounds):
        rates = {}
        for each in ("bare", kind):
            url = servers.redis()
            environment = {"BENCH_REDIS": url, "BENCH_BROKER": url}
            if database:
                environment["BENCH_DATABASE"] = servers.database(database)
            with ExitStack() as stack:
                if far:
                    port = int(url.rsplit(":", 1)[1].split("/")[0])
                    proxy = stack.enter_context(TCPProxy(port))
                    proxy.delay(FAR)
                    environment["BENCH_BROKER"] = url.replace(str(port), str(proxy.port))
                result = measure("dispatch", each, n, **environment)
            rates[each] = checked(result, complete=each in ("bare", "lease"))
        ratios.append(rates[kind] / rates["bare"])
    return statistics.median(ratios)


def compare_confirmed(servers: Servers, n: int, rounds: int) -> float:
    """Return the rate on RabbitMQ over a bare loop that has each message confirmed."""
    ratios = []
    for _ in range(rounds):
        rates = {}
        for each in ("bare", "lease"):
            rabbit = servers.get(RabbitMQ)
            url = rabbit.create_vhost()
            result = measure(
                "dispatch",
                each,
                n,
                BENCH_BROKER=url,
                BENCH_CONFIRMED="1",
                BENCH_DATABASE=servers.database("postgresql"),
            )
            rabbit.delete_vhost(url)
            rates[each] = checked(result, complete=True)
        ratios.append(rates["lease"] / rates["bare"])
    return statistics.median(ratios)


def dispatching(servers: Servers, n: int, rounds: int) -> Iterator[tuple[str, float]]:
    """Yield the names of comparisons with their ratios."""
    for database in ("postgresql", "mariadb", "sqlite"):
        yield f"lease, {database}", compare(servers, "lease", n, rounds, database=database)
    yield (
        f"lease, postgresql, broker {FAR * 1e3:g} ms away",
        compare(servers, "lease", n, rounds, database="postgresql", far=True),
    )
    for kind in ("stock", "redbeat", "django"):
        yield kind, compare(servers, kind, n, 1)
    yield "lease, postgresql, RabbitMQ, both confirmed", compare_confirmed(servers, n, rounds)


def fencing(servers: Servers, n: int, rounds: int) -> Iterator[str]:
    """Yield sentences about what the fence costs."""
    added = fence.unstamped(20_000, 9)
    yield f"a fenced call without a stamp: {added * 1e6:+.1f} µs"
    # Beside the others' server, as only this one waits for its disk.
    with PostgreSQL(fsync=True) as server:
        bench = fence.Bench(servers.redis(), server.create_database())
        alone, added = bench.added(n, rounds)
        yield (
            f"a task that writes one row, {alone * 1e3:.2f} ms: {added * 1e3:+.2f} ms in the "
            f"guarded transaction"
        )
        ratio = bench.throughput(n, rounds)
        yield (
            f"bodies of {fence.BODY * 1e3:g} ms on {fence.PROCESSES} processes: {ratio:.2f} of "
            f"the plain tasks' rate"
        )
        bench.close()


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--due", type=int, default=10_000, help="entries that are due at once")
    parser.add_argument("--many", type=int, default=100_000, help="entries of an idle beat")
    parser.add_argument("--tasks", type=int, default=1000, help="tasks that pass the fence")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as stack:
        servers = Servers(stack)
        print(f"{options.due} due entries: tasks/s over a bare apply_async loop")
        try:
            for name, ratio in dispatching(servers, options.due, options.rounds):
                print(f"  {name:45} {ratio:6.2f}", flush=True)
        except ServiceMissing as missing:
            print(f"  left out: {missing}")
        print("the fence, on PostgreSQL with fsync")
        for line in fencing(servers, options.tasks, options.rounds):
            print(f"  {line}", flush=True)
        print(f"{options.many} entries that are not due")
        print(f"  {'':10} {'start-up':>12} {'idle tick':>14} {'memory':>10}")
        stock: dict[str, float] = {}
        for kind in ("stock", "memory", "lease"):
            url = servers.redis()
            environment = {"BENCH_BROKER": url, "BENCH_DATABASE": servers.database("postgresql")}
            result = measure("idle", kind, options.many, **environment)
            stock = stock or result
            print(
                f"  {kind:10} {result['start_up_s']:8.2f} s CPU {result['idle_us']:11.1f} µs "
                f"{result['memory_mb']:7.0f} MB   "
                f"({result['start_up_s'] / stock['start_up_s']:.2f} and "
                f"{result['memory_mb'] / stock['memory_mb']:.2f} of stock)",
                flush=True,
            )


if __name__ == "__main__":
    main()
