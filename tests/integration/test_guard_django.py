"""The guard on Django's own connections, on each database."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import sqlalchemy as sa

from celery_lease.errors import (
    AlreadySettled,
    ConfigurationError,
    MissingFence,
    NotWritable,
    StaleEpoch,
    UnsafeTransaction,
)
from celery_lease.guards.fence import TaskFence, Unfenced
from celery_lease.stores.fences import FenceStore
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.schema import commit_table
from tests.integration.django_project import set_up
from tests.integration.test_guard_sqlalchemy import Desk
from tests.leases import NAME, grant, own_schema, read_only_sessions, ticket
from tests.services import (
    COMMIT,
    PostgreSQL,
    TCPProxy,
    Verdict,
    cut_before,
    lose_answer,
)

pytest.importorskip("django_celery_beat")

_ENGINES = {
    "postgresql": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite3",
}


@pytest.fixture(scope="module", autouse=True)
def project() -> None:
    """Have Django set up, with a driver for MariaDB."""
    set_up()
    try:
        import MySQLdb  # noqa: F401
    except ImportError:
        import pymysql

        pymysql.install_as_MySQLdb()


class Counter:
    """Django's connection to a desk's database."""

    def __init__(self, desk: Desk, alias: str) -> None:
        from django.db import connections

        self.desk = desk
        self.alias = alias
        self.connection = connections[alias]

    def write(self, number: int) -> None:
        """Write a note through Django."""
        with self.connection.cursor() as cursor:
            cursor.execute("INSERT INTO note (id, epoch) VALUES (%s, 0)", [number])


@pytest.fixture
def counter(database_url: str) -> Iterator[Counter]:
    """A desk whose database Django knows too."""
    with _counter(database_url, sa.make_url(database_url)) as made:
        yield made


@pytest.fixture
def server_counter(server_url: str) -> Iterator[Counter]:
    """A desk on a server, which can limit how long a transaction is idle."""
    with _counter(server_url, sa.make_url(server_url)) as made:
        yield made


@pytest.fixture
def far_counter(server_url: str) -> Iterator[tuple[Counter, TCPProxy]]:
    """One whose Django reaches the database through a proxy."""
    url = sa.make_url(server_url)
    with TCPProxy(url.port or 0) as proxy:
        far = url.set(host="127.0.0.1", port=proxy.port)
        with _counter(server_url, far) as made:
            yield made, proxy


@contextmanager
def _counter(desks: str, djangos: sa.URL) -> Iterator[Counter]:
    from django.db import connections

    desk = Desk(desks)
    alias = f"db{uuid.uuid4().hex}"
    connections.settings[alias] = _entry(djangos)
    yield Counter(desk, alias)
    connections[alias].close()
    del connections.settings[alias]
    desk.close()


def _entry(url: sa.URL) -> dict[str, Any]:
    return {
        "ENGINE": f"django.db.backends.{_ENGINES[url.get_backend_name()]}",
        "NAME": url.database,
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": url.host or url.query.get("host", ""),
        "PORT": str(url.port or ""),
        "OPTIONS": {},
        "ATOMIC_REQUESTS": False,
        "AUTOCOMMIT": True,
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": False,
        "TIME_ZONE": None,
        "TEST": {
            "CHARSET": None,
            "COLLATION": None,
            "MIGRATE": True,
            "MIRROR": None,
            "NAME": None,
        },
    }


def test_a_block_commits_its_rows_together_with_the_outcome(counter: Counter) -> None:
    """On the connection that the ORM uses."""
    fence = counter.desk.fence()
    with fence.atomic(counter.alias):
        counter.write(1)
        assert counter.desk.lease.outcome(fence.ticket.task_id) is None
    assert counter.desk.notes() == [1]
    assert counter.desk.lease.outcome(fence.ticket.task_id) == "committed"


@pytest.mark.parametrize("final", [True, False])
def test_a_block_commits_in_debug_mode_as_well(
    counter: Counter, monkeypatch: pytest.MonkeyPatch, final: bool
) -> None:
    """Django then keeps each statement with its parameters put in by ``%``."""
    from django.conf import settings

    monkeypatch.setattr(settings, "DEBUG", True)
    fence = counter.desk.fence()
    with fence.atomic(counter.alias, final=final):
        counter.write(1)
    assert counter.desk.notes() == [1]
    with counter.desk.engine.connect() as connection:
        at = connection.scalars(sa.select(commit_table.c.at)).all()
    now = datetime.now(timezone.utc)
    assert [abs(now - each) < timedelta(hours=1) for each in at] == [True] * final


def test_a_stale_block_is_rolled_back(counter: Counter) -> None:
    """And the connection is fit for the next, current block."""
    stale = counter.desk.fence()
    new = counter.desk.lease.depose()
    with pytest.raises(StaleEpoch) as caught, stale.atomic(counter.alias):
        counter.write(1)
    assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    with counter.desk.fence(lease=new).atomic(counter.alias):
        counter.write(2)
    assert counter.desk.notes() == [2]


def test_the_second_execution_writes_nothing(counter: Counter) -> None:
    """A redelivered message."""
    first, second = counter.desk.fence("same"), counter.desk.fence("same")
    with first.atomic(counter.alias):
        counter.write(1)
    with pytest.raises(AlreadySettled), second.atomic(counter.alias):
        counter.write(2)
    assert counter.desk.notes() == [1]


def test_earlier_blocks_are_only_checked(counter: Counter) -> None:
    """``final=False``, current and stale."""
    fence = counter.desk.fence()
    with fence.atomic(counter.alias, final=False, idle=5):
        counter.write(1)
    assert counter.desk.lease.outcome(fence.ticket.task_id) is None
    counter.desk.lease.depose()
    with pytest.raises(StaleEpoch), fence.atomic(counter.alias, final=False):
        counter.write(2)
    assert counter.desk.notes() == [1]


def test_an_exception_in_the_block_settles_nothing(counter: Counter) -> None:
    """Rolled back, and free to try again."""
    fence = counter.desk.fence()
    with pytest.raises(ZeroDivisionError), fence.atomic(counter.alias):
        counter.write(1)
        raise ZeroDivisionError
    with fence.atomic(counter.alias):
        counter.write(2)
    assert counter.desk.notes() == [2]


@pytest.mark.parametrize("error", ["DatabaseError", "ZeroDivisionError"])
def test_an_error_of_a_hook_after_the_commit_is_raised(counter: Counter, error: str) -> None:
    """The block is committed, and settled; a DatabaseError is no lost answer to its COMMIT."""
    from django.db import DatabaseError, transaction

    kind = DatabaseError if error == "DatabaseError" else ZeroDivisionError
    fence = counter.desk.fence()
    seen: list[bool] = []

    def fail() -> None:
        seen.append(fence.settled)
        raise kind

    with pytest.raises(kind), fence.atomic(counter.alias):
        counter.write(1)
        transaction.on_commit(fail, using=counter.alias)
        assert not fence.settled
    assert seen == [True]
    assert fence.settled
    assert counter.desk.notes() == [1]


def test_the_hooks_of_a_commit_whose_answer_was_lost_are_called(
    far_counter: tuple[Counter, TCPProxy],
) -> None:
    """The ledger knows that it is committed; what the user does after a commit is due."""
    from django.db import transaction

    counter, proxy = far_counter
    fence = counter.desk.fence()
    seen: list[str] = []
    with fence.atomic(counter.alias):
        counter.write(1)
        transaction.on_commit(lambda: seen.append("first"), using=counter.alias)
        transaction.on_commit(lambda: counter.write(2), using=counter.alias)
        proxy.filter = lose_answer(COMMIT)
    assert fence.settled
    assert seen == ["first"]
    assert counter.desk.notes() == [1, 2]


def test_the_hooks_of_a_commit_that_never_arrived_are_not_called(
    far_counter: tuple[Counter, TCPProxy],
) -> None:
    """Nothing was committed, so the error is raised, and what follows a commit is not due."""
    from django.db import DatabaseError, transaction

    counter, proxy = far_counter
    fence = counter.desk.fence()
    seen: list[str] = []
    with pytest.raises(DatabaseError), fence.atomic(counter.alias):
        counter.write(1)
        transaction.on_commit(lambda: seen.append("first"), using=counter.alias)
        proxy.filter = cut_before(COMMIT)
    assert not fence.settled
    assert seen == []
    assert counter.desk.notes() == []


def test_a_connection_that_breaks_after_the_commit_is_no_error_of_the_blocks(
    far_counter: tuple[Counter, TCPProxy],
) -> None:
    """It is committed; only the idle limit is still to be undone, on MariaDB by a statement."""
    counter, proxy = far_counter
    fence = counter.desk.fence()
    committed = False

    def cut(sender: str, chunk: bytes, connection: Any) -> Verdict:
        nonlocal committed
        committed = committed or COMMIT.search(chunk) is not None
        late = committed and b"idle_transaction_timeout" in chunk
        return Verdict.DROP_AND_CUT if late else Verdict.FORWARD

    with fence.atomic(counter.alias):
        counter.write(1)
        proxy.filter = cut
    proxy.filter = None
    assert fence.settled
    with counter.desk.fence().atomic(counter.alias):
        counter.write(2)
    assert counter.desk.notes() == [1, 2]


def test_a_connection_that_breaks_in_the_body_is_the_bodys_error(
    far_counter: tuple[Counter, TCPProxy],
) -> None:
    """Undoing the idle limit on it must not say something else; the next block reconnects."""
    from django.db import OperationalError

    counter, proxy = far_counter
    fence = counter.desk.fence()
    with pytest.raises(OperationalError), fence.atomic(counter.alias, idle=7):
        counter.write(1)
        proxy.cut()
        counter.write(2)
    with counter.desk.fence().atomic(counter.alias):
        counter.write(3)
    assert counter.desk.notes() == [3]


def test_a_connection_that_broke_before_the_guard_is_an_error_of_djangos(
    far_counter: tuple[Counter, TCPProxy],
) -> None:
    """That is what a task names in ``autoretry_for``."""
    from django.db import OperationalError

    counter, proxy = far_counter
    with pytest.raises(OperationalError), counter.desk.fence().atomic(counter.alias):
        counter.write(1)
        proxy.cut()
    assert counter.desk.notes() == []


def test_savepoints_inside_are_the_users_own(counter: Counter) -> None:
    """An inner ``atomic`` is a savepoint."""
    from django.db import transaction

    with counter.desk.fence().atomic(counter.alias):
        counter.write(1)
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=counter.alias):
            counter.write(2)
            raise ZeroDivisionError
    assert counter.desk.notes() == [1]


def test_a_transaction_that_was_begun_before_is_refused(counter: Counter) -> None:
    """The guard would not be its last word."""
    from django.db import transaction

    fence = counter.desk.fence()
    with (
        transaction.atomic(using=counter.alias),
        pytest.raises(UnsafeTransaction, match="begun before"),
        fence.atomic(counter.alias),
    ):
        pass
    counter.connection.set_autocommit(False)
    try:
        with pytest.raises(UnsafeTransaction), fence.atomic(counter.alias):
            pass
    finally:
        counter.connection.rollback()
        counter.connection.set_autocommit(True)


def test_a_database_without_lease_tables_says_what_to_look_at(
    counter: Counter, tmp_path: Any
) -> None:
    """Two databases cannot commit together."""
    from django.db import connections

    alias = f"db{uuid.uuid4().hex}"
    url = sa.make_url(f"sqlite:///{tmp_path / 'elsewhere.sqlite3'}")
    connections.settings[alias] = _entry(url)
    with (
        pytest.raises(MissingFence, match="beat_lease_url"),
        counter.desk.fence().atomic(alias),
    ):
        pass
    connections[alias].close()
    del connections.settings[alias]


def test_an_idle_limit_that_is_none_is_refused(counter: Counter) -> None:
    """0 would end the transaction at once, and a server takes no endless one."""
    with (
        pytest.raises(ConfigurationError, match="idle = 0"),
        counter.desk.fence().atomic(counter.alias, idle=0),
    ):
        counter.write(1)
    assert counter.desk.notes() == []


@pytest.mark.postgresql
def test_a_database_that_nobody_may_write_to_is_called_that(
    postgresql: PostgreSQL, postgresql_url: str
) -> None:
    """As behind a guard on SQLAlchemy: the task is tried again later then."""
    with _counter(postgresql_url, sa.make_url(postgresql_url)) as counter:
        fence = counter.desk.fence()
        fence.store.dispose()
        with (
            read_only_sessions(postgresql, postgresql_url),
            pytest.raises(NotWritable),
            fence.atomic(counter.alias),
        ):
            pass


def test_an_unfenced_call_opens_a_plain_transaction(counter: Counter) -> None:
    """Called by hand."""
    with Unfenced().atomic(counter.alias) as connection:
        assert connection is counter.connection
        counter.write(1)
    assert counter.desk.notes() == [1]


@pytest.mark.postgresql
def test_the_tables_are_found_in_a_schema_of_their_own(postgresql_url: str) -> None:
    """Where ``beat_lease_engine_options`` says so, as on SQLAlchemy's connections."""
    options = own_schema(postgresql_url)
    store = SQLLeaseStore(postgresql_url, options)
    store.prepare(create=True)
    store.ensure(NAME)
    store.raise_fence(term := grant(store))
    with _counter(postgresql_url, sa.make_url(postgresql_url)) as counter:
        fences = FenceStore(postgresql_url, options)
        fence = TaskFence(shown := ticket(term, "x"), fences, fences.look(shown))
        with fence.atomic(counter.alias):
            counter.write(1)
        assert counter.desk.notes() == [1]
        fences.dispose()
    store.dispose()


