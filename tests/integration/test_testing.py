"""The helpers for people's tests, used the way the documentation tells."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from celery_lease import FencedTask
from celery_lease.execution import fence_store
from celery_lease.settings import Settings
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.testing import HeldLease, hold, run
from tests.integration.workshop import Workshop
from tests.leases import opened
from tests.services.base import ROOT


def test_a_held_lease_is_nobody_elses(sqlite_url: str) -> None:
    """Holding it twice is a mistake in a test."""
    lease = hold(sqlite_url)
    with pytest.raises(RuntimeError, match="held by"):
        hold(sqlite_url)
    lease.close()


def test_closing_gives_the_lease_back(database_url: str) -> None:
    """The next test may hold one of the same name; a term that is not ours any more stays."""
    first = hold(database_url)
    first.close()
    second = hold(database_url)
    third = second.depose()
    second.close()
    with pytest.raises(RuntimeError, match="held by"):
        hold(database_url)
    third.close()


def test_closing_does_not_need_the_database(sqlite_url: str) -> None:
    """Its fixture may be torn down first; an error there would hide the test's own."""
    lease = hold(sqlite_url)
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as connection:
        connection.execute("DROP TABLE celery_lease")
    lease.close()


def test_a_lease_whose_fence_is_not_raised_is_not_held(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every task under it would be refused as stale, and nobody would know why."""
    disposed: list[SQLLeaseStore] = []
    dispose = SQLLeaseStore.dispose
    monkeypatch.setattr(
        SQLLeaseStore, "dispose", lambda self: (disposed.append(self), dispose(self))
    )
    hold(sqlite_url).close()
    with closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))) as connection:
        connection.execute("UPDATE celery_lease_fence SET epoch = 41, term = 'lost'")
        connection.commit()
    with pytest.raises(RuntimeError, match="its fence is conflict"):
        hold(sqlite_url)
    assert len(disposed) == 2
    with opened(sqlite_url) as store:
        lease = store.read("celery")
        assert lease is not None
        assert lease.holder is None


def test_deposing_gives_the_next_epoch(sqlite_url: str) -> None:
    """As many takeovers as a test needs."""
    lease: HeldLease = hold(sqlite_url)
    epochs = [lease.epoch]
    for _ in range(2):
        lease = lease.depose()
        epochs.append(lease.epoch)
    assert epochs == [1, 2, 3]
    lease.close()


def test_a_task_runs_under_the_lease_it_is_given(workshop: Workshop) -> None:
    """Current or deposed."""

    @workshop.task(name="write")
    def write(self: FencedTask, text: str) -> int | None:
        workshop.write(self, text)
        return self.epoch

    old = workshop.lease
    assert run(write, "a", under=old, task_id="a").get() == 1
    assert old.outcome("a") == "committed"
    assert old.epoch_of("a") == 1
    new = old.depose()
    assert run(write, "b", under=old).state == "IGNORED"
    assert run(write, "c", under=new).get() == 2
    assert workshop.notes() == [("a", 1), ("c", 2)]


_CONFTEST = 'pytest_plugins = ["celery_lease.fixtures"]\n'
_TEST = """
from celery import Celery
from celery_lease import FencedTask
from celery_lease.testing import run

app = Celery("theirs")


@app.task(base=FencedTask, bind=True)
def summarise(self):
    return self.epoch


def test_it(lease_url, held_lease):
    app.conf.beat_lease_url = lease_url
    assert run(summarise, under=held_lease).get() == 1
    held_lease.depose()
    assert run(summarise, under=held_lease).state == "IGNORED"
"""


def test_the_fixtures_work_in_somebody_elses_project(tmp_path: Path) -> None:
    """Two lines of set-up."""
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_theirs.py").write_text(_TEST)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_each_test_has_the_database_that_it_sets(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One app, many tests: an old database refuses all of the others' tasks as stale."""
    reads: list[Any] = []
    read = Settings.from_conf
    monkeypatch.setattr(Settings, "from_conf", lambda conf: (reads.append(conf), read(conf))[1])

    @workshop.task(name="work")
    def work(self: FencedTask) -> int | None:
        return self.epoch

    stores = set()
    for number in range(2):
        url = f"sqlite:///{tmp_path / f'{number}.sqlite3'}"
        lease = hold(url)
        workshop.app.conf.beat_lease_url = url
        stores.add(fence_store(workshop.app))
        assert run(work, under=lease, task_id="a").state == "SUCCESS"
        assert lease.outcome("a") == "committed"
        lease.close()
    assert len(stores) == 2
    # What has not changed is not read again: this is asked for by every stamped task.
    assert len(reads) == 2
    workshop.app.conf.beat_lease_guard_idle = 7
    assert fence_store(workshop.app).idle == 7
