"""The drivers for MySQL and MariaDB: PyMySQL, and mysqlclient as far as it can be had without it.

The environment ``mysqlclient`` of tox runs all tests on MariaDB with mysqlclient itself.
"""

from __future__ import annotations

import sys
from typing import Any

import pymysql
import pytest
import sqlalchemy as sa
from pymysql.constants import CLIENT

from celery_lease.errors import (
    ConfigurationError,
    NotWritable,
    SchemaMismatch,
    StoreContention,
    StoreError,
    StoreUnavailable,
)
from celery_lease.stores.dialects import create_engine, database_of, translated

NAMES = ["mysql+pymysql", "mysql+mysqldb", "mariadb+pymysql", "mariadb+mysqldb"]


class Asked(Exception):
    """The driver was asked to connect."""


@pytest.fixture(params=NAMES)
def asked(request, monkeypatch):
    """What the driver is asked for when an engine connects, by the URL's rest and options."""
    # PyMySQL takes mysqlclient's place: of that only the name is wanted.
    monkeypatch.setitem(sys.modules, "MySQLdb", pymysql)

    def connect(**arguments: Any) -> None:
        raise Asked(arguments)

    monkeypatch.setattr(pymysql, "connect", connect)

    def ask(rest: str = "", **options: Any) -> dict[str, Any]:
        url = f"{request.param}://u:secret@h/d{rest}"
        engine = create_engine(url, options, lock_wait=1, statement_wait=10)
        with pytest.raises(Asked) as caught:
            engine.connect()
        return caught.value.args[0]

    return ask


def test_every_wait_for_the_socket_has_an_end(asked):
    """The C library waits for a silent server as long as TCP does: for hours."""
    arguments = asked()

    found = [arguments[f"{each}_timeout"] for each in ("connect", "read", "write")]
    assert found == [10, 11, 11]


def test_rows_are_counted_where_they_match_not_where_they_change(asked):
    """A renewal within one microsecond of another changes nothing, and is not a lost lease."""
    assert asked()["client_flag"] & CLIENT.FOUND_ROWS


def test_names_have_all_their_letters(asked):
    """mysqlclient takes the character set its C library was built with, latin1 maybe."""
    assert asked()["charset"] == "utf8mb4"


def test_what_the_url_says_wins(asked):
    """It is the user's word as much as the engine options are."""
    arguments = asked("?read_timeout=60&charset=latin1", connect_args={"write_timeout": 50})

    assert (arguments["read_timeout"], arguments["charset"]) == (60, "latin1")
    assert (arguments["write_timeout"], arguments["connect_timeout"]) == (50, 10)


@pytest.mark.parametrize(
    "error",
    [
        TypeError("'nope' is an invalid keyword argument for connect()"),
        ValueError("executemany_fallback must be either 'loop' or 'multi'"),
        FileNotFoundError("no such certificate"),
        pymysql.NotSupportedError("Unknown ssl_mode specification"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_argument_that_the_driver_does_not_take_is_a_wrong_setting(monkeypatch, error):
    """Waiting would not help: taken for a server that is down, it is a standby for ever."""

    def connect(**arguments: Any) -> None:
        raise error

    monkeypatch.setattr(pymysql, "connect", connect)
    engine = create_engine("mysql+pymysql://h/d", {}, lock_wait=1, statement_wait=10)
    with pytest.raises(ConfigurationError, match="connect_args") as caught, translated(engine):
        engine.connect()
    assert str(error) in str(caught.value)


class Numbered(Exception):
    """An error of MariaDB's connector or of MySQL's: the number is an attribute."""

    def __init__(self, errno: int) -> None:
        super().__init__("what happened, in words")
        self.errno = errno


@pytest.mark.parametrize("error", [lambda number: pymysql.Error(number, "said"), Numbered])
@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (1213, StoreContention),
        (1290, NotWritable),
        (1146, SchemaMismatch),
        # The C library's for a server that is down, where PyMySQL says 2003.
        (2002, StoreUnavailable),
        (2013, StoreUnavailable),
        (1064, None),
    ],
)
def test_an_error_is_known_by_its_number_wherever_the_driver_keeps_it(
    error: Any, number: int, kind: type[StoreError] | None
):
    """A guard works on the user's own engine, whatever its driver."""
    dialect = sa.make_url("mariadb+pymysql://").get_dialect()()
    assert database_of(dialect).classify(error(number)) is kind
