"""The guard where things go wrong: isolation levels, lost answers, frozen workers, locks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.pq import ExecStatus
from sqlalchemy.orm import Session, sessionmaker

from celery_lease.errors import AlreadySettled, FencingError, StaleEpoch
from celery_lease.stores.base import Raised
from celery_lease.stores.dialects import pipeline
from tests.integration.test_guard_sqlalchemy import Desk, Note, write
from tests.leases import grant
from tests.services import TCPProxy, Verdict, hold, lose_answer

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@pytest.fixture
def desks() -> Iterator[Callable[..., Desk]]:
    """Make desks; close them in the end."""
    made: list[Desk] = []

    def make(url: str, **options: Any) -> Desk:
        made.append(Desk(url, **options))
        return made[-1]

    yield make
    for desk in made:
        desk.close()


class Behind:
    """A user's engine whose connections go through a proxy."""

    def __init__(self, desk: Desk) -> None:
        url = sa.make_url(desk.url)
        self.proxy = TCPProxy(url.port or 0).start()
        # An application's connection: psycopg would also try the host's other addresses.
        self.engine = sa.create_engine(
            url.set(host="127.0.0.1", port=self.proxy.port), connect_args=_quick(url)
        )

    def close(self) -> None:
        """Close both."""
        self.proxy.resume()
        self.engine.dispose()
        self.proxy.stop()


def _quick(url: sa.URL) -> dict[str, Any]:
    return {"connect_timeout": 5}


@pytest.fixture
def behind() -> Iterator[Callable[[Desk], Behind]]:
    """Make engines behind proxies; close them in the end."""
    made: list[Behind] = []

    def make(desk: Desk) -> Behind:
        made.append(Behind(desk))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("level", LEVELS)
def test_stale_is_stale_at_every_isolation_level(
    server_url: str, desks: Callable[..., Desk], level: str
) -> None:
    """Even where the transaction's snapshot is from before the takeover."""
    desk = desks(server_url, isolation_level=level)
    fence = desk.fence()
    with pytest.raises(StaleEpoch), fence.transaction(desk.engine) as connection:
        connection.execute(sa.select(Note.id)).all()
        write(connection, 1)
        desk.lease.depose()
    assert desk.notes() == []


@pytest.mark.parametrize("level", LEVELS)
def test_current_is_current_at_every_isolation_level(
    server_url: str, desks: Callable[..., Desk], level: str
) -> None:
    """A renewal, or the leader's own marks, disturb nobody."""
    desk = desks(server_url, isolation_level=level)
    fence = desk.fence()
    with fence.transaction(desk.engine) as connection:
        connection.execute(sa.select(Note.id)).all()
        write(connection, 1)
        desk.lease._store.renew(desk.lease.term, 3600)
    assert desk.notes() == [1]


@pytest.mark.parametrize("level", LEVELS)
def test_a_duplicate_is_a_duplicate_at_every_isolation_level(
    server_url: str, desks: Callable[..., Desk], level: str
) -> None:
    """A key conflict in one, a serialization failure in another: looked at again afresh."""
    desk = desks(server_url, isolation_level=level)
    first, second = desk.fence("same"), desk.fence("same")
    with pytest.raises(AlreadySettled), second.transaction(desk.engine) as slow:
        # A snapshot of before, without a lock on the notes.
        slow.execute(sa.text("SELECT COUNT(*) FROM celery_lease_term")).all()
        with first.transaction(desk.engine) as quick:
            write(quick, 1)
        write(slow, 2)
    assert desk.notes() == [1]


@pytest.mark.postgresql
def test_a_serialization_failure_of_current_tasks_is_not_called_stale(
    postgresql_url: str, desks: Callable[..., Desk]
) -> None:
    """Two current tasks with write skew: one is turned back by the database, and may retry."""
    desk = desks(postgresql_url, isolation_level="SERIALIZABLE")
    with desk.engine.begin() as connection:
        write(connection, 1)
        write(connection, 2)
    one, two = desk.fence(), desk.fence()
    update = sa.update(Note)
    with pytest.raises(sa.exc.OperationalError) as caught, two.transaction(desk.engine) as b:
        b.execute(sa.select(sa.func.sum(Note.epoch))).scalar()
        with one.transaction(desk.engine) as a:
            a.execute(sa.select(sa.func.sum(Note.epoch))).scalar()
            a.execute(update.where(Note.id == 1).values(epoch=1))
        b.execute(update.where(Note.id == 2).values(epoch=1))
    assert caught.value.orig.sqlstate == "40001"
    assert (one.settled, two.settled, two.refused) == (True, False, None)


