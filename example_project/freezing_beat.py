"""The scheduler of beat A: it can stop itself in the middle of a dispatch."""

from __future__ import annotations

import time
from typing import Any

from celery.signals import before_task_publish

from celery_lease import LeasedScheduler
from example_project.freezing import armed, freeze_here


class FreezingScheduler(LeasedScheduler):
    """Stops between its last look at the lease and the broker having the message."""

    def setup_schedule(self) -> None:
        """Listen for publishes of this process."""
        before_task_publish.connect(self._freeze, weak=False)
        super().setup_schedule()

    def _freeze(self, headers: dict[str, Any] | None = None, **_: Any) -> None:
        # The trust was checked before; what follows is the broker's part.
        if armed("dispatch"):
            self._wait_for_a_renewal()
            freeze_here("dispatch", (headers or {}).get("id", ""))

    def _wait_for_a_renewal(self) -> None:
        """Have the renewing thread out of the SQLite file: frozen in it, it would hold it."""
        renewals = self.elector.renewals
        while self.elector.renewals == renewals:
            time.sleep(0.001)
