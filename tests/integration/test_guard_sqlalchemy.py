"""The guard on SQLAlchemy transactions: nothing stale commits, nothing commits unguarded."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from celery_lease.errors import (
    AlreadySettled,
    ConfigurationError,
    MissingFence,
    StaleEpoch,
    UnsafeTransaction,
)
from celery_lease.guards.fence import TaskFence, Unfenced
from celery_lease.stores.fences import FenceStore, Ticket
from celery_lease.stores.schema import metadata
from celery_lease.testing import HeldLease, hold

TARGETS = ["Session", "sessionmaker", "scoped_session", "Engine", "Connection"]


class Base(DeclarativeBase):
    """The guarded data."""


class Note(Base):
    """A row that somebody writes."""

    __tablename__ = "note"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    epoch: Mapped[int]


class Desk:
    """A lease that is held, the fence of one execution under it, and a user's engine."""

    def __init__(self, url: str, **engine_options: Any) -> None:
        self.url = url
        self.lease: HeldLease = hold(url)
        self.store = FenceStore(url, idle=5.0)
        self.engine = sa.create_engine(url, **engine_options)
        Base.metadata.create_all(self.engine)

    def fence(self, task_id: str | None = None, lease: HeldLease | None = None) -> TaskFence:
        """Return the fence of a new execution."""
        lease = lease or self.lease
        task_id = task_id or str(uuid.uuid4())
        ticket = Ticket(
            lease=lease.term.name,
            epoch=lease.epoch,
            term=lease.term.uuid,
            task_id=task_id,
            run=task_id,
            execution=str(uuid.uuid4()),
        )
        return TaskFence(ticket, self.store, self.store.look(ticket))

    @contextmanager
    def target(self, kind: str) -> Iterator[Any]:
        """Yield a target of each kind that a guard takes."""
        if kind == "Engine":
            yield self.engine
        elif kind == "sessionmaker":
            yield sessionmaker(self.engine)
        elif kind == "scoped_session":
            registry = scoped_session(sessionmaker(self.engine))
            yield registry
            registry.remove()
        elif kind == "Session":
            with Session(self.engine) as session:
                yield session
        else:
            with self.engine.connect() as connection:
                yield connection

    @contextmanager
    def lasting(self, kind: str) -> Iterator[Any]:
        """Yield a target whose connection lasts, as it is, for longer than a block."""
        if kind == "no reset":
            self.engine.dispose()
            self.engine = sa.create_engine(self.url, pool_reset_on_return=None, pool_size=1)
            yield self.engine
        elif kind == "Session on a connection":
            with self.engine.connect() as connection, Session(connection) as session:
                yield session
        else:
            with self.target(kind) as target:
                yield target

    def notes(self) -> list[int]:
        """Return the ids that are committed."""
        with self.engine.connect() as connection:
            return list(connection.scalars(sa.select(Note.id).order_by(Note.id)))

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()
        self.store.dispose()
        self.lease.close()


def asked(engine: sa.Engine) -> list[str]:
    """Return a list of the statements that the database is given from now on.

    PostgreSQL says them itself: the guard that brings its COMMIT is none of the engine's.
    """
    seen: list[str] = []
    if engine.dialect.name != "postgresql":
        sa.event.listen(engine, "before_cursor_execute", lambda *given: seen.append(given[2]))
        sa.event.listen(engine, "commit", lambda connection: seen.append("COMMIT"))
        return seen

    @sa.event.listens_for(engine, "connect")
    def connected(dbapi: Any, record: Any) -> None:
        dbapi.add_notice_handler(lambda said: seen.append(said.message_primary.split(": ", 1)[1]))
        dbapi.execute("SET client_min_messages = log")
        dbapi.execute("SET log_statement = 'all'")
        dbapi.commit()
        seen.clear()

    engine.dispose()  # for connections that are listened to from their start
    return seen


def write(work: Any, number: int, epoch: int = 0) -> None:
    """Write a note and have it reach the database."""
    work.execute(sa.insert(Note).values(id=number, epoch=epoch))


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


