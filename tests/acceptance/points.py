"""Exact points at which a test has a process wait, stop or end: files, and no sleeps.

A test arms a point; the first process that passes it takes it, says so, and does there
what was asked.
"""

import os
import signal
import threading
import time
import weakref
from datetime import datetime, timezone
from pathlib import Path

from tests.services import wait_until

#: Where the files are, for the processes.
DIRECTORY = "ACCEPTANCE_POINTS"


def pass_point(name):
    """Go on, unless a test has armed this point."""
    directory = Path(os.environ[DIRECTORY])
    armed = directory / f"{name}.armed"
    taken = directory / f"{name}.taken.{os.getpid()}"
    try:
        armed.rename(taken)  # Only one process can.
    except FileNotFoundError:
        return
    action = taken.read_text()
    (directory / f"{name}.note").write_text(str(os.getpid()))
    (directory / f"{name}.note").rename(directory / f"{name}.reached")
    if action == "exit":
        os._exit(9)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "be told to end in vain":
        _be_told_to_end_in_vain()
    elif action == "wait":
        while not (directory / f"{name}.released").exists():
            time.sleep(0.02)


def _be_told_to_end_in_vain():
    """Get a SIGTERM in a callback of the garbage collector: Python drops what its handler raises.

    By chance this happens to any process that allocates while the signal comes.
    """
    thing = threading.Event()
    # To this very thread: sent to the process, it may come when the callback is over.
    callback = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
    del thing
    assert callback() is None


class Points:
    """The test's side."""

    def __init__(self, directory):
        self.directory = directory
        self.directory.mkdir()

    def arm(self, name, action):
        """Have the first process that passes wait, stop (by SIGSTOP), exit… there."""
        for old in self.directory.glob(f"{name}.*"):
            old.unlink()
        (self.directory / "new").write_text(action)
        (self.directory / "new").rename(self.directory / f"{name}.armed")

    def reached(self, name, timeout=30.0):
        """Wait until a process is there; return its id."""
        note = self.directory / f"{name}.reached"
        wait_until(note.exists, timeout=timeout, message=f"a process to pass {name!r}")
        return int(note.read_text())

    def reached_at(self, name):
        """Return the instant at which a process was there, by this host's clock: the servers' too.

        The test may see it much later, where the machine is busy.
        """
        changed = (self.directory / f"{name}.reached").stat().st_mtime
        return datetime.fromtimestamp(changed, timezone.utc)

    def release(self, name):
        """Let the process that waits there go on."""
        (self.directory / f"{name}.released").touch()
