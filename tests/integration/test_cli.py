"""``celery lease``: what it prints, and the exit status that scripts go by."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from celery import Celery
from click.testing import CliRunner

from celery_lease import Occurrence
from celery_lease.cli import lease
from celery_lease.stores.base import Raised
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.schema import metadata, schema_table
from celery_lease.testing import hold
from tests.leases import NAME, expire, grant, opened
from tests.services import TCPProxy, wait_until
from tests.services.base import ROOT


def _runner() -> CliRunner:
    try:
        return CliRunner(mix_stderr=False)
    except TypeError:  # click 8.2 never mixes them
        return CliRunner()


def run(*words: str, **conf: object) -> SimpleNamespace:
    """Run `celery lease …` in this process, for an app with these settings."""
    app = Celery("tests", set_as_current=False)
    app.conf.update(conf)
    done = _runner().invoke(lease, words, obj=SimpleNamespace(app=app))
    assert "Traceback" not in done.stderr
    return SimpleNamespace(status=done.exit_code, out=done.stdout, err=done.stderr)


def run_json(*words: str, **conf: object) -> tuple[int, dict]:
    """Do the same with ``--json``."""
    done = run(*words, "--json", **conf)
    return done.status, json.loads(done.out)


# --- acquire ------------------------------------------------------------------------------


def test_acquiring_a_free_lease_prints_the_grant(database_url):
    """A script learns under which epoch it may act, and until when."""
    status, grant_ = run_json("acquire", "--url", database_url, "--name", "n", "--ttl", "60")

    assert status == 0
    assert (grant_["granted"], grant_["name"], grant_["epoch"]) == (True, "n", 1)
    assert grant_["holder"].split(":")[1] == str(os.getpid())
    assert 55 < grant_["remaining"] <= 60
    assert grant_["expires_at"].endswith("+00:00")


def test_acquiring_raises_the_fence_as_a_takeover_does(database_url):
    """What the former holder's tasks write must be refused from then on."""
    run("acquire", "--url", database_url, "--name", NAME, "--ttl", "60")

    with opened(database_url) as store:
        assert store.read_fence(NAME).epoch == 1


def test_a_loser_is_told_who_holds_it_and_exits_with_1(database_url):
    """It may know holder, epoch and expiry, and not the uuid that stamps carry."""
    with opened(database_url) as store:
        term = grant(store)
        status, answer = run_json("acquire", "--url", database_url, "--name", NAME, "--ttl", "5")

    assert status == 1
    assert (answer["granted"], answer["holder"], answer["epoch"]) == (False, term.holder, 1)
    assert 25 < answer["remaining"] <= 30
    assert term.uuid not in json.dumps(answer)


def test_one_whose_takeover_was_overtaken_exits_with_1(sqlite_url, monkeypatch):
    """Somebody else leads: the database has answered."""
    monkeypatch.setattr(SQLLeaseStore, "raise_fence", lambda *_: Raised.SUPERSEDED)

    done = run("acquire", "--url", sqlite_url)
    status, answer = run_json("acquire", "--url", sqlite_url, "--name", "other")

    assert (done.status, done.out) == (1, f"not granted: {answer['reason']}\n")
    assert (status, answer["granted"]) == (1, False)


def test_an_expired_lease_is_granted_under_the_next_epoch(database_url):
    """The same atomic statement that beats use."""
    with opened(database_url) as store:
        old = grant(store)
        expire(store)
        status, answer = run_json("acquire", "--url", database_url, "--name", NAME, "--ttl", "5")

    assert (status, answer["epoch"], answer["previous_holder"]) == (0, 2, old.holder)


def test_the_answers_are_sentences_without_json(database_url):
    """A person reads them as well."""
    words = ("acquire", "--url", database_url, "--name", "n", "--ttl", "60")
    first, second = run(*words), run(*words)

    assert first.out.startswith("granted: n: ")
    assert " leads under epoch 1 since " in first.out
    assert second.out.startswith("not granted: n: ")