def test_a_constraint_that_is_checked_at_the_commit_keeps_its_cause(postgresql_url: str) -> None:
    """Every foreign key of Django's is such a one, and its driver's error has the name."""
    from django.db import IntegrityError

    with _counter(postgresql_url, sa.make_url(postgresql_url)) as counter:
        with counter.connection.cursor() as cursor:
            cursor.execute("CREATE TABLE parent (id INT PRIMARY KEY)")
            cursor.execute(
                "CREATE TABLE child (id INT CONSTRAINT named REFERENCES parent "
                "DEFERRABLE INITIALLY DEFERRED)"
            )
        fence = counter.desk.fence()
        with (
            pytest.raises(IntegrityError) as caught,
            fence.atomic(counter.alias) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute("INSERT INTO child VALUES (1)")
        assert caught.value.__cause__.diag.constraint_name == "named"  # type: ignore[union-attr]
        assert (fence.settled, fence.refused) == (False, None)


def test_a_database_where_no_lease_can_be_kept_is_refused(counter: Counter) -> None:
    """Its rows would be guarded by nothing."""
    counter.connection.vendor = "oracle"
    with (
        pytest.raises(UnsafeTransaction, match="no lease can be kept"),
        counter.desk.fence().atomic(counter.alias),
    ):
        counter.write(1)
    del counter.connection.vendor
    assert counter.desk.notes() == []


def test_the_limit_goes_on_a_connection_that_a_health_check_replaced(
    server_counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Django makes it anew as the block begins; it stays for the user's next transactions."""
    counter = server_counter
    limit = _limit_of(counter)
    before = limit()
    monkeypatch.setattr(counter.connection, "health_check_enabled", True)
    monkeypatch.setattr(counter.connection, "health_check_done", False)
    monkeypatch.setattr(counter.connection, "is_usable", lambda: False)
    with counter.desk.fence().atomic(counter.alias, idle=7):
        counter.write(1)
    monkeypatch.undo()
    assert limit() == before


def _limit_of(counter: Counter) -> Callable[[], str]:
    """Return what tells the idle limit that Django's connection has now."""
    variable = {
        "postgresql": "SELECT current_setting('idle_in_transaction_session_timeout')",
        "mysql": "SELECT @@idle_transaction_timeout",
    }[counter.connection.vendor]

    def limit() -> str:
        with counter.connection.cursor() as cursor:
            cursor.execute(variable)
            return str(cursor.fetchone()[0])

    return limit


def test_the_limit_goes_when_the_block_is_over(server_counter: Counter) -> None:
    """Django keeps the connection for the user's next transaction."""
    counter = server_counter
    limit = _limit_of(counter)
    before = limit()
    with counter.desk.fence().atomic(counter.alias, idle=7):
        assert limit() in ("7s", "7")
    assert limit() == before
