"""Beats and workers over one database and one broker."""

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone

import pytest
import sqlalchemy as sa
from celery import Celery

from tests.acceptance.ledger import Ledger
from tests.acceptance.points import DIRECTORY, Points
from tests.services import TCPProxy, wait_until
from tests.services.base import ROOT
from tests.services.cluster import BeatNode, WorkerNode
from tests.services.processes import CeleryProcess

TTL, RENEW, MARGIN, RETRY = 6, 2, 1, 1
#: How long a takeover may take after a crash.
TAKEOVER = TTL + RETRY + 1

POSTGRESQL, MARIADB, SQLITE = "postgresql-redis", "mariadb-rabbitmq", "sqlite-redis"
_MARKS = {
    POSTGRESQL: (pytest.mark.postgresql, pytest.mark.redis),
    MARIADB: (pytest.mark.mariadb, pytest.mark.rabbitmq),
    SQLITE: (pytest.mark.redis,),
}


def on(first, *others):
    """Run a test on these pairs of servers; on the first of them in an ordinary run too."""
    pairs = [pytest.param(first, marks=_MARKS[first])]
    pairs += [pytest.param(each, marks=(*_MARKS[each], pytest.mark.slow)) for each in others]
    return pytest.mark.parametrize("pair", pairs, indirect=True)


@dataclass
class Pair:
    """A database and a broker."""

    name: str
    database: str
    broker: str
    results: str
    #: The servers; None for a file.
    database_server: object
    broker_server: object


def make_pair(name, request):
    """Return a fresh database and a fresh broker of this kind."""
    get = request.getfixturevalue
    if name == MARIADB:
        database = get("mariadb_url")
        servers = get("mariadb"), get("rabbitmq")
        return Pair(name, database, get("rabbitmq_url"), f"db+{database}", *servers)
    broker = get("redis_url")
    if name == SQLITE:
        return Pair(name, get("sqlite_url"), broker, broker, None, get("redis_server"))
    servers = get("postgresql"), get("redis_server")
    return Pair(name, get("postgresql_url"), broker, broker, *servers)


