"""The fence on SQLAlchemy transactions: the guard is the last statement before COMMIT.

It runs at the engine's ``commit`` event, after the session's flush and after the
user's own ``before_commit`` hooks. Nothing of a transaction is visible before its
COMMIT, so last is early enough, and the shared lock it takes lasts one round trip; where
the COMMIT can come in the same message, not even that. The driver's own is an empty one then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import sqlalchemy as sa
from sqlalchemy.orm import Session, SessionTransactionOrigin, scoped_session, sessionmaker

from celery_lease.errors import (
    FencingError,
    StoreContention,
    StoreError,
    UnsafeTransaction,
)
from celery_lease.settings import positive_duration
from celery_lease.stores.dialects import Direct, database_of, masked, translated, within
from celery_lease.stores.fences import (
    FenceStore,
    Ticket,
    look,
    objection,
    passes,
    refusal,
)

__all__ = ["Guard", "guarded", "plain"]

_NESTED = "a guarded block cannot stand inside another one"
_BEGUN = "it is in a transaction that was begun before, which this block would end"


class _State(Enum):
    OPEN = "open"
    #: Its COMMIT was sent: after the guard let it pass, or together with the guard.
    PASSED = "passed"
    COMMITTED = "committed"
    #: Its COMMIT was answered with an error, and the ledger does not know it.
    LOST = "lost"
    REFUSED = "refused"


class Guard:
    """The last word of one transaction.

    Args:
        ticket: What is shown at the fence.
        store: The lease database, for what has to be asked on another connection.
        final: Whether passing settles the ticket's task, or is only a check.
        idle: Seconds of silence after which the server ends the transaction, from
            its start on; None for the guard's last round trip only.

    Raises:
        ConfigurationError: *idle* is no number of seconds above 0.
    """

    def __init__(
        self, ticket: Ticket, store: FenceStore, *, final: bool, idle: float | None = None
    ) -> None:
        self.ticket = ticket
        self._store = store
        self._final = final
        self._idle = None if idle is None else positive_duration("idle", idle)
        self._state = _State.OPEN
        self._error: BaseException | None = None
        #: What was raised where nobody knows whether the COMMIT arrived.
        self._unanswered: BaseException | None = None
        self._engine: sa.Engine | None = None
        self._connections: WeakSet[sa.Connection] = WeakSet()

    @property
    def open(self) -> bool:
        """Whether the transaction is still to be committed."""
        return self._state is _State.OPEN

    def bind_arguments(self, session: Session) -> dict[str, Any]:
        """Return what leads *session* to the engine of the transaction that it rolled back."""
        if self._engine is None or isinstance(session.bind, sa.Connection):
            return {}
        return {"bind": self._engine}

    def enroll(self, connection: sa.Connection) -> None:
        """Make this guard the last word of the transaction that begins on *connection*.

        Raises:
            UnsafeTransaction: It could not be that.
        """
        self.begin()
        other = _guards.get(connection)
        if other is not None and other is not self and other.open:
            raise self.unsafe(_NESTED)
        if self._engine is not None and connection.engine is not self._engine:
            raise self.unsafe("the session works on two engines, and only one can be guarded")
        database = database_of(connection.dialect)
        if database.autocommits(connection.connection.dbapi_connection):
            raise self.unsafe("the connection is in AUTOCOMMIT, so writes would precede the guard")
        self._engine = connection.engine
        self._connections.add(connection)
        _guards[connection] = self
        if self._idle is not None:
            database.limit_idle(within(connection), self._idle)

    def begin(self) -> None:
        """Refuse to begin a transaction once the guard has spoken."""
        if self._state not in (_State.OPEN, _State.REFUSED):
            raise self.unsafe("the guarded block was committed inside; nothing may follow in it")
        self.raise_refusal()

    def must_have_spoken(self) -> None:
        """Raise if a commit went by without the engine committing."""
        if self.open:
            raise self.unsafe("the session's transaction belongs to somebody else")

    def leave(self) -> None:
        """Let go of the connections: the block is over."""
        for connection in self._connections:
            _guards.pop(connection, None)
            if self._state in (_State.PASSED, _State.LOST):
                # Something raised between the two. SQLAlchemy takes the transaction for
                # ended, and the next one on a connection that stays open would commit it.
                _roll_back(connection)
            _give_back(connection)

    def raise_refusal(self) -> None:
        """Raise again what was raised before: swallowing it does not help."""
        if self._error is not None:
            raise self._error

    def raise_swallowed(self) -> None:
        """Raise again what a commit inside the block raised, unless it did commit."""
        self.raise_refusal()
        if self._unanswered is not None and not self.has_settled():
            raise self._unanswered

    def unsafe(self, reason: str) -> UnsafeTransaction:
        """Return the error that says why this transaction cannot be guarded."""
        return UnsafeTransaction(reason, name=self.ticket.lease)

    def pass_or_refuse(self, connection: sa.Connection) -> None:
        """Run the guard's statement on a transaction that is about to commit.

        Raises:
            FencingError: It is refused, and rolled back already.
        """
        try:
            error = self._verdict(connection)
        except BaseException as unexpected:
            self._refuse(connection, unexpected)
            raise
        if error is not None:
            self._refuse(connection, error)
            raise error
        if self._state is _State.OPEN:
            self._state = _State.PASSED

    def speak_alone(self) -> None:
        """Say the last word where there is no transaction, as nothing was written.

        Raises:
            FencingError: It is refused.
            StoreError: The lease database did not answer.
        """
        try:
            if self._final:
                self._store.settle(self.ticket, "committed")
                error = None
            else:
                error = refusal(self.ticket, self._store.look(self.ticket))
        except FencingError as refused:
            error = refused
        if error is not None:
            self._state, self._error = _State.REFUSED, error
            raise error
        self._state = _State.COMMITTED

    def _refuse(self, connection: sa.Connection, error: BaseException) -> None:
        # Out of the commit hook the connection goes back to its pool with its transaction
        # open, and the next block on it would commit these rows.
        _roll_back(connection)
        if self._state is _State.PASSED:  # Then the COMMIT may have arrived.
            self._unanswered = error
        else:
            self._state, self._error = _State.REFUSED, error

    def _verdict(self, connection: sa.Connection) -> BaseException | None:
        """Return why the transaction must not commit; None where it may."""
        self.begin()
        way, database = self._within(connection), database_of(connection.dialect)
        commit = _is_alone(connection) and database.brings_commit(way)
        error: BaseException | None = None
        try:
            with translated(connection.engine):
                if self._passes(way, commit=commit):
                    return None
        except StoreError as problem:
            # What the database itself has said is for the task, as without a guard.
            error = problem.__cause__ or problem
            driver = getattr(error, "orig", None) or error
            shown = masked(connection.engine.url)
            told = objection(self.ticket, self._store, database, driver, shown=shown)
            if told is not None:
                return told
            if not isinstance(problem, StoreContention):
                return error
        except sa.exc.IntegrityError as duplicate:
            error = duplicate
        # Neither "no row" nor a serialization failure is an answer: look again, afresh.
        _roll_back(connection)
        return self._reason(connection) or error or self._contention()

    def _passes(self, way: Direct, *, commit: bool) -> bool:
        """Run the guard's statement, and the COMMIT where the two go out together."""
        idle = self._store.idle
        if not commit:
            return passes(way, self.ticket, final=self._final, idle=idle)
        self._state = _State.PASSED  # Until the server says otherwise.
        try:
            passed = passes(way, self.ticket, final=self._final, idle=idle, commit=True)
        except sa.exc.DBAPIError as error:
            if not error.connection_invalidated:
                self._state = _State.OPEN
            raise
        self._state = _State.COMMITTED if passed else _State.OPEN
        return passed

    def _reason(self, connection: sa.Connection) -> BaseException | None:
        try:
            shown = masked(connection.engine.url)
            return refusal(self.ticket, look(self._within(connection), self.ticket, shown))
        except FencingError as error:
            return error

    def _within(self, connection: sa.Connection) -> Direct:
        # The lease tables are called what the lease engine calls them, not the user's.
        return within(connection, self._store.engine)

    def _contention(self) -> StoreContention:
        return StoreContention(f"the fence of {self.ticket.lease!r} was moving; try again")

    def succeeded(self) -> None:
        """Take note that the COMMIT after the guard was answered."""
        if self._state is _State.PASSED:
            self._state = _State.COMMITTED

    def survives(self, error: BaseException) -> bool:
        """Find out what became of a COMMIT whose answer was an error.

        Returns:
            True where the commit row of this execution is there: it is committed.

        Raises:
            FencingError: It is not, and can never be: the fence has moved on.
        """
        if self._state is not _State.PASSED:
            return False
        try:
            found, refused = self._find()
        except (StoreError, FencingError):
            return False
        if refused is not None:
            raise refused from error
        return found

    def has_settled(self) -> bool:
        """Return whether the outcome is on record, by this transaction.

        Of a commit inside the block nobody but the ledger knows whether it succeeded.

        Raises:
            StoreError: The ledger did not answer.
            MissingFence: There is none.
        """
        if self._final and self._state is _State.PASSED:
            return self._find()[0]
        return self._final and self._state is _State.COMMITTED

    def _find(self) -> tuple[bool, FencingError | None]:
        """Return whether this execution's own row is there, and why it can never be."""
        standing = self._store.look(self.ticket)
        found = self._final and standing.execution == self.ticket.execution
        self._state = _State.COMMITTED if found else _State.LOST
        return found, refusal(self.ticket, standing)


