"""Beats that run as daemons (``--detach``): nobody's child, known by a pid file."""

import psutil
import pytest

from tests.acceptance.cluster import MARIADB, POSTGRESQL, RETRY, SQLITE, on
from tests.acceptance.ledger import seconds
from tests.services import wait_until
from tests.services.base import alive
from tests.services.guardian import GUARDIAN


class Daemon:
    """A beat that has left the process that started it."""

    def __init__(self, cluster, name):
        self.pidfile = cluster.directory / f"{name}.pid"
        self.logfile = cluster.directory / f"{name}.log"
        files = ("--pidfile", str(self.pidfile), "--logfile", str(self.logfile))
        scheduler = ("--scheduler", "celery_lease:LeasedScheduler")
        status, said = cluster.celery("beat", "--detach", *files, *scheduler, "--loglevel", "INFO")
        assert status == 0, said
        wait_until(self._has_pid, message=f"the pid of {name}")
        # It knows when its process began, and so signals no later one under the same id.
        self.process = psutil.Process(int(self.pidfile.read_text()))
        GUARDIAN.watch(self.process.pid)

    def _has_pid(self):
        # Written a moment after it was made.
        return self.pidfile.exists() and self.pidfile.read_text().endswith("\n")

    def said(self, text):
        """Wait until it said something."""
        wait_until(lambda: text in self.logfile.read_text(), message=f"the log to say {text!r}")

    def told_to_end(self):
        """Send SIGTERM, as an init script does, and wait until it is gone."""
        self.process.terminate()
        wait_until(lambda: not alive(self.process), message="the end of the daemon")

    def close(self):
        """End it at once."""
        if alive(self.process):
            self.process.kill()
        GUARDIAN.forget(self.process.pid)


@pytest.fixture
def detach(cluster):
    """Start daemons, which end with the test."""
    daemons = []

    def start(name):
        daemons.append(Daemon(cluster, name))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.close()


@on(POSTGRESQL, MARIADB, SQLITE)
def test_daemons_lead_stand_by_and_hand_over_at_a_sigterm(cluster, ledger, detach):
    """Detaching forks twice and closes every file: threads and connections come after that."""
    cluster.schedule = {"often": {"every": 1.0}}
    cluster.worker(ready=False)
    first = detach("first")
    first.said("leads under epoch 1")
    assert cluster.pid_of_leader() == first.process.pid
    second = detach("second")
    second.said("stands by")
    ledger.renewals(1)
    ledger.committed("often")

    first.told_to_end()
    assert not first.pidfile.exists()
    second.said("leads under epoch 2")
    [(ended, ended_at)] = ledger.rows(
        "SELECT ended, ended_at FROM celery_lease_term WHERE epoch = 1"
    )
    assert ended == "released"
    assert seconds(ledger.acquired_at(2), ended_at) <= RETRY + 0.5
    assert cluster.pid_of_leader() == second.process.pid
    ledger.first_claim(2)

    second.told_to_end()
    assert ledger.rows("SELECT holder FROM celery_lease") == [(None,)]
    ledger.assert_sound()
