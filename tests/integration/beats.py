"""Beats in this process: a clock that a test moves, a broker that it reads."""

import uuid
from datetime import datetime, timedelta, timezone

import sqlalchemy as sa
from celery import Celery

from celery_lease.publish import Undelivered
from celery_lease.scheduler import LeasedScheduler
from celery_lease.stores.schema import commit_table, lease_table, run_table

#: When the tests' schedules begin: the whole hour, a moment ago on the database's clock.
START = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)


class Crash(BaseException):
    """The process ends here, as far as the scheduler can tell."""


class Beat(LeasedScheduler):
    """A leased scheduler whose clock and broker a test holds in its hands."""

    clock = START + timedelta(seconds=1)
    #: Called with the runs before a flush, and after it; may raise.
    before_flush = after_flush = staticmethod(lambda runs: None)

    def now(self):
        """Return the test's instant."""
        return self.clock

    def flush(self, sendings):
        """Let the test step in."""
        runs = [each.run for each in sendings]
        self.before_flush(runs)
        super().flush(sendings)
        self.after_flush(runs)

    def at(self, **delta):
        """Move the clock to so long after the start."""
        self.clock = START + timedelta(**delta)
        return self

    def go(self):
        """Tick until there is nothing more to do."""
        while self.tick() == 0.0 and self.elector.leading:
            pass
        return self


def no_broker(runs):
    """Stand for a broker that is away."""
    raise Undelivered("connection refused")


def crash(runs):
    """End the process at this point."""
    raise Crash


def plain(*args, **kwargs):
    """Do nothing: no worker ever runs it."""


class Cluster:
    """Any number of beats over one lease database and one in-memory broker."""

    def __init__(self, url, **conf):
        self.url = url
        self.queue = f"queue-{uuid.uuid4()}"
        self.conf = {
            "beat_lease_url": url,
            "beat_lease_retry_interval": 0.05,
            "beat_lease_ttl": 60,
            "beat_lease_renew_interval": 20,
            "task_default_queue": self.queue,
            "result_backend": None,
            "timezone": "UTC",
            **conf,
        }
        self.beats = []

    def app(self, schedule, **conf):
        """Return an app with this schedule; its entries begin at the start of the hour."""
        entries = {
            name: {"task": "tasks.plain", "last_run_at": START, **entry}
            for name, entry in schedule.items()
        }
        app = Celery(f"app-{uuid.uuid4()}", broker="memory://", set_as_current=False)
        app.conf.update(self.conf, beat_schedule=entries, **conf)
        app.task(name="tasks.plain")(plain)
        return app

    def beat(self, schedule=None, cls=Beat, **conf):
        """Start a beat; a schedule is given as ``beat_schedule`` has it."""
        every_minute = {"entry": {"schedule": 60.0}}
        beat = cls(app=self.app(schedule or every_minute, **conf))
        self.beats.append(beat)
        return beat

    def depose(self):
        """End the current term as an expiry would, without its holder knowing."""
        self.write(sa.update(lease_table).values(expires_at=START - timedelta(days=1)))

    def close(self):
        """Close all beats."""
        for beat in self.beats:
            beat.close()

    # --- what there is to see -------------------------------------------------------------

    def messages(self):
        """Take all messages from the broker."""
        found = []
        with self.beats[0].app.connection() as connection:
            queue = connection.SimpleQueue(self.queue)
            while True:
                try:
                    message = queue.get(block=False)
                except queue.Empty:
                    return found
                message.ack()
                found.append(message)

    def sent(self):
        """Take all messages; return their (entry, due_at in minutes after the start, epoch)."""
        runs = {each.id: each for each in self.rows(run_table)}
        return [
            (
                runs[message.headers["id"]].entry,
                (runs[message.headers["id"]].due_at - START).total_seconds() / 60,
                message.headers["stamps"]["lease_epoch"],
            )
            for message in self.messages()
        ]

    def rows(self, table):
        """Return all rows of a table, by time where there is one."""
        order = next((table.c[e] for e in ("due_at", "at") if e in table.c), None)
        query = sa.select(table) if order is None else sa.select(table).order_by(order)
        with self.engine.connect() as connection:
            return list(connection.execute(query))

    def runs(self, *columns):
        """Return columns of all runs, oldest first; a due_at as minutes after the start."""
        return [
            tuple(
                (row.due_at - START).total_seconds() / 60 if each == "due" else getattr(row, each)
                for each in columns
            )
            for row in self.rows(run_table)
        ]

    @property
    def engine(self):
        """The lease database."""
        return self.beats[0].store.engine

    def write(self, statement, **values):
        """Write to the lease database behind everybody's back."""
        with self.engine.begin() as connection:
            connection.execute(statement, values)

    def refuse(self, run_id):
        """Refuse a run, as a worker does."""
        self.write(
            sa.update(run_table).where(run_table.c.id == run_id).values(state="refused", open=True)
        )

    def commit(self, run_id):
        """Settle a run, as a worker does."""
        self.write(
            sa.insert(commit_table).values(
                task_id=run_id,
                lease="celery",
                epoch=1,
                term="t",
                execution="e",
                outcome="committed",
                at=datetime.now(timezone.utc),
            )
        )
