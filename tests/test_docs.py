"""What the documentation says by hand is compared with the code."""

from __future__ import annotations

import ast
import configparser
import dataclasses
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, schedules
from celery.utils.dispatch import Signal

import celery_lease
from celery_lease import canary, cli, errors, signals
from celery_lease.due import due_at, missed
from celery_lease.entry import PLAIN, Wishes
from celery_lease.execution import fence_store
from celery_lease.occurrence import Misfire, MisfirePolicy, Occurrence, RunState
from celery_lease.settings import Settings
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.task import FencedTask
from celery_lease.testing import hold, run
from celery_lease.transition import Action
from tests.leases import opened

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "celery_lease"


def page(name: str) -> str:
    """Return the source of one page."""
    return (DOCS / f"{name}.rst").read_text(encoding="utf-8")


def pages() -> list[Path]:
    """Return all pages, and what the repository shows beside them."""
    return [*sorted(DOCS.rglob("*.rst")), ROOT / "README.rst", ROOT / "CHANGELOG.rst"]


def described(kind: str, text: str) -> list[str]:
    """Return what the directives of one kind describe."""
    return re.findall(rf"^\.\. {kind}:: (\S+)$", text, re.MULTILINE)


# --- settings, entries, errors, signals, commands -----------------------------------------


def test_every_setting_is_described_once() -> None:
    """A setting that nobody can read about does not exist for its users."""
    assert sorted(described("setting", page("reference/settings"))) == sorted(Settings.names())


def test_every_key_of_an_entry_is_described() -> None:
    """As for settings."""
    keys = re.findall(r"^``(\w+)``$", page("reference/entries"), re.MULTILINE)
    assert keys == [each.name for each in dataclasses.fields(Wishes)]


def test_the_default_of_overlap_timeout_is_told() -> None:
    """It is the one default of an entry's key that no setting has."""
    assert f"Default: {PLAIN.overlap_timeout:g}." in page("reference/entries")


def test_the_bounds_of_a_takeover_are_those_of_the_defaults() -> None:
    """The figures on the first pages are sums of settings."""
    default = Settings()
    bound = default.ttl + default.retry_interval
    assert f"about {bound:g}\n   seconds with the defaults" in page("index")
    figures = (
        f"With the defaults: {default.retry_interval:g} s, {bound:g} s, "
        f"{default.stall_timeout + bound:g} s, and {default.guard_idle:g} s more."
    )
    assert figures in page("explanation/guarantees")


def test_the_attributes_of_a_fenced_task_are_described_with_their_defaults() -> None:
    """They are set in a decorator, where a wrong name would go unseen."""
    told = dict(re.findall(r"^``(\w+) = (.+)``$", page("reference/tasks"), re.MULTILINE))
    own = [name for name in FencedTask.__annotations__ if not name.startswith("_")]
    assert told == {name: repr(getattr(FencedTask, name)) for name in own}


def test_every_error_is_described() -> None:
    """Each one has a cause and a way out, or is a base of those that do."""
    text = page("reference/errors")
    bases = {"CeleryLeaseError", "LeaseError", "FencingError", "StoreError"}
    for name in set(errors.__all__) - bases:
        assert f"``{name}``" in text, name


def test_every_signal_is_described_with_its_arguments() -> None:
    """A receiver's parameters are copied from that page."""
    rows = _rows(page("reference/signals"))
    told = {row[0].strip("`"): set(re.findall(r"``(\w+)``", row[1])) for row in rows[1:]}
    sent = {
        name: set(value.providing_args or ())
        for name, value in vars(signals).items()
        if isinstance(value, Signal)
    }
    assert told == sent


def test_every_command_and_option_is_described() -> None:
    """``--help`` tells what a command does; the page tells when it is wanted."""
    text = page("reference/cli")
    sections = dict(
        re.findall(r"^([a-z]+)\n-+\n((?:(?!\n[a-z]+\n-+\n)[\s\S])*)", text, re.MULTILINE)
    )
    assert sorted(sections) == sorted(cli.lease.commands)
    for name, command in cli.lease.commands.items():
        for option in (each for each in command.params if each.opts[0] not in ("--json", "--url")):
            shown = sections[name] if option.opts[0] != "--name" else text
            assert option.opts[0] in shown, f"{name} {option.opts[0]}"
    assert "--json" in text
    assert "--url" in text


def test_the_checks_of_a_database_are_those_that_the_page_shows(sqlite_url: str) -> None:
    """Who reads "failed" looks it up by its name."""
    shown = re.findall(r"^   ok      ([^:]+): ", page("reference/cli"), re.MULTILINE)
    assert shown == [each.check for each in canary.run(sqlite_url, {}, rounds=2, create=True)]


