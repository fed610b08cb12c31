"""Each wrong setting of the errors page ends beat with the line that the page shows."""

from __future__ import annotations

import importlib.util
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.services import MariaDB, PostgreSQL, ServiceMissing, free_port
from tests.services.processes import CeleryProcess

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.rst"
#: A line of a log begins with its time; the level follows.
RECORD = re.compile(r"^\[[^\]]*: (?P<level>[A-Z]+)/\w+\] (?P<said>.*)$", re.MULTILINE)
#: Where the page's examples say that their servers are.
PORTS = {"postgresql": "5432", "mysql": "3306"}

PROGRAM = """
from celery import Celery

app = Celery("proj", broker="memory://")
app.conf.beat_schedule = {"often": {"task": "proj.nothing", "schedule": 0.2}}
"""


@dataclass(frozen=True)
class Example:
    """One example of the page."""

    name: str
    #: Whether beat ends, or stands by.
    ends: bool
    #: The lines of configuration.
    configuration: str
    #: What beat says.
    said: str


def examples() -> list[Example]:
    """Return the page's examples: a marker, a block of Python, a block of text."""
    text = PAGE.read_text(encoding="utf-8")
    marker = re.compile(r"^\.\. startup-(error|standby): (\S+)$", re.MULTILINE)
    return [
        Example(
            name=match[2],
            ends=match[1] == "error",
            configuration=_block(text, "python", match.end()),
            said=_block(text, "text", match.end()).strip(),
        )
        for match in marker.finditer(text)
    ]


def _block(text: str, language: str, start: int) -> str:
    block = re.compile(rf"^\.\. code-block:: {language}\n\n((?:   .*\n|\n)+)", re.MULTILINE)
    found = block.search(text, start)
    assert found is not None
    return re.sub(r"^   ", "", found[1], flags=re.MULTILINE)


EXAMPLES = {each.name: each for each in examples()}
#: Those that need a server which answers.
SERVED = {"password-postgresql", "password-mariadb"}
ALONE = [each for each in EXAMPLES.values() if each.ends and each.name not in SERVED]


def _beat(directory: Path, configuration: str) -> CeleryProcess:
    (directory / "proj.py").write_text(PROGRAM + configuration, encoding="utf-8")
    return CeleryProcess.beat("proj", directory=directory, cwd=directory, loglevel="INFO")


def _records(beat: CeleryProcess) -> list[tuple[str, str]]:
    return [(each["level"], each["said"]) for each in RECORD.finditer(beat.logs())]


def _ends_with(beat: CeleryProcess, said: str) -> None:
    """Start beat and check that it ends as promised: one line, no traceback, no password."""
    beat.start()
    try:
        status = beat.wait()
    finally:
        beat.teardown()
    told = [each for each in _records(beat) if each != ("INFO", "beat: Starting...")]
    assert told == [("CRITICAL", said)]
    assert status == 1
    assert "Traceback" not in beat.logs()
    assert not re.search(r"secret|:wrong", beat.logs())


@pytest.mark.parametrize("example", ALONE, ids=lambda each: each.name)
def test_a_wrong_setting_ends_beat_with_the_line_that_the_page_shows(
    example: Example, tmp_path: Path
) -> None:
    """Who set it wrongly reads one line with the setting and the way out, and no traceback."""
    if "psycopg2" in example.configuration and importlib.util.find_spec("psycopg2"):
        pytest.skip("psycopg2 is installed here")
    _ends_with(_beat(tmp_path, example.configuration), example.said)


@pytest.fixture
def strict_postgresql(postgresql: PostgreSQL) -> Iterator[PostgreSQL]:
    """A PostgreSQL that asks the role "beat" for its password."""
    if postgresql.external:
        raise ServiceMissing("the rules of a server that is not ours are not changed")
    rules = postgresql.directory / "data" / "pg_hba.conf"
    before = rules.read_text(encoding="utf-8")
    postgresql.execute("CREATE ROLE beat LOGIN PASSWORD 'right'")
    rules.write_text(f"host all beat all scram-sha-256\n{before}", encoding="utf-8")
    postgresql.execute("SELECT pg_reload_conf()")
    yield postgresql
    rules.write_text(before, encoding="utf-8")
    postgresql.execute("SELECT pg_reload_conf()")
    postgresql.execute("DROP ROLE beat")


@pytest.mark.postgresql
def test_a_wrong_password_ends_beat_on_postgresql(
    strict_postgresql: PostgreSQL, tmp_path: Path
) -> None:
    """The driver gives no code for it: it is told from a server that is down by its message."""
    _check_password(
        EXAMPLES["password-postgresql"], strict_postgresql.url(), "postgresql", tmp_path
    )


@pytest.fixture
def strict_mariadb(mariadb: MariaDB) -> Iterator[MariaDB]:
    """A MariaDB with a user "beat" who has a password."""
    mariadb.execute("CREATE USER beat@'127.0.0.1' IDENTIFIED BY 'right'")
    yield mariadb
    mariadb.execute("DROP USER beat@'127.0.0.1'")


@pytest.mark.mariadb
def test_a_wrong_password_ends_beat_on_mariadb(strict_mariadb: MariaDB, tmp_path: Path) -> None:
    """The server said no; waiting would not help."""
    _check_password(EXAMPLES["password-mariadb"], strict_mariadb.url(), "mysql", tmp_path)


def _check_password(example: Example, url: str, kind: str, directory: Path) -> None:
    # Always over TCP, as in the page's example.
    def here(text: str) -> str:
        return text.replace(PORTS[kind], str(sa.make_url(url).port))

    _ends_with(_beat(directory, here(example.configuration)), here(example.said))


def test_a_database_that_is_down_makes_a_standby(tmp_path: Path) -> None:
    """Restarting beat would not bring the database back; sending without a lease must not be."""
    example, port = EXAMPLES["database-down"], str(free_port())
    lines = "app.conf.beat_lease_retry_interval = 0.5\n"
    configuration = example.configuration.replace(PORTS["postgresql"], port) + lines
    said = example.said.replace(PORTS["postgresql"], port).replace("every 5 s", "every 0.5 s")
    with _beat(tmp_path, configuration) as beat:
        beat.wait_for_log(said)
        assert ("ERROR", said) in _records(beat)
        with socket.create_server(("127.0.0.1", int(port))) as server:
            server.settimeout(30)
            for _ in range(2):  # It tries, and tries again.
                server.accept()[0].close()
        assert beat.status == "running"
        beat.kill("SIGTERM")
        assert beat.wait() == 0
    assert "Sending due task" not in beat.logs()
    assert "Traceback" not in beat.logs()
    assert "secret" not in beat.logs()


def test_every_example_of_the_page_is_started() -> None:
    """An example that no test starts would go out of date unseen."""
    standbys = {each.name for each in EXAMPLES.values() if not each.ends}
    assert standbys == {"database-down"}
    assert {each.name for each in ALONE} | SERVED | standbys == set(EXAMPLES)
    assert len(ALONE) >= 9