def test_a_locked_file_is_an_error_of_the_database(
    sqlite_url: str, desks: Callable[..., Desk]
) -> None:
    """Passed on as it is: the task may catch it and try again."""
    desk = desks(sqlite_url, connect_args={"timeout": 0.05})
    fence = desk.fence()
    other = sa.create_engine(sqlite_url)
    with other.connect() as writer:
        writer.exec_driver_sql("BEGIN IMMEDIATE")
        with (
            pytest.raises(sa.exc.OperationalError, match="locked"),
            fence.transaction(desk.engine),
        ):
            pass
        writer.rollback()
    other.dispose()
    with fence.transaction(desk.engine) as connection:
        write(connection, 1)
    assert desk.notes() == [1]


@pytest.mark.parametrize("level", [None, "BEGIN IMMEDIATE"])
def test_sqlite_with_and_without_explicit_begins(
    sqlite_url: str, desks: Callable[..., Desk], level: str | None
) -> None:
    """The recipe for real transactions sets isolation_level to None, which is not AUTOCOMMIT."""
    desk = desks(sqlite_url)
    if level is not None:

        @sa.event.listens_for(desk.engine, "connect")
        def connect(dbapi: Any, record: Any) -> None:
            dbapi.isolation_level = None

        @sa.event.listens_for(desk.engine, "begin")
        def begin(connection: sa.Connection) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

        desk.engine.dispose()
    with desk.fence().transaction(desk.engine) as connection:
        write(connection, 1)
    stale = desk.fence()
    desk.lease.depose()
    with pytest.raises(StaleEpoch), stale.transaction(sessionmaker(desk.engine)) as session:
        write(session, 2)
    assert desk.notes() == [1]


def test_a_table_made_in_sqlite_is_not_there_when_stale(
    sqlite_url: str, desks: Callable[..., Desk]
) -> None:
    """DDL is part of a transaction here, but sqlite3 begins none for it."""
    desk = desks(sqlite_url)
    stale = desk.fence()
    desk.lease.depose()
    with pytest.raises(StaleEpoch), stale.transaction(desk.engine) as connection:
        connection.exec_driver_sql("CREATE TABLE made (id INTEGER)")
    assert not sa.inspect(desk.engine).has_table("made")


def test_a_renewal_after_the_first_read_does_not_turn_sqlites_first_write_away(
    sqlite_url: str, desks: Callable[..., Desk]
) -> None:
    """A transaction from the first read on would be "locked" with its old snapshot."""
    desk = desks(sqlite_url)
    with desk.fence().transaction(sessionmaker(desk.engine)) as session:
        session.execute(sa.select(Note.id)).all()
        desk.lease._store.renew(desk.lease.term, 3600)
        with session.begin_nested():
            write(session, 1)
    assert desk.notes() == [1]


@pytest.mark.parametrize("kind", ["Engine", "sessionmaker"])
def test_a_read_with_a_name_for_it_is_a_mere_read_for_sqlite(
    sqlite_url: str, desks: Callable[..., Desk], kind: str
) -> None:
    """A WITH that writes nothing must not begin a transaction whose snapshot is soon too old."""
    desk = desks(sqlite_url)
    target = desk.engine if kind == "Engine" else sessionmaker(desk.engine)
    with desk.fence().transaction(target) as work:
        named = sa.select(Note.id).cte("named")
        work.execute(sa.select(named)).all()
        desk.lease._store.renew(desk.lease.term, 3600)
        write(work, 1)
    assert desk.notes() == [1]


def test_a_table_that_is_there_already_does_not_make_sqlites_first_write_too_late(
    sqlite_url: str, desks: Callable[..., Desk]
) -> None:
    """Its CREATE only reads, and a write of anybody's would come before ours."""
    desk = desks(sqlite_url)
    renewed = threading.Thread(target=desk.lease._store.renew, args=(desk.lease.term, 3600))
    with desk.fence().transaction(desk.engine) as connection:
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS note (id INTEGER)")
        renewed.start()  # Waits for the block, now.
        renewed.join(0.2)
        write(connection, 1)
    renewed.join()
    assert desk.notes() == [1]


