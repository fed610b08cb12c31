"""
Races between guarded writes and takeovers: ``python -m tests.guard_race``.

The takeover is put before the guard, beside it, and between the guard and its COMMIT, on
every isolation level of each database, always through a pool of connections. A twin that
reads the epoch without locking shows that the races would find a leak. Writes
``guard-race.json``; exit status 1 if a stale write was committed anywhere.

After a takeover has returned, nothing of an older epoch may become visible: the rows of the
older epoch are counted right then and again later, after the same pooled connection has
committed for somebody current.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout  # its own kind before Python 3.11
from dataclasses import asdict, dataclass
from pathlib import Path

import sqlalchemy as sa

from celery_lease.errors import FencingError, StaleEpoch, StoreContention
from celery_lease.guards.sqlalchemy import Guard, guarded
from celery_lease.lease import Term
from celery_lease.stores.base import Raised
from celery_lease.stores.fences import FenceStore, Ticket
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.schema import fence_table
from tests.leases import NAME, expire, grant, opened
from tests.services import MariaDB, PostgreSQL

#: How long a takeover is given to overtake a guard that it must not overtake, in seconds.
OVERTAKING = 0.1

#: About how long a takeover takes, in seconds.
TAKEOVER = 0.006

_LOCKING = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
LEVELS = {
    "postgresql": _LOCKING,
    "mariadb": _LOCKING,
    # The driver's own BEGIN, which comes with the first write, and BEGIN IMMEDIATE by events.
    "sqlite": ("READ UNCOMMITTED", "SERIALIZABLE", "IMMEDIATE"),
}
#: Where an unlocked SELECT excludes a takeover by itself: it takes a lock after all.
SAFE_TWINS = {("mariadb", "SERIALIZABLE"), ("sqlite", "IMMEDIATE")}

target_table = sa.Table(
    "guard_race_target",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    mysql_engine="InnoDB",
    mariadb_engine="InnoDB",
)


@dataclass
class Figures:
    """What became of one configuration."""

    attempts: int = 0
    stale_at_commit: int = 0
    stale_committed: int = 0
    twin_stale_committed: int = 0


class Race:
    """One database on one isolation level."""

    def __init__(self, url: str, level: str, store: SQLLeaseStore) -> None:
        self.store = store
        self.fences = FenceStore(url)
        self.figures = Figures()
        self.level = level
        self.sqlite = store.engine.dialect.name == "sqlite"
        self.engine = self._engine(url, level)
        self.threads = ThreadPoolExecutor(2)
        self._nothing = threading.Event()
        self.term = self.take_over()
        target_table.create(self.engine, checkfirst=True)

    def _engine(self, url: str, level: str) -> sa.Engine:
        """The user's engine: one pooled connection, so that each block inherits the last one's."""
        options: dict = {"pool_size": 1, "max_overflow": 0}
        if level == "IMMEDIATE":
            engine = sa.create_engine(url, **options)

            @sa.event.listens_for(engine, "connect")
            def connect(dbapi, record) -> None:
                dbapi.isolation_level = None

            @sa.event.listens_for(engine, "begin")
            def begin(connection) -> None:
                connection.exec_driver_sql("BEGIN IMMEDIATE")

            return engine
        return sa.create_engine(url, isolation_level=level, **options)

    def close(self) -> None:
        """Leave nothing open."""
        self.threads.shutdown()
        self.engine.dispose()
        self.fences.dispose()

    # --- the two sides

    def take_over(self) -> Term:
        """Become the leader, whoever was it, and raise the fence."""
        expire(self.store)
        term = grant(self.store)
        while True:
            with contextlib.suppress(StoreContention):
                raised = self.store.raise_fence(term)
                if raised is not Raised.RAISED:
                    raise AssertionError(f"the fence is {raised}")
                return term

    def overtake(self) -> tuple[Term, int]:
        """Take over; return the new term, and what the old one had committed by then."""
        old = self.term
        new = self.take_over()
        return new, self.committed(old)

    def committed(self, term: Term) -> int:
        """How many rows of a term's epoch are there."""
        count = sa.select(sa.func.count()).where(target_table.c.epoch == term.epoch)
        with self.store.engine.connect() as connection:
            return connection.execute(count).scalar_one()

    @contextlib.contextmanager
    def guarded(self, term: Term) -> Iterator[sa.Connection]:
        """A guarded block, as a task of this term opens it."""
        ticket = Ticket(
            lease=NAME,
            epoch=term.epoch,
            term=term.uuid,
            task_id=(task := str(uuid.uuid4())),
            run=task,
            execution=str(uuid.uuid4()),
        )
        with guarded(self.engine, Guard(ticket, self.fences, final=True)) as connection:
            yield connection

    @contextlib.contextmanager
    def twin(self, term: Term) -> Iterator[sa.Connection]:
        """The same with the obvious check: read the epoch, compare, go on."""
        with self.engine.begin() as connection:
            query = sa.select(fence_table.c.epoch).where(fence_table.c.name == NAME)
            if connection.execute(query).scalar_one() != term.epoch:
                raise StaleEpoch("stale", epoch=term.epoch)
            yield connection

    def write(self, connection: sa.Connection, term: Term) -> None:
        """What the task is there for."""
        connection.execute(sa.insert(target_table).values(epoch=term.epoch))

    def write_current(self) -> None:
        """Commit a current block on the connection that a refused one was on."""
        with self.guarded(self.term) as connection:
            self.write(connection, self.term)

    # --- the interleavings

    def takeover_before_the_guard(self) -> None:
        """The worker pauses before its guard: everybody else goes on meanwhile."""
        old, overtaken = self.term, []

        def pause() -> None:
            overtaken.extend(self.overtake())

        self.figures.attempts += 1
        refused = False
        if self.level == "IMMEDIATE":
            pause()  # Once it has begun, nobody else can write.
        try:
            with self.guarded(old) as connection:
                if self.sqlite and not overtaken:
                    pause()  # Once it has written, nobody else can.
                self.write(connection, old)
                if not overtaken:
                    pause()
        except StaleEpoch:
            refused = True
        self._account(old, overtaken[0], overtaken[1], refused=refused)

    def takeover_beside_the_guard(self) -> None:
        """Both meet at a barrier: either may be first."""
        old, barrier = self.term, threading.Barrier(2)

        def rival() -> tuple[Term, int]:
            barrier.wait(60)
            return self.overtake()

        overtaking = self.threads.submit(rival)
        self.figures.attempts += 1
        refused = False
        try:
            with self._prepared(old, barrier) as connection:
                if not self.sqlite:
                    barrier.wait(60)
                    # About what a takeover takes: so either is first.
                    self._nothing.wait(random.uniform(0, TAKEOVER))
                del connection
        except (FencingError, StoreContention, sa.exc.OperationalError) as error:
            refused = isinstance(error, StaleEpoch)
        self._account(old, *overtaking.result(60), refused=refused)

    @contextlib.contextmanager
    def _prepared(self, term: Term, barrier: threading.Barrier) -> Iterator[sa.Connection]:
        if self.sqlite:
            barrier.wait(60)
        with self.guarded(term) as connection:
            self.write(connection, term)
            yield connection

    def takeover_after_the_guard(self) -> None:
        """The worker pauses between its guard and its COMMIT: the takeover has to wait."""
        old, over = self.term, threading.Event()
        overtaking: list[Future] = []

        def rival() -> tuple[Term, int]:
            found = self.overtake()
            over.set()
            return found

        def spoken(conn) -> None:
            if not overtaking:
                overtaking.append(self.threads.submit(rival))
                over.wait(OVERTAKING)

        self.figures.attempts += 1
        # After the guard's own listener; and as somebody listens, its COMMIT comes later.
        sa.event.listen(self.engine, "commit", spoken)
        try:
            with self.guarded(old) as connection:
                self.write(connection, old)
        finally:
            sa.event.remove(self.engine, "commit", spoken)
        new, before = overtaking[0].result(60)
        self._account(old, new, before, refused=False)

    def _account(self, old: Term, new: Term, before: int, *, refused: bool) -> None:
        self.term = new
        self.write_current()
        late = self.committed(old) - before
        self.figures.stale_at_commit += refused or late > 0
        self.figures.stale_committed += late

    def twin_round(self) -> None:
        """A takeover between the twin's check and its write."""
        old, overtaken = self.term, []
        try:
            with self.twin(old) as connection:
                overtaking = self.threads.submit(self.overtake)
                with contextlib.suppress(FutureTimeout):
                    overtaken.extend(overtaking.result(OVERTAKING))
                self.write(connection, old)
        except (StaleEpoch, sa.exc.OperationalError):
            pass
        new, before = overtaking.result(60)
        self.term = new
        self.figures.twin_stale_committed += self.committed(old) - before


