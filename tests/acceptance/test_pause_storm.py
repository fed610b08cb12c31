"""Random pauses, crashes and restarts for a while; then every occurrence is counted."""

import random
import signal
import time
from contextlib import suppress

import pytest

from tests.acceptance.cluster import MARIADB, POSTGRESQL, TTL, on
from tests.services.base import freeze_tree, process_tree, signal_all
from tests.services.processes import ProcessFailed

ENTRIES = 20


@on(POSTGRESQL, MARIADB)
@pytest.mark.parametrize("duration", [30, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.timeout(1200)
def test_no_pause_crash_or_restart_breaks_a_promise(cluster, ledger, duration):
    """Stale never wins, nothing is lost, nothing guarded happens twice."""
    # Longer than a message waits in its queue, which the long storm fills where it shares a
    # small machine with others: each round would make the queue longer.
    patience = 10 if duration < 100 else 30
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    cluster.schedule = {
        f"entry-{number}": {
            "every": 5.0 + number % 6,
            "misfire": "all" if number % 5 == 0 else "latest",
            # A broker that restarts may lose messages, and a killed worker has some.
            "retry_lost_after": 2 * patience,
            "kwargs": {"work": 0.1 * (number % 3), "idle": 5},
        }
        for number in range(ENTRIES)
    }
    cluster.conf = {
        "beat_lease_redispatch_after": patience,
        "beat_lease_max_attempts": 1000,
        "beat_lease_guard_idle": 3,
        # Else a killed process is the task's failure, which is an outcome too.
        "task_reject_on_worker_lost": True,
        # Restart after restart: a worker comes back each time.
        "broker_connection_max_retries": None,
    }
    beats = [cluster.leader("A"), cluster.beat("B"), cluster.beat("C")]
    workers = [cluster.worker(name, concurrency=2, ready=False) for name in ("one", "two")]
    ledger.committed("entry-0")

    storm = Storm(cluster, [*beats, *workers], random.Random(seed))
    storm.freeze(beats[0], 2 * TTL)  # Chance may spare the leader for as long as 30 s.
    storm.rage(duration)
    calm_at = ledger.now()

    ledger.assert_accounted(
        cluster.schedule, before=calm_at, timeout=120 if duration < 100 else 300
    )
    ledger.assert_sound()
    counts = {
        what: ledger.number(f"SELECT COUNT(*) FROM {source}")
        for what, source in (
            ("epochs", "celery_lease_term"),
            ("committed", "target"),
            ("skipped", "celery_lease_run WHERE state = 'skipped'"),
            ("stale", "refusal WHERE reason = 'stale'"),
            ("duplicates", "refusal WHERE reason = 'duplicate'"),
            ("most attempts", "celery_lease_run WHERE attempt > 2"),
        )
    }
    print(f"{storm.faults}; {counts}")
    assert counts["epochs"] > 1


class Storm:
    """Faults, one after the other, in an order that the seed decides."""

    def __init__(self, cluster, nodes, chance):
        self.cluster = cluster
        self.nodes = nodes
        self.chance = chance
        #: How many of each kind there were.
        self.faults = {}
        self._frozen = []
        self._dead = []

    def rage(self, duration):
        """Do harm for so many seconds, then let all go on."""
        begin = time.monotonic()
        pair = self.cluster.pair
        restarts = [
            (begin + at * duration / 10, server)
            for at, server in ((2, pair.database_server), (6, pair.broker_server))
        ]
        if duration > 100:  # More than one of each.
            restarts = [
                (begin + at, self.chance.choice([pair.database_server, pair.broker_server]))
                for at in range(30, duration, 60)
            ]
        while time.monotonic() < begin + duration:
            self._recover(time.monotonic())
            if restarts and restarts[0][0] < time.monotonic():
                _, server = restarts.pop(0)
                self._count(f"{server.name} restarted")
                self.chance.choice([server.restart, lambda s=server: (s.kill(), s.start())])()
            else:
                self.chance.choice([self._freeze, self._freeze, self._kill, self._kill_child])()
            time.sleep(self.chance.uniform(0.5, 2.0))  # The storm's own pace.
        self._recover(float("inf"))

    def _recover(self, now):
        """Thaw what was frozen for long enough, and start again what is dead."""
        for each in [each for each in self._frozen if each[0] <= now]:
            self._frozen.remove(each)
            signal_all(each[1], signal.SIGCONT)
        for each in [each for each in self._dead if each[0] <= now]:
            self._dead.remove(each)
            each[1].start()
        for node in self._running():
            if node.container.status == "exited":  # Of a pool that was killed while it started.
                node.start()

    def _running(self):
        """Return the nodes that are neither dead nor frozen."""
        busy = [node for _, node in self._dead] + [node for _, _, node in self._frozen]
        return [node for node in self.nodes if node not in busy]

    def freeze(self, node, seconds):
        """Freeze one of the nodes for so long."""
        until = time.monotonic() + seconds
        self._frozen.append((until, freeze_tree(node.container.pid), node))
        self._count("froze")

    def _freeze(self):
        if nodes := self._running():
            self.freeze(self.chance.choice(nodes), self.chance.uniform(0.5, 3) * TTL)

    def _kill(self):
        if nodes := self._running():
            node = self.chance.choice(nodes)
            signal_all(process_tree(node.container.pid), signal.SIGKILL)
            node.container.wait()
            self._dead.append((time.monotonic() + self.chance.uniform(0, 3), node))
            self._count("killed")

    def _kill_child(self):
        """Kill one process of a pool: the worker goes on without it."""
        pools = [(node, node.container.children) for node in self._running()]
        if pools := [(node, children) for node, children in pools if children]:
            node, children = self.chance.choice(pools)
            with suppress(ProcessFailed, ProcessLookupError):  # It has ended by itself.
                node.kill("SIGKILL", pid=self.chance.choice(children))
            self._count("killed a child")

    def _count(self, what):
        self.faults[what] = self.faults.get(what, 0) + 1
