"""The Celery application and its ten lines of configuration."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from celery import Celery

#: Where the embedded default keeps its files.
DIRECTORY = Path(os.environ.get("EXAMPLE_DIR", ".")).resolve()

#: Lease tables and guarded data live in one database: the guard is one transaction.
DATABASE_URL = os.environ.get("EXAMPLE_DATABASE_URL", f"sqlite:///{DIRECTORY}/lease.sqlite3")


def _seconds(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


app = Celery("example_project", include=["example_project.tasks"])
app.conf.update(
    broker_url=os.environ.get("EXAMPLE_BROKER_URL", f"sqla+sqlite:///{DIRECTORY}/broker.sqlite3"),
    result_backend=os.environ.get(
        "EXAMPLE_RESULT_BACKEND", f"db+sqlite:///{DIRECTORY}/results.sqlite3"
    ),
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    beat_scheduler="celery_lease:LeasedScheduler",
    beat_lease_url=DATABASE_URL,
    beat_lease_name="documents",
    beat_lease_ttl=_seconds("EXAMPLE_TTL", 15),
    beat_lease_renew_interval=_seconds("EXAMPLE_RENEW", 5),
    beat_lease_margin=_seconds("EXAMPLE_MARGIN", 2),
    beat_lease_retry_interval=_seconds("EXAMPLE_RETRY", 2),
    beat_schedule={
        "daily-summary": {
            "task": "documents.summarise",
            "schedule": timedelta(seconds=_seconds("EXAMPLE_SUMMARY_EVERY", 10)),
        },
        "retention-planning": {
            "task": "documents.plan_retention",
            "schedule": timedelta(seconds=_seconds("EXAMPLE_PLANNING_EVERY", 15)),
        },
    },
)
if app.conf.broker_url.startswith("sqla+"):
    # Several processes share the file: wait for its one writer.
    app.conf.broker_transport_options = {"connect_args": {"timeout": 30}}