@pytest.fixture
def desk(database_url: str, desks: Callable[..., Desk]) -> Desk:
    """A desk on each kind of database, with a pool of one connection."""
    return desks(database_url, pool_size=1, max_overflow=0, pool_timeout=5)


@pytest.mark.parametrize("kind", TARGETS)
def test_what_is_written_is_committed_together_with_the_outcome(desk: Desk, kind: str) -> None:
    """One transaction: either both are there or neither is."""
    fence = desk.fence()
    with desk.target(kind) as target, fence.transaction(target) as work:
        write(work, 1)
        assert desk.lease.outcome(fence.ticket.task_id) is None
    assert desk.notes() == [1]
    assert desk.lease.outcome(fence.ticket.task_id) == "committed"
    assert fence.settled


@pytest.mark.parametrize("kind", TARGETS)
def test_a_takeover_in_the_block_turns_its_commit_away(desk: Desk, kind: str) -> None:
    """The check is made last, so a takeover at any time before it is seen."""
    fence = desk.fence()
    with desk.target(kind) as target:
        with pytest.raises(StaleEpoch) as caught, fence.transaction(target) as work:
            desk.lease.depose()
            write(work, 1)
        assert (caught.value.epoch, caught.value.current_epoch) == (1, 2)
    assert desk.notes() == []
    assert desk.lease.outcome(fence.ticket.task_id) is None


@pytest.mark.parametrize("again", ["the same target", "the pool's one connection"])
@pytest.mark.parametrize("kind", TARGETS)
def test_a_refused_connection_is_clean_for_the_next_block(
    desk: Desk, kind: str, again: str
) -> None:
    """An exception out of the commit hook alone would leave the transaction open there."""
    stale = desk.fence()
    new = desk.lease.depose()
    with desk.target(kind) as target:
        with pytest.raises(StaleEpoch), stale.transaction(target) as work:
            write(work, 1)
        if again == "the same target":
            with desk.fence(lease=new).transaction(target) as work:
                write(work, 2)
    if again != "the same target":
        with desk.fence(lease=new).transaction(desk.engine) as work:
            write(work, 2)
    assert desk.notes() == [2]


@pytest.mark.parametrize("kind", TARGETS)
def test_swallowing_the_refusal_and_committing_again_does_not_help(desk: Desk, kind: str) -> None:
    """Once refused, the block stays refused."""
    fence = desk.fence()
    with (
        desk.target(kind) as target,
        pytest.raises(StaleEpoch),
        fence.transaction(target) as work,
    ):
        desk.lease.depose()
        write(work, 1)
        with pytest.raises(StaleEpoch):
            work.commit()
        work.rollback()
        with pytest.raises(StaleEpoch):
            write(work, 2)
        work.rollback()
    assert desk.notes() == []
    assert isinstance(fence.refused, StaleEpoch)


@pytest.mark.parametrize("kind", TARGETS)
def test_a_commit_inside_is_the_guarded_commit_and_nothing_follows_it(
    desk: Desk, kind: str
) -> None:
    """A second transaction in the block would go by without a guard."""
    fence = desk.fence()
    with (
        desk.target(kind) as target,
        pytest.raises(UnsafeTransaction, match="committed inside"),
        fence.transaction(target) as work,
    ):
        write(work, 1)
        work.commit()
        assert desk.lease.outcome(fence.ticket.task_id) == "committed"
        write(work, 2)
    assert desk.notes() == [1]


@pytest.mark.parametrize("kind", TARGETS)
def test_a_commit_inside_is_known_whatever_follows(desk: Desk, kind: str) -> None:
    """In the block, for ``retry()``; after an exception, for the log line and the next block."""
    fence = desk.fence()
    with desk.target(kind) as target:
        with pytest.raises(ZeroDivisionError), fence.transaction(target) as work:
            write(work, 1)
            assert not fence.settled
            work.commit()
            assert fence.settled
            raise ZeroDivisionError
        assert fence.settled
        with pytest.raises(UnsafeTransaction, match="final"), fence.transaction(target):
            pass
    assert desk.notes() == [1]