def _celery(*words: str, folder) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "celery", "lease", *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_lease_is_held_until_a_signal_and_released_then(sqlite_url, tmp_path, number):
    """It renews: the ttl is shorter than the wait; and the next one need not wait for it."""
    words = ("acquire", "--url", sqlite_url, "--name", NAME, "--ttl", "2", "--hold", "--json")
    with _celery(*words, folder=tmp_path) as process, opened(sqlite_url) as store:
        granted = json.loads(process.stdout.readline())
        expiry = granted["expires_at"]
        wait_until(lambda: store.read(NAME).expires_at.isoformat() > expiry, message="a renewal")
        process.send_signal(number)
        out, err = process.communicate(timeout=20)

        assert (process.returncode, err) == (0, "")
        assert json.loads(out) == {"ended": "released", "epoch": 1, "reason": None}
        assert store.read(NAME).holder is None


def test_a_held_lease_that_is_lost_ends_with_1(sqlite_url, tmp_path):
    """A script that wraps it must not go on as if it led."""
    words = ("acquire", "--url", sqlite_url, "--name", NAME, "--ttl", "2", "--hold")
    with _celery(*words, folder=tmp_path) as process, opened(sqlite_url) as store:
        process.stdout.readline()
        store.raise_epoch(NAME, 9)
        out, _ = process.communicate(timeout=20)

    assert process.returncode == 1
    assert out.startswith("conflict: epoch 1")


# --- looking ------------------------------------------------------------------------------


def test_status_shows_each_lease_and_who_leads(database_url):
    """The first thing that somebody asks at night."""
    with opened(database_url) as store:
        term = grant(store)
        store.raise_fence(term)
        store.ensure("other")
        status, answer = run_json("status", "--url", database_url)
        text = run("status", "--url", database_url).out

    held, free = answer["leases"]
    assert status == 0
    assert (held["name"], held["holder"], held["epoch"]) == (NAME, term.holder, 1)
    assert (held["held"], held["fence"]) == (True, 1)
    assert (free["name"], free["held"]) == ("other", False)
    assert f"{NAME}: {term.holder} leads under epoch 1" in text
    assert "other: nobody leads" in text


def test_status_of_an_unknown_lease_exits_with_1(database_url):
    """A misspelt name must not look like a lease that nobody holds."""
    with opened(database_url):
        done = run("status", "--url", database_url, "--name", "nope")

    assert (done.status, done.out) == (1, "there is no lease 'nope'\n")


def test_status_of_a_lease_that_nobody_holds_exits_with_1(database_url):
    """An alert goes by the exit status: red while nobody leads, green again with a leader."""
    with opened(database_url) as store:
        look = ("status", "--url", database_url, "--name", NAME)
        store.ensure(NAME)
        before = run(*look).status
        term = grant(store)
        leading = run(*look).status
        store.release(term)
        after = run(*look).status

    assert (before, leading, after) == (1, 0, 1)


def test_status_tells_of_runs_that_are_not_settled(database_url):
    """Lost messages and workers that take nothing are silent otherwise."""
    with contextlib.closing(hold(database_url, NAME)) as held:
        for second in range(3):
            due = datetime(2025, 3, 30, 6, 0, second, tzinfo=timezone.utc)
            held.record(Occurrence(lease=NAME, entry="e", due_at=due), fenced=second < 2)
        plain = run("status", "--url", database_url)
        _, answer = run_json("status", "--url", database_url)

    assert "2 fenced runs not settled, the oldest since 20" in plain.out
    (lease_,) = answer["leases"]
    assert lease_["unsettled"] == 2
    assert lease_["unsettled_since"].endswith("+00:00")


@pytest.mark.parametrize("command", ["status", "history"])
def test_looking_makes_no_file(tmp_path, command):
    """A typing error in a path is one, and no new database."""
    file = tmp_path / "typo.sqlite3"
    done = run(command, "--url", f"sqlite:///{file}")

    assert done.status == 3
    assert "celery lease init" in done.err
    assert not file.exists()


