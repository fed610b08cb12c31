"""Leader election for anything: the lease and the guard without beat or tasks."""

import os
import subprocess
import sys
import threading
from datetime import datetime, timezone

import pytest
import sqlalchemy as sa

from celery_lease import (
    ConfigurationError,
    LeaderElection,
    LeaseConflict,
    LeaseLost,
    MissingFence,
    SchemaMismatch,
    StaleEpoch,
)
from celery_lease import election as election_module
from celery_lease.elector import Elector
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.schema import term_table
from tests.services.base import ROOT


@pytest.fixture
def target(database_url):
    """An engine on the lease database, with one guarded table."""
    engine = sa.create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE resource (writer VARCHAR(20), epoch BIGINT)"))
    yield engine
    engine.dispose()


def writes(engine):
    """Return what the guarded table took, oldest first."""
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text("SELECT * FROM resource"))]


def write(leadership, engine, writer):
    """Write one row under the guard."""
    with leadership.transaction(engine) as connection:
        connection.execute(
            sa.text("INSERT INTO resource VALUES (:writer, :epoch)"),
            {"writer": writer, "epoch": leadership.epoch},
        )


def depose(url, name):
    """End the current term as an administrator would."""
    store = SQLLeaseStore(url)
    store.raise_epoch(name, store.read(name).epoch + 1)
    store.dispose()


def test_a_leader_writes_under_its_epoch_and_releases_at_the_end(database_url, target):
    """The block is the term: whoever comes next need not wait for an expiry."""
    for epoch in (1, 2):
        with LeaderElection(database_url, "janitor").lead(timeout=10) as leadership:
            assert leadership.trusted
            assert leadership.epoch == epoch
            write(leadership, target, "janitor")
        assert not leadership.trusted

    assert writes(target) == [("janitor", 1), ("janitor", 2)]


def test_a_loss_that_the_renewing_thread_noticed_is_told_with_both_epochs(sqlite_url):
    """It notices first as a rule: what is logged or compared must not be epoch 0 then."""
    ended = threading.Event()
    with LeaderElection(sqlite_url, "janitor").lead(timeout=10):
        pass
    election = LeaderElection(
        sqlite_url, "janitor", ttl=3, renew_interval=0.05, on_stopped_leading=ended.set
    )
    with election.lead(timeout=10) as leadership:
        depose(sqlite_url, "janitor")
        assert ended.wait(10)
        with pytest.raises(LeaseLost) as lost:
            leadership.check()

    assert (lost.value.held_epoch, lost.value.current_epoch) == (2, 3)


def test_the_write_of_a_deposed_leader_is_refused(database_url, target):
    """It may still believe in its lease: the transaction is what finds out."""
    with LeaderElection(database_url, "janitor", ttl=60).lead(timeout=10) as first:
        write(first, target, "first")
        depose(database_url, "janitor")
        with LeaderElection(database_url, "janitor").lead(timeout=10) as second:
            write(second, target, "second")
            with pytest.raises(StaleEpoch) as refused:
                write(first, target, "first, late")

    assert refused.value.epoch == 1
    assert refused.value.current_epoch == second.epoch
    assert writes(target) == [("first", 1), ("second", second.epoch)]


def test_somebody_elses_lease_is_waited_for_no_longer_than_asked(database_url):
    """A controller may have better things to do than to stand by."""
    election = LeaderElection(database_url, "janitor", ttl=60)
    impatient = LeaderElection(database_url, "janitor").lead(timeout=0.2)
    with election.lead(timeout=10), pytest.raises(TimeoutError), impatient:
        pytest.fail("two leaders")


def test_callbacks_tell_when_leading_begins_and_ends(database_url):
    """The end is told once, although it is noticed in more than one place."""
    told = []
    ended = threading.Event()
    election = LeaderElection(
        database_url,
        "janitor",
        ttl=1.0,
        on_started_leading=lambda leadership: told.append(leadership.epoch),
        on_stopped_leading=lambda: (told.append("stopped"), ended.set()),
    )

    with election.lead(timeout=10) as leadership:
        depose(database_url, "janitor")
        assert ended.wait(10), "the renewal finds out"
        with pytest.raises(LeaseLost):
            leadership.check()

    assert told == [1, "stopped"]


