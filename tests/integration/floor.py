"""A worker process, and what a test of it needs: a lease that is held, an app to send with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from celery import Celery

from celery_lease.lease import Term
from celery_lease.testing import HeldLease, hold
from tests.integration.app import make_app
from tests.services import Redis
from tests.services.base import wait_until
from tests.services.processes import CeleryProcess


class Floor:
    """A worker process, the app to send with, and a lease to send under.

    Args:
        kind: The result backend.
        redis: The broker.
        directory: For everything that is written.
        url: The database of the lease and the guarded data; a SQLite file if not given.
        pool: The worker's pool.
        concurrency: How many tasks it runs at once.
    """

    def __init__(
        self,
        kind: str,
        redis: Redis,
        directory: Path,
        *,
        url: str = "",
        pool: str = "prefork",
        concurrency: int = 2,
    ) -> None:
        self.kind = kind
        self.marks = directory / "marks"
        self.marks.mkdir()
        (directory / "results").mkdir()
        self.url = url or f"sqlite:///{directory / 'lease.sqlite3'}"
        backend = {
            "redis": redis.create_database(),
            "db": f"db+sqlite:///{directory / 'results.sqlite3'}",
            "file": f"file://{directory / 'results'}",
            "rpc": "rpc://",
        }[kind]
        broker = redis.create_database()
        self.lease: HeldLease = hold(self.url)
        self.app: Celery = make_app(self.url, broker, backend, str(self.marks))
        self.worker = CeleryProcess.worker(
            "tests.integration.app",
            directory=directory,
            pool=pool,
            concurrency=concurrency,
            env={
                "FLOOR_LEASE": self.url,
                "FLOOR_BROKER": broker,
                "FLOOR_BACKEND": backend,
                "FLOOR_MARKS": str(self.marks),
            },
        )

    def send(self, key: str, then: str = "return", **options: Any) -> Any:
        """Dispatch the task as a beat would, with an errback."""
        commit = options.pop("commit", False)
        return self.lease.dispatch(
            self.app.tasks["work"],
            (key, then, commit),
            entry=key,
            link_error=self.app.tasks["errback"].s(),
            **options,
        )

    def send_again(self, task_id: str, key: str, then: str = "return") -> Any:
        """Send another attempt of a run under the lease that is held now."""
        return self.app.tasks["work"].apply_async(
            (key, then), link_error=self.app.tasks["errback"].s(), **self.lease.options(task_id)
        )

    def began(self, key: str) -> None:
        """Wait until the body runs."""
        wait_until((self.marks / f"{key}.began").exists, message=f"{key} to begin")

    def go(self, key: str) -> None:
        """Let the body go on."""
        (self.marks / f"{key}.go").touch()

    def depose(self) -> Term:
        """Have another holder take over; go on under its lease."""
        self.lease = self.lease.depose()
        return self.lease.term

    def errbacks(self, task_id: str) -> list[str]:
        """Return the epochs that the errback of a task was called under."""
        return [each.suffix[9:] for each in self.marks.glob(f"{task_id}.errback-*")]

    def said(self, text: str) -> None:
        """Wait until the worker said something."""
        self.worker.wait_for_log(text, 30)

    def close(self) -> None:
        """End the worker and all connections."""
        self.worker.teardown()
        self.lease.close()
        self.app.engine.dispose()
        self.app.close()