@pytest.mark.parametrize("kind", ["Engine", "sessionmaker"])
@pytest.mark.parametrize("final", [True, False])
def test_a_commit_inside_settles_only_if_it_is_one(desk: Desk, kind: str, final: bool) -> None:
    """The guard has passed, but a hook of the user's own came after it."""

    def fail(connection: sa.Connection) -> None:
        raise ZeroDivisionError

    fence = desk.fence()
    sa.event.listen(desk.engine, "commit", fail)
    with (
        desk.target(kind) as target,
        pytest.raises(ZeroDivisionError),
        fence.transaction(target, final=final) as work,
    ):
        write(work, 1)
        work.commit()
    sa.event.remove(desk.engine, "commit", fail)
    assert not fence.settled
    assert desk.notes() == []
    with desk.target(kind) as target, fence.transaction(target) as work:
        write(work, 1)
    assert desk.notes() == [1]


@pytest.mark.parametrize("kind", ["Connection", "Session", "Session on a connection", "no reset"])
@pytest.mark.parametrize(("inside", "final"), [(True, True), (False, True), (False, False)])
def test_what_raises_between_guard_and_commit_leaves_nothing_for_the_next_block(
    desk: Desk, kind: str, inside: bool, final: bool
) -> None:
    """A hook of the user's, a soft time limit: SQLAlchemy believes that it has committed.

    The connection stays open, or goes back into a pool that does not roll back.
    """

    def fail(connection: sa.Connection) -> None:
        raise ZeroDivisionError

    first = desk.fence()
    with desk.lasting(kind) as target:
        sa.event.listen(desk.engine, "commit", fail)
        with (
            pytest.raises(ZeroDivisionError),
            first.transaction(target, final=final) as work,
        ):
            write(work, 1)
            if inside:
                work.commit()
        sa.event.remove(desk.engine, "commit", fail)
        desk.lease = desk.lease.depose()  # Nothing is locked.
        with desk.fence().transaction(target) as work:
            write(work, 2)
    assert not first.settled
    assert desk.notes() == [2]


def test_a_commit_inside_an_earlier_block_settles_nothing(desk: Desk) -> None:
    """``final=False`` leaves no row."""
    fence = desk.fence()
    with (
        pytest.raises(ZeroDivisionError),
        fence.transaction(desk.engine, final=False) as work,
    ):
        write(work, 1)
        work.commit()
        assert not fence.settled
        raise ZeroDivisionError
    assert not fence.settled


def test_objects_added_after_a_commit_inside_are_not_lost_in_silence(desk: Desk) -> None:
    """They are only flushed at the end of the block, which then has to speak up."""
    fence = desk.fence()
    with (
        pytest.raises(UnsafeTransaction, match="committed inside"),
        fence.transaction(sessionmaker(desk.engine)) as session,
    ):
        session.add(Note(id=1, epoch=0))
        session.commit()
        session.add(Note(id=2, epoch=0))
    assert desk.notes() == [1]


@pytest.mark.parametrize("kind", TARGETS)
def test_a_block_that_writes_nothing_still_settles(desk: Desk, kind: str) -> None:
    """Nothing to do is an outcome."""
    fence = desk.fence()
    with desk.target(kind) as target, fence.transaction(target):
        pass
    assert desk.lease.outcome(fence.ticket.task_id) == "committed"


@pytest.mark.parametrize("final", [True, False])
def test_a_session_whose_tables_alone_have_engines_may_write_nothing(
    desk: Desk, final: bool
) -> None:
    """No row to bill today is a good end too, though there is no engine to say it on."""
    fence = desk.fence()
    with fence.transaction(sessionmaker(binds={Note: desk.engine}), final=final):
        pass
    assert fence.settled == final

    desk.lease.depose()
    stale = desk.fence()
    with (
        pytest.raises(StaleEpoch),
        stale.transaction(sessionmaker(binds={Note: desk.engine}), final=final),
    ):
        pass
    assert not stale.settled
    assert isinstance(stale.refused, StaleEpoch)


@pytest.mark.parametrize("kind", TARGETS)
def test_what_was_rolled_back_inside_is_gone_and_the_rest_is_guarded(
    desk: Desk, kind: str
) -> None:
    """The guard stands before the commit that comes, whatever went before."""
    fence = desk.fence()
    with desk.target(kind) as target, fence.transaction(target) as work:
        write(work, 1)
        work.rollback()
        write(work, 2)
    assert desk.notes() == [2]
    assert desk.lease.outcome(fence.ticket.task_id) == "committed"


