"""A Celery app with fenced tasks for worker processes; its addresses come from the environment."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery
from sqlalchemy.orm import sessionmaker

from celery_lease import FencedTask
from celery_lease.errors import UnsafeTransaction
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
    # As many connections as a worker runs tasks at once.
    engine = sa.create_engine(lease, pool_size=0)
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

    @app.task(base=FencedTask, bind=True, shared=False, name="mingle")
    def mingle(self: FencedTask, key: str, gate: str) -> None:
        """Say whose fence this is, again and again, with other tasks at work in between."""
        seen: list[Any] = []

        def look() -> None:
            entry = self.occurrence.entry if self.occurrence else None
            seen.append([self.request.id, self.fence.idempotency_key, self.epoch, entry])

        look()
        witness.delay(key)
        look()
        try:
            with self.fence.transaction(maker) as session:
                session.add(Note(text=key, epoch=self.epoch))
                session.flush()
                look()
                (marks / f"{key}.flushed").touch()
                wait_for(gate)
                look()
        finally:
            look()
            (marks / f"{key}.saw").write_text(json.dumps(seen))

    @app.task(base=FencedTask, bind=True, shared=False, name="scatter")
    def scatter(self: FencedTask, key: str) -> str:
        """Write from a thread (from a greenlet, in a pool of them) with the fence it is given."""
        fence = self.fence

        def ask() -> str:
            try:
                return f"the fence of epoch {self.fence.epoch}"
            except UnsafeTransaction:
                return "no fence"

        def write_there() -> None:
            with fence.transaction(maker) as session:
                session.add(Note(text=key, epoch=fence.epoch))

        with ThreadPoolExecutor(1) as threads:
            found = threads.submit(ask).result()
            threads.submit(write_there).result()
        return found

    @app.task(bind=True, shared=False, name="witness")
    def witness(self: Any, key: str) -> None:
        """Leave a mark that names the stamp. No fence turns it away."""
        stamps = self.request.stamps or {}
        (marks / f"{key}.child-{stamps.get('lease_epoch')}-{stamps.get('lease_run')}").touch()

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

    @app.task(
        base=FencedTask,
        bind=True,
        shared=False,
        name="patient",
        acks_late=True,
        acks_on_failure_or_timeout=False,
        time_limit=1,
    )
    def patient(self: FencedTask, key: str) -> str:
        """Run out of time, until there is a mark."""
        (marks / f"{key}.began").touch()
        wait_for(f"{key}.go")
        return f"{key} in time"

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
