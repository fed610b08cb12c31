"""Fixtures for all tests: private servers, and a fresh database for each test on each of them."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.services import MariaDB, PostgreSQL, RabbitMQ, Redis, ServiceMissing

#: Set where every server must be there: a missing one is then a failure, not a skip.
REQUIRE_SERVICES = "CELERY_LEASE_REQUIRE_SERVICES"


def pytest_configure(config: pytest.Config) -> None:
    """Make a SIGTERM end the run as Ctrl-C does: with the servers stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what the tests run on."""
    mysql = "mysqlclient" if MariaDB.admin.get_driver_name() == "mysqldb" else "PyMySQL"
    packages = ("celery", "kombu", "SQLAlchemy", "psycopg", mysql, "redis")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return [f"python {platform.python_version()}, {versions}", f"servers: {_servers()}"]


def _servers() -> str:
    found = []
    for cls in (PostgreSQL, MariaDB, Redis, RabbitMQ):
        service = cls()
        try:
            if not service.external:
                service.check()
        except ServiceMissing:
            found.append(f"no {cls.name}")
        else:
            found.append(f"{cls.name}{' (external)' if service.external else ''}")
    return ", ".join(found)


def skip_or_fail(missing: ServiceMissing) -> None:
    """Skip at home; fail where every server must be there."""
    if os.environ.get(REQUIRE_SERVICES):
        pytest.fail(f"{missing} ({REQUIRE_SERVICES} is set)", pytrace=False)
    pytest.skip(str(missing))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Turn a missing server in a fixture into a skip, or a failure."""
    try:
        return (yield)
    except ServiceMissing as missing:
        skip_or_fail(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Turn a missing server in a test's body into a skip, or a failure."""
    try:
        return (yield)
    except ServiceMissing as missing:
        skip_or_fail(missing)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """The session's PostgreSQL server."""
    with PostgreSQL() as service:
        yield service


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """The session's MariaDB server."""
    with MariaDB() as service:
        yield service


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Redis]:
    """The session's Redis server."""
    with Redis() as service:
        yield service


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """The session's RabbitMQ server, which takes ten seconds to start."""
    with RabbitMQ() as service:
        yield service


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'lease.sqlite3'}"


@pytest.fixture
def postgresql_url(postgresql: PostgreSQL) -> Iterator[str]:
    """The URL of an empty PostgreSQL database."""
    url = postgresql.create_database()
    yield url
    postgresql.drop_database(url)


@pytest.fixture
def mariadb_url(mariadb: MariaDB) -> Iterator[str]:
    """The URL of an empty MariaDB database."""
    url = mariadb.create_database()
    yield url
    mariadb.drop_database(url)


@pytest.fixture
def redis_url(redis_server: Redis) -> str:
    """The URL of an empty Redis database."""
    return redis_server.create_database()


@pytest.fixture
def rabbitmq_url(rabbitmq: RabbitMQ) -> Iterator[str]:
    """The URL of an empty RabbitMQ virtual host."""
    url = rabbitmq.create_vhost()
    yield url
    rabbitmq.delete_vhost(url)


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.postgresql),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
    ]
)
def database_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database, on each kind of database in turn."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture(
    params=[
        pytest.param("postgresql", marks=pytest.mark.postgresql),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
    ]
)
def server_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database, on each kind of server in turn."""
    return request.getfixturevalue(f"{request.param}_url")