@contextmanager
def guarded(target: Any, guard: Guard) -> Iterator[Any]:
    """Yield the session or connection of a transaction whose last statement is *guard*.

    Args:
        target: A Session, sessionmaker, scoped_session, Engine or Connection.
        guard: The guard, used once.

    Raises:
        UnsafeTransaction: The guard could not be the last word.
        FencingError: Refused; nothing was written.
        TypeError: *target* is none of these.
    """
    with _opened(target) as work:
        block = _session if isinstance(work, Session) else _connection
        with block(work, guard):
            yield work


@contextmanager
def plain(target: Any) -> Iterator[Any]:
    """Yield the session or connection of a transaction without a guard.

    Args:
        target: As of :func:`guarded`.

    Raises:
        UnsafeTransaction: It is in a transaction that would not end with this block.
        TypeError: *target* is none of these.
    """
    with _opened(target) as work:
        if _is_begun_elsewhere(work):
            raise UnsafeTransaction(_BEGUN)
        _begin(work)
        try:
            yield work
            _begin(work)
            work.commit()
        except BaseException:
            work.rollback()
            raise


@contextmanager
def _opened(target: Any) -> Iterator[Any]:
    """Yield the session or connection of *target*, closing what was opened here."""
    if isinstance(target, (Session, sa.Connection)):
        yield target
    elif isinstance(target, scoped_session):
        yield target()
    elif isinstance(target, sessionmaker):
        with target() as session:
            yield session
    elif isinstance(target, sa.Engine):
        with target.connect() as connection:
            yield connection
    else:
        raise TypeError(
            f"give a Session, sessionmaker, scoped_session, Engine or Connection, "
            f"not {type(target).__name__}"
        )