@pytest.mark.parametrize("kind", ["Engine", "sessionmaker"])
def test_sqlites_explicit_begins_go_on_after_a_rollback_inside(
    sqlite_url: str, desks: Callable[..., Desk], kind: str
) -> None:
    """The user's own BEGIN comes at the same event as the guard, and only one may begin."""
    desk = desks(sqlite_url)

    @sa.event.listens_for(desk.engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    target = desk.engine if kind == "Engine" else sessionmaker(desk.engine)
    with desk.fence().transaction(target) as work:
        work.rollback()
        with work.begin_nested():
            write(work, 1)
    assert desk.notes() == [1]


# --- a COMMIT whose answer is lost --------------------------------------------------------


@pytest.mark.parametrize("kind", ["Engine", "sessionmaker"])
def test_a_commit_whose_answer_was_lost_is_found_in_the_ledger(
    server_url: str, desks: Callable[..., Desk], behind: Callable[[Desk], Behind], kind: str
) -> None:
    """This execution's own row is there, so the block did what it had to do."""
    desk = desks(server_url)
    far = behind(desk)
    fence = desk.fence()
    target = far.engine if kind == "Engine" else sessionmaker(far.engine)
    with fence.transaction(target) as work:
        write(work, 1)
        far.proxy.filter = lose_answer(b"COMMIT")
    assert fence.settled
    assert desk.notes() == [1]
    assert desk.lease.outcome(fence.ticket.task_id) == "committed"


@pytest.mark.parametrize("takeover", [False, True])
def test_a_commit_that_never_arrived_is_an_error_or_stale(
    server_url: str, desks: Callable[..., Desk], behind: Callable[[Desk], Behind], takeover: bool
) -> None:
    """Without a row there is no commit; whether it may be tried again, the fence tells."""
    desk = desks(server_url)
    far = behind(desk)
    fence = desk.fence()
    deposed: list[Any] = []

    def cut(sender: str, chunk: bytes, connection: Any) -> Verdict:
        if b"COMMIT" not in chunk or sender != "client":
            return Verdict.FORWARD
        deposed.append(True)
        return Verdict.DROP_AND_CUT

    expected = StaleEpoch if takeover else sa.exc.OperationalError
    real = desk.store.look

    def look(*arguments: Any) -> Any:
        if takeover:
            desk.lease.depose()
        return real(*arguments)

    with pytest.raises(expected), fence.transaction(far.engine) as work:
        write(work, 1)
        far.proxy.filter = cut
        desk.store.look = look  # type: ignore[method-assign] - at the moment of the question
    assert deposed
    assert desk.notes() == []
    assert isinstance(fence.refused, StaleEpoch) == takeover


def test_a_check_without_an_outcome_cannot_tell_whether_its_commit_arrived(
    server_url: str, desks: Callable[..., Desk], behind: Callable[[Desk], Behind]
) -> None:
    """``final=False`` leaves no row to find: the error is raised, and the attempt may repeat."""
    desk = desks(server_url)
    far = behind(desk)
    fence = desk.fence()
    with (
        pytest.raises(sa.exc.OperationalError),
        fence.transaction(far.engine, final=False) as work,
    ):
        write(work, 1)
        far.proxy.filter = lose_answer(b"COMMIT")
    assert not fence.settled


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("idle", [None, 30])
def test_a_connection_that_broke_before_the_guard_is_an_error_of_sqlalchemys(
    server_url: str,
    desks: Callable[..., Desk],
    behind: Callable[[Desk], Behind],
    final: bool,
    idle: float | None,
) -> None:
    """That is what a task names in ``autoretry_for``; any other ends the run as failed."""
    desk = desks(server_url)
    far = behind(desk)
    fence = desk.fence()
    with (
        pytest.raises(sa.exc.OperationalError),
        fence.transaction(far.engine, final=final, idle=idle) as work,
    ):
        write(work, 1)
        far.proxy.cut()
    assert not fence.settled
    with fence.transaction(far.engine) as work:
        write(work, 2)
    assert desk.notes() == [2]


# --- frozen -------------------------------------------------------------------------------


def test_a_worker_frozen_between_guard_and_commit_holds_a_takeover_up_no_longer_than_the_limit(
    server_url: str, desks: Callable[..., Desk], behind: Callable[[Desk], Behind]
) -> None:
    """The server ends its transaction, the lock is free, and its COMMIT comes too late."""
    desk = desks(server_url)
    desk.store.idle = 1.0
    far = behind(desk)
    sa.event.listen(far.engine, "commit", lambda connection: None)  # Keeps the two apart.
    fence = desk.fence()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with fence.transaction(far.engine) as connection:
                write(connection, 1)
                far.proxy.filter = hold(b"COMMIT")
        except (FencingError, sa.exc.DBAPIError) as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert far.proxy.holding.wait(10)
    began = time.monotonic()
    desk.lease.depose()
    took = time.monotonic() - began
    far.proxy.filter = None
    far.proxy.resume()
    thread.join(20)
    assert 0.2 < took < 1.0 + 2.0
    assert [type(each) for each in errors] == [StaleEpoch]
    assert desk.notes() == []


@pytest.mark.postgresql
@pytest.mark.parametrize("final", [False, True])
def test_a_worker_frozen_before_its_last_message_holds_no_takeover_up(
    postgresql_url: str, desks: Callable[..., Desk], behind: Callable[[Desk], Behind], final: bool
) -> None:
    """Guard and COMMIT go out together with psycopg: the fence is locked by neither or both."""
    desk = desks(postgresql_url)
    far = behind(desk)
    fence = desk.fence()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with fence.transaction(far.engine, final=final) as connection:
                write(connection, 1)
                far.proxy.filter = hold(b"COMMIT")
        except (FencingError, sa.exc.DBAPIError) as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert far.proxy.holding.wait(10)
    desk.lease._store.release(desk.lease.term)
    term = grant(desk.lease._store)
    assert desk.lease._store.raise_fence(term) is Raised.RAISED, "at once: nothing is locked"
    far.proxy.filter = None
    far.proxy.resume()
    thread.join(20)

    assert [type(each) for each in errors] == [StaleEpoch]
    assert desk.notes() == []


@pytest.mark.parametrize("kind", ["Engine", "sessionmaker"])
@pytest.mark.parametrize("threshold", [0, 1, None])
@pytest.mark.postgresql
def test_the_guard_gets_through_whatever_psycopg_prepares(
    postgresql_url: str, desks: Callable[..., Desk], threshold: int | None, kind: str
) -> None:
    """It keeps to what it is told, and takes note where psycopg has dropped all of it."""
    desk = desks(postgresql_url, connect_args={"prepare_threshold": threshold})
    target = desk.engine if kind == "Engine" else sessionmaker(desk.engine)
    prepared: list[int] = []
    for number, final in enumerate([False, True, True, True] * 2):
        with desk.fence().transaction(target, final=final) as work:
            write(work, number)
            query = sa.text("SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE :l")
            prepared.append(work.execute(query, {"l": "INSERT INTO celery_lease%"}).scalar())
        if number == 3:
            with desk.engine.connect() as connection:
                connection.execute(sa.select(Note.id))
                connection.rollback()  # psycopg has the server forget its statements here.
    assert prepared == {None: [0] * 8, 0: [0, 0, 1, 1] * 2, 1: [0, 0, 0, 1] * 2}[threshold]
    stale = desk.fence()
    desk.lease.depose()
    with pytest.raises(StaleEpoch), stale.transaction(target) as work:
        write(work, 9)
    assert desk.notes() == list(range(8))


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("listened", [False, True])
def test_the_guard_gets_through_where_results_are_streamed(
    server_url: str, desks: Callable[..., Desk], listened: bool, final: bool
) -> None:
    """PostgreSQL cannot declare a cursor for an INSERT."""
    desk = desks(server_url)
    if listened:
        sa.event.listen(desk.engine, "commit", lambda connection: None)
    streaming = desk.engine.execution_options(stream_results=True)
    fence = desk.fence()
    with fence.transaction(streaming, final=final) as connection:
        connection.execute(sa.select(Note.id)).all()
    assert fence.settled == final


def test_what_a_listener_of_the_users_adds_to_the_commit_is_behind_the_guard_too(
    server_url: str, desks: Callable[..., Desk]
) -> None:
    """It comes after the guard, and must be in the transaction that the guard let pass."""
    desk = desks(server_url)

    @sa.event.listens_for(desk.engine, "commit")
    def audit(connection: sa.Connection) -> None:
        write(connection, 100)

    with desk.fence().transaction(desk.engine) as connection:
        write(connection, 1)
    stale = desk.fence()
    desk.lease.depose()
    with pytest.raises(StaleEpoch), stale.transaction(desk.engine) as connection:
        write(connection, 2)
    assert desk.notes() == [1, 100]


@pytest.mark.postgresql
@pytest.mark.parametrize("late", [False, True])
def test_a_constraint_that_is_checked_at_the_commit_is_an_error_of_the_users_own(
    postgresql_url: str, desks: Callable[..., Desk], late: bool
) -> None:
    """Neither a duplicate nor stale, whether the guard brings the COMMIT or comes before it."""
    desk = desks(postgresql_url)
    if late:
        sa.event.listen(desk.engine, "commit", lambda connection: None)
    with desk.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE parent (id INT PRIMARY KEY)")
        connection.exec_driver_sql(
            "CREATE TABLE child (id INT REFERENCES parent DEFERRABLE INITIALLY DEFERRED)"
        )
    fence = desk.fence()
    with (
        pytest.raises(sa.exc.IntegrityError, match="child"),
        fence.transaction(desk.engine) as connection,
    ):
        connection.exec_driver_sql("INSERT INTO child VALUES (1)")
    assert (fence.settled, fence.refused) == (False, None)
    with fence.transaction(desk.engine) as connection:
        write(connection, 1)
    assert desk.notes() == [1]


@pytest.mark.postgresql
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("does", "expected", "words"),
    [
        ("RAISE EXCEPTION 'orders must balance'", sa.exc.ProgrammingError, "must balance"),
        ("PERFORM 1 FROM of_the_users", sa.exc.ProgrammingError, "of_the_users"),
        ("RAISE EXCEPTION 'no' USING ERRCODE = '42501'", sa.exc.ProgrammingError, "no"),
    ],
    ids=["raises", "misses a table", "lacks a privilege"],
)
def test_what_a_trigger_says_at_the_commit_is_said_as_without_a_guard(
    postgresql_url: str,
    desks: Callable[..., Desk],
    late: bool,
    does: str,
    expected: type[Exception],
    words: str,
) -> None:
    """It is about the user's tables, and a task may name its kind in ``autoretry_for``."""
    desk = desks(postgresql_url)
    if late:
        sa.event.listen(desk.engine, "commit", lambda connection: None)
    with desk.engine.begin() as connection:
        connection.exec_driver_sql(
            f"CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN "
            f"{does.replace(chr(39), chr(39) * 2)}; RETURN NULL; END'"
        )
        connection.exec_driver_sql(
            "CREATE CONSTRAINT TRIGGER t AFTER INSERT ON note DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION f()"
        )
    fence = desk.fence()
    with pytest.raises(expected, match=words), fence.transaction(desk.engine) as connection:
        write(connection, 1)
    assert (fence.settled, fence.refused) == (False, None)
    assert desk.notes() == []