@pytest.mark.parametrize("kind", TARGETS)
def test_a_rollback_inside_with_nothing_after_it_still_settles(desk: Desk, kind: str) -> None:
    """A duplicate key that was swallowed, say."""
    fence = desk.fence()
    with desk.target(kind) as target, fence.transaction(target) as work:
        write(work, 1)
        work.rollback()
    assert desk.notes() == []
    assert desk.lease.outcome(fence.ticket.task_id) == "committed"


@pytest.mark.parametrize("kind", TARGETS)
def test_savepoints_inside_are_the_users_own(desk: Desk, kind: str) -> None:
    """Releasing a savepoint is no commit; rolling back to one is no rollback of the block."""
    fence = desk.fence()
    with desk.target(kind) as target, fence.transaction(target) as work:
        with work.begin_nested():
            write(work, 1)
        inner = work.begin_nested()
        write(work, 2)
        inner.rollback()
        assert desk.lease.outcome(fence.ticket.task_id) is None
    assert desk.notes() == [1]
    assert desk.lease.outcome(fence.ticket.task_id) == "committed"


def in_savepoint(work: Any) -> None:
    """Write a note in a savepoint."""
    with work.begin_nested():
        write(work, 1)


def from_cte(work: Any) -> None:
    """Write a note with a statement that begins with its source."""
    source = sa.select(sa.literal(1).label("id")).cte("source")
    note = sa.insert(Note).from_select(["id", "epoch"], sa.select(source.c.id, sa.literal(0)))
    work.execute(note)


def in_joined_session(work: Any) -> None:
    """Write a note in a session that joins the transaction with a savepoint."""
    connection = work.connection() if isinstance(work, Session) else work
    with Session(connection, join_transaction_mode="create_savepoint") as session:
        session.add(Note(id=1, epoch=0))
        session.commit()


FIRST = [in_savepoint, from_cte, in_joined_session]


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("kind", TARGETS)
def test_whatever_writes_first_is_turned_away_when_stale(
    desk: Desk, kind: str, first: Callable[[Any], None]
) -> None:
    """sqlite3 begins late: a savepoint or a CTE as the first thing would commit by itself."""
    stale = desk.fence()
    desk.lease.depose()
    with (
        desk.target(kind) as target,
        pytest.raises(StaleEpoch),
        stale.transaction(target) as work,
    ):
        first(work)
    assert desk.notes() == []


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("kind", TARGETS)
def test_whatever_writes_first_goes_with_the_block(
    desk: Desk, kind: str, first: Callable[[Any], None]
) -> None:
    """Rolled back with it after an exception, and for a second delivery."""
    fence, again = desk.fence("same"), desk.fence("same")
    with desk.target(kind) as target:
        with pytest.raises(ZeroDivisionError), fence.transaction(target) as work:
            first(work)
            raise ZeroDivisionError
        with fence.transaction(target):
            pass
        with pytest.raises(AlreadySettled), again.transaction(target) as work:
            first(work)
    assert desk.notes() == []


@pytest.mark.parametrize("first", [in_savepoint, from_cte])
@pytest.mark.parametrize("kind", TARGETS)
def test_whatever_writes_first_after_a_rollback_inside_goes_with_the_block(
    desk: Desk, kind: str, first: Callable[[Any], None]
) -> None:
    """The second transaction in the block begins as late as the first."""
    with (
        desk.target(kind) as target,
        pytest.raises(ZeroDivisionError),
        desk.fence().transaction(target) as work,
    ):
        write(work, 2)
        work.rollback()
        first(work)
        raise ZeroDivisionError
    assert desk.notes() == []


@pytest.mark.parametrize("kind", TARGETS)
def test_an_exception_in_the_block_rolls_back_and_settles_nothing(desk: Desk, kind: str) -> None:
    """The task may catch it and try another final block."""
    fence = desk.fence()
    with desk.target(kind) as target:
        with pytest.raises(ZeroDivisionError), fence.transaction(target) as work:
            write(work, 1)
            raise ZeroDivisionError
        assert not fence.settled
        with fence.transaction(target) as work:
            write(work, 2)
    assert desk.notes() == [2]