def race(url: str, level: str, *, rounds: int) -> Figures:
    """
    Race guarded writes of one isolation level.

    `rounds` stale attempts for certain, a third as many with either side first, a tenth with the
    takeover after the guard, and a tenth by the twin.
    """
    with opened(url) as store:
        each = Race(url, level, store)
        try:
            plan: list[tuple[Callable[[], None], int]] = [
                (each.takeover_before_the_guard, rounds),
                (each.takeover_beside_the_guard, max(3, rounds // 3)),
                (each.takeover_after_the_guard, max(3, rounds // 10)),
                (each.twin_round, max(3, rounds // 10)),
            ]
            for interleaving, times in plan:
                for _ in range(times):
                    interleaving()
        finally:
            each.close()
        return each.figures


def is_sound(database: str, level: str, figures: Figures, *, rounds: int) -> bool:
    """Whether nothing stale was committed, and the twin shows that it could have been."""
    leaks = (database, level) not in SAFE_TWINS
    return (
        figures.stale_at_commit >= rounds
        and figures.stale_committed == 0
        and (figures.twin_stale_committed > 0) is leaks
    )


def main() -> int:
    """Race on each level of each database and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=330)
    parser.add_argument("--output", type=Path, default=Path("guard-race.json"))
    options = parser.parse_args()
    # As Ctrl-C: with the servers stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: dict[str, dict[str, int]] = {}
    ok = True
    with PostgreSQL() as postgresql, MariaDB() as mariadb, tempfile.TemporaryDirectory() as folder:
        create = {
            "postgresql": postgresql.create_database,
            "mariadb": mariadb.create_database,
            "sqlite": lambda: f"sqlite:///{tempfile.mkdtemp(dir=folder)}/lease.sqlite3",
        }
        for database, levels in LEVELS.items():
            for level in levels:
                figures = race(create[database](), level, rounds=options.rounds)
                good = is_sound(database, level, figures, rounds=options.rounds)
                found[f"{database} {level}"] = asdict(figures)
                print(f"{'ok  ' if good else 'FAIL'} {database} {level}: {figures}", flush=True)
                ok &= good
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