@pytest.mark.postgresql
@pytest.mark.parametrize("final", [False, True])
def test_a_lost_commit_that_the_block_swallowed_is_raised_at_its_end(
    postgresql_url: str, desks: Callable[..., Desk], behind: Callable[[Desk], Behind], final: bool
) -> None:
    """Nothing of it is there, and the run must not count as committed."""
    desk = desks(postgresql_url)
    far = behind(desk)
    fence = desk.fence()
    with (
        pytest.raises(sa.exc.OperationalError),
        fence.transaction(sessionmaker(far.engine), final=final) as session,
    ):
        write(session, 1)
        far.proxy.cut()
        with suppress(sa.exc.DBAPIError):
            session.commit()
        session.rollback()
    assert not fence.settled
    assert desk.notes() == []


@pytest.mark.postgresql
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_a_transaction_that_the_user_has_broken_is_not_taken_for_a_moving_fence(
    postgresql_url: str, desks: Callable[..., Desk], late: bool, final: bool
) -> None:
    """An error that the body swallowed: tried later, it would come to the same."""
    desk = desks(postgresql_url)
    if late:
        sa.event.listen(desk.engine, "commit", lambda connection: None)
    fence = desk.fence()
    with (
        pytest.raises(sa.exc.DBAPIError, match="aborted"),
        fence.transaction(desk.engine, final=final) as connection,
    ):
        write(connection, 1)
        with suppress(sa.exc.DBAPIError):
            connection.exec_driver_sql("SELECT 1/0")
    assert (fence.settled, fence.refused) == (False, None)
    with fence.transaction(desk.engine) as connection:
        write(connection, 2)
    assert desk.notes() == [2]


