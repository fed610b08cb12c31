"""Real Celery processes for tests, with the face of a container."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.services.base import ROOT, alive, freeze_tree, process_tree, signal_all, wait_until
from tests.services.guardian import GUARDIAN, family

if TYPE_CHECKING:
    from typing_extensions import Self

_numbers = itertools.count(1)


class ProcessFailed(Exception):
    """A process ended, or said nothing, where it should have gone on."""


class CeleryProcess:
    """
    One process that logs to a file and that a test signals, asks and waits for.

    It has what pytest-celery's nodes ask of a container (`name`, `id`, `status`, `kill`, `logs`,
    `ready`, `reload`, `restart`, `teardown`), see `tests.services.cluster`. Usable as a context
    manager: start, wait until ready; teardown.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        directory: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        ready_when: str | re.Pattern[str] = "",
        ready_timeout: float = 30.0,
    ) -> None:
        """`directory` gets the log; the process is ready when its log says `ready_when`."""
        self.name = name
        self.command = list(command)
        self.env = dict(env or {})
        self.cwd = cwd
        self.ready_when = ready_when
        self.ready_timeout = ready_timeout
        #: The file with everything the process said.
        self.log = directory / f"{name}-{next(_numbers)}.log"
        #: pytest-celery shows the first twelve letters of it.
        self.id = self.log.stem
        self.process: subprocess.Popen[bytes] | None = None
        self._begin = 0

    @classmethod
    def beat(
        cls,
        app: str,
        *arguments: str,
        name: str = "beat",
        scheduler: str = "lease",
        loglevel: str = "DEBUG",
        **options: object,
    ) -> Self:
        """A ``celery beat`` of an app; further options are the constructor's."""
        command = [sys.executable, "-m", "celery", "-A", app, "beat"]
        command += ["--scheduler", scheduler, "--loglevel", loglevel, *arguments]
        return cls(name, command, ready_when="beat: Starting...", **options)

    @classmethod
    def worker(
        cls,
        app: str,
        *arguments: str,
        name: str = "worker",
        pool: str = "prefork",
        concurrency: int = 1,
        loglevel: str = "INFO",
        **options: object,
    ) -> Self:
        """A ``celery worker`` of an app; further options are the constructor's."""
        command = [sys.executable, "-m", "celery", "-A", app, "worker"]
        command += ["--hostname", f"{name}@%h", "--pool", pool, "--concurrency", str(concurrency)]
        command += ["--loglevel", loglevel, "--without-gossip", "--without-mingle", *arguments]
        return cls(name, command, ready_when=re.compile(r"@\S+ ready\."), **options)

    def start(self) -> Self:
        """Start, and do not wait."""
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.cwd,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.env},
                start_new_session=True,
            )
        GUARDIAN.watch(self.pid)
        return self

    @property
    def pid(self) -> int:
        """The main process."""
        if self.process is None:
            raise ProcessFailed(f"{self.name} was never started")
        return self.process.pid

    @property
    def children(self) -> list[int]:
        """Its descendants, oldest first: a prefork worker's pool."""
        return sorted(process.pid for process in process_tree(self.pid)[1:])

    @property
    def exit_code(self) -> int | None:
        """How the main process ended (-9: by SIGKILL); None while it runs."""
        return None if self.process is None else self.process.poll()

    @property
    def status(self) -> str:
        """``created``, ``running`` (stopped by SIGSTOP counts, as for a container), ``exited``."""
        if self.process is None:
            return "created"
        return "running" if self.exit_code is None else "exited"

    def kill(
        self, signal: str | int = "SIGKILL", *, group: bool = False, pid: int | None = None
    ) -> None:
        """Signal the main process, or the whole group, or one of the children."""
        number = signal_number(signal)
        if group:
            os.killpg(self.pid, number)
        elif pid is None:
            # Not os.kill: this knows whether the process was reaped already.
            self.process.send_signal(number)
        elif pid in self.children:
            os.kill(pid, number)
        else:
            raise ProcessFailed(f"{pid} is no child of {self.name}")

    def freeze(self) -> None:
        """Stop the main process and all its children (SIGSTOP), and wait until they stand."""
        tree = freeze_tree(self.pid)
        wait_until(lambda: all(map(_stands, tree)), message=f"{self.name} to stand")

    def thaw(self) -> None:
        """Let the main process and all its children go on (SIGCONT)."""
        signal_all(process_tree(self.pid), signal.SIGCONT)

    def logs(self) -> str:
        """Everything it said, before a restart too."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for_log(
        self, wanted: str | re.Pattern[str], timeout: float = 30.0, *, after: int = 0
    ) -> re.Match[str]:
        """
        Wait until the log has a text, or matches a compiled expression, from `after` on.

        The match's `end()` is the position to go on from. Fails early when the process ends.
        """
        regex = re.compile(re.escape(wanted)) if isinstance(wanted, str) else wanted

        def look() -> re.Match[str] | None:
            ended = self.status == "exited"  # before we read: it may have said it last
            match = regex.search(self.logs(), after)
            if match is None and ended:
                raise ProcessFailed(
                    f"{self.name} ended with {self.exit_code} and never said {regex.pattern!r}"
                    f"\n{self._last_words()}"
                )
            return match

        try:
            return wait_until(look, timeout=timeout, interval=0.05)
        except TimeoutError:
            raise TimeoutError(
                f"{self.name} did not say {regex.pattern!r} in {timeout:g} s\n{self._last_words()}"
            ) from None

    def wait(self, timeout: float = 30.0) -> int:
        """Wait for the end of the main process and return its exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"{self.name} did not end within {timeout:g} s\n{self._last_words()}"
            ) from None

    def ready(self) -> bool:
        """Wait until it is ready, since its latest start."""
        self.wait_for_log(self.ready_when, self.ready_timeout, after=self._begin_of_text())
        return True

    def reload(self) -> None:
        """Look at the process again, as for a container: `status` always does."""

    def restart(self, timeout: float = 10) -> None:
        """End it and start it again, with the same log."""
        self.stop(timeout)
        self.start()

    def stop(self, timeout: float = 10) -> None:
        """End it and its children: thaw, SIGTERM, and SIGKILL for what is left after `timeout`."""
        if self.process is None:
            return
        group = family(self.pid)
        if self.status == "running":
            signal_all(group, signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                pass  # by force, then
        # The group outlives its leader: the children of a killed worker are in it.
        signal_all(group := group | family(self.pid), signal.SIGKILL)
        self.process.wait(10)
        wait_until(lambda: not any(map(alive, group)), message=f"the end of {self.name}'s group")
        GUARDIAN.forget(self.pid)

    def teardown(self) -> None:
        """End it; the log stays."""
        self.stop()

    def __enter__(self) -> Self:
        """Start, and wait until it is ready."""
        self.start()
        try:
            self.ready()
        except BaseException:
            self.teardown()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        """End it."""
        self.teardown()

    def __repr__(self) -> str:
        return f"<{self.name}: {self.status}>"

    def _begin_of_text(self) -> int:
        return len(self.log.read_bytes()[: self._begin].decode(errors="replace"))

    def _last_words(self) -> str:
        return "\n".join(self.logs().splitlines()[-30:])


def _stands(process: psutil.Process) -> bool:
    return not alive(process) or process.status() == psutil.STATUS_STOPPED


def signal_number(name: str | int) -> int:
    """The number of ``"SIGSTOP"``, ``"STOP"`` or a number."""
    if isinstance(name, str):
        return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    return name
