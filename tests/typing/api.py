"""How the public names are used: checked by mypy, not run."""

from __future__ import annotations

from datetime import datetime

from celery import Celery
from celery.beat import PersistentScheduler, Scheduler
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session, sessionmaker
from typing_extensions import assert_type

import celery_lease
from celery_lease import (
    FencedTask,
    LeaderElection,
    Lease,
    LeasedScheduler,
    MisfirePolicy,
    Occurrence,
    StaleEpoch,
    install,
    leased,
)

app = Celery("typed")
install(app)
version: str = celery_lease.__version__
# No such name: it must be an error.
misspelt: object = celery_lease.LeaderElecton  # type: ignore[attr-defined]
scheduler: type[Scheduler] = LeasedScheduler
highly_available: type[Scheduler] = leased(PersistentScheduler)


@app.task(base=FencedTask, bind=True)
def fenced(self: FencedTask, factory: sessionmaker[Session], engine: Engine) -> None:
    """Use what a task's body has."""
    with self.fence.transaction(factory) as session:
        assert_type(session, Session)
    with self.fence.transaction(engine, final=False, idle=5.0) as connection:
        assert_type(connection, Connection)
    self.fence.transaction("sqlite://")  # type: ignore[call-overload] # Not a URL.
    self.fence.check()
    headers: dict[str, str] = self.fence.headers()
    epoch: int | None = self.epoch
    occurrence: Occurrence | None = self.occurrence
    if occurrence is not None:
        due_at: datetime = occurrence.due_at
        run: str = occurrence.run_id
        print(due_at, run, headers, epoch)


def control(url: str, engine: Engine) -> None:
    """Lead something that is not beat."""
    try:
        with LeaderElection(url, "janitor", ttl=30).lead(timeout=5) as leadership:
            while leadership.trusted:
                leadership.check()
                with leadership.transaction(engine) as connection:
                    assert_type(connection, Connection)
                    print(leadership.epoch, leadership.term.holder)
    except StaleEpoch as error:
        print(error.epoch, error.current_epoch, error.name)


def show(lease: Lease) -> str:
    """Use what anybody may see of a lease."""
    policy = MisfirePolicy("latest")
    return f"{lease.holder} {lease.epoch} {lease.remaining:.1f} {lease.held} {policy.value}"