class Limit(Exception):
    """What a soft time limit raises, anywhere."""


@pytest.mark.mariadb
@pytest.mark.parametrize("event", ["before_cursor_execute", "after_cursor_execute"])
def test_a_guard_that_is_interrupted_commits_nothing(
    mariadb_url: str, desks: Callable[..., Desk], event: str
) -> None:
    """Its COMMIT has not been sent, wherever the limit strikes."""
    desk = desks(mariadb_url)
    fence = desk.fence()

    def interrupt(connection: sa.Connection, cursor: Any, sql: str, *rest: Any) -> None:
        if "celery_lease_commit" in sql:
            raise Limit

    sa.event.listen(desk.engine, event, interrupt)
    with pytest.raises(Limit), fence.transaction(desk.engine) as connection:
        write(connection, 1)
    assert not fence.settled
    assert desk.notes() == []


@pytest.mark.postgresql
def test_the_last_words_of_a_server_that_ends_the_session_are_what_is_raised(
    postgresql_url: str, desks: Callable[..., Desk]
) -> None:
    """That it was idle for too long says more than that it is gone."""
    desk = desks(postgresql_url)
    fence = desk.fence()
    with (
        pytest.raises(sa.exc.DBAPIError) as raised,
        fence.transaction(desk.engine, idle=0.1) as work,
    ):
        write(work, 1)
        gone = sa.text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")
        (pid,) = work.execute(sa.text("SELECT pg_backend_pid()")).one()
        with desk.engine.connect() as other:
            while other.execute(gone, {"pid": pid}).scalar():
                other.rollback()
    assert getattr(raised.value.orig, "sqlstate", None) == "25P03"
    assert not fence.settled
    assert desk.notes() == []