@pytest.mark.parametrize("command", ["status", "history"])
def test_looking_needs_no_right_to_write(sqlite_url, command):
    """Whatever monitors may have a role, or a replica, of its own."""
    with opened(sqlite_url) as store:
        grant(store)
    file = sqlite_url.removeprefix("sqlite:///")
    done = run(command, "--url", f"sqlite:///file:{file}?mode=ro&uri=true", "--name", NAME)

    assert done.status == 0
    assert "epoch" in done.out


def test_a_directory_that_is_not_there_is_a_wrong_setting(tmp_path):
    """A volume that is not mounted will not be by waiting."""
    done = run("init", "--url", f"sqlite:///{tmp_path}/nowhere/lease.sqlite3")

    assert done.status == 2
    assert "correct its directory" in done.err


@pytest.mark.parametrize("command", ["status", "history", "init", "acquire", "check"])
def test_a_file_that_is_no_database_is_named_with_its_setting(tmp_path, command):
    """One URL of several is wrong, and the driver does not say which."""
    (tmp_path / "notes.txt").write_text("no database at all " * 100)
    done = run(command, beat_lease_url=f"sqlite:///{tmp_path}/notes.txt")

    named = f"beat_lease_url = 'sqlite:///{tmp_path}/notes.txt': file is not a database"
    assert (done.status, done.err) == (3, f"Error: {named}\n")


def test_a_file_that_cannot_be_opened_is_asked_about(tmp_path):
    """Who runs the command is often somebody else than beat."""
    done = run("init", beat_lease_url=f"sqlite:///{tmp_path}")

    assert done.status == 3
    assert done.err.endswith("; may this user open it?\n")


def test_a_lock_that_is_not_to_be_had_names_the_database_and_asks_nothing(sqlite_url):
    """It can be opened: who is told to look at rights looks at the wrong thing."""
    with opened(sqlite_url) as store, store.engine.begin() as connection:
        lock_row = sa.text("UPDATE celery_lease SET epoch = epoch")
        connection.execute(lock_row)
        done = run("raise", "--to", "9", beat_lease_url=sqlite_url)

    assert done.err == f"Error: beat_lease_url = {sqlite_url!r}: database is locked\n"


def test_history_can_be_printed_where_output_is_latin_1(sqlite_url, tmp_path):
    """A terminal or a cron job without UTF-8 is where somebody looks after an incident."""
    run("acquire", "--url", sqlite_url, "--name", NAME)
    command = [sys.executable, "-m", "celery", "lease", "history"]
    done = subprocess.run(
        [*command, "--url", sqlite_url, "--name", NAME],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" .. ...\n")


def test_a_lease_that_there_is_none_of_has_no_history(sqlite_url):
    """As `status` says: it is a typing error more often than not."""
    with opened(sqlite_url):
        unknown = run("history", "--url", sqlite_url, "--name", "unknown")
        unused = run("history", "--url", sqlite_url, "--name", NAME)

    assert (unknown.status, unknown.out) == (1, "there is no lease 'unknown'\n")
    assert (unused.status, unused.out) == (0, f"{NAME}: no term yet\n")


def test_history_tells_who_led_when_and_how_it_ended(database_url):
    """What is read after an incident."""
    with opened(database_url) as store:
        store.release(grant(store, "a"))
        grant(store, "b")
        status, answer = run_json("history", "--url", database_url, "--name", NAME)
        text = run("history", "--url", database_url, "--name", NAME).out

    newer, older = answer["terms"]
    assert status == 0
    assert (newer["epoch"], newer["ended"]) == (2, None)
    assert (older["epoch"], older["ended"], older["holder"]) == (1, "released", "host:1:a")
    assert len(text.splitlines()) == 2


