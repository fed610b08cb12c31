"""Each private server can be frozen, killed and restarted, and leaves nothing behind."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import kombu
import psutil
import pytest
import redis
import sqlalchemy as sa

from tests.services import (
    MariaDB,
    PostgreSQL,
    Redis,
    ServiceFailed,
    ServiceMissing,
    wait_until,
)
from tests.services.base import ROOT, alive, process_tree

SERVERS = [
    pytest.param("postgresql", marks=pytest.mark.postgresql),
    pytest.param("mariadb", marks=pytest.mark.mariadb),
    pytest.param("redis_server", marks=pytest.mark.redis),
    pytest.param("rabbitmq", marks=pytest.mark.rabbitmq),
]


@pytest.fixture(params=SERVERS)
def server(request):
    """Each of the session's servers; they are as good as new after each test here."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=SERVERS[:2])
def database_server(request):
    """Each of the session's servers that keeps data."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def private(monkeypatch):
    """Servers of our own, whatever the environment names."""
    for cls in (PostgreSQL, MariaDB, Redis):
        monkeypatch.delenv(cls.url_variable(), raising=False)


def test_it_knows_its_processes_and_its_version(server):
    """Tests signal by pid, and the header names versions."""
    server.freeze()  # PostgreSQL has processes that come and go.
    try:
        assert server.pid in server.pids
        assert all(psutil.pid_exists(pid) for pid in server.pids)
    finally:
        server.thaw()
    assert server.version()[0].isdigit()


def test_a_frozen_server_answers_nothing_until_it_is_thawed(server):
    """A stop of the world, with all connections open: the failure that time-outs are for."""
    server.freeze()
    try:
        assert not server.answers()
    finally:
        server.thaw()
    wait_until(server.answers, timeout=30)


def test_a_killed_server_comes_back_at_the_same_address(server):
    """Clients are configured once."""
    url, pids = server.url(), server.pids
    server.kill()
    assert not server.answers()
    server.start()
    assert server.answers()
    assert server.url() == url
    assert not set(pids) & set(server.pids)


def test_committed_data_survive_a_kill_and_a_restart(database_server):
    """A database that forgets would make every crash test pass or fail for the wrong reason."""
    url = database_server.create_database()
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE t (x INTEGER)"))
        connection.execute(sa.text("INSERT INTO t VALUES (1)"))
    database_server.kill()
    database_server.start()
    database_server.restart()
    with engine.begin() as connection:
        assert connection.execute(sa.text("SELECT x FROM t")).scalar() == 1
    database_server.drop_database(url)


def test_a_database_is_dropped_whoever_is_connected(database_server):
    """A test that failed leaves sessions with open transactions, and must not block the next."""
    url = database_server.create_database()
    engine = sa.create_engine(url)
    connection = engine.connect()
    connection.execute(sa.text("CREATE TABLE t (x INTEGER)"))
    connection.execute(sa.text("INSERT INTO t VALUES (1)"))
    database_server.drop_database(url)
    connection.invalidate()
    connection.close()
    engine.dispose()


@pytest.mark.parametrize(
    "cls",
    [
        pytest.param(PostgreSQL, marks=pytest.mark.postgresql),
        pytest.param(MariaDB, marks=pytest.mark.mariadb),
        pytest.param(Redis, marks=pytest.mark.redis),
    ],
)
def test_a_stopped_server_leaves_nothing_behind(cls, private):
    """Not a process, not a file; and stopping twice, or frozen, is fine."""
    with cls() as server:
        directory = server.directory
        server.freeze()
        family = process_tree(server.pid)  # Complete: nothing is born or ends any more.
    assert not any(map(alive, family))
    assert not directory.exists()
    server.stop()


RUN = """
import sys, time
from pathlib import Path
from tests.services import Redis
from tests.services.processes import CeleryProcess