@pytest.mark.parametrize("kind", TARGETS)
def test_earlier_blocks_are_checked_and_the_last_one_settles(desk: Desk, kind: str) -> None:
    """``final=False`` commits under the fence without an outcome, as often as needed."""
    fence = desk.fence()
    with desk.target(kind) as target:
        for number in (1, 2):
            with fence.transaction(target, final=False) as work:
                write(work, number)
            assert desk.lease.outcome(fence.ticket.task_id) is None
        with fence.transaction(target) as work:
            write(work, 3)
        with pytest.raises(UnsafeTransaction, match="final"), fence.transaction(target):
            pass
    assert desk.notes() == [1, 2, 3]


@pytest.mark.parametrize("kind", TARGETS)
def test_an_earlier_block_is_refused_when_stale(desk: Desk, kind: str) -> None:
    """Checked is checked, with an outcome or without."""
    fence = desk.fence()
    with (
        desk.target(kind) as target,
        pytest.raises(StaleEpoch),
        fence.transaction(target, final=False) as work,
    ):
        desk.lease.depose()
        write(work, 1)
    assert desk.notes() == []


@pytest.mark.parametrize("kind", TARGETS)
def test_the_second_execution_of_a_message_writes_nothing(desk: Desk, kind: str) -> None:
    """A redelivered message has the same id and another execution."""
    first, second = desk.fence("same"), desk.fence("same")
    with desk.target(kind) as target:
        with first.transaction(target) as work:
            write(work, 1)
        with pytest.raises(AlreadySettled) as caught, second.transaction(target) as work:
            write(work, 2)
    assert caught.value.outcome == "committed"
    assert desk.notes() == [1]


@pytest.mark.parametrize("kind", ["Session", "scoped_session"])
def test_a_session_that_began_by_itself_is_taken_over(desk: Desk, kind: str) -> None:
    """What it wrote before the block joins it, and is guarded with it."""
    fence = desk.fence()
    with desk.target(kind) as target:
        write(target, 1)
        with fence.transaction(target) as work:
            write(work, 2)
    assert desk.notes() == [1, 2]
    stale = desk.fence()
    desk.lease.depose()
    with desk.target(kind) as target:
        write(target, 3)
        with pytest.raises(StaleEpoch), stale.transaction(target):
            pass
    assert desk.notes() == [1, 2]


def test_a_session_that_somebody_began_is_refused(desk: Desk) -> None:
    """Its end is not ours to decide, so the guard might not be its last word."""
    with Session(desk.engine) as session, session.begin():
        write(session, 1)
        with pytest.raises(UnsafeTransaction, match="begun before"):
            desk.fence().transaction(session).__enter__()


def test_a_session_inside_a_savepoint_is_refused(desk: Desk) -> None:
    """Leaving the block would release the savepoint, not commit."""
    with Session(desk.engine) as session:
        write(session, 1)
        with (
            session.begin_nested(),
            pytest.raises(UnsafeTransaction, match="begun before"),
        ):
            desk.fence().transaction(session).__enter__()
        session.rollback()


def test_a_connection_in_a_transaction_is_refused(desk: Desk) -> None:
    """Begun by hand or by itself: on a Connection the two cannot be told apart."""
    with desk.engine.connect() as connection:
        write(connection, 1)
        with pytest.raises(UnsafeTransaction, match="begun before"):
            desk.fence().transaction(connection).__enter__()


def test_a_session_on_a_connection_with_an_outer_transaction_is_refused(desk: Desk) -> None:
    """Its commit would not be one."""
    with (
        desk.engine.connect() as connection,
        connection.begin(),
        Session(connection) as session,
        pytest.raises(UnsafeTransaction, match="elsewhere"),
    ):
        desk.fence().transaction(session).__enter__()


