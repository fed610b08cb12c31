"""What tests rely on when they start, signal and read real processes."""

import os
import re
import signal
import sys

import psutil
import pytest

from tests.services import wait_until
from tests.services.base import alive
from tests.services.cluster import BeatNode, ProcessCluster, ProcessNode, WorkerNode
from tests.services.processes import CeleryProcess, ProcessFailed
from tests.services_selftest.app import nap

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Two write into one log: each line in one piece, or one's is found inside the other's.
    os.write(1, b"child %d\\n" % os.getpid())
    time.sleep(600)
os.write(1, b"ready\\n")
time.sleep(600)
"""

POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
signal.signal(signal.SIGUSR1, lambda *_: print("usr1", flush=True))
print("ready", flush=True)
while True:
    # Short: a signal that comes right before a sleep is handled after it.
    time.sleep(0.05)
"""


@pytest.fixture
def script(tmp_path):
    """Make processes of Python scripts; they are ended whatever the test does."""
    processes = []

    def make(code, name="script"):
        process = CeleryProcess(
            name, [sys.executable, "-c", code], directory=tmp_path, ready_when="ready"
        )
        processes.append(process)
        return process

    yield make
    for process in processes:
        process.teardown()


def stopped(pid):
    """Whether a process was stopped by a signal."""
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_its_life_shows_in_status_and_exit_code(script):
    """Created, running, exited: the words that pytest-celery's nodes look at."""
    process = script(POLITE)
    assert (process.status, process.exit_code) == ("created", None)
    process.start()
    assert process.ready()
    assert (process.status, process.exit_code) == ("running", None)
    process.kill("SIGTERM")
    assert process.wait(10) == 7
    assert (process.status, process.exit_code) == ("exited", 7)


def test_a_killed_process_shows_the_signal(script):
    """A test of a crash must see that it was one."""
    with script(POLITE) as process:
        process.kill()
        assert process.wait(10) == -signal.SIGKILL


def test_a_frozen_process_counts_as_running_and_goes_on_after_sigcont(script):
    """As with containers: a stopped one can still be sent a signal."""
    with script(POLITE) as process:
        process.kill("SIGSTOP")
        wait_until(lambda: stopped(process.pid))
        assert process.status == "running"
        process.kill(signal.SIGUSR1)
        process.kill("CONT")
        process.wait_for_log("usr1", 10)


def test_signals_reach_the_group_or_one_child(script):
    """A pool child is frozen alone, a worker with all that it has."""
    with script(STUBBORN) as process:
        child = int(process.wait_for_log(re.compile(r"child (\d+)")).group(1))
        assert process.children == [child]
        process.kill("SIGSTOP", pid=child)
        wait_until(lambda: stopped(child))
        assert not stopped(process.pid)
        process.kill("SIGCONT", pid=child)
        process.kill("SIGSTOP", group=True)
        wait_until(lambda: stopped(child) and stopped(process.pid))
        process.thaw()
        wait_until(lambda: not stopped(child) and not stopped(process.pid))
        process.freeze()
        assert stopped(child)
        assert stopped(process.pid)
        process.stop(timeout=0)


def test_only_its_own_processes_are_signalled(script):
    """A wrong pid must never hit a stranger."""
    with script(POLITE) as process, pytest.raises(ProcessFailed):
        process.kill("SIGKILL", pid=os.getpid())


def test_stop_ends_stubborn_and_frozen_processes_with_their_children(script):
    """Whatever a test did to them, nothing stays behind."""
    process = script(STUBBORN).start()
    process.ready()
    family = [psutil.Process(pid) for pid in (process.pid, *process.children)]
    process.freeze()
    process.stop(timeout=0.1)
    assert not any(map(alive, family))


def test_stop_ends_the_children_of_a_killed_process(script):
    """A killed worker leaves its pool behind."""
    process = script(STUBBORN).start()
    child = psutil.Process(int(process.wait_for_log(re.compile(r"child (\d+)")).group(1)))
    process.kill()
    process.wait()
    assert alive(child)
    process.stop()
    assert not alive(child)


def test_a_restart_goes_on_in_the_same_log_and_is_ready_anew(script):
    """Readiness is that of the new process, not what the old one said."""
    process = script(POLITE).start()
    process.ready()
    first = process.pid
    process.restart()
    process.ready()
    assert process.pid != first
    assert process.logs().count("ready") == 2


def test_waiting_for_a_log_line_fails_early_when_the_process_ended(script):
    """The reason is in the log, and it must be shown without waiting for the deadline."""
    process = script("print('some reason')").start()
    with pytest.raises(ProcessFailed, match="some reason"):
        process.wait_for_log("never", 60)


def test_waiting_for_a_log_line_has_a_deadline(script):
    """The message says what was waited for."""
    with script(POLITE) as process, pytest.raises(TimeoutError, match="never"):
        process.wait_for_log("never", 0.1)


def test_waiting_goes_on_from_where_the_last_line_was_found(script):
    """The same line said twice is two events."""
    with script(POLITE) as process:
        process.kill("SIGUSR1")
        first = process.wait_for_log("usr1")
        with pytest.raises(TimeoutError):
            process.wait_for_log("usr1", 0.1, after=first.end())
        process.kill("SIGUSR1")
        assert process.wait_for_log("usr1", after=first.end()).start() >= first.end()


def test_a_node_does_with_a_process_what_it_does_with_a_container(script):
    """The verbs of pytest-celery's own API work where no Docker does."""
    node = ProcessNode(script(POLITE)).start()
    assert node.ready()
    assert node.name() == "script"
    node.kill("SIGUSR1")
    node.assert_log_exists("usr1", timeout=10)
    node.assert_log_does_not_exist("never", timeout=0.1)
    node.restart()
    assert node.ready()
    node.kill()
    node.container.wait(10)
    assert node.container.status == "exited"
    node.kill("SIGTERM")  # nothing to kill is no error
    node.teardown()


def test_a_cluster_starts_and_ends_its_nodes_together(script):
    """Two beats and two workers are one thing to a test."""
    with ProcessCluster(script(POLITE, "a"), ProcessNode(script(POLITE, "b"))) as cluster:
        assert [node.name() for node in cluster] == ["a", "b"]
        assert {node.container.status for node in cluster} == {"running"}
    assert {node.container.status for node in cluster} == {"exited"}


@pytest.mark.redis
def test_a_real_beat_and_a_real_worker(redis_url, tmp_path, monkeypatch):
    """The whole path once: start, task, freeze of the worker with its pool, thaw, end."""
    module = "tests.services_selftest.app"
    options = {"directory": tmp_path, "env": {"SELFTEST_BROKER": redis_url}}
    schedule = f"--schedule={tmp_path / 'schedule'}"
    stock = "celery.beat:PersistentScheduler"
    beat = BeatNode(CeleryProcess.beat(module, schedule, scheduler=stock, **options))
    worker = WorkerNode(CeleryProcess.worker(module, **options))
    with ProcessCluster(beat, worker):
        assert len(worker.pool) == 1
        with nap.app.connection_for_write(redis_url) as connection:
            nap.apply_async((1.0,), connection=connection)
        asleep = worker.wait_for_log(re.compile(r"asleep in (\d+)"))
        assert int(asleep.group(1)) == worker.pool[0]
        worker.container.freeze()
        worker.assert_log_does_not_exist("awake", timeout=1.5)
        worker.container.thaw()
        worker.wait_for_log("awake", timeout=10)
    assert beat.container.exit_code == 0
    assert worker.container.exit_code == 0