def test_the_apps_settings_are_read(tmp_path):
    """With ``-A`` nothing has to be repeated on the command line."""
    url = f"sqlite:///{tmp_path}/app.sqlite3"
    run("init", beat_lease_url=url, beat_lease_name="mine")
    status, answer = run_json("acquire", beat_lease_url=url, beat_lease_name="mine")

    assert (status, answer["name"]) == (0, "mine")


# --- repairing ----------------------------------------------------------------------------


def test_raising_the_epoch_is_told_and_never_goes_down(database_url):
    """The way out of a conflict."""
    words = ("raise", "--url", database_url, "--name", NAME)
    with opened(database_url) as store:
        grant(store)
        up = run_json(*words, "--to", "50")
        down = run_json(*words, "--to", "50")

        assert (up[0], up[1]["raised"], up[1]["epoch"]) == (0, True, 50)
        assert (down[0], down[1]["raised"], down[1]["epoch"]) == (1, False, 50)
        assert grant(store).epoch == 51


# --- init ---------------------------------------------------------------------------------


def test_init_makes_what_beats_need(database_url):
    """For installations whose beats may not make tables."""
    assert run("init", "--url", database_url).status == 0

    store = SQLLeaseStore(database_url)
    store.prepare(create=False)
    assert store.read("celery").epoch == 0
    store.dispose()


def test_the_sql_of_init_is_all_that_an_administrator_needs(database_url):
    """Run by hand, it makes exactly the schema that the package expects."""
    dialect = sa.make_url(database_url).get_backend_name()
    _, answer = run_json("init", "--sql", dialect)
    engine = sa.create_engine(database_url)
    with engine.begin() as connection:
        for statement in answer["statements"]:
            connection.exec_driver_sql(statement)
    engine.dispose()

    with opened(database_url) as store:
        assert grant(store).epoch == 1
        store.prepare(create=False)


def test_the_sql_connects_to_nothing():
    """It is for reading; the settings may not even be right yet."""
    done = run("init", "--sql", "postgresql", beat_lease_url="nonsense")

    assert done.status == 0
    for table in metadata.tables:
        assert f"CREATE TABLE {table} (" in done.out


@pytest.mark.parametrize("role", ["beat@10.0.%", "'beat'@'10.0.%'"])
def test_grants_are_for_the_account_of_one_host(role):
    """MySQL's accounts are, and all that is quoted as one is the name of a user."""
    done = run("init", "--sql", "mariadb", "--grants", "--beat-role", role)

    assert "ON celery_lease TO beat@`10.0.%`;" in done.out
    assert "TO celery_worker;" in done.out


def test_grants_need_a_dialect():
    """Each database has its own words."""
    assert run("init", "--grants").status == 2


# --- what is wrong ------------------------------------------------------------------------