def test_every_set_of_durations_on_the_page_is_allowed() -> None:
    """They will be copied."""
    for row in _rows(page("howto/choose-ttl"))[1:]:
        ttl, renew, margin, retry = map(float, row[1:5])
        Settings(ttl=ttl, renew_interval=renew, margin=margin, retry_interval=retry)
        assert row[5] == f"{ttl + retry:g} s"


def test_every_public_name_is_listed() -> None:
    """What is not on that page is not public."""
    listed = page("reference/api").split("By path:", maxsplit=1)[0]
    names = [name for name in celery_lease.__all__ if name not in errors.__all__]
    for name in names:
        assert f"``{name}``" in listed, name


def test_the_map_of_modules_shows_the_layers_that_are_enforced() -> None:
    """Who adds a module looks there for its place."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    layers = config["importlinter:contract:layers"]["layers"]
    enforced = [set(re.findall(r"\w+", layer)) for layer in layers.split("\n") if layer]
    text = page("explanation/architecture")
    rows = _rows(text[text.index("modules, checked by") :])[1:]
    assert [set(re.findall(r"``(\w+)``", row[0])) for row in rows] == enforced
    modules = {each.stem for each in PACKAGE.glob("[!_]*.py")} | {"guards", "stores"}
    assert modules - set().union(*enforced) == set()


# --- log lines ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Told:
    """A call that logs something."""

    #: Its stable name; None where it has none.
    action: str | None
    #: The method: info, warning, error, critical, exception, log.
    method: str
    #: The message, with its placeholders; None where it is not a literal.
    message: str | None


def _told() -> Iterator[Told]:
    """Yield all calls of the package that log, the transitions left out."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger.")):
                continue
            method = ast.unparse(node.func).removeprefix("logger.")
            texts = [
                each.value
                for each in node.args
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
            for action in _actions(node):
                yield Told(action, method, texts[0] if texts else None)


def _actions(call: ast.Call) -> list[str] | list[None]:
    extra = next((each.value for each in call.keywords if each.arg == "extra"), None)
    if not isinstance(extra, ast.Dict):
        return [None]
    named = {
        key.value: value
        for key, value in zip(extra.keys, extra.values, strict=True)
        if isinstance(key, ast.Constant)
    }
    return _names(named["action"]) if "action" in named else [None]


def _names(action: ast.expr) -> list[str]:
    if isinstance(action, ast.Constant):
        return [str(action.value)]
    assert ast.unparse(action) == "f'run-{state.value}'", f"teach {__name__} this action"
    return [f"run-{each.value}" for each in (RunState.FAILED, RunState.SKIPPED)]


def _described_lines() -> dict[str, tuple[str | None, str | None]]:
    """Return level and line of each log event on the page, where they are written by hand."""
    found = {}
    for block in re.split(r"^\.\. log-event:: ", page("reference/log-events"), flags=re.MULTILINE)[
        1:
    ]:
        level = re.search(r"^   :level: (.*)$", block, re.MULTILINE)
        line = re.search(r"^   :line: (.*)$", block, re.MULTILINE)
        found[block.split(maxsplit=1)[0]] = level and level[1], line and line[1]
    return found


def test_every_log_event_is_described_once() -> None:
    """The page is the runbook: what is logged and not there leaves its reader alone."""
    events = described("log-event", page("reference/log-events"))
    known = {each.action for each in _told() if each.action is not None}
    known |= {f"lease-{each.value}" for each in Action}
    assert sorted(events) == sorted(known)


def test_every_log_line_of_the_page_is_one_of_the_code() -> None:
    """Somebody searches for a line as it is in the log."""
    told = list(_told())
    for action, (level, line) in _described_lines().items():
        if line is None:
            continue
        calls = [each for each in told if each.action == action]
        assert any(_could_say(each.message, line) for each in calls), f"{action}: {line}"
        methods = {"error" if each.method == "exception" else each.method for each in calls}
        if "log" not in methods:
            assert level in {each.upper() for each in methods}, action


def test_every_loud_line_has_an_action() -> None:
    """Words may change from one version to the next; what an alarm looks for must not."""
    quiet = {"debug", "info"}
    assert [each for each in _told() if each.action is None and each.method not in quiet] == []


def test_an_example_of_every_transition_can_be_made() -> None:
    """The page shows each of them as it is logged."""
    source = (DOCS / "_ext" / "lease_docs.py").read_text(encoding="utf-8")
    for each in Action:
        assert f"Action.{each.name}:" in source, each


def _could_say(message: str | None, line: str) -> bool:
    if message is None:
        return False
    parts = re.split(r"%(?:\.\d+)?[srdgf]", message)
    return re.fullmatch(".*".join(map(re.escape, parts)), line) is not None


# --- the table of misfires ----------------------------------------------------------------

STOPPED = datetime(2025, 3, 3, 11, 59, 30, tzinfo=timezone.utc)


def _app() -> Celery:
    app = Celery("docs", set_as_current=False)
    app.conf.timezone = "UTC"
    return app


def _schedule(title: str) -> Any:
    """Return the schedule of a column of the table."""
    if title.startswith("Interval"):
        return schedules.schedule(30, app=_app())
    if title.startswith("Crontab"):
        return schedules.crontab(minute="*/15", app=_app())
    pytest.importorskip("ephem")
    return schedules.solar("sunrise", 52.52, 13.405, app=_app())


def _misfire(text: str) -> Misfire:
    """Return what a row's first cell says."""
    policy, _, grace = text.partition(", grace ")
    wishes = Wishes(
        misfire=MisfirePolicy(policy.strip("`")),
        grace=float(grace.removesuffix(" s")) if grace else None,
    )
    return wishes.on_misfire(Settings())


def _decided(schedule: Any, misfire: Misfire, now: datetime) -> str:
    """Return what happens, in the words of the table."""
    first = due_at(schedule, STOPPED)
    if first > now:
        return "nothing was due"
    decision = misfire.decide(missed(schedule, first, now, misfire.wanted + 1), now)
    fired = f"{len(decision.fire)} fired" if decision.fire else ""
    if decision.skipped is None:
        return fired
    count = decision.skipped.count
    if count is None:
        return f"{fired}, the rest skipped" if fired else "all skipped"
    return f"{fired}, {count} skipped" if fired else f"{count} skipped"


def _rows(text: str) -> list[list[str]]:
    """Return the rows of the first list table of a text, cells as they are written."""
    table = re.search(r"^\.\. list-table::.*\n((?:   .*\n|\n)+)", text, re.MULTILINE)
    assert table is not None
    rows = re.split(r"^   \* - ", table[1], flags=re.MULTILINE)[1:]
    return [[" ".join(cell.split()) for cell in re.split(r"\n     - ", row)] for row in rows]


def test_the_table_of_misfires_tells_what_the_code_does() -> None:
    """Somebody chooses a policy from that table alone."""
    text = page("explanation/misfires")
    head, *rows = _rows(text[text.index("checked by tests/test_docs.py") :])
    away = {"1 minute": timedelta(minutes=1), "1 day": timedelta(days=1)}
    computed = [
        [
            row[0],
            row[1],
            *(
                _decided(_schedule(title), _misfire(row[0]), STOPPED + away[row[1]])
                for title in head[2:]
            ),
        ]
        for row in rows
    ]
    assert computed == rows
    policies = {row[0].partition(",")[0] for row in rows}
    assert policies == {f"``{each.value}``" for each in MisfirePolicy}


@pytest.mark.parametrize(
    ("minute", "hour", "start", "expected"),
    [
        ("*/30", "*", (2025, 10, 25, 23, 30), ["02:00+0200", "02:30+0200", "03:00+0100"]),
        ("30", "2", (2025, 3, 29, 12, 0), ["03:30+0200", "02:30+0200"]),
    ],
    ids=["autumn", "spring"],
)
def test_celerys_crontab_is_as_odd_as_the_page_says(
    minute: str, hour: str, start: tuple[int, ...], expected: list[str]
) -> None:
    """Should Celery change it, the page has to."""
    app = _app()
    app.conf.timezone = "Europe/Berlin"
    schedule = schedules.crontab(minute=minute, hour=hour, app=app)
    found, last = [], datetime(*start, tzinfo=timezone.utc)
    for _ in expected:
        last = due_at(schedule, last)
        found.append(f"{last.astimezone(schedule.tz):%H:%M%z}")
    assert found == expected


# --- blocks of code -----------------------------------------------------------------------


def _python_blocks() -> Iterator[Any]:
    block = re.compile(r"^\.\. code-block:: python\n((?:   .*\n|\n)+)", re.MULTILINE)
    for path in pages():
        for number, match in enumerate(block.finditer(path.read_text(encoding="utf-8")), 1):
            code = re.sub(r"^ +:[a-z-]+:.*\n", "", match[1], flags=re.MULTILINE)
            code = textwrap.dedent(code)
            yield pytest.param(code, id=f"{path.stem}-{number}")


@pytest.mark.parametrize("code", list(_python_blocks()))
def test_python_on_a_page_is_python(code: str) -> None:
    """It will be copied."""
    ast.parse(code)


def test_sql_on_a_page_runs(database_url: str) -> None:
    """It is copied in the middle of an incident."""
    store = SQLLeaseStore(database_url)
    store.prepare(create=True)
    block = re.compile(r"^( *)\.\. code-block:: sql\n\n((?:\1   .*\n|\n)+)", re.MULTILINE)
    # The last one drops the tables at its end.
    names = ("howto/monitor", "reference/schema", "howto/switch-and-remove")
    text = "\n".join(page(name) for name in names)
    statements = [each for match in block.finditer(text) for each in match[2].split(";")]
    statements = [each for each in statements if each.strip()]
    assert len(statements) >= 4
    with store.engine.connect() as connection:
        # So that "%" is no placeholder.
        literally = connection.execution_options(no_parameters=True)
        for statement in statements:
            literally.exec_driver_sql(textwrap.dedent(statement))
    store.dispose()


#: What the how-to takes for granted.
_PROJECT = {
    "proj/__init__.py": "",
    "proj/app.py": """
from celery import Celery

app = Celery("proj", broker="memory://", set_as_current=False)
""",
    "proj/db.py": """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker


class Base(DeclarativeBase): ...


class Summary(Base):
    __tablename__ = "summary"
    run: Mapped[str] = mapped_column(primary_key=True)
    text: Mapped[str]
    epoch: Mapped[int]


Session = sessionmaker()
""",
}


def test_the_tests_of_the_how_to_pass(tmp_path: Path) -> None:
    """Somebody begins with them."""
    blocks = [
        each.values[0] for each in _python_blocks() if each.id.startswith("test-your-tasks-")
    ]
    conftest, tasks, *tests = blocks
    files = {
        **_PROJECT,
        "conftest.py": conftest,
        "proj/tasks.py": tasks,
        "test_summaries.py": "\n".join(tests),
        # Two of one name, the first of which leaves its lease with another.
        "test_same.py": "def test_it(lease):\n    lease.depose()\n",
        "test_same_again.py": "def test_it(lease):\n    assert lease.epoch == 1\n",
    }
    (tmp_path / "proj").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:celery", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{sum(each.count('def test_') for each in tests) + 2} passed" in done.stdout


_CONTROLLER = """
import signal

import sqlalchemy as sa
from sqlalchemy.orm import sessionmaker

Session = sessionmaker(sa.create_engine({url!r}))


def tidy(session, epoch):
    print("leads under epoch", epoch, flush=True)
    signal.pause()

"""


def test_the_controller_of_the_election_page_releases_its_lease_on_sigterm(
    sqlite_url: str,
) -> None:
    """A deployment stops it that way: the next one must not wait for the ttl."""
    code = next(each.values[0] for each in _python_blocks() if each.id == "election-1")
    code = code.replace("postgresql+psycopg://app@db/app", sqlite_url)
    with subprocess.Popen(
        [sys.executable, "-c", _CONTROLLER.format(url=sqlite_url) + code],
        stdout=subprocess.PIPE,
        text=True,
    ) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "leads under epoch 1\n"
        controller.terminate()
        assert controller.wait(20) == 0
    with opened(sqlite_url, name="janitor") as store:
        lease = store.read("janitor")
        assert lease is not None
        assert lease.holder is None


def test_the_tutorials_program_does_what_the_tutorial_says(tmp_path: Path) -> None:
    """A first contact that fails is the last one."""
    code = next(each.values[0] for each in _python_blocks() if each.id == "first-failover-1")
    program = tmp_path / "documents.py"
    program.write_text(code, encoding="utf-8")
    names: dict[str, Any] = {"__file__": str(program), "__name__": "documents"}
    # Without this module's `from __future__ import annotations`.
    exec(compile(code, str(program), "exec", dont_inherit=True), names)
    lease = hold(names["URL"], names["app"].conf.beat_lease_name)
    occurrence = Occurrence(lease="documents", entry="summary", due_at=STOPPED)
    lease.record(occurrence)
    try:
        done = run(names["summarise"], under=lease, task_id=occurrence.run_id)
        assert done.state == "SUCCESS", done.traceback
        with names["Session"]() as session:
            (summary,) = session.query(names["Summary"])
            assert summary.epoch == lease.epoch
        lease.depose().close()
        assert run(names["summarise"], under=lease).state == "IGNORED"
    finally:
        lease.close()
        names["Session"].kw["bind"].dispose()
        fence_store(names["app"]).dispose()
