"""The app of the acceptance tests, configured by the test that starts its processes.

What a task writes under the fence goes to ``target``, one row a commit, with the epoch
that the entry's row in ``register`` had before. The row lock on ``register`` puts the
commits of an entry in order, so a row that is older than the one before it would show.
"""

import json
import os
import signal
import time
from contextvars import ContextVar
from datetime import datetime, timedelta

import sqlalchemy as sa
from celery import Celery, chain, chord, group
from celery.schedules import crontab
from celery.signals import worker_process_init
from sqlalchemy.orm import sessionmaker

from celery_lease import FencedTask
from celery_lease.signals import task_refused
from celery_lease.stamp import Stamp
from tests.acceptance.points import pass_point

#: What the test says: see `Cluster.configuration`.
GIVEN = json.loads(os.environ["ACCEPTANCE"])
#: When the test began.
BEGAN = datetime.fromisoformat(GIVEN["began"])
DAY = timedelta(days=1)


def entry(name, task="guarded", every=None, cron=None, ago=None, **others):
    """Return an entry of ``beat_schedule``; one with no interval is due once, at once.

    Args:
        name: Its name, which is its task's first argument.
        task: Which task.
        every: Seconds.
        cron: The fields of a crontab.
        ago: How many seconds ago it ran last.
        others: Further keys.
    """
    if cron is not None:
        schedule = crontab(**cron)
    else:
        schedule = DAY if every is None else timedelta(seconds=every)
        ago = DAY.total_seconds() if every is None else ago
    found = {"task": f"acceptance.{task}", "schedule": schedule, "args": [name], **others}
    if ago is not None:
        found["last_run_at"] = BEGAN - timedelta(seconds=ago)
    return found