WRONG = {
    "renew": ({"beat_lease_renew_interval": 20}, "beat_lease_renew_interval", "lower"),
    "unknown": ({"beat_lease_tt1": 3}, "beat_lease_tt1", "beat_lease_ttl"),
    "policy": ({"beat_lease_misfire": "some"}, "beat_lease_misfire", "'latest'"),
    "protocol": ({"task_protocol": 1}, "task_protocol", "task_protocol = 2"),
    "no URL": ({"beat_lease_url": "nonsense"}, "beat_lease_url", "sqlite:///"),
    "no such database": ({"beat_lease_url": "nosql://u:secret@h/d"}, "nosql", "mysql+pymysql"),
    "not for leases": ({"beat_lease_url": "oracle://u:secret@h/d"}, "beat_lease_url", "use Post"),
    "in memory": ({"beat_lease_url": "sqlite://"}, "beat_lease_url", "name a file"),
    "asynchronous": ({"beat_lease_url": "sqlite+aiosqlite:///x"}, "beat_lease_url", "sqlite3"),
    "port": ({"beat_lease_url": "postgresql+psycopg://u:secret@h:x/d"}, "beat_lease_url", "write"),
    "isolation": (
        {"beat_lease_engine_options": {"isolation_level": "AUTOCOMMIT"}},
        "beat_lease_engine_options",
        "remove it",
    ),
    "isolation by the way": (
        {"beat_lease_engine_options": {"execution_options": {"isolation_level": "AUTOCOMMIT"}}},
        "beat_lease_engine_options",
        "remove it",
    ),
    "streams": (
        {"beat_lease_engine_options": {"execution_options": {"stream_results": True}}},
        "stream_results",
        "remove it",
    ),
    "in shared memory": (
        {"beat_lease_url": "sqlite:///file::memory:?cache=shared&uri=true"},
        "beat_lease_url",
        "name a file",
    ),
    "another driver": ({"beat_lease_url": "mysql://u:secret@h/d"}, "MySQLdb", "mysql+pymysql://"),
    "a driver that waits for ever": (
        {"beat_lease_url": "mariadb+mariadbconnector://u:secret@h/d"},
        "mariadbconnector",
        "write mariadb+pymysql://… or mariadb+mysqldb://…",
    ),
    "a driver that waits for ever, too": (
        {"beat_lease_url": "postgresql+pg8000://u:secret@h/d"},
        "pg8000",
        "write postgresql+psycopg://… or ",
    ),
    "for ever": ({"beat_lease_ttl": 1e18}, "beat_lease_ttl", "seconds"),
    "option": ({"beat_lease_engine_options": {"nope": 1}}, "beat_lease_engine_options", "nope"),
    "argument": (
        {
            "beat_lease_url": "sqlite:////tmp",
            "beat_lease_engine_options": {"connect_args": {"nope": 1}},
        },
        "beat_lease_engine_options",
        "nope",
    ),
    "ttl": ({"beat_lease_ttl": "30"}, "beat_lease_ttl", "seconds"),
}


@pytest.mark.parametrize(("conf", "named", "way_out"), WRONG.values(), ids=WRONG)
def test_a_wrong_setting_is_one_line_that_names_it_and_the_way_out(
    tmp_path, monkeypatch, conf, named, way_out
):
    """Whoever made the mistake should not have to read a traceback to find it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "MySQLdb", None)  # which a machine may have
    done = run("status", **conf)

    assert done.status == 2
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert named in done.err
    assert way_out in done.err
    assert "secret" not in done.err


def test_a_driver_that_is_not_there_is_named_with_the_way_to_install_it(monkeypatch):
    """The package's own list of requirements has no driver in it."""
    monkeypatch.setitem(sys.modules, "psycopg", None)
    done = run("status", "--url", "postgresql+psycopg://u:secret@h/d")

    assert done.status == 2
    assert "pip install 'celery-lease[postgresql]'" in done.err
    assert "secret" not in done.err


@pytest.mark.postgresql
def test_a_wrong_role_is_a_wrong_setting(postgresql_url):
    """Waiting does not help."""
    url = sa.make_url(postgresql_url).set(username="nobody_here", password="secret")
    done = run("status", "--url", url.render_as_string(hide_password=False))

    assert done.status == 2
    assert "correct its user" in done.err
    assert "secret" not in done.err


def test_a_database_that_hangs_is_told_before_a_probe_loses_its_patience(server_url):
    """A probe that is killed says nothing about why."""
    url = sa.make_url(server_url)
    with TCPProxy(url.port or 0) as proxy:
        proxy.hang()
        far = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
        began = time.monotonic()
        done = run("status", "--url", far)
        took = time.monotonic() - began

    assert done.status == 3
    assert "is the database up?" in done.err
    assert took < 9


def test_a_database_that_is_away_is_not_a_wrong_setting():
    """A script can tell the two apart, and try again."""
    done = run("status", "--url", "postgresql+psycopg://u:secret@127.0.0.1:1/d")

    assert done.status == 3
    assert done.err.count("\n") == 1
    assert "is the database up?" in done.err
    assert "secret" not in done.err