def test_a_guarded_block_inside_another_is_refused(desk: Desk) -> None:
    """Both would settle the same run."""
    fence = desk.fence()
    with fence.transaction(desk.engine) as work:
        write(work, 1)
        with (
            pytest.raises(UnsafeTransaction, match="inside another"),
            fence.transaction(sessionmaker(desk.engine)),
        ):
            pass
    assert desk.notes() == [1]


@pytest.mark.parametrize(
    ("kind", "begun"),
    [("scoped_session", True), ("Session", False), ("Session on a connection", True)],
)
def test_a_block_of_another_task_inside_one_leaves_its_guard_in_force(
    desk: Desk, kind: str, begun: bool
) -> None:
    """A task that is applied in a block shares its thread's session; the block must not notice.

    A guard that is taken away with the inner block would let what follows it pass unguarded.
    """
    outer, inner = desk.fence(), desk.fence()
    with (
        desk.lasting(kind) as target,
        pytest.raises(StaleEpoch),
        outer.transaction(target) as work,
    ):
        if begun:
            work.execute(sa.select(Note.id)).all()
        with pytest.raises(UnsafeTransaction, match="inside another"), inner.transaction(target):
            pass
        desk.lease.depose()
        write(work, 1)
    assert desk.notes() == []


def test_two_phase_is_refused(desk: Desk) -> None:
    """The engine's commit event does not fire for it: the write would go by unguarded."""
    with (
        Session(desk.engine, twophase=True) as session,
        pytest.raises(UnsafeTransaction, match="two-phase"),
    ):
        desk.fence().transaction(session).__enter__()


@pytest.mark.parametrize("kind", ["Engine", "sessionmaker"])
def test_autocommit_is_refused_before_anything_is_written(desk: Desk, kind: str) -> None:
    """Each statement would be visible before the guard."""
    engine = desk.engine.execution_options(isolation_level="AUTOCOMMIT")
    target = engine if kind == "Engine" else sessionmaker(engine)
    with (
        pytest.raises(UnsafeTransaction, match="AUTOCOMMIT"),
        desk.fence().transaction(target) as work,
    ):
        write(work, 1)
    assert desk.notes() == []


def test_an_engine_that_autocommits_by_its_options_is_refused(
    database_url: str, desks: Callable[..., Desk]
) -> None:
    """The driver is asked: the server calls this READ COMMITTED."""
    desk = desks(database_url, isolation_level="AUTOCOMMIT")
    with (
        pytest.raises(UnsafeTransaction, match="AUTOCOMMIT"),
        desk.fence().transaction(sessionmaker(desk.engine)) as work,
    ):
        write(work, 1)
    assert desk.notes() == []


def test_an_engine_with_execution_options_is_guarded(desk: Desk) -> None:
    """SQLAlchemy 2.0 has no events on such an engine itself."""
    engine = desk.engine.execution_options(logging_token="guarded")
    with desk.fence().transaction(engine) as work:
        write(work, 1)
    stale = desk.fence()
    with pytest.raises(StaleEpoch), stale.transaction(sessionmaker(engine)) as work:
        desk.lease.depose()
        write(work, 2)
    assert desk.notes() == [1]


@pytest.mark.parametrize("final", [True, False])
def test_an_engine_that_translates_schemas_finds_the_lease_tables(desk: Desk, final: bool) -> None:
    """The map is for the user's tables: a tenant's schema has no lease tables."""
    tenants = {None: "tenant"}
    engine = desk.engine.execution_options(schema_translate_map=tenants)
    with engine.connect() as connection:
        with desk.fence().transaction(connection, final=final):
            pass
        assert connection.get_execution_options()["schema_translate_map"] == tenants
    stale = desk.fence()
    desk.lease.depose()
    with pytest.raises(StaleEpoch), stale.transaction(sessionmaker(engine), final=final):
        pass


@pytest.mark.postgresql
def test_lease_tables_in_a_schema_of_their_own_are_found_there(
    postgresql_url: str, desks: Callable[..., Desk]
) -> None:
    """Where ``beat_lease_engine_options`` says so, whatever the user's engine says."""
    desk = desks(postgresql_url)
    options = {"execution_options": {"schema_translate_map": {None: "own"}}}
    desk.store.dispose()
    desk.store = FenceStore(postgresql_url, options)
    _move(desk, "public", "own")
    first, second = desk.fence("same"), desk.fence("same")
    with first.transaction(desk.engine) as work:
        write(work, 1)
    with pytest.raises(AlreadySettled), second.transaction(desk.engine) as work:
        write(work, 2)
    assert desk.notes() == [1]
    _move(desk, "own", "public")


