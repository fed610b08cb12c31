"""The epoch in log lines: on real workers, in each pool, with each way to set logging up."""

import json
import logging
import re
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.app.defaults import DEFAULT_PROCESS_LOG_FMT

from celery_lease import LeaseFilter
from celery_lease.journal import TransitionLog, sentence
from celery_lease.lease import Lease
from celery_lease.logs import _equip
from celery_lease.testing import hold
from celery_lease.transition import Action, Transition
from tests.services.processes import CeleryProcess

FORMAT = "E=%(lease_epoch)s L=%(lease_name)s R=%(lease_run)s %(message)s"


@pytest.fixture
def said(sqlite_url, redis_server, tmp_path):
    """Run one stamped and one plain call in a worker; return what its log says."""
    broker = redis_server.create_database()
    lease = hold(sqlite_url)
    sender = Celery("sender", broker=broker, set_as_current=False)
    workers = []

    def run(pool="prefork", env=None, **conf):
        settings = {"beat_lease_url": sqlite_url, **conf}
        worker = CeleryProcess.worker(
            "tests.integration.logging_app",
            directory=tmp_path,
            pool=pool,
            env={
                "LOGGING_BROKER": broker,
                "LOGGING_CONF": json.dumps(settings),
                **(env or {}),
            },
        )
        workers.append(worker)
        worker.start().ready()
        speak = sender.signature("speak")
        result = lease.dispatch(speak, ("stamped",))
        speak.apply_async(("plain",))
        worker.wait_for_log("module plain")
        worker.wait_for_log(re.compile(rf"speak\[{result.id}\].* succeeded"))
        assert "Traceback" not in worker.logs(), "a field that is missing prints a traceback"
        return worker.logs(), result.id

    yield run
    for worker in workers:
        worker.teardown()
    sender.close()
    lease.close()


def line(log, text):
    """Return the line of the log that says *text*."""
    [found] = [each for each in log.splitlines() if text in each]
    return found


@pytest.mark.redis
@pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "gevent"])
def test_lines_of_a_stamped_task_show_its_epoch_by_default(said, pool):
    """Nobody has to set a format to tell a stale task's lines from a current one's."""
    log, task_id = said(pool)

    assert "epoch=1" in line(log, "task stamped")
    assert "epoch=1" in line(log, "module stamped")
    assert "epoch=1" in line(log, f"Task speak[{task_id}] succeeded")
    assert "epoch=" not in line(log, "task plain")
    assert "epoch=" not in line(log, "module plain")


@pytest.mark.redis
def test_the_fields_are_there_for_a_format_of_ones_own(said):
    """Name, epoch and run, and a dash where there is none."""
    log, task_id = said(worker_log_format=FORMAT, worker_task_log_format=FORMAT)

    assert line(log, "task stamped") == f"E=1 L=celery R={task_id} task stamped"
    assert line(log, "module stamped") == f"E=1 L=celery R={task_id} module stamped"
    assert line(log, "task plain") == "E=- L=- R=- task plain"
    assert line(log, "own stamped").startswith("E=mine "), "the user's own extra stays"


@pytest.mark.redis
def test_the_fields_are_there_when_the_root_logger_is_the_users_own(said):
    """worker_hijack_root_logger = False leaves the root's handlers alone; tasks have their own."""
    log, _ = said(env={"LOGGING_ROOT": "1"}, worker_hijack_root_logger=False)

    assert line(log, "module stamped") == "mine epoch=1 module stamped"
    assert line(log, "module plain") == "mine epoch=- module plain"
    assert "epoch=1" in line(log, "task stamped")


@pytest.mark.redis
def test_the_filter_serves_those_who_use_dictconfig(said):
    """Then Celery sets nothing up, so there is nothing to add the fields to."""
    handler = {"class": "logging.StreamHandler", "formatter": "f", "filters": ["lease"]}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"lease": {"()": "celery_lease.LeaseFilter"}},
        "formatters": {"f": {"format": FORMAT}},
        "handlers": {"h": handler},
        "root": {"handlers": ["h"], "level": "INFO"},
    }

    log, task_id = said(env={"LOGGING_DICT": json.dumps(config)})

    assert line(log, "task stamped") == f"E=1 L=celery R={task_id} task stamped"
    assert line(log, "module plain") == "E=- L=- R=- module plain"


def test_a_formatter_of_the_users_own_is_left_as_it_is():
    """Celery's format in a class that takes none: made anew it would fail, or be another."""

    class Own(logging.Formatter):
        def __init__(self):
            super().__init__(DEFAULT_PROCESS_LOG_FMT)

    handlers = [logging.StreamHandler(), logging.StreamHandler()]
    handlers[0].setFormatter(own := Own())
    handlers[1].setFormatter(logging.Formatter(DEFAULT_PROCESS_LOG_FMT))
    _equip(SimpleNamespace(handlers=handlers))

    assert handlers[0].formatter is own
    assert "lease_tag" in handlers[1].formatter._fmt
    assert all(isinstance(each.filters[0], LeaseFilter) for each in handlers)


def test_the_filter_leaves_a_record_alone_that_has_the_fields():
    """Beat's own lines carry the epoch that they are about."""
    record = logging.makeLogRecord({"lease_epoch": 7, "lease_name": "mine"})

    assert LeaseFilter().filter(record) is True
    assert LeaseFilter().filter(record) is True
    assert (record.lease_epoch, record.lease_name) == (7, "mine")
    assert (record.lease_run, record.lease_tag) == ("-", " epoch=7")


def transition(action, **details):
    """Return a transition of the process "me"."""
    return Transition(action=action, name="celery", holder="me", **details)


def seen(**changes):
    """Return a lease as a standby sees it."""
    fields = {
        "name": "celery",
        "holder": "other",
        "epoch": 4,
        "acquired_at": None,
        "renewed_at": None,
        "expires_at": None,
        "remaining": 12.34,
    }
    return Lease(**{**fields, **changes})


def test_a_standby_says_behind_whom_and_for_how_long_yet():
    """The first question when nothing is sent: who leads, and until when?"""
    said = sentence(transition(Action.STANDING_BY, lease=seen(), epoch=4))

    assert said == (
        "lease 'celery': me stands by; other leads under epoch 4, for 12.3 s more unless renewed"
    )


@pytest.mark.parametrize("action", list(Action))
def test_every_transition_has_a_sentence_and_fields(action, caplog):
    """Holder, epoch and state in words and in fields, whatever happened."""
    logger = logging.getLogger("tests.transitions")
    with caplog.at_level(logging.DEBUG, logger=logger.name):
        TransitionLog(logger)(
            transition(action, epoch=4, lease=seen(), reason="because", seconds=1.5)
        )

    [record] = caplog.records
    assert "me" in record.getMessage()
    assert "epoch" in record.getMessage() or action is Action.UNAVAILABLE
    assert record.action == f"lease-{action.value}"
    assert (record.lease_name, record.lease_epoch, record.lease_holder) == ("celery", 4, "me")
    assert record.lease_state in ("leading", "standby")


def test_what_only_repeats_itself_is_told_quietly(caplog):
    """A standby tries each few seconds; its log should show what changed."""
    logger = logging.getLogger("tests.transitions")
    log = TransitionLog(logger)
    with caplog.at_level(logging.DEBUG, logger=logger.name):
        for holder in ("other", "other", "third"):
            log(transition(Action.STANDING_BY, epoch=4, lease=seen(holder=holder)))

    assert [each.levelname for each in caplog.records] == ["INFO", "DEBUG", "INFO"]