def test_missing_tables_are_one_line_that_names_the_command(database_url):
    """The most likely mistake of all."""
    done = run("status", "--url", database_url)

    assert done.status == 3
    assert "celery lease init" in done.err


def test_tables_without_their_version_are_not_called_missing(sqlite_url):
    """A migration that somebody wrote makes the tables, and has to insert that one row."""
    with opened(sqlite_url) as store, store.engine.begin() as connection:
        connection.execute(sa.delete(schema_table))

    assert (
        "do not tell their version; run 'celery lease init'"
        in run("status", "--url", sqlite_url).err
    )
    assert run("init", "--url", sqlite_url).status == 0
    assert run("status", "--url", sqlite_url).status == 0


def test_help_works_where_the_settings_are_wrong():
    """It is where one looks when they are."""
    assert run("acquire", "--help", beat_lease_tt1=3).status == 0


# --- check --------------------------------------------------------------------------------


def check(url: str) -> tuple[int, dict[str, dict]]:
    """Run the canary; return its exit status and what it found, by check."""
    status, answer = run_json("check", "--url", url, "--rounds", "3")
    assert answer["ok"] is (status == 0)
    assert answer["unknown"]
    return status, {each["check"]: each for each in answer["checks"]}


def test_a_sound_database_passes_the_check_and_keeps_nothing_of_it(database_url):
    """It is run on production databases."""
    with opened(database_url) as store:
        grant(store)
        before = _everything(store)
        status, found = check(database_url)

        assert status == 0
        assert {each["status"] for each in found.values()} <= {"ok", "warning"}
        assert len(found) == 10
        assert _everything(store) == before


def _everything(store: SQLLeaseStore) -> dict[str, int]:
    with store.engine.connect() as connection:
        return {
            name: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for name, table in metadata.tables.items()
        }


def test_the_check_warns_of_a_file_that_each_directory_has_its_own_of(tmp_path, monkeypatch):
    """Two beats that were started in two places would both lead."""
    monkeypatch.chdir(tmp_path)
    status, answer = run_json("check", "--rounds", "1")

    assert (status, answer["ok"]) == (0, True)
    (found,) = [each for each in answer["checks"] if each["status"] == "warning"]
    assert str(tmp_path / "celery-lease.sqlite3") in found["detail"]


def test_a_check_without_tables_is_no_verdict_on_the_database(sqlite_url):
    """They are to be made first."""
    done = run("check", "--url", sqlite_url, beat_lease_auto_init=False)

    assert done.status == 3
    assert "celery lease init" in done.err


def test_the_check_says_what_it_cannot_know(sqlite_url):
    """A green check must not be read as more than it is."""
    done = run("check", "--url", sqlite_url, "--rounds", "1")

    assert "what no check from here can know:" in done.out
    assert "failover" in done.out
    assert done.out.splitlines()[-1] == "sound"


UNDO = {
    "postgresql": """
        CREATE FUNCTION undoing() RETURNS trigger AS
            'BEGIN NEW.epoch := OLD.epoch; RETURN NEW; END' LANGUAGE plpgsql;
        CREATE TRIGGER undoing BEFORE UPDATE ON celery_lease
            FOR EACH ROW EXECUTE FUNCTION undoing()
        """,
    "mysql": """
        CREATE TRIGGER undoing BEFORE UPDATE ON celery_lease
            FOR EACH ROW SET NEW.epoch = OLD.epoch
        """,
    "sqlite": """
        CREATE TRIGGER undoing AFTER UPDATE OF epoch ON celery_lease BEGIN
            UPDATE celery_lease SET epoch = OLD.epoch WHERE name = NEW.name;
        END
        """,
}
UNDO["mariadb"] = UNDO["mysql"]