def _move(desk: Desk, before: str, after: str) -> None:
    with desk.engine.begin() as connection:
        connection.execute(sa.text(f"CREATE SCHEMA IF NOT EXISTS {after}"))
        for table in metadata.tables:
            connection.execute(sa.text(f"ALTER TABLE {before}.{table} SET SCHEMA {after}"))


@pytest.mark.postgresql
def test_a_search_path_without_the_lease_tables_is_named_as_a_cause(
    postgresql_url: str, desks: Callable[..., Desk]
) -> None:
    """The database is the right one, and so is beat_lease_url."""
    desk = desks(postgresql_url)
    with (
        pytest.raises(MissingFence, match="search_path"),
        desk.fence().transaction(desk.engine) as work,
    ):
        work.execute(sa.text("SET LOCAL search_path = 'elsewhere'"))


def test_a_session_on_two_engines_is_refused_where_it_touches_the_second(desk: Desk) -> None:
    """Only one of the two commits could be guarded."""
    other = sa.create_engine("sqlite://")
    local = sa.Table("local", sa.MetaData(), sa.Column("id", sa.Integer))
    maker = sessionmaker(desk.engine, binds={local: other})
    with (
        pytest.raises(UnsafeTransaction, match="two engines"),
        desk.fence().transaction(maker) as session,
    ):
        write(session, 1)
        session.execute(sa.insert(local).values(id=1))
    other.dispose()
    assert desk.notes() == []


class Routed(Session):
    """A session that writes to the leader and reads from a follower."""

    leader: sa.Engine

    def get_bind(self, *arguments: Any, clause: Any = None, bind: Any = None, **kw: Any) -> Any:
        """Return an engine as the recipe in SQLAlchemy's documentation does."""
        if bind is not None:
            return bind
        if self._flushing or isinstance(clause, (sa.Insert, sa.Update, sa.Delete)):
            return self.leader
        return sa.create_engine("sqlite://")


@pytest.mark.parametrize("rollback", [False, True])
@pytest.mark.parametrize("kind", ["binds", "routed"])
def test_a_session_that_chooses_its_engine_by_what_it_writes_is_not_asked_before(
    desk: Desk, kind: str, rollback: bool
) -> None:
    """Asked without a mapper, it knows no engine, or names another one."""
    if kind == "binds":
        maker = sessionmaker(binds={Note: desk.engine})
    else:
        maker = sessionmaker(class_=type("Routing", (Routed,), {"leader": desk.engine}))
    fence = desk.fence()
    with fence.transaction(maker) as session:
        session.add(Note(id=1, epoch=0))
        if rollback:
            session.flush()
            session.rollback()
    assert desk.notes() == ([] if rollback else [1])
    assert desk.lease.outcome(fence.ticket.task_id) == "committed"


@pytest.mark.parametrize("way", ["commit", "rollback", None])
def test_a_session_without_autobegin_is_begun_for_the_block(desk: Desk, way: str | None) -> None:
    """And again where the body ended its transaction."""
    fence = desk.fence()
    with fence.transaction(sessionmaker(desk.engine, autobegin=False)) as session:
        write(session, 1)
        if way is not None:
            getattr(session, way)()
    assert desk.notes() == ([] if way == "rollback" else [1])
    assert desk.lease.outcome(fence.ticket.task_id) == "committed"


@pytest.mark.parametrize("kind", [sa.Engine.connect, Session])
def test_an_unfenced_call_ends_nobody_elses_transaction(
    desk: Desk, kind: Callable[[sa.Engine], Any]
) -> None:
    """What works by hand works under a stamp, where it would be refused, too."""
    with kind(desk.engine) as work:
        work.begin()
        write(work, 1)
        with pytest.raises(UnsafeTransaction), Unfenced().transaction(work):
            raise AssertionError("the block was entered")
        work.rollback()
    assert desk.notes() == []