@contextmanager
def _session(session: Session, guard: Guard) -> Iterator[None]:
    _refuse_begun(session, guard)
    _sessions[session] = guard
    try:
        for connection in _begun(session):
            guard.enroll(connection)
        _begin(session)
        yield
        guard.raise_swallowed()
        _begin(session)  # The block may have ended it: there is still an outcome to record.
        if guard.open:
            # A session with several binds chooses its engine by what it writes: flush first.
            session.flush()
        if guard.open and not _begun(session):
            try:
                session.connection(bind_arguments=guard.bind_arguments(session))
            except sa.exc.UnboundExecutionError:
                # It has no bind of its own, its tables' binds differ, and it wrote nothing.
                guard.speak_alone()
        _commit(session, guard)
        guard.must_have_spoken()
    except BaseException:
        session.rollback()
        raise
    finally:
        del _sessions[session]
        guard.leave()


@contextmanager
def _connection(connection: sa.Connection, guard: Guard) -> Iterator[None]:
    if _is_begun_elsewhere(connection):
        raise guard.unsafe(_BEGUN)
    try:
        connection.begin()
        guard.enroll(connection)
        yield
        guard.raise_swallowed()
        if guard.open and not connection.in_transaction():
            # The block rolled back by itself: there is still an outcome to record.
            connection.begin()
        _commit(connection, guard)
    except BaseException:
        connection.rollback()
        raise
    finally:
        guard.leave()