def test_the_end_of_the_block_is_told_on_its_own_thread_after_the_release(sqlite_url):
    """Who takes its time to stop must not keep the lease, nor have it told as not released."""
    seen = []

    def stopped():
        store = SQLLeaseStore(sqlite_url)
        seen.append((threading.current_thread(), store.read("janitor").holder))
        store.dispose()

    with LeaderElection(sqlite_url, "janitor", on_stopped_leading=stopped).lead(timeout=10):
        pass

    assert seen == [(threading.current_thread(), None)]


def test_a_callback_that_fails_changes_nothing_about_the_end(sqlite_url, monkeypatch, caplog):
    """The conflict is recorded, the caller gets the error it was promised, and the log tells."""
    recorded = threading.Event()
    monkeypatch.setattr(SQLLeaseStore, "end_by_conflict", lambda *_: recorded.set())

    def broken():
        raise RuntimeError("cannot stop")

    election = LeaderElection(
        sqlite_url, "janitor", ttl=3, renew_interval=0.1, on_stopped_leading=broken
    )
    with election.lead(timeout=10) as leadership:
        depose(sqlite_url, "janitor")
        assert recorded.wait(10)
        with pytest.raises(LeaseConflict):
            leadership.check()
    with election.lead(timeout=10):
        pass

    failed = [each for each in caplog.records if getattr(each, "action", "") == "callback-failed"]
    assert [each.exc_info[0] for each in failed] == [RuntimeError, RuntimeError]


def test_a_term_that_is_lost_before_its_body_begins_is_told_to_end(database_url, monkeypatch):
    """Whoever was told that leading began has something to stop."""
    told, electors = [], []

    class Known(Elector):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            electors.append(self)

    monkeypatch.setattr(election_module, "Elector", Known)
    monkeypatch.setattr(
        election_module, "prune", lambda *args, **kwargs: electors[0].concede("a test says so")
    )
    election = LeaderElection(
        database_url,
        "janitor",
        on_started_leading=lambda leadership: told.append(leadership.trusted),
        on_stopped_leading=lambda: told.append("stopped"),
    )

    with election.lead(timeout=10):
        told.append("body")

    assert told == [False, "body", "stopped"]


def test_an_interrupt_while_the_lease_is_released_skips_nothing(sqlite_url, monkeypatch):
    """Whoever leads again in this process would do so beside open connections."""
    done = []

    class Interrupted(Elector):
        def close(self):
            super().close()
            raise KeyboardInterrupt

    class Store(SQLLeaseStore):
        def dispose(self):
            super().dispose()
            done.append("disposed")

    monkeypatch.setattr(election_module, "Elector", Interrupted)
    monkeypatch.setattr(election_module, "SQLLeaseStore", Store)
    election = LeaderElection(
        sqlite_url, "janitor", on_stopped_leading=lambda: done.append("stopped")
    )
    with pytest.raises(KeyboardInterrupt), election.lead(timeout=10):
        pass

    assert sorted(done) == ["disposed", "stopped"]


_FORK = """
import os, sys
from celery_lease import LeaderElection

def stopped():
    print("stopped" if os.getpid() == parent else "stopped in the child", flush=True)

parent = os.getpid()
election = LeaderElection(sys.argv[1], "janitor", ttl=60, on_stopped_leading=stopped)
with election.lead(timeout=10) as leadership:
    child = os.fork()
    if child == 0:
        print(leadership.trusted, flush=True)
        sys.exit(0)
    os.waitpid(child, 0)
    leadership.check()
    leadership._elector._renew(leadership._elector._tenure)
    print(leadership.trusted, leadership._elector.renewals, flush=True)
"""


