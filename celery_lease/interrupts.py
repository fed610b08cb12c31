"""Signals that end the process, put off until a step is done.

Celery's beat ends on SIGTERM and SIGINT by an exception that its handler raises, wherever
the main thread is: between a flush and the mark that belongs to it, too.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["put_off"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def put_off() -> Iterator[None]:
    """Have a signal that comes inside the block handled at its end.

    Elsewhere than on the main thread, where Python handles signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, Any]] = []
    # SIG_DFL and SIG_IGN are no callables, and stay: the process ends at once, or never.
    handlers = {each: handler for each in _SIGNALS if callable(handler := signal.getsignal(each))}
    for each in handlers:
        signal.signal(each, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number, frame in came[:1]:  # The first is enough: it ends the process.
            handlers[signal.Signals(number)](number, frame)