def _begin(work: Session | sa.Connection) -> None:
    """Begin where a session does not do so by itself."""
    if isinstance(work, Session) and not work.autobegin and not work.in_transaction():
        work.begin()


def _commit(work: Session | sa.Connection, guard: Guard) -> None:
    ours = guard.open
    try:
        work.commit()
        if ours:
            guard.succeeded()
    except sa.exc.DBAPIError as error:
        if not guard.survives(error):
            raise
        # The answer was lost, not the commit. What is left is a broken connection.
        work.rollback()


def _refuse_begun(session: Session, guard: Guard) -> None:
    """Refuse a session whose transaction would not end with this block's commit."""
    if session in _sessions:
        raise guard.unsafe(_NESTED)
    if session.twophase:
        raise guard.unsafe("a two-phase transaction is prepared before the guard could run")
    if _is_begun_elsewhere(session):
        raise guard.unsafe(_BEGUN)
    if isinstance(session.bind, sa.Connection) and session.bind.in_transaction():
        begun_by_session = session.bind in _begun(session)
        if not begun_by_session:
            raise guard.unsafe("the session's connection is in a transaction begun elsewhere")


def _is_begun_elsewhere(work: Session | sa.Connection) -> bool:
    """Return whether it is in a transaction that somebody began, and not SQLAlchemy by itself."""
    if isinstance(work, sa.Connection):
        return work.in_transaction()
    transaction = work.get_transaction()
    return transaction is not None and (
        work.in_nested_transaction()
        or transaction.origin is not SessionTransactionOrigin.AUTOBEGIN
    )


def _begun(session: Session) -> list[sa.Connection]:
    """Return the connections that an autobegun session is working on already."""
    transaction = session.get_transaction()
    # There is no public way to ask; the attribute is the same in SQLAlchemy 2.0 and 2.1.
    begun = getattr(transaction, "_connections", {})
    return list({id(each[0]): each[0] for each in begun.values()}.values())


def _is_alone(connection: sa.Connection) -> bool:
    """Return whether no listener of the user's comes between the guard and the COMMIT."""
    return len(connection.dispatch.commit) == 1


def _roll_back(connection: sa.Connection) -> None:
    """End the transaction in the database, behind SQLAlchemy's back."""
    if connection.invalidated or connection.closed:
        return
    try:
        connection.dialect.do_rollback(connection.connection)
    except connection.dialect.loaded_dbapi.Error:
        connection.invalidate()


def _give_back(connection: sa.Connection) -> None:
    """Undo the idle limit on a connection that stays open: a pool does it for the others."""
    if connection.invalidated or connection.closed:
        return
    dbapi = connection.connection.dbapi_connection
    try:
        database_of(connection.dialect).give_back(dbapi, connection.info)
    except connection.dialect.loaded_dbapi.Error:
        connection.invalidate()


# --- SQLAlchemy's events ------------------------------------------------------------------

# Listeners on the classes see all engines, those of ``engine.execution_options(…)`` too, on
# which SQLAlchemy 2.0 has no events. They come with the import: added by the first block,
# they might be added by two threads at once, and under the eyes of a third one that goes
# through the list; and a session's own costs as much as a small statement.

#: Sessions in a guarded block.
_sessions: WeakKeyDictionary[Session, Guard] = WeakKeyDictionary()
#: Connections in a guarded block.
_guards: WeakKeyDictionary[sa.Connection, Guard] = WeakKeyDictionary()


@sa.event.listens_for(Session, "after_begin")
def _after_begin(session: Session, transaction: Any, connection: sa.Connection) -> None:
    guard = _sessions.get(session)
    if guard is not None:
        guard.enroll(connection)


@sa.event.listens_for(sa.Engine, "commit")
def _on_commit(connection: sa.Connection) -> None:
    guard = _guards.get(connection)
    if guard is not None:
        guard.pass_or_refuse(connection)


@sa.event.listens_for(sa.Engine, "begin")
def _on_begin(connection: sa.Connection) -> None:
    guard = _guards.get(connection)
    if guard is not None:
        guard.begin()


@sa.event.listens_for(sa.Engine, "before_cursor_execute")
def _on_statement(connection: sa.Connection, cursor: Any, statement: str, *rest: Any) -> None:
    if connection in _guards:
        database_of(connection.dialect).begin_guarded(connection, statement)