@pytest.mark.postgresql
@pytest.mark.parametrize("threshold", [0, None])
@pytest.mark.parametrize("kind", ["Engine", "sessionmaker"])
def test_a_session_that_ends_right_after_its_commit_is_no_error_of_the_blocks(
    postgresql_url: str,
    desks: Callable[..., Desk],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    threshold: int | None,
) -> None:
    """As where a server is stopped: the COMMIT was answered, and the message was not."""
    desk = desks(postgresql_url, connect_args={"prepare_threshold": threshold})
    fence = desk.fence()

    def ended(pgconn: Any) -> Iterator[Any]:
        *answers, end = yield from real(pgconn)
        assert end.status == ExecStatus.PIPELINE_SYNC
        return [*answers, last_words]

    real = pipeline._answers
    with (
        psycopg.connect(postgresql_url.replace("+psycopg", "")) as other,
        desk.target(kind) as target,
    ):
        last_words = other.pgconn.exec_(
            b"DO $$BEGIN RAISE 'stopped' USING ERRCODE = '57P01'; END$$"
        )
        monkeypatch.setattr(pipeline, "_answers", ended)
        with fence.transaction(target) as work:
            write(work, 1)
    assert fence.settled
    assert desk.notes() == [1]


@pytest.mark.postgresql
def test_a_psycopg_that_remembers_its_statements_in_another_way_has_the_two_go_apart(
    postgresql_url: str, desks: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of it is not public: that may change, and nothing must break with it."""
    desk = desks(postgresql_url)
    fence = desk.fence()
    seen: list[str] = []
    sa.event.listen(desk.engine, "before_cursor_execute", lambda *given: seen.append(given[2]))
    monkeypatch.setattr(pipeline, "_MEMORY", ("get", "remember"))
    with fence.transaction(desk.engine) as work:
        write(work, 1)
    assert "celery_lease_commit" in seen[-1]
    assert fence.settled
    assert desk.notes() == [1]


@pytest.mark.postgresql
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("lasting", ["Connection", "no reset", "Session on a connection"])
def test_an_interrupted_last_message_is_looked_up_in_the_ledger(
    postgresql_url: str,
    desks: Callable[..., Desk],
    monkeypatch: pytest.MonkeyPatch,
    lasting: str,
    sent: bool,
    final: bool,
) -> None:
    """It may have arrived; and the next question must not be given the answer to this one."""
    desk = desks(postgresql_url)
    fence = desk.fence()

    def interrupt(*given: Any) -> Any:
        raise Limit

    def interrupt_answered(pgconn: Any) -> Iterator[Any]:
        yield from answers(pgconn)
        raise Limit

    answers = pipeline._answers
    with desk.lasting(lasting) as target:
        with monkeypatch.context() as patch:
            if sent:
                patch.setattr(pipeline, "_answers", interrupt_answered)
            else:
                patch.setattr(pipeline, "_Query", interrupt)
            with pytest.raises(Limit), fence.transaction(target, final=final) as work:
                write(work, 1)
        assert fence.settled == (sent and final)
        with desk.fence().transaction(target) as work:
            write(work, 2)
    assert desk.notes() == ([1, 2] if sent else [2])


def test_a_body_frozen_with_rows_written_is_ended_by_its_own_limit(
    server_url: str, desks: Callable[..., Desk]
) -> None:
    """``idle=`` counts from the start, so that the next attempt need not wait for its rows."""
    desk = desks(server_url)
    fence = desk.fence()
    with (
        pytest.raises(sa.exc.DBAPIError),
        fence.transaction(desk.engine, idle=1.0) as connection,
    ):
        write(connection, 1)
        began = time.monotonic()
        with desk.engine.connect() as other:
            write(other, 1)  # Waits for the row until the server has ended the first writer.
            other.rollback()
        assert 0.2 < time.monotonic() - began < 4.0
        write(connection, 2)
    assert desk.notes() == []
    assert not fence.settled


def test_the_limit_goes_when_the_block_is_over(
    server_url: str, desks: Callable[..., Desk]
) -> None:
    """A pooled connection's next transaction is the user's own affair."""
    desk = desks(server_url, pool_size=1, max_overflow=0)
    variable = (
        "SELECT current_setting('idle_in_transaction_session_timeout')"
        if server_url.startswith("postgresql")
        else "SELECT @@idle_transaction_timeout"
    )

    def limit() -> str:
        with desk.engine.connect() as connection:
            return str(connection.scalar(sa.text(variable)))

    before = limit()
    with desk.fence().transaction(desk.engine, idle=7.0) as connection:
        assert str(connection.scalar(sa.text(variable))) in ("7s", "7")
    assert limit() == before


@pytest.mark.parametrize("ending", ["commit", "error"])
@pytest.mark.parametrize("kind", ["Connection", "Session on a connection"])
def test_the_limit_goes_on_a_connection_that_stays_open(
    server_url: str, desks: Callable[..., Desk], kind: str, ending: str
) -> None:
    """It is in no pool yet when its next transaction begins."""
    desk = desks(server_url)
    variable = sa.text(
        "SELECT current_setting('idle_in_transaction_session_timeout')"
        if server_url.startswith("postgresql")
        else "SELECT @@idle_transaction_timeout"
    )
    with desk.engine.connect() as connection, Session(connection) as session:
        target = connection if kind == "Connection" else session
        before = connection.scalar(variable)
        connection.rollback()
        with (
            suppress(ZeroDivisionError),
            desk.fence().transaction(target, idle=7.0) as work,
        ):
            assert str(work.scalar(variable)) in ("7s", "7")
            if ending == "error":
                raise ZeroDivisionError
        assert connection.scalar(variable) == before


def test_a_takeover_waits_for_guards_in_flight_and_not_for_bodies(
    server_url: str, desks: Callable[..., Desk]
) -> None:
    """Before its last statement a guarded transaction holds no lock on lease or fence.

    Raising the fence would fail by its lock wait otherwise, as the block is still open.
    """
    desk = desks(server_url)
    fence = desk.fence()
    with pytest.raises(StaleEpoch), fence.transaction(desk.engine) as connection:
        write(connection, 1)
        desk.lease.depose()
    assert desk.notes() == []
