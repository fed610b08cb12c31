"""The story, on real processes: two beats, two workers, one freeze of each, one takeover.

``python -m example_project.failover [--dir DIRECTORY]``; ``make demo`` does so. Nothing
but SQLite files: one for the lease and the guarded data, one for the broker, one for
results. Every figure of the verdict is read from those files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

TTL, RENEW, MARGIN, RETRY = 3.0, 0.5, 0.5, 0.5
SUMMARY_EVERY, PLANNING_EVERY = 2.0, 3.0
#: No step takes this long unless something is wrong.
PATIENCE = 45.0

PROGRAMS = {
    "beat A": ["beat", "-S", "example_project.freezing_beat:FreezingScheduler"],
    "beat B": ["beat"],
    "worker 1": ["worker", "--pool", "solo", "--hostname", "one@%h", "--without-gossip"],
    "worker 2": ["worker", "--pool", "solo", "--hostname", "two@%h", "--without-gossip"],
}


class StoryBroke(Exception):
    """A step of the story did not come about."""


class Process:
    """One ``celery`` process, its log, and the signals that the story sends it."""

    def __init__(self, name: str, directory: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.log = directory / f"{name.replace(' ', '-')}.log"
        command = [sys.executable, "-m", "celery", "-A", "example_project", *PROGRAMS[name]]
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [*command, "--loglevel", "INFO"],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self._told = 0

    @property
    def frozen(self) -> bool:
        """Whether the kernel shows it as stopped."""
        stat = Path(f"/proc/{self.popen.pid}/stat")
        if not stat.exists():  # no /proc: ask ps
            shown = subprocess.run(
                ["ps", "-o", "state=", "-p", str(self.popen.pid)],
                capture_output=True,
                text=True,
                check=False,
            ).stdout
            return shown.strip().startswith("T")
        return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"

    def text(self) -> str:
        """Return all that it has logged."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def news(self) -> Iterator[str]:
        """Yield the lines that have come since the last call and speak of an epoch."""
        lines = self.text().splitlines(keepends=True)
        while self._told < len(lines) and lines[self._told].endswith("\n"):
            line = lines[self._told].rstrip()
            self._told += 1
            if "epoch" in line:
                yield line

    def go_on(self) -> None:
        """Continue it."""
        self.popen.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """End it gracefully and return its exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(20)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait()


@dataclass
class Story:
    """The time line: it starts processes, waits for what it can see, and tells it."""

    directory: Path
    database_url: str
    environment: dict[str, str]
    processes: dict[str, Process] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    takeover: float | None = None

    def __post_init__(self) -> None:
        self.engine = sa.create_engine(self.database_url)

    # --- telling ------------------------------------------------------------------------

    def tell(self, text: str) -> None:
        """Print a line of the time line."""
        self.relay()
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def relay(self) -> None:
        """Print what the processes logged about epochs."""
        for process in self.processes.values():
            for line in process.news():
                print(f"          {process.name:9}| {line}", flush=True)

    # --- seeing -------------------------------------------------------------------------

    def rows(self, query: str, **values: Any) -> list[Any]:
        """Return the rows of a query over the database."""
        with self.engine.connect() as connection:
            return list(connection.execute(sa.text(query), values))

    def number(self, query: str, **values: Any) -> int:
        """Return the one number of a query."""
        return int(self.rows(query, **values)[0][0])

    def wait_for(self, what: str, seen: Callable[[], Any]) -> Any:
        """Wait until *seen* returns something true, and return it.

        Raises:
            StoryBroke: It did not happen in time, or a process ended.
        """
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self.relay()
            for process in self.processes.values():
                if process.popen.poll() is not None:
                    raise StoryBroke(f"{process.name} ended with {process.popen.returncode}")
            try:
                found = seen()
            except sa.exc.OperationalError:
                found = None  # The tables are still being made, or the file is busy.
            if found:
                return found
            time.sleep(0.05)
        raise StoryBroke(f"waited {PATIENCE:.0f} s in vain for: {what}")

    def committed(self, where: str = "1 = 1", **values: Any) -> list[Any]:
        """Return runs that have their final outcome: (id, epoch of the commit)."""
        return self.rows(
            "SELECT r.id, c.epoch FROM celery_lease_run r JOIN celery_lease_commit c "
            f"ON c.task_id = r.id WHERE c.outcome = 'committed' AND {where}",
            **values,
        )

    # --- acting -------------------------------------------------------------------------

    def start(self, name: str) -> Process:
        """Start one of the programs."""
        self.processes[name] = Process(name, self.directory, self.environment)
        return self.processes[name]

    def freeze_at(self, point: str) -> tuple[Process, str]:
        """Have the next process that passes *point* stop itself there; return it and its note."""
        (self.directory / f"{point}.armed").touch()
        note = self.directory / f"{point}.frozen"
        self.wait_for(f"a process to stop at {point!r}", note.exists)
        pid, _, detail = note.read_text(encoding="utf-8").strip().partition(" ")
        process = next(each for each in self.processes.values() if each.popen.pid == int(pid))
        self.wait_for(f"{process.name} to be frozen", lambda: process.frozen)
        return process, detail

    # --- the story ----------------------------------------------------------------------

    def play(self) -> None:
        """Play it from the first lease to the last commit."""
        # One after the other: on SQLite each would make the broker's tables and queues.
        for name in ("worker 1", "worker 2"):
            worker = self.start(name)
            self.wait_for(f"{name} to be ready", lambda worker=worker: " ready." in worker.text())
        self.start("beat A")
        self.wait_for("epoch 1", lambda: self.rows("SELECT 1 FROM celery_lease_term"))
        self.tell("beat A leads under epoch 1")
        self.start("beat B")
        self.wait_for("a first summary", lambda: self.committed("r.entry = 'daily-summary'"))
        self.tell("the first summary is committed under epoch 1")
        beat_b = self.processes["beat B"]
        self.wait_for("beat B to stand by", lambda: "stands by" in beat_b.text())
        self.tell("beat B stands by")

        worker, summary = self.freeze_at("summary")
        self.tell(f"{worker.name} is frozen inside the guarded block of summary {summary[:8]}")
        beat_a, late = self.freeze_at("dispatch")
        frozen_at = time.time()
        self.tell(f"{beat_a.name} is frozen in its dispatch of {_short(late)}, not yet sent")

        self.wait_for(
            "epoch 2", lambda: self.rows("SELECT 1 FROM celery_lease_term WHERE epoch = 2")
        )
        self.takeover = self._acquired_at(2) - frozen_at
        self.tell(f"beat B took over under epoch 2, {self.takeover:.1f} s after the freeze")
        late_id = late.split()[0]
        self.wait_for("the unsent run", lambda: self.committed("r.id = :id", id=late_id))
        self.tell(f"beat B sent {_short(late)}, and it is committed under epoch 2")

        beat_a.go_on()
        self.tell(f"{beat_a.name} wakes up, and its late message goes out")
        self.wait_for("the late message to be refused", lambda: self._refused(late_id))
        self.wait_for("beat A to stand by", lambda: beat_a.text().count("stands by"))
        self.tell(f"the late message was refused before its body; {beat_a.name} stands by")

        worker.go_on()
        self.tell(f"{worker.name} wakes up and tries to commit summary {summary[:8]}")
        self.wait_for("the frozen summary to be refused", lambda: self._refused(summary))
        self.tell("it was refused at its commit, and its rows were rolled back")
        self.wait_for("the refused run again", lambda: self.committed("r.id = :id", id=summary))
        self.tell("the refused run was dispatched again and committed under epoch 2")

    def finish(self) -> dict[str, int]:
        """Stop beats, wait for what is under way, stop workers; return exit statuses."""
        statuses = {name: self.processes.pop(name).stop() for name in ("beat A", "beat B")}
        self.wait_for("all runs to be settled", lambda: not self._unsettled())
        self.tell("both beats are stopped, every run is settled")
        for name in list(self.processes):
            statuses[name] = self.processes.pop(name).stop()
        return statuses

    def _refused(self, task_id: str) -> list[Any]:
        return self.rows("SELECT 1 FROM refusal WHERE task_id = :id", id=task_id)

    def _acquired_at(self, epoch: int) -> float:
        text = self.rows(
            "SELECT acquired_at FROM celery_lease_term WHERE epoch = :epoch", epoch=epoch
        )[0][0]
        return datetime.fromisoformat(f"{text}+00:00").timestamp()

    def _unsettled(self) -> list[Any]:
        return self.rows(
            "SELECT r.id FROM celery_lease_run r WHERE r.state <> 'skipped' AND NOT EXISTS "
            "(SELECT 1 FROM celery_lease_commit c WHERE c.task_id = r.id)"
        )

    def _gaps(self) -> int:
        """Count the summaries that were due and are neither runs nor recorded as skipped."""
        rows = self.rows(
            "SELECT due_at, skipped FROM celery_lease_run WHERE entry = 'daily-summary' "
            "ORDER BY due_at"
        )
        due = [datetime.fromisoformat(str(each.due_at)) for each in rows]
        planned = round((due[-1] - due[0]).total_seconds() / SUMMARY_EVERY) + 1
        return planned - sum(each.skipped or 1 for each in rows)

    def verdict(self) -> dict[str, Any]:
        """Return the figures, all read from the database."""
        refused = "SELECT COUNT(*) FROM refusal WHERE stage = :stage"
        found = {
            "epochs": [
                each[0] for each in self.rows("SELECT epoch FROM celery_lease_term ORDER BY epoch")
            ],
            "runs": self.number("SELECT COUNT(*) FROM celery_lease_run"),
            "commits": self.number("SELECT COUNT(*) FROM celery_lease_commit"),
            "summaries": self.number("SELECT COUNT(*) FROM summary"),
            "refused_at_start": self.number(refused, stage="start"),
            "refused_at_commit": self.number(refused, stage="commit"),
            "stale_committed": self.number(_STALE_ROWS) + self.number(_OUT_OF_ORDER),
            "committed_twice": self.number(_TWICE),
            "lost": len(self._unsettled()) + self.number(_UNWRITTEN) + self._gaps(),
            "takeover_s": round(self.takeover, 2) if self.takeover is not None else None,
            "ttl_s": TTL,
            "retry_s": RETRY,
        }
        found["ok"] = (
            found["epochs"] == [1, 2]
            and found["refused_at_start"] >= 1
            and found["refused_at_commit"] >= 1
            and found["stale_committed"] == found["committed_twice"] == found["lost"] == 0
            and found["takeover_s"] is not None
            and found["takeover_s"] <= TTL + RETRY + 1
        )
        return found


_EPOCHS = "SELECT epoch FROM celery_lease_term ORDER BY epoch"
#: Target rows that were not written under the epoch of their run's commit.
_STALE_ROWS = """
SELECT COUNT(*) FROM (
    SELECT run_id, epoch FROM summary UNION ALL SELECT run_id, epoch FROM maintenance
) w LEFT JOIN celery_lease_commit c ON c.task_id = w.run_id
WHERE c.task_id IS NULL OR c.epoch <> w.epoch
"""
#: Commits under a lower epoch than one that was there before them.
_OUT_OF_ORDER = """
SELECT COUNT(*) FROM celery_lease_commit later
WHERE EXISTS (SELECT 1 FROM celery_lease_commit c WHERE c.at < later.at AND c.epoch > later.epoch)
"""
#: Runs whose work is in the target more than once.
_TWICE = """
SELECT COUNT(*) FROM (
    SELECT run_id FROM summary GROUP BY run_id HAVING COUNT(*) > 1
    UNION ALL
    SELECT run_id FROM maintenance GROUP BY run_id, document_id HAVING COUNT(*) > 1
) doubled
"""
#: Summaries that count as committed and are not in the target, or did not succeed.
_UNWRITTEN = """
SELECT COUNT(*) FROM celery_lease_run r JOIN celery_lease_commit c ON c.task_id = r.id
WHERE c.outcome <> 'committed'
   OR (r.entry = 'daily-summary' AND NOT EXISTS (SELECT 1 FROM summary s WHERE s.run_id = r.id))