@pytest.mark.parametrize("way", ["commit", "rollback", None])
@pytest.mark.parametrize("autobegin", [True, False])
def test_an_unfenced_call_opens_a_plain_transaction(
    desk: Desk, autobegin: bool, way: str | None
) -> None:
    """On the same targets as a guarded one, a session without autobegin included."""
    maker = sessionmaker(desk.engine, autobegin=autobegin)
    with Unfenced().transaction(maker) as session:
        write(session, 1)
        if way is not None:
            getattr(session, way)()
    assert desk.notes() == ([] if way == "rollback" else [1])


def test_hooks_before_the_commit_write_ahead_of_the_guard(desk: Desk) -> None:
    """What they add is guarded with the rest: the guard comes after the flush."""
    maker = sessionmaker(desk.engine)
    fence, statements = desk.fence(), asked(desk.engine)

    @sa.event.listens_for(maker, "before_commit")
    def add_another(session: Session) -> None:
        session.add(Note(id=2, epoch=0))

    with fence.transaction(maker) as session:
        session.add(Note(id=1, epoch=0))
    guards = [each for each in statements if "celery_lease_commit" in each]
    assert guards == statements[-2:-1]
    assert statements[-1] == "COMMIT"
    assert desk.notes() == [1, 2]


def test_the_guard_is_one_statement_more(desk: Desk) -> None:
    """Its cost is a round trip, or not even that."""
    fence, statements = desk.fence(), asked(desk.engine)
    with fence.transaction(desk.engine) as work:
        write(work, 1)
    *_, own, guard, commit = statements
    assert [each.split()[:3] for each in (own, guard, commit)] == [
        ["INSERT", "INTO", "note"],
        ["INSERT", "INTO", "celery_lease_commit"],
        ["COMMIT"],
    ]
    assert [each for each in statements[:-3] if each != "BEGIN"] == []


def test_a_database_without_a_fence_says_what_to_look_at(desk: Desk, tmp_path: Any) -> None:
    """Most often beat_lease_url is another one on the worker."""
    elsewhere = sa.create_engine(f"sqlite:///{tmp_path / 'elsewhere.sqlite3'}")
    Base.metadata.create_all(elsewhere)
    with (
        pytest.raises(MissingFence, match="beat_lease_url"),
        desk.fence().transaction(elsewhere) as work,
    ):
        write(work, 1)
    with elsewhere.connect() as connection:
        assert connection.scalars(sa.select(Note.id)).all() == []
    elsewhere.dispose()


@pytest.mark.parametrize("idle", [0, -1, float("inf"), float("nan"), "5", True])
def test_an_idle_limit_that_is_none_is_refused(desk: Desk, idle: Any) -> None:
    """0 would end the transaction at once, and a server takes no endless one."""
    with (
        pytest.raises(ConfigurationError, match="idle = "),
        desk.fence().transaction(desk.engine, idle=idle) as work,
    ):
        write(work, 1)
    assert desk.notes() == []


def test_a_target_of_another_kind_is_a_type_error(desk: Desk) -> None:
    """A URL, say."""
    with (
        pytest.raises(TypeError, match="sessionmaker"),
        desk.fence().transaction("sqlite://"),
    ):
        pass


def test_sessions_outside_the_block_are_left_alone(desk: Desk) -> None:
    """The listener on the class sees every commit of the process."""
    with desk.fence().transaction(desk.engine) as work:
        write(work, 1)
    desk.lease.depose()
    with Session(desk.engine) as session:
        session.add(Note(id=2, epoch=0))
        session.commit()
    assert desk.notes() == [1, 2]


def test_the_engines_events_are_heard_before_there_are_threads() -> None:
    """Two first blocks at once would have the guard run twice, and later blocks fail."""
    script = (
        "import sqlalchemy as sa, celery_lease.task\n"
        "from celery_lease.guards import sqlalchemy as guards\n"
        "assert sa.event.contains(sa.Engine, 'commit', guards._on_commit)\n"
        "assert sa.event.contains(sa.Engine, 'begin', guards._on_begin)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
