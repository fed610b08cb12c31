"""The example project's stories, on real processes."""

import json
import os
import sqlite3
import subprocess
import sys

import pytest


def play(story, directory, timeout):
    """Run one story as a user does, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"example_project.{story}", "--dir", str(directory)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def failover(tmp_path_factory):
    """Play the story of the README once; return what it printed and where its files are."""
    directory = tmp_path_factory.mktemp("failover")
    return play("failover", directory, 140), directory


@pytest.mark.timeout(150)
def test_a_frozen_leader_and_a_frozen_worker_do_no_harm(failover):
    """The promise of the README: stale never wins, nothing is lost, nothing happens twice."""
    shown, directory = failover

    result = json.loads((directory / "result.json").read_text())
    assert result["ok"] is True
    assert result["epochs"] == [1, 2]
    assert result["refused_at_start"] >= 1
    assert result["refused_at_commit"] >= 1
    assert (result["stale_committed"], result["committed_twice"], result["lost"]) == (0, 0, 0)
    assert result["takeover_s"] <= result["ttl_s"] + result["retry_s"] + 1
    assert "epoch=1" in shown, "a worker's line of a stamped task carries its epoch"
    assert "epoch=2" in shown


@pytest.mark.timeout(150)
def test_plain_sql_over_the_files_agrees_with_the_verdict(failover):
    """The verdict would be worth little if it could only be had from the program itself."""
    _, directory = failover

    with sqlite3.connect(directory / "lease.sqlite3") as database:
        terms = database.execute("SELECT epoch, ended FROM celery_lease_term ORDER BY epoch")
        assert list(terms) == [(1, "expired"), (2, "released")]
        doubled = database.execute(
            "SELECT entry, due_at FROM celery_lease_run r JOIN celery_lease_commit c "
            "ON c.task_id = r.id GROUP BY entry, due_at HAVING COUNT(*) > 1"
        )
        assert list(doubled) == []
        astray = database.execute(
            "SELECT s.run_id FROM summary s LEFT JOIN celery_lease_commit c "
            "ON c.task_id = s.run_id WHERE c.epoch IS NOT s.epoch"
        )
        assert list(astray) == []


@pytest.mark.timeout(90)
def test_of_two_controllers_the_stale_one_is_refused(tmp_path):
    """The lease and the guard serve anything that one process at a time may do."""
    shown = play("controllers", tmp_path, 80)

    assert "the first wakes up, and is refused" in shown
    assert "in order: True" in shown
