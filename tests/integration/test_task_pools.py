"""Fenced tasks in pools that run many of them in one process: threads, and gevent's greenlets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from tests.integration.floor import Floor
from tests.integration.workshop import Note
from tests.services import Redis
from tests.services.base import wait_until

pytestmark = pytest.mark.redis

#: How many tasks of each epoch are at work at the same time.
MANY = 12
_MARKS = {"postgresql": pytest.mark.postgresql, "mariadb": pytest.mark.mariadb}


def on(*pools: str) -> pytest.MarkDecorator:
    """Run a test in these pools, on each kind of server: SQLite has one writer at a time."""
    pairs = [
        pytest.param((pool, database), marks=_MARKS[database], id=f"{pool}-{database}")
        for pool in pools
        for database in _MARKS
    ]
    return pytest.mark.parametrize("floor", pairs, indirect=True)


@pytest.fixture(scope="module")
def floor(
    request: pytest.FixtureRequest, redis_server: Redis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Floor]:
    """A floor whose worker has the pool that the test names."""
    pool, database = request.param
    server = request.getfixturevalue(database)
    url = server.create_database()
    directory = tmp_path_factory.mktemp("floor")
    # Results of Redis would ask it, when they are collected, after its end.
    floor = Floor("file", redis_server, directory, url=url, pool=pool, concurrency=2 * MANY)
    try:
        floor.worker.start().ready()
        yield floor
    finally:
        floor.close()
        server.drop_database(url)


def mingle(floor: Floor, key: str, gate: str, **options: Any) -> Any:
    """Send a task that is in the middle of its guarded block until the gate opens."""
    return floor.lease.dispatch(floor.app.tasks["mingle"], (key, gate), entry=key, **options)


def flushed(floor: Floor, key: str) -> None:
    """Wait until a task has written its row, and has not committed it."""
    wait_until((floor.marks / f"{key}.flushed").exists, message=f"{key} to write its row")


def notes(floor: Floor, key: str) -> list[tuple[str, int]]:
    """Return the rows that are committed of tasks whose name begins so."""
    with floor.app.engine.connect() as connection:
        query = sa.select(Note.text, Note.epoch).where(Note.text.startswith(f"{key}-"))
        return sorted((text, epoch) for text, epoch in connection.execute(query))


@on("gevent", "threads")
def test_each_of_many_tasks_at_once_has_a_fence_of_its_own(floor: Floor, key: str) -> None:
    """Current and stale ones meet in one process: with another's fence, a stale one commits."""

    def send(name: str) -> dict[str, Any]:
        sent = {
            each: mingle(floor, each, f"{key}.gate")
            for each in (f"{key}-{name}-{number}" for number in range(MANY))
        }
        for each in sent:
            flushed(floor, each)
        return sent

    old = floor.lease.epoch
    stale = send("stale")
    floor.depose()
    current = send("current")
    (floor.marks / f"{key}.gate").touch()

    for result in current.values():
        wait_until(lambda result=result: result.state == "SUCCESS", message="a current one's end")
        assert floor.lease.outcome(result.id) == "committed"
    for result in stale.values():
        floor.said(f"Task refused: mingle[{result.id}] (at commit)")
        wait_until(lambda result=result: floor.lease.run_state(result.id) == "refused")
        assert result.state == "PENDING"
        assert floor.lease.outcome(result.id) is None
    assert notes(floor, key) == sorted((each, old + 1) for each in current)

    for sent, epoch in ((stale, old), (current, old + 1)):
        for each, result in sent.items():
            seen = json.loads((floor.marks / f"{each}.saw").read_text())
            assert seen == [[result.id, result.id, epoch, each]] * 5
            child = floor.marks / f"{each}.child-{epoch}-{result.id}"
            wait_until(child.exists, message=f"the stamped child of {each}")


@on("gevent", "threads")
def test_what_a_body_starts_is_given_its_fence(floor: Floor, key: str) -> None:
    """Context variables reach greenlets as little as threads; to ask there must not go unseen."""
    name = f"{key}-scatter"
    result = floor.lease.dispatch(floor.app.tasks["scatter"], (name,), entry=key)
    wait_until(lambda: result.state == "SUCCESS", message="its end")
    assert result.result == "no fence"
    assert notes(floor, key) == [(name, floor.lease.epoch)]
    assert floor.lease.outcome(result.id) == "committed"


@on("gevent")
@pytest.mark.parametrize("stale", [False, True])
def test_a_hard_time_limit_ends_a_greenlet_with_nothing_written(
    floor: Floor, key: str, stale: bool
) -> None:
    """It is an exception wherever the greenlet waits, in the middle of a guarded block too."""
    result = mingle(floor, f"{key}-late", f"{key}.gate", time_limit=2)
    flushed(floor, f"{key}-late")
    if stale:
        floor.depose()
        floor.said(f"Task refused: mingle[{result.id}] (at failure)")
        wait_until(lambda: floor.lease.run_state(result.id) == "refused")
        assert floor.lease.outcome(result.id) is None
        assert result.state == "PENDING"
    else:
        wait_until(lambda: result.state == "FAILURE")
        assert floor.lease.outcome(result.id) == "failed"
    assert notes(floor, key) == []


@on("gevent")
def test_a_terminated_greenlet_is_settled_as_revoked_with_nothing_written(
    floor: Floor, key: str
) -> None:
    """There is no process to kill, so the greenlet is."""
    result = mingle(floor, f"{key}-revoked", f"{key}.gate")
    flushed(floor, f"{key}-revoked")
    floor.app.control.revoke(result.id, terminate=True)
    wait_until(lambda: floor.lease.outcome(result.id) == "revoked")
    wait_until((floor.marks / f"{key}-revoked.saw").exists, message="the end of the body")
    (floor.marks / f"{key}.gate").touch()
    wait_until(lambda: result.state == "REVOKED")
    assert notes(floor, key) == []