"""


def _short(ids: str) -> str:
    return ", ".join(each[:8] for each in ids.split())


@contextmanager
def _story(directory: Path) -> Iterator[Story]:
    """Yield a story whose processes are ended, whatever happens."""
    environment = {
        **os.environ,
        "EXAMPLE_DIR": str(directory),
        "EXAMPLE_FREEZE_DIR": str(directory),
        "EXAMPLE_TTL": str(TTL),
        "EXAMPLE_RENEW": str(RENEW),
        "EXAMPLE_MARGIN": str(MARGIN),
        "EXAMPLE_RETRY": str(RETRY),
        "EXAMPLE_SUMMARY_EVERY": str(SUMMARY_EVERY),
        "EXAMPLE_PLANNING_EVERY": str(PLANNING_EVERY),
    }
    story = Story(directory, f"sqlite:///{directory}/lease.sqlite3", environment)
    try:
        yield story
    finally:
        for process in story.processes.values():
            process.popen.send_signal(signal.SIGCONT)
            process.popen.kill()
            process.popen.wait()
        story.engine.dispose()


def _fresh(directory: Path) -> None:
    """Take away what an earlier story left."""
    directory.mkdir(parents=True, exist_ok=True)
    patterns = ("*.sqlite3", "*.sqlite3-*", "*.log", "*.armed", "*.taken", "*.frozen")
    for pattern in (*patterns, "result.json"):
        for each in directory.glob(pattern):
            each.unlink()


def main(arguments: list[str] | None = None) -> int:
    """Play the story, print the verdict, return the exit status."""
    parser = argparse.ArgumentParser(description="Two beats, one leader, a stale write refused.")
    parser.add_argument("--dir", help="leave result.json, logs and the SQLite files there")
    given = parser.parse_args(arguments).dir
    directory = Path(given or tempfile.mkdtemp(prefix="celery-lease-demo-")).resolve()
    _fresh(directory)
    print(f"files in {directory}; ttl {TTL:g} s, retry {RETRY:g} s")
    try:
        with _story(directory) as story:
            story.play()
            statuses = story.finish()
            result = {**story.verdict(), "exit_statuses": statuses}
    except StoryBroke as error:
        print(f"\nFAILED: {error}; the logs are in {directory}")
        return 1
    result["ok"] = result["ok"] and set(statuses.values()) == {0}
    (directory / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    _print_verdict(result)
    if given is None and result["ok"]:
        shutil.rmtree(directory, ignore_errors=True)
    return 0 if result["ok"] else 1


def _print_verdict(result: dict[str, Any]) -> None:
    print("\nverdict, read from the databases:")
    for key, value in result.items():
        if key != "ok":
            print(f"  {key.replace('_', ' '):18} {value}")
    print(
        "\nOK: nothing stale was committed, nothing twice, nothing was lost"
        if result["ok"]
        else "\nFAILED: see the figures above"
    )


if __name__ == "__main__":
    sys.exit(main())