sleeper = CeleryProcess("sleeper", ["sleep", "600"], directory=Path(sys.argv[1])).start()
with Redis() as server:
    print(server.directory, server.pid, sleeper.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.redis
def test_a_killed_run_leaves_nothing_behind(private, tmp_path):
    """Nobody cleans up after SIGKILL but somebody else."""
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with run:
        directory, *pids = run.stdout.readline().split()
        family = [psutil.Process(int(pid)) for pid in pids]
        assert all(map(alive, family))
        run.kill()
    wait_until(lambda: not any(map(alive, family)))
    wait_until(lambda: not Path(directory).exists())


@pytest.mark.postgresql
def test_programs_in_a_private_folder_are_copied(monkeypatch, private):
    """Environments in root's home are closed to the user that PostgreSQL must run as."""
    monkeypatch.setattr("tests.services.postgresql.reachable", lambda path: False)
    with PostgreSQL() as server:
        server.kill()
        server.start()
        assert server.answers()
    with server:
        assert server.answers(), "and again from the beginning"


@pytest.mark.redis
def test_two_servers_of_a_kind_run_side_by_side(private):
    """Two test runs on one machine do not meet."""
    with Redis() as one, Redis() as other:
        assert one.port != other.port
        assert one.answers()
        assert other.answers()


@pytest.mark.redis
def test_a_port_that_was_taken_meanwhile_is_given_up(private):
    """Between choosing a free port and using it, somebody else may have come."""
    taken = socket.create_server(("127.0.0.1", 0))

    class Unlucky(Redis):
        """Chooses a port that is taken, at first."""

        def choose_ports(self):
            """The taken port, once."""
            if self.port:
                super().choose_ports()
            else:
                self.port = taken.getsockname()[1]

    with taken, Unlucky() as server:
        assert server.port != taken.getsockname()[1]


@pytest.mark.redis
def test_a_server_that_does_not_start_says_why(private):
    """The log's last lines are the error's text: nobody should have to look for the file."""

    class Broken(Redis):
        """Has a wrong option."""

        def command(self):
            """One option too many."""
            return [*super().command(), "--no-such-option", "x"]

    server = Broken()
    with pytest.raises(ServiceFailed, match="no-such-option"):
        server.start()
    server.stop()


@pytest.mark.redis
def test_each_redis_database_starts_empty(redis_server):
    """Tests do not see each other's messages."""
    urls = [redis_server.create_database() for _ in range(2)]
    if not redis_server.external:
        assert len(set(urls)) == 2
    for url in urls:
        with redis.Redis.from_url(url) as client:
            assert client.dbsize() == 0


@pytest.mark.rabbitmq
def test_each_virtual_host_starts_empty(rabbitmq, rabbitmq_url):
    """Tests do not see each other's queues."""
    if rabbitmq.external:
        pytest.skip("a server that somebody named has only its own virtual host")
    other = rabbitmq.create_vhost()
    with kombu.Connection(rabbitmq_url) as connection:
        connection.SimpleQueue("q").put("x")
    with kombu.Connection(other) as connection:
        assert connection.SimpleQueue("q").qsize() == 0
    rabbitmq.delete_vhost(other)


def test_a_named_server_is_used_and_never_signalled(monkeypatch):
    """Somebody else's server is not ours to freeze."""
    url = "redis://127.0.0.1:1/5"
    monkeypatch.setenv("CELERY_LEASE_TEST_REDIS_URL", url)
    server = Redis()
    assert server.external
    assert server.url() == url
    for verb in (server.freeze, server.thaw, server.kill, server.restart):
        with pytest.raises(ServiceMissing):
            verb()


INNER = """
from tests.services import ServiceMissing
from tests.conftest import *  # the hooks under test

import pytest

@pytest.fixture
def server():
    raise ServiceMissing("no such server")

def test_fixture(server):
    pass

def test_body():
    raise ServiceMissing("no such server")
"""


@pytest.mark.parametrize(
    ("required", "outcome", "status"), [("", "2 skipped", 0), ("1", "1 failed, 1 error", 1)]
)
def test_a_missing_server_skips_at_home_and_fails_where_it_is_required(
    tmp_path, required, outcome, status
):
    """A run that is meant to have all servers must not pass by leaving tests out."""
    (tmp_path / "conftest.py").write_text(INNER.partition("import pytest")[0])
    (tmp_path / "test_inner.py").write_text(INNER)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", tmp_path, tmp_path],
        cwd=ROOT,
        env={**os.environ, "CELERY_LEASE_REQUIRE_SERVICES": required, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert outcome in done.stdout
    assert done.returncode == status