def test_a_process_that_is_forked_inside_the_block_leaves_the_term_alone(database_url):
    """Leaving the block there must not release the lease under the one who still leads."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORK, database_url],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.stdout.splitlines() == ["False", "True 1", "stopped"], ran.stderr


def test_a_term_that_is_lost_right_after_its_grant_is_campaigned_for_again(
    sqlite_url, monkeypatch
):
    """A pause of the process there is nothing that the caller could do about."""

    class Paused(Elector):
        def campaign(self):
            granted = super().campaign()
            if granted and self.term.epoch == 1:
                self._tenure.trusted_until = self.clock.now()
            return granted

    monkeypatch.setattr(election_module, "Elector", Paused)
    election = LeaderElection(sqlite_url, "janitor", ttl=0.5, retry_interval=0.1)
    with election.lead(timeout=10) as leadership:
        assert leadership.epoch == 2


def test_a_body_that_hangs_does_not_keep_the_lease(database_url):
    """With a stall timeout, renewing stops when check() has not been called in time."""
    election = LeaderElection(database_url, "janitor", ttl=1.0, stall_timeout=0.2)
    other = LeaderElection(database_url, "janitor")
    with election.lead(timeout=10), other.lead(timeout=20) as second:
        assert second.epoch == 2


def test_a_target_in_another_database_is_refused(database_url, tmp_path):
    """A guard in the wrong database would guard nothing."""
    other = sa.create_engine(f"sqlite:///{tmp_path}/other.sqlite3")
    with other.begin() as connection:
        connection.execute(sa.text("CREATE TABLE resource (writer VARCHAR(20), epoch BIGINT)"))

    election = LeaderElection(database_url, "janitor")
    with (
        election.lead(timeout=10) as leadership,
        pytest.raises(MissingFence, match="beat_lease_url"),
    ):
        write(leadership, other, "astray")

    assert writes(other) == []
    other.dispose()


def test_the_history_of_an_election_is_not_kept_for_ever(database_url):
    """What leads once a minute leaves half a million terms a year, and a grant looks at them."""
    with LeaderElection(database_url, "janitor").lead(timeout=10):
        pass
    store = SQLLeaseStore(database_url)
    with store.engine.begin() as connection:
        long_ago = datetime(2020, 1, 1, tzinfo=timezone.utc)
        connection.execute(sa.update(term_table).values(ended_at=long_ago))
    with LeaderElection(database_url, "janitor").lead(timeout=10):
        assert [each.epoch for each in store.history("janitor", 10)] == [2]
    store.dispose()


@pytest.mark.postgresql
def test_a_wait_for_the_database_ends_before_the_lease_does(postgresql_url):
    """A renewal that hangs leaves time for another one, however short the lease is."""
    election = LeaderElection(postgresql_url, "janitor", ttl=4)
    with election.lead(timeout=10) as leadership:
        engine = leadership._elector.store.engine
        with engine.connect() as connection:
            limit = connection.scalar(sa.text("SELECT current_setting('statement_timeout')"))
    assert limit == "1800ms"


def test_impossible_durations_are_refused_at_once(database_url):
    """Nobody should find out at three in the morning."""
    with pytest.raises(ConfigurationError, match="renew_interval") as refused:
        LeaderElection(database_url, "janitor", ttl=3, renew_interval=2)

    assert "beat_lease" not in str(refused.value), "it is a parameter here, and no setting"
    assert refused.value.setting == "renew_interval"


def test_errors_out_of_leading_name_parameters(sqlite_url):
    """Whoever has no app looks in vain for its settings."""
    wrong = {
        "url": LeaderElection("postgres://app@db/app", "janitor"),
        "engine_options": LeaderElection(sqlite_url, "janitor", engine_options={"nope": 1}),
        "create": LeaderElection(sqlite_url, "janitor", create=False),
    }
    for parameter, election in wrong.items():
        with pytest.raises((ConfigurationError, SchemaMismatch), match=parameter) as refused:
            election.lead(timeout=0).__enter__()
        assert "beat_lease" not in str(refused.value)
        assert getattr(refused.value, "setting", parameter) == parameter


def test_errors_leave_a_file_its_name(tmp_path):
    """It may look like a setting."""
    url = f"sqlite:///{tmp_path}/beat_lease_files.sqlite3"
    election = LeaderElection(url, "janitor", create=False)

    with pytest.raises(SchemaMismatch, match="beat_lease_files"):
        election.lead(timeout=0).__enter__()


@pytest.mark.parametrize("wrong", [None, 5, b"janitor"])
def test_a_name_that_is_no_string_is_refused_at_once(sqlite_url, wrong):
    """A database may take bytes for another name."""
    with pytest.raises(ConfigurationError, match=r"^name = "):
        LeaderElection(sqlite_url, wrong)


@pytest.mark.parametrize("wrong", [float("inf"), "30", 10**11])
def test_what_is_no_duration_is_refused_at_once(database_url, wrong):
    """Found by the database, it would be an error of the database's."""
    with pytest.raises(ConfigurationError, match="ttl = "):
        LeaderElection(database_url, "janitor", ttl=wrong)
