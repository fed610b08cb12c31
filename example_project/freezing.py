"""How the story stops a process at an exact place: the process stops itself there.

A sleep is not exact. The story makes a file ``<point>.armed``; the first process that
passes the point takes it, writes down who and what it is, and sends itself SIGSTOP.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path


def armed(point: str) -> bool:
    """Return whether the story asks for a stop at this point."""
    directory = os.environ.get("EXAMPLE_FREEZE_DIR")
    return bool(directory) and Path(directory, f"{point}.armed").exists()


def freeze_here(point: str, detail: str = "") -> None:
    """Stop this process here if the story asked for it; it goes on at SIGCONT.

    Args:
        point: Name of the place.
        detail: What it was about to do, for the story to read.
    """
    directory = os.environ.get("EXAMPLE_FREEZE_DIR")
    if not directory:
        return
    order, taken = Path(directory, f"{point}.armed"), Path(directory, f"{point}.taken")
    try:
        order.rename(taken)  # Only one process can.
    except FileNotFoundError:
        return
    note = Path(directory, f"{point}.note")
    note.write_text(f"{os.getpid()} {detail}\n", encoding="utf-8")
    note.rename(Path(directory, f"{point}.frozen"))
    os.kill(os.getpid(), signal.SIGSTOP)
