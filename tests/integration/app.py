"""A Celery app with fenced tasks for worker processes; its addresses come from the environment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery
from sqlalchemy.orm import sessionmaker

from celery_lease import FencedTask
from tests.integration.workshop import Base, Note


def make_app(  # noqa: C901 - many small tasks
    lease: str, broker: str, backend: str, directory: str
) -> Celery:
    """Return the app.

    Args:
        lease: URL of the lease database, which is the guarded data's too.
        broker: URL of the broker.
        backend: URL of the result backend.
        directory: Where tasks leave marks, and look for them.
    """
    app = Celery("floor", broker=broker, backend=backend, set_as_current=False)
    app.conf.update(
        beat_lease_url=lease,
        broker_connection_retry_on_startup=True,
        # What is left of a process that was killed comes back while the test waits.
        broker_transport_options={"visibility_timeout": 3600},
        worker_prefetch_multiplier=1,
        task_send_sent_event=False,
    )
    marks = Path(directory)
    engine = sa.create_engine(lease)
    maker = sessionmaker(engine)

    def write(task: FencedTask, text: str) -> None:
        with task.fence.transaction(maker) as session:
            session.add(Note(text=text, epoch=task.epoch))

    def wait_for(mark: str) -> None:
        while not (marks / mark).exists():
            time.sleep(0.02)

    @app.task(base=FencedTask, bind=True, shared=False, name="work")
    def work(self: FencedTask, key: str, then: str = "return", commit: bool = False) -> str:
        """Say that the body runs, wait for a mark, and end in one of several ways."""
        if commit:
            write(self, key)
        (marks / f"{key}.began").touch()
        if then == "die":
            wait_for(f"{key}.go")
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for(f"{key}.go")
        if then == "fail":
            raise ValueError(key)
        return f"{key} under {self.epoch}"

    @app.task(base=FencedTask, bind=True, shared=False, name="dash")
    def dash(self: FencedTask, before: float, after: float) -> int | None:
        """Write a note somewhere between two pauses; return the epoch."""
        time.sleep(before)
        write(self, self.request.id)
        time.sleep(after)
        return self.epoch

    @app.task(
        base=FencedTask,
        bind=True,
        shared=False,
        name="fragile",
        retry_on_worker_lost=True,
        default_retry_delay=0,
    )
    def fragile(self: FencedTask, key: str) -> str:
        """Die at the first attempt."""
        if self.request.retries == 0:
            (marks / f"{key}.began").touch()
            wait_for(f"{key}.go")
            os.kill(os.getpid(), signal.SIGKILL)
        return f"{key} at attempt {self.request.retries}"

    @app.task(bind=True, shared=False, name="errback")
    def errback(self: Any, task_id: str) -> None:
        """Leave a mark that names the stamp."""
        epoch = (self.request.stamps or {}).get("lease_epoch")
        (marks / f"{task_id}.errback-{epoch}").touch()

    app.engine = engine
    return app


if "FLOOR_LEASE" in os.environ:
    app = make_app(
        os.environ["FLOOR_LEASE"],
        os.environ["FLOOR_BROKER"],
        os.environ["FLOOR_BACKEND"],
        os.environ["FLOOR_MARKS"],
    )
    Base.metadata.create_all(app.engine)
    app.engine.dispose()