app = Celery("acceptance", broker=GIVEN["broker"], backend=GIVEN["results"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    task_acks_late=True,
    beat_max_loop_interval=1,
    beat_lease_url=GIVEN["lease"],
    beat_lease_ttl=6,
    beat_lease_renew_interval=2,
    beat_lease_margin=1,
    beat_lease_retry_interval=1,
    timezone="UTC",
    beat_schedule={name: entry(name, **how) for name, how in GIVEN["schedule"].items()},
)
app.conf.beat_schedule.update(
    # Too many for the environment.
    (f"many {number}", {"task": "acceptance.plain", "schedule": DAY, "args": [f"many {number}"]})
    for number in range(GIVEN["many"])
)
app.conf.update(GIVEN["conf"])

engine = sa.create_engine(
    GIVEN["database"],
    connect_args={"timeout": 30} if GIVEN["database"].startswith("sqlite") else {},
)
Session = sessionmaker(engine)


@worker_process_init.connect
def forget_connections(**_):
    """Of the parent process, which notes refusals too: they are not this process's."""
    engine.dispose(close=False)


_here = ContextVar("here", default=None)


@sa.event.listens_for(engine, "commit")
def between_guard_and_commit(connection):
    """The guard listens on all engines, and so speaks first."""
    if _here.get() is not None:
        pass_point(f"{_here.get()}.commit")


def write(statement, **values):
    """Write a row that no fence looks at."""
    with engine.begin() as connection:
        connection.execute(sa.text(statement), values)


def note(task, name):
    """Note that a task has started, whatever becomes of it."""
    stamp = Stamp.of(task.request)
    write(
        "INSERT INTO started (entry, task_id, epoch, worker, pid) "
        "VALUES (:entry, :task_id, :epoch, :worker, :pid)",
        entry=name,
        task_id=task.request.id,
        epoch=stamp.epoch if stamp is not None else None,
        worker=task.request.hostname,
        pid=os.getpid(),
    )


@app.task(
    base=FencedTask,
    bind=True,
    name="acceptance.guarded",
    # A database that restarts: the user's own connections break as well.
    autoretry_for=(sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.InternalError),
    retry_kwargs={"max_retries": None, "countdown": 1},
)
def guarded(self, name, work=0.0, idle=None, failing_epochs=()):
    """Write one row under the fence."""
    note(self, name)
    pass_point(f"{name}.body")
    pass_point(f"{name}.{self.epoch}.body")
    end = time.monotonic() + work
    while time.monotonic() < end:
        time.sleep(0.05)  # This is the work.
    if self.epoch in failing_epochs:
        raise ValueError(f"epoch {self.epoch} fails")
    token = _here.set(name)
    try:
        with self.fence.transaction(Session, idle=idle) as session:
            add(session, name, self.request.id, self.epoch)
            pass_point(f"{name}.flushed")
    finally:
        _here.reset(token)
    pass_point(f"{name}.done")
    return f"epoch {self.epoch}"


def add(session, name, run_id, epoch):
    """Add a target row behind the one before it."""
    at = {"entry": name}
    session.execute(sa.text("UPDATE register SET writes = writes + 1 WHERE entry = :entry"), at)
    before = session.scalar(sa.text("SELECT epoch FROM register WHERE entry = :entry"), at)
    session.execute(
        sa.text(
            "INSERT INTO target (entry, run_id, epoch, epoch_before) "
            "VALUES (:entry, :run_id, :epoch, :before)"
        ),
        {**at, "run_id": run_id, "epoch": epoch, "before": before},
    )
    session.execute(
        sa.text("UPDATE register SET epoch = :epoch WHERE entry = :entry"), {**at, "epoch": epoch}
    )


@app.task(bind=True, name="acceptance.plain")
def plain(self, name, *args):
    """Start, and that is all."""
    note(self, name)


# --- a task and all that it can send ---------------------------------------------------------


@app.task(base=FencedTask, bind=True, name="acceptance.child")
def child(self, name, fail=False):
    """Be a consequence."""
    note(self, name)
    if fail:
        raise ValueError(f"{name} fails")


@app.task(base=FencedTask, bind=True, name="acceptance.retrying", max_retries=1)
def retrying(self, name):
    """Be tried twice."""
    note(self, name)
    if self.request.retries == 0:
        raise self.retry(countdown=0)


@app.task(
    base=FencedTask,
    bind=True,
    name="acceptance.autoretrying",
    autoretry_for=(ValueError,),
    retry_kwargs={"max_retries": 1, "countdown": 0},
)
def autoretrying(self, name):
    """Be tried twice, by Celery's own doing."""
    note(self, name)
    if self.request.retries == 0:
        raise ValueError(name)


@app.task(base=FencedTask, bind=True, name="acceptance.replacing")
def replacing(self, name):
    """Be replaced."""
    raise self.replace(child.si(name))


@app.task(base=FencedTask, bind=True, name="acceptance.dying")
def dying(self, name, how):
    """Let the process be killed: by the worker, at a time limit, or by somebody else."""
    note(self, name)
    if how == "lost":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def send_family(name):
    """Send a child in every way there is."""

    def one(what, **kwargs):
        return child.si(f"{name}: {what}", **kwargs)

    child.delay(f"{name}: delay")
    chain(one("chain 1"), one("chain 2")).apply_async()
    group(one("group"), one("group")).apply_async()
    chord([one("chord"), one("chord")], one("chord's body")).apply_async()
    one("linking").apply_async(link=one("linked"))
    one("failing", fail=True).apply_async(link_error=one("errback"))
    retrying.delay(f"{name}: retry")
    autoretrying.delay(f"{name}: autoretry")
    replacing.delay(f"{name}: replaced")
    for how, limits in (("too long", {"time_limit": 1}), ("lost", {})):
        errback = one(f"errback of {how}")
        dying.apply_async((f"{name}: {how}", how), link_error=errback, **limits)


@app.task(base=FencedTask, bind=True, name="acceptance.family")
def family(self, name):
    """Send them all, fenced."""
    send_family(name)


@app.task(name="acceptance.plain_family")
def plain_family(name):
    """Send them all from a task without a fence."""
    send_family(name)


@task_refused.connect
def note_refusal(sender=None, **what):
    """Keep a line of each task that was turned away."""
    write(
        "INSERT INTO refusal (task_id, epoch, current_epoch, stage, reason) "
        "VALUES (:task_id, :epoch, :current_epoch, :stage, :reason)",
        **{key: what.get(key) for key in ("task_id", "epoch", "current_epoch", "stage", "reason")},
    )
