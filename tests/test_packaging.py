"""What is installed: entry points, types, and an import without side effects."""

import subprocess
import sys
from importlib.metadata import entry_points
from importlib.resources import files

import celery_lease


def in_a_fresh_process(code):
    """Run *code* in a Python that has imported nothing yet; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_neither_celery_nor_sqlalchemy():
    """A worker needs no scheduler, and importing must not touch anybody's current app."""
    loaded = in_a_fresh_process(
        "import sys, celery_lease\n"
        "print(sorted({'celery', 'kombu', 'sqlalchemy'} & set(sys.modules)))"
    )
    assert loaded == "[]"


def test_importing_every_public_name_connects_no_signal():
    """Other apps in the same process must not notice; only a bound task or install() does."""
    connected = in_a_fresh_process(
        "from celery import signals\n"
        "names = [each for each in vars(signals).values() if hasattr(each, 'receivers')]\n"
        "before = [len(each.receivers or ()) for each in names]\n"
        "import celery_lease\n"
        "[getattr(celery_lease, each) for each in celery_lease.__all__]\n"
        "print(before == [len(each.receivers or ()) for each in names])"
    )
    assert connected == "True"


def test_every_public_name_is_there():
    """A name in __all__ is a promise."""
    missing = [each for each in celery_lease.__all__ if not hasattr(celery_lease, each)]
    assert missing == []


def test_a_name_that_is_not_there_is_an_attribute_error():
    """hasattr() and symbol_by_name() rely on it."""
    assert not hasattr(celery_lease, "no_such_name")


def test_beat_finds_the_scheduler_by_its_short_name():
    """``celery beat -S lease`` works through the entry point."""
    [found] = entry_points(group="celery.beat_schedulers", name="lease")
    assert found.load() is celery_lease.LeasedScheduler


def test_celery_finds_the_command():
    """``celery lease …`` works through the entry point."""
    [found] = entry_points(group="celery.commands", name="lease")
    assert found.load().name == "lease"


def test_the_package_ships_its_types():
    """Without the marker, a type checker ignores them."""
    assert files("celery_lease").joinpath("py.typed").is_file()
