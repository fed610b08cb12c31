"""A Celery app with fenced tasks, a lease that is held, and a worker in this process."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from celery import Celery, signals
from celery.contrib.testing.worker import start_worker
from celery.worker import state
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from celery_lease import FencedTask
from celery_lease.execution import fence_store
from celery_lease.signals import task_refused
from celery_lease.testing import HeldLease, hold
from tests.services.base import wait_until


class Base(DeclarativeBase):
    """The guarded data."""


class Note(Base):
    """A row that a task writes."""

    __tablename__ = "note"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str] = mapped_column(sa.String(200))
    epoch: Mapped[int]


class Workshop:
    """Everything a test of fenced tasks needs; close it in the end."""

    def __init__(self, url: str, directory: Path, **conf: Any) -> None:
        self.url = url
        self.lease: HeldLease = hold(url)
        self.engine = sa.create_engine(url)
        self.Session = sessionmaker(self.engine)
        Base.metadata.create_all(self.engine)
        self.app = Celery("workshop", set_as_current=False)
        self.app.conf.update(
            broker_url="memory://",
            broker_transport_options={"polling_interval": 0.01},
            # One process: queues are shared by all apps on this transport.
            task_default_queue=f"workshop-{uuid.uuid4()}",
            result_backend=f"db+sqlite:///{directory / 'results.sqlite3'}",
            beat_lease_url=url,
            worker_send_task_events=False,
            broker_connection_retry_on_startup=True,
        )
        self.app.conf.update(conf)
        #: (task name, task id, state) of everything that a worker ended, oldest first.
        self.ended: list[tuple[str, str, str]] = []
        #: What task_refused said.
        self.refusals: list[dict[str, Any]] = []
        self._headers: list[dict[str, Any]] = []
        #: What the task side logged. Celery's log set-up removes caplog's handler.
        self.records: list[logging.LogRecord] = []
        self._handler = logging.Handler()
        self._handler.emit = self.records.append  # type: ignore[method-assign]
        logging.getLogger("celery_lease.task").addHandler(self._handler)
        signals.task_postrun.connect(self._note_end)
        signals.before_task_publish.connect(self._note_publish)
        task_refused.connect(self._note_refusal)

    def _note_end(self, sender: Any = None, task_id: str = "", state: str = "", **_: Any) -> None:
        self.ended.append((sender.name, task_id, state))

    def _note_publish(self, headers: Any = None, **_: Any) -> None:
        self._headers.append(headers)

    def _note_refusal(self, sender: Any = None, **what: Any) -> None:
        what.pop("signal", None)
        self.refusals.append({"task": sender.name, **what})

    @property
    def published(self) -> list[tuple[str, str, dict[str, Any]]]:
        """(task name, task id, stamps) of everything that was published, oldest first."""
        return [
            (each["task"], each["id"], dict(each.get("stamps") or {})) for each in self._headers
        ]

    def task(self, **options: Any) -> Any:
        """Decorate a fenced, bound task."""
        return self.plain(**{"bind": True, "base": FencedTask, **options})

    def plain(self, **options: Any) -> Any:
        """Decorate a task of this app alone: by default Celery gives it to all apps."""
        return self.app.task(shared=False, **options)

    @contextmanager
    def worker(self) -> Iterator[None]:
        """Run a worker in a thread of this process."""
        with start_worker(self.app, perform_ping_check=False, loglevel=logging.INFO):
            yield
            # As start_worker does; the broadcast ends its wait for a message.
            state.should_terminate = 0
            self.app.control.broadcast("heartbeat")

    def wait(self, task_id: str, times: int = 1) -> str:
        """Wait until a worker has ended a task for the n-th time; return its last state."""

        def states() -> list[str]:
            return [state for _, each, state in self.ended if each == task_id]

        wait_until(lambda: len(states()) >= times, timeout=20, message=f"the end of {task_id}")
        return states()[times - 1]

    def result_state(self, task_id: str) -> str:
        """Return what the result store says."""
        return self.app.backend.get_state(task_id)

    def write(self, task: Any, text: str, **options: Any) -> None:
        """Write a note in a guarded block of a task."""
        with task.fence.transaction(self.Session, **options) as session:
            session.add(Note(text=text, epoch=task.epoch or 0))

    def notes(self) -> list[tuple[str, int]]:
        """Return the notes that are committed, oldest first."""
        with self.Session() as session:
            rows = session.execute(sa.select(Note.text, Note.epoch).order_by(Note.id))
            return [(text, epoch) for text, epoch in rows]

    def logged(self, action: str) -> list[logging.LogRecord]:
        """Return what was logged about one kind of transition."""
        return [each for each in self.records if getattr(each, "action", None) == action]

    def close(self) -> None:
        """Let go of connections and signals."""
        logging.getLogger("celery_lease.task").removeHandler(self._handler)
        signals.task_postrun.disconnect(self._note_end)
        signals.before_task_publish.disconnect(self._note_publish)
        task_refused.disconnect(self._note_refusal)
        fence_store(self.app).dispose()
        self.engine.dispose()
        self.lease.close()
        self.app.close()
