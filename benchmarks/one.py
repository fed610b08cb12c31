"""One measurement in one process: ``python -m benchmarks.one MEASURE KIND N``.

MEASURE is ``dispatch`` (N entries that are all due) or ``idle`` (N that are not). The
broker, the lease database and Redis come from the environment. Prints one JSON line.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import sys
import tempfile
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

from celery import Celery
from celery.utils.imports import symbol_by_name

BROKER = os.environ["BENCH_BROKER"]
REDIS = os.environ.get("BENCH_REDIS", BROKER)
DATABASE = os.environ.get("BENCH_DATABASE", "")
#: Seconds after which a slow scheduler's rate is known well enough.
PATIENCE = 15.0
QUEUE = "benchmarks"
HOUR = timedelta(hours=1)
#: One hourly occurrence is due, not two.
PAST = datetime.now(timezone.utc) - 1.5 * HOUR

SCHEDULERS = {
    "stock": "celery.beat:PersistentScheduler",
    "memory": "celery.beat:Scheduler",
    "redbeat": "redbeat.schedulers:RedBeatScheduler",
    "django": "django_celery_beat.schedulers:DatabaseScheduler",
    "lease": "celery_lease.scheduler:LeasedScheduler",
}


def make_app(n: int, last_run_at: datetime | None, confirmed: bool) -> Celery:
    """Return an app with N hourly entries."""
    app = Celery("benchmarks", broker=BROKER)
    due = {} if last_run_at is None else {"last_run_at": last_run_at}
    app.conf.update(
        task_default_queue=QUEUE,
        task_ignore_result=True,
        result_backend=None,
        result_expires=None,
        timezone="UTC",
        beat_schedule={
            f"e{each:06d}": {"task": "bench.task", "schedule": HOUR, "args": (each,), **due}
            for each in range(n)
        },
        redbeat_redis_url=REDIS,
        redbeat_lock_key=None,
        broker_transport_options={"confirm_publish": True} if confirmed else {},
    )
    if DATABASE:
        app.conf.beat_lease_url = DATABASE

    @app.task(name="bench.task")
    def task(n: int) -> int:
        return n

    return app


def set_up_django(n: int, last_run_at: datetime | None) -> None:
    """Have N rows in a SQLite file of Django's."""
    import django
    from django.conf import settings
    from django.core.management import call_command

    name = Path(tempfile.mkdtemp()) / "django.sqlite3"
    settings.configure(
        INSTALLED_APPS=["django.contrib.contenttypes", "django_celery_beat"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(name)}},
        USE_TZ=True,
        SECRET_KEY="benchmarks",
    )
    django.setup()
    call_command("migrate", verbosity=0)
    from django_celery_beat.models import IntervalSchedule, PeriodicTask

    hourly, _ = IntervalSchedule.objects.get_or_create(every=1, period="hours")
    PeriodicTask.objects.bulk_create(
        PeriodicTask(
            name=f"e{each:06d}",
            task="bench.task",
            interval=hourly,
            args=f"[{each}]",
            last_run_at=last_run_at,
        )
        for each in range(n)
    )


def make_scheduler(kind: str, app: Celery):
    """Return a scheduler as beat would make it."""
    cls = symbol_by_name(SCHEDULERS[kind])
    return cls(app=app, schedule_filename=str(Path(tempfile.mkdtemp()) / "schedule"))


class Broker:
    """What the broker has, counted without taking it."""

    def __init__(self, app: Celery) -> None:
        self.channel = app.connection_for_write().default_channel

    def count(self) -> int:
        """Return how many messages wait."""
        try:
            return self.channel.queue_declare(QUEUE, passive=True).message_count
        except self.channel.connection.client.channel_errors:
            return 0

    def ids(self) -> set[str]:
        """Return the distinct task ids of all messages: this takes them."""
        found = set()
        while (message := self.channel.basic_get(QUEUE, no_ack=True)) is not None:
            found.add(message.headers["id"])
        return found


def dispatch(kind: str, n: int) -> dict[str, object]:
    """Measure how fast N due entries are sent."""
    confirmed = os.environ.get("BENCH_CONFIRMED") == "1"
    app = make_app(n, PAST, confirmed)
    if kind == "django":
        set_up_django(n, PAST)
        app.conf.beat_schedule = {}
    task = app.tasks["bench.task"]
    with app.producer_pool.acquire(block=True) as producer:
        task.apply_async((0,), producer=producer)  # declares the queue
        channel = app.connection_for_write().default_channel
        channel.queue_purge(QUEUE)
        if kind == "bare":
            began = time.perf_counter()
            for each in range(n):
                task.apply_async((each,), producer=producer)
            wall, before = time.perf_counter() - began, 0
        else:
            wall, before = tick_until_sent(make_scheduler(kind, app), kind, n, Broker(app))
    broker = Broker(app)
    sent = broker.count()
    return {
        "per_s": (sent - before) / wall,
        "sent": sent,
        "distinct": len(broker.ids()),
        "published": published(app) if kind == "lease" else sent,
    }


def tick_until_sent(scheduler, kind: str, n: int, broker: Broker) -> tuple[float, int]:
    """Tick until all is sent or patience ends; return seconds, and what was sent before."""
    if kind in ("stock", "memory"):
        for entry in scheduler.schedule.values():
            entry.last_run_at = PAST
    before = 0
    if kind == "lease":  # acquiring and loading is start-up: count from the first batch
        while not before:
            scheduler.tick()
            before = broker.count()
    began, ticks = time.perf_counter(), 0
    while time.perf_counter() - began < PATIENCE:
        scheduler.tick()
        ticks += 1
        if (kind in ("lease", "redbeat") or ticks % 100 == 0) and broker.count() >= n:
            break
    wall = time.perf_counter() - began
    if kind == "lease":
        scheduler.close()
    return wall, before


def published(app: Celery) -> int:
    """Return how many runs the ledger shows as published."""
    import sqlalchemy as sa

    engine = sa.create_engine(app.conf.beat_lease_url)
    with engine.connect() as connection:
        count = "SELECT COUNT(*) FROM celery_lease_run WHERE state = 'published'"
        return int(connection.execute(sa.text(count)).scalar_one())


def idle(kind: str, n: int) -> dict[str, object]:
    """Measure start-up, an idle tick and memory with N entries."""
    app = make_app(n, None, confirmed=False)
    if kind == "django":
        set_up_django(n, datetime.now(timezone.utc))
        app.conf.beat_schedule = {}
    gc.collect()
    began = time.process_time()
    scheduler = make_scheduler(kind, app)
    scheduler.tick()
    while kind == "lease" and scheduler.tick() == 0.0:
        pass
    start_up = time.process_time() - began
    ticks = 2000 if kind == "lease" else 5
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(ticks):
            scheduler.tick()
        rounds.append((time.perf_counter() - began) / ticks)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if kind == "lease":
        scheduler.close()
    return {"start_up_s": start_up, "idle_us": min(rounds) * 1e6, "memory_mb": memory}


if __name__ == "__main__":
    measure, kind, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
    logging.disable(logging.CRITICAL)
    result = {"dispatch": dispatch, "idle": idle}[measure](kind, n)
    print(json.dumps({"measure": measure, "kind": kind, "n": n, **result}))
