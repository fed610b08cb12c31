"""
Ends what a test run started, should the run itself be killed.

One small process a run: it is told what was started and what has ended, on its standard input,
and acts when that is closed. It imports nothing of the project, so as to start quickly.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil


class Guardian:
    """Our side: starts the process when there is something to watch."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def watch(self, pid: int, directory: Path | None = None) -> None:
        """If we are killed: kill this process, its children and group; remove the directory."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        self._tell([pid, str(directory or "")])

    def forget(self, pid: int) -> None:
        """This process has ended."""
        if self._process is not None:
            self._tell([pid, None])

    def dismiss(self) -> None:
        """Nothing is left to watch."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _tell(self, message: list[object]) -> None:
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()


GUARDIAN = Guardian()
# Registered before anything it watches is, and so called after all that was stopped.
atexit.register(GUARDIAN.dismiss)


def main() -> None:
    """The other side: listen until the run ends, then end what it left."""
    left: dict[int, str] = {}
    for line in sys.stdin:
        pid, directory = json.loads(line)
        if directory is None:
            left.pop(pid, None)
        else:
            left[pid] = directory
    for pid, directory in left.items():
        for process in family(pid):
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                pass  # gone by itself: as good
        if directory:
            shutil.rmtree(directory, ignore_errors=True)


def family(pid: int) -> set[psutil.Process]:
    """A process, its descendants, and the members of its group, which outlives it."""
    members: set[psutil.Process] = set()
    for process in psutil.process_iter():
        try:
            if process.pid == pid or os.getpgid(process.pid) == pid:
                members |= {process, *process.children(recursive=True)}
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass  # gone while we looked
    return members


if __name__ == "__main__":
    main()
