"""A connection that breaks around COMMIT: adopted or conceded, never two terms, never twice."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from celery_lease.errors import AlreadySettled, StoreUnavailable
from celery_lease.guards.sqlalchemy import Guard, guarded
from celery_lease.lease import Lease, Term
from celery_lease.stores.base import Raised, Renewal
from celery_lease.stores.fences import FenceStore, Ticket
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.schema import commit_table
from tests.leases import NAME, expire, grant, holder, opened, take
from tests.services import COMMIT, TCPProxy, cut_before, lose_answer
from tests.services.proxy import Filter, Verdict, once

#: Rounds of each verb at each point: 4 x 3 x 17 = 204.
ROUNDS = 17

POINTS: dict[str, Callable[[re.Pattern[bytes]], Filter]] = {
    # The server never sees it.
    "before": cut_before,
    # The server sees it, and its client is gone before it can answer.
    "during": lambda pattern: once(Verdict.CUT_AFTER_FORWARD, pattern),
    # The server has done it, and the answer is lost.
    "after": lose_answer,
}

STATEMENT = re.compile(rb"UPDATE celery_lease SET")

target_table = sa.Table(
    "unknown_outcome_target", sa.MetaData(), sa.Column("task", sa.String(36), nullable=False)
)


class Line:
    """A lease database behind a line that breaks, and a straight line to the same one."""

    def __init__(self, url: str, straight: SQLLeaseStore, proxy: TCPProxy) -> None:
        self.proxy = proxy
        self.straight = straight
        # A prepared statement goes by its number, in which nobody finds what is sent.
        driver = sa.make_url(url).get_driver_name()
        arguments = {"prepare_threshold": None} if driver == "psycopg" else {}
        self.options = {"connect_args": arguments}
        self.url = sa.make_url(url).set(port=proxy.port).render_as_string(hide_password=False)
        self.store = SQLLeaseStore(self.url, self.options)
        self.fences = FenceStore(self.url, self.options)
        self.engine = sa.create_engine(self.url, pool_pre_ping=True, **self.options)

    @property
    def commits(self) -> re.Pattern[bytes]:
        """What makes an acquire or a release happen: one statement, or a COMMIT."""
        return STATEMENT if self.store.database.one_statement_acquire else COMMIT

    @contextlib.contextmanager
    def broken(self, point: str, pattern: re.Pattern[bytes]) -> Iterator[None]:
        """Break once, at this point."""
        # A new connection is set up with a COMMIT of its own.
        self.store.read(NAME)
        self.proxy.filter = POINTS[point](pattern)
        try:
            yield
        finally:
            self.proxy.filter = None

    def close(self) -> None:
        """Leave nothing open."""
        self.store.dispose()
        self.fences.dispose()
        self.engine.dispose()


@pytest.fixture
def line(server_url) -> Iterator[Line]:
    """A lease database with a proxy before it."""
    with opened(server_url) as straight, TCPProxy(sa.make_url(server_url).port) as proxy:
        target_table.create(straight.engine)
        made = Line(server_url, straight, proxy)
        yield made
        made.close()


@pytest.mark.parametrize("point", POINTS)
def test_an_acquire_without_an_answer_is_adopted_or_did_not_happen(line, point):
    """A winner that does not know it leads costs a ttl; a loser that thinks it does, two terms."""
    adopted = 0
    for number in range(ROUNDS):
        expire(line.straight)
        attempt = str(uuid.uuid4())
        with line.broken(point, line.commits):
            try:
                answer = line.store.acquire(NAME, holder(), 30, attempt)
            except StoreUnavailable:
                answer = None
        adopted += isinstance(answer, Term)
        if isinstance(answer, Term):
            assert answer.uuid == attempt
            assert isinstance(take(line.straight, "rival"), Lease), "two valid terms"
            assert line.straight.renew(answer, 30) is Renewal.RENEWED
            newest = line.straight.history(NAME, 1)[0]
            assert (newest.epoch, newest.ended) == (answer.epoch, None)
        else:
            assert answer is None, f"round {number}: lost to nobody"

    # A server that has the statement mostly goes on without its client; one that has not, cannot.
    assert {"before": adopted == 0, "during": True, "after": adopted == ROUNDS}[point]


@pytest.mark.parametrize("point", POINTS)
def test_a_renewal_without_an_answer_is_asked_again(line, point):
    """A broken pooled connection is one warning at most, never a lost lease."""
    term = grant(line.straight, ttl=5)
    for _ in range(ROUNDS):
        before = line.straight.read(NAME).renewed_at
        with line.broken(point, STATEMENT):
            assert line.store.renew(term, 30) is Renewal.RENEWED
        assert line.straight.read(NAME).renewed_at > before


@pytest.mark.parametrize("point", POINTS)
def test_a_release_without_an_answer_is_known_to_have_happened(line, point):
    """Telling a clean stop from a lost lease is what the history is for."""
    for _ in range(ROUNDS):
        term = grant(line.straight)
        with line.broken(point, line.commits):
            assert line.store.release(term)
        assert line.straight.read(NAME).holder is None
        assert line.straight.history(NAME, 1)[0].ended == "released"


@pytest.mark.parametrize("point", POINTS)
def test_a_guarded_commit_without_an_answer_happens_once(line, point):
    """The block says that it is committed, or the task is done again: one of the two."""
    term = grant(line.straight, ttl=300)
    line.straight.raise_fence(term)
    for _ in range(ROUNDS):
        task = str(uuid.uuid4())
        with line.broken(point, COMMIT):
            committed = _attempt(line, term, task)
        again = _attempt(line, term, task)

        assert not (committed and again), "one task was told twice that it committed"
        assert _count(line, target_table, target_table.c.task == task) == 1
        assert _count(line, commit_table, commit_table.c.task_id == task) == 1


def _attempt(line: Line, term: Term, task: str) -> bool:
    """One delivery of a task; whether it was told that it committed."""
    ticket = Ticket(
        lease=NAME, epoch=term.epoch, term=term.uuid, task_id=task, run=task,
        execution=str(uuid.uuid4()),
    )  # fmt: skip
    try:
        with guarded(line.engine, Guard(ticket, line.fences, final=True)) as connection:
            connection.execute(sa.insert(target_table).values(task=task))
    except (AlreadySettled, sa.exc.DBAPIError):
        return False
    return True


def _count(line: Line, table: sa.Table, condition: sa.ColumnElement[bool]) -> int:
    with line.straight.engine.connect() as connection:
        query = sa.select(sa.func.count()).select_from(table).where(condition)
        return connection.execute(query).scalar_one()


@pytest.mark.parametrize("point", POINTS)
def test_a_jump_without_an_answer_is_adopted_or_did_not_happen(line, point):
    """The stamps must carry the epoch that the row shows."""
    for number in range(3):
        expire(line.straight)
        term = grant(line.straight)
        with line.broken(point, COMMIT):
            try:
                jumped = line.store.jump(term, 100 * (number + 1))
            except StoreUnavailable:
                jumped = None
        shown = jumped or term
        if point != "during":
            assert (jumped is None) == (point == "before")
            assert line.straight.renew(shown, 30) is Renewal.RENEWED


@pytest.mark.parametrize("point", POINTS)
def test_a_fence_raised_without_an_answer_is_raised_once(line, point):
    """Asking again is the same yes."""
    for _ in range(3):
        expire(line.straight)
        term = grant(line.straight)
        with line.broken(point, re.compile(rb"UPDATE celery_lease_fence")):
            assert line.store.raise_fence(term) is Raised.RAISED
        assert line.straight.read_fence(NAME).term == term.uuid


def test_a_winner_that_cannot_ask_again_does_not_lead_and_costs_one_ttl_at_most(line):
    """Its grant stands in the row; nobody trusts it, and it expires."""
    with line.broken("after", line.commits):
        answered = line.proxy.filter

        def and_then_refuse(sender, chunk, connection):
            verdict = answered(sender, chunk, connection)
            if verdict is Verdict.DROP_AND_CUT:
                line.proxy.refuse()
            return verdict

        line.proxy.filter = and_then_refuse
        with pytest.raises(StoreUnavailable):
            line.store.acquire(NAME, holder(), 30, "lost")
    line.proxy.resume()

    assert isinstance(take(line.straight, "rival"), Lease)
    assert isinstance(take(line.store), Lease), "it may not adopt by its name"
    expire(line.straight)
    assert grant(line.straight, "rival").epoch == 2