def test_a_trigger_that_undoes_the_epoch_is_found(database_url):
    """An audit or history trigger gone wrong would hand out one epoch again and again."""
    with opened(database_url) as store, store.engine.begin() as connection:
        connection.exec_driver_sql(UNDO[sa.make_url(database_url).get_backend_name()])

    status, found = check(database_url)

    assert status == 1
    assert found["one winner, epoch + 1"]["status"] == "failed"
    assert "from 0 to 0" in found["one winner, epoch + 1"]["detail"]


@pytest.mark.postgresql
def test_an_unlogged_table_is_found(postgresql_url):
    """A crash of the server empties it: the epochs would begin again at 1."""
    with opened(postgresql_url) as store, store.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE celery_lease SET UNLOGGED")

    status, found = check(postgresql_url)

    assert status == 1
    assert found["epochs survive a crash"]["status"] == "failed"
    assert "celery_lease is UNLOGGED" in found["epochs survive a crash"]["detail"]


@pytest.mark.postgresql
def test_commits_that_do_not_wait_for_the_disk_are_found(postgresql, postgresql_url):
    """Our own session always waits; what guarded transactions do is the database's to say."""
    name = sa.make_url(postgresql_url).database
    with opened(postgresql_url):
        postgresql.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")

    _, found = check(postgresql_url)

    assert "synchronous_commit = off" in found["epochs survive a crash"]["detail"]


@pytest.mark.mariadb
def test_a_table_without_transactions_is_found(mariadb_url):
    """An engine that ignores ROLLBACK lets refused writes stand."""
    with opened(mariadb_url) as store, store.engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE celery_lease ENGINE = MyISAM")

    status, found = check(mariadb_url)

    assert status == 1
    assert "MyISAM" in found["epochs survive a crash"]["detail"]


@pytest.mark.postgresql
def test_a_role_that_may_not_write_is_told_so(postgresql, postgresql_url):
    """It could look and never lead; of the database that says nothing."""
    with opened(postgresql_url) as store, store.engine.begin() as connection:
        connection.exec_driver_sql("DROP ROLE IF EXISTS reader")
        connection.exec_driver_sql("CREATE ROLE reader LOGIN")
        connection.exec_driver_sql("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader")
    url = sa.make_url(postgresql_url).set(username="reader")
    try:
        done = run("check", "--url", url.render_as_string(hide_password=False))
    finally:
        with opened(postgresql_url) as store, store.engine.begin() as connection:
            connection.exec_driver_sql("DROP OWNED BY reader")
            connection.exec_driver_sql("DROP ROLE reader")

    assert (done.status, done.out) == (3, "")
    assert "permission denied" in done.err
    assert "'celery lease init --sql postgresql --grants'" in done.err


@pytest.mark.postgresql
def test_a_read_only_server_is_found_and_refused(postgresql_url):
    """What a replica looks like to a client."""
    with opened(postgresql_url):
        pass
    options = {"connect_args": {"options": "-c default_transaction_read_only=on"}}
    done = run("check", beat_lease_url=postgresql_url, beat_lease_engine_options=options)

    assert done.status == 1
    assert "read-only" in done.out


@pytest.mark.mariadb
def test_a_read_only_mariadb_is_found_even_by_a_role_that_could_write(mariadb, mariadb_url):
    """A privileged role writes to a replica without an error, and to no effect elsewhere."""
    with opened(mariadb_url):
        pass
    mariadb.execute("SET GLOBAL read_only = 1")
    try:
        done = run("check", "--url", mariadb_url)
    finally:
        mariadb.execute("SET GLOBAL read_only = 0")

    assert done.status == 1
    assert "read-only" in done.out


def test_a_file_that_may_not_be_written_is_found(sqlite_url):
    """A wrong owner after a deployment."""
    with opened(sqlite_url):
        pass
    path = sa.make_url(sqlite_url).database
    done = run("check", "--url", f"sqlite:///file:{path}?mode=ro&uri=true")

    assert done.status == 1
    assert "read-only" in done.out