class Cluster:
    """What a test starts; all of it ends with the test."""

    def __init__(self, pair, directory):
        self.pair = pair
        self.directory = directory
        self.ledger = Ledger(pair.database)
        self.points = Points(directory / "points")
        #: The schedule of the beats that are started next; see `app.entry`.
        self.schedule = {}
        #: How many entries more, that are due in a day.
        self.many = 0
        #: Further settings of the processes that are started next.
        self.conf = {}
        self.began = datetime.now(timezone.utc)
        self.nodes = []
        self._stack = ExitStack()

    # --- starting -------------------------------------------------------------------------

    def environment(self, *, lease=None, broker=None):
        """Return what tells a process where everything is; by a proxy, where one is given."""
        self.ledger.register(self.schedule)
        given = {
            "began": self.began.isoformat(),
            "database": self.pair.database,
            "lease": by(lease, self.pair.database),
            "broker": by(broker, self.pair.broker),
            "results": self.pair.results,
            "schedule": self.schedule,
            "many": self.many,
            "conf": self.conf,
        }
        return {"ACCEPTANCE": json.dumps(given), DIRECTORY: str(self.points.directory)}

    def beat(
        self,
        name,
        *arguments,
        scheduler="tests.acceptance.scheduler:StoppingScheduler",
        loglevel="INFO",
        **proxies,
    ):
        """Start a beat."""
        process = CeleryProcess.beat(
            "tests.acceptance.app",
            *arguments,
            name=name,
            scheduler=scheduler,
            loglevel=loglevel,
            directory=self.directory,
            env=self.environment(**proxies),
        )
        return self._start(BeatNode(process))

    def beats(self, **options):
        """Start two beats at once; return the one that leads and the one that stands by."""
        beats = [self.beat(name, **options) for name in ("A", "B")]
        wait_until(
            lambda: {self._standing(beat) for beat in beats} == {"leads under epoch", "stands by"},
            message="one to lead and one to stand by",
        )
        return sorted(beats, key=self._standing)

    @staticmethod
    def _standing(beat):
        """Return what a beat says of itself first; nothing yet is an empty text."""
        said = re.search(r": \S+:\d+:\w+ (leads under epoch|stands by)", beat.logs())
        return said[1] if said else ""

    def leader(self, name, *arguments, epoch=1, **options):
        """Start a beat and wait until it leads."""
        beat = self.beat(name, *arguments, **options)
        beat.wait_for_log(f"leads under epoch {epoch}")
        return beat

    def standby(self, name, *arguments, **options):
        """Start a beat and wait until it stands by."""
        beat = self.beat(name, *arguments, **options)
        beat.wait_for_log("stands by")
        return beat

    def pid_of_leader(self):
        """Return the process that holds the lease, as its holder's name says."""
        [(holder,)] = self.ledger.rows("SELECT holder FROM celery_lease")
        return int(holder.split(":")[1])

    def worker(
        self, name="worker", *arguments, ready=True, pool="prefork", concurrency=1, **proxies
    ):
        """Start a worker, and wait until it is ready unless told otherwise."""
        process = CeleryProcess.worker(
            "tests.acceptance.app",
            *arguments,
            name=name,
            pool=pool,
            concurrency=concurrency,
            directory=self.directory,
            env=self.environment(**proxies),
        )
        node = self._start(WorkerNode(process))
        if ready:
            node.ready()
        return node

    def _start(self, node):
        self.nodes.append(node)
        return node.start()

    def proxy(self, url):
        """Start a proxy before the server of an URL."""
        return self._stack.enter_context(TCPProxy(sa.make_url(url).port))

    def stop(self, beat):
        """Stop a beat gracefully; return its exit status and when, by the database's clock."""
        beat.kill("SIGTERM")
        return beat.container.wait(), self.ledger.now()

    def crash(self, beat):
        """Kill a beat, and return when, by the database's clock."""
        beat.kill("SIGKILL")
        return self.ledger.now()

    def wait_for_expiry(self):
        """Wait until the lease has expired by the database's clock."""
        query = "SELECT expires_at FROM celery_lease"
        wait_until(
            lambda: self.ledger.rows(query)[0][0] < self.ledger.now(),
            timeout=TTL + 5,
            message="the lease to expire",
        )

    def result(self, task_id):
        """Return a task's (state, result) as a client of the result backend sees it."""
        with Celery(backend=self.pair.results, set_as_current=False) as app:
            found = app.AsyncResult(task_id)
            return found.state, found.result

    def send(self, task, *arguments):
        """Send a task by hand."""
        with Celery(broker=self.pair.broker, set_as_current=False) as app:
            app.send_task(task, arguments)

    def role(self):
        """Make a user of the database who may do nothing; return its name and its URL."""
        url, server = sa.make_url(self.pair.database), self.pair.database_server
        name = f"beat_{url.database}"
        server.execute(f"CREATE USER {name}")
        self._stack.callback(server.execute, f"DROP USER {name}")
        if url.get_backend_name() == "postgresql":
            self._stack.callback(self.ledger.execute, f"DROP OWNED BY {name}")
        return name, url.set(username=name).render_as_string(hide_password=False)

    def celery(self, *arguments, **proxies):
        """Run a ``celery`` command to its end; return its exit status and what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "tests.acceptance.app", *arguments],
            env={**os.environ, **self.environment(**proxies)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout

    def close(self):
        """End everything."""
        for node in self.nodes:
            node.container.stop(timeout=0)  # At once: nobody waits for its farewell.
        self._stack.close()
        self.ledger.engine.dispose()


def by(proxy, url):
    """Return an URL by way of a proxy; a whole other one if that is given instead."""
    if proxy is None or isinstance(proxy, str):
        return proxy or url
    there = sa.make_url(url)
    return url.replace(f":{there.port}/", f":{proxy.port}/", 1)
