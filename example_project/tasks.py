"""The tasks. What they write is written under the fence, or not at all."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from celery.signals import worker_init, worker_process_init

from celery_lease import FencedTask
from celery_lease.signals import task_refused
from example_project.app import app
from example_project.freezing import freeze_here
from example_project.models import (
    UTC,
    Document,
    Maintenance,
    Refusal,
    Session,
    Summary,
    engine,
    prepare,
)


@app.task(base=FencedTask, bind=True, name="documents.summarise")
def summarise(self: FencedTask) -> dict[str, int]:
    """Count the documents and what they hold, once an occurrence."""
    with Session() as session:
        documents, size = session.execute(
            sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(Document.size), 0))
        ).one()
    with self.fence.transaction(Session) as session:
        session.add(
            Summary(run_id=self.request.id, epoch=self.epoch, documents=documents, total_size=size)
        )
        freeze_here("summary", self.request.id)
    return {"documents": documents, "size": size}


@app.task(base=FencedTask, bind=True, name="documents.plan_retention")
def plan_retention(self: FencedTask) -> int:
    """Plan a review of each document that is older than a year, once an occurrence."""
    limit = datetime.now(UTC) - timedelta(days=365)
    with Session() as session:
        old = session.scalars(sa.select(Document.id).where(Document.created_at < limit)).all()
    with self.fence.transaction(Session) as session:
        session.add_all(
            Maintenance(run_id=self.request.id, epoch=self.epoch, document_id=each, step="review")
            for each in old
        )
    return len(old)


@task_refused.connect
def note_refusal(sender: Any = None, **what: Any) -> None:
    """Keep an audit line of every task that was turned away."""
    with Session.begin() as session:
        session.add(
            Refusal(
                task_id=what["task_id"],
                epoch=what["epoch"],
                current_epoch=what.get("current_epoch"),
                stage=what["stage"],
            )
        )


@worker_init.connect
def prepare_tables(**_: Any) -> None:
    """Have tables and documents before the first task."""
    prepare()


@worker_process_init.connect
def forget_connections(**_: Any) -> None:
    """Leave the parent's connections to the parent: both processes hear of refusals."""
    engine.dispose(close=False)
