"""The scheduler of beat A: it can stop itself in the middle of a dispatch."""

from __future__ import annotations

from typing import Any

from celery.signals import before_task_publish

from celery_lease import LeasedScheduler
from example_project.freezing import freeze_here


class FreezingScheduler(LeasedScheduler):
    """Stops between its last look at the lease and the broker having the message."""

    def setup_schedule(self) -> None:
        """Listen for publishes of this process."""
        before_task_publish.connect(_freeze, weak=False)
        super().setup_schedule()


def _freeze(headers: dict[str, Any] | None = None, **_: Any) -> None:
    # The trust was checked before; what follows is the broker's part.
    freeze_here("dispatch", (headers or {}).get("id", ""))
