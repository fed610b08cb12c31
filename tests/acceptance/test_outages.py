"""The broker away, the lease database away, connections killed, rights withdrawn."""

import json
import re

import pytest

from celery_lease.stores import ddl
from tests.acceptance.cluster import (
    MARGIN,
    MARIADB,
    POSTGRESQL,
    RETRY,
    SQLITE,
    TTL,
    on,
)
from tests.acceptance.ledger import seconds
from tests.services import wait_until

LONG = pytest.param(30, marks=pytest.mark.slow)


def wait(ledger, duration):
    """Let so many seconds pass by the database's clock."""
    began_at = ledger.now()
    wait_until(
        lambda: seconds(ledger.now(), began_at) >= duration,
        timeout=duration + 5,
        message="the outage to last",
    )


# --- the broker -----------------------------------------------------------------------------


@on(MARIADB, POSTGRESQL, SQLITE)
@pytest.mark.parametrize("leader_changes", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("away", [3, LONG])
def test_what_was_due_while_the_broker_was_away_is_sent_when_it_is_back(
    cluster, ledger, leader_changes, away
):
    """It stays claimed, and goes out under the same id for the same due time."""
    cluster.schedule = {"often": {"every": 1.0}}
    proxy = cluster.proxy(cluster.pair.broker)
    cluster.worker(ready=False)
    beat_a, beat_b = cluster.beats(broker=proxy)
    ledger.committed("often")

    proxy.refuse()
    proxy.cut()
    beat_a.wait_for_log(re.compile(r"the broker did not take messages under epoch 1"))
    wait(ledger, away)
    unsent = "SELECT id, due_at FROM celery_lease_run WHERE state = 'claimed'"
    [(run_id, due_at)] = ledger.rows(unsent)  # The entry claims no more before this is sent.
    assert "lost epoch 1" not in beat_a.logs(), "neither loop nor renewals were held up"
    # The line may have been cut between a message and its confirm: then the broker has it.
    arrived = ledger.rows("SELECT epoch FROM celery_lease_commit WHERE task_id = :id", id=run_id)
    if leader_changes:
        status, _ = cluster.stop(beat_a)
        assert status == 0
        beat_b.wait_for_log("leads under epoch 2")
    back_at = ledger.now()
    proxy.resume()

    committed = ledger.wait(
        "SELECT c.epoch, r.due_at FROM celery_lease_commit c JOIN celery_lease_run r "
        "ON r.id = c.task_id WHERE r.id = :id",
        id=run_id,
    )
    assert committed == [(2 if leader_changes and not arrived else 1, due_at)]
    wait_until(
        lambda: [due for _, _, due in ledger.committed("often") if due > back_at],
        message="an occurrence after the outage",
    )
    ledger.assert_sound()
    ledger.assert_accounted(cluster.schedule, before=back_at)


# --- the lease database -----------------------------------------------------------------------


@on(POSTGRESQL, MARIADB)
@pytest.mark.parametrize("away", [TTL + 2, LONG])
@pytest.mark.parametrize("how", ["refuse", pytest.param("hang", marks=pytest.mark.slow)])
def test_without_its_database_a_leader_stands_by_and_recovers_unaided(cluster, ledger, away, how):
    """It leads for as long as it may trust what it was last told, and never extends that."""
    cluster.schedule = {"often": {"every": 1.0}, "plain": {"every": 1.0, "task": "plain"}}
    proxy = cluster.proxy(cluster.pair.database)
    cluster.worker(ready=False)
    beats = cluster.beats(lease=proxy)
    ledger.committed("often")

    getattr(proxy, how)()
    if how == "refuse":
        proxy.cut()
    away_at = ledger.now()
    wait(ledger, TTL - MARGIN)
    beats[0].wait_for_log(re.compile(r"lost epoch 1 and stands by"))
    started = "SELECT COUNT(*) FROM started"
    trusted = ledger.number(started)
    status, said = cluster.celery("lease", "status", lease=proxy)
    assert (status, "beat_lease_url" in said, "Traceback" in said) == (3, True, False)
    wait(ledger, away - (TTL - MARGIN))
    assert ledger.number(started) == trusted, "nothing was dispatched after the trust window"
    assert [each.container.status for each in beats] == ["running", "running"]
    back_at = ledger.now()
    proxy.resume()

    assert seconds(ledger.next_claim(back_at), back_at) <= TTL + 2 * RETRY + 1
    status, said = cluster.celery("lease", "status", "--json", lease=proxy)
    [lease] = json.loads(said[said.index("{") :])["leases"]
    # A grant that hung on its way may arrive too late: that epoch is nobody's.
    assert (status, lease["held"], lease["epoch"] > 1) == (0, True, True)
    last = "SELECT MAX(claimed_at) AS last_at FROM celery_lease_run WHERE epoch = 1"
    assert seconds(ledger.number(last), away_at) <= TTL - MARGIN
    ledger.assert_settled(away_at)
    ledger.assert_sound()
    assert ledger.gaps("often", 1.0) == []
    assert ledger.gaps("plain", 1.0) == []


@pytest.mark.slow
@on(MARIADB, POSTGRESQL)
def test_a_killed_connection_costs_one_warning_at_most_and_not_the_lease(cluster, ledger):
    """A firewall or an administrator may close it at any time."""
    cluster.schedule = {"often": {"every": 1.0}}
    beat = cluster.leader("A")
    ledger.first_claim(1)
    ledger.renewals(1)
    quiet = len(beat.logs())
    kill_connections(ledger)

    assert max(ledger.renewals(3)) <= 2 * RETRY + 1
    claimed = ledger.number("SELECT COUNT(*) FROM celery_lease_run")
    ledger.wait("SELECT id FROM celery_lease_run", count=claimed + 2)
    said = beat.logs()[quiet:].splitlines()
    # A claim that broke off may leave an occurrence late, which is told as well.
    warnings = [line for line in said if "WARNING" in line and "skipped, due" not in line]
    assert len(warnings) <= 1, "\n".join(warnings)
    assert ledger.epoch() == 1
    assert ledger.gaps("often", 1.0) == []


def kill_connections(ledger):
    """End every other session on the database."""
    if ledger.engine.dialect.name == "postgresql":
        ledger.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return
    others = (
        "SELECT id FROM information_schema.processlist "
        "WHERE db = database() AND id <> connection_id()"
    )
    for (each,) in ledger.rows(others):
        ledger.execute(f"KILL {each}")


# --- what cannot be by-passed -------------------------------------------------------------------


@pytest.mark.slow
@on(POSTGRESQL, MARIADB)
def test_no_database_means_no_dispatch(cluster, ledger):
    """A beat that cannot ask who leads sends nothing; when it can, it leads."""
    cluster.schedule = {"plain": {"every": 1.0, "task": "plain"}}
    proxy = cluster.proxy(cluster.pair.database)
    proxy.refuse()
    beat = cluster.beat("A", lease=proxy)
    beat.wait_for_log("the lease database does not answer")
    wait(ledger, 3 * RETRY)
    assert beat.container.status == "running"
    assert len(re.findall("the lease database does not answer", beat.logs())) == 1
    proxy.resume()
    beat.wait_for_log("leads under epoch 1")
    ledger.first_claim(1)


@on(MARIADB, POSTGRESQL)
def test_without_tables_or_rights_a_beat_does_not_start(cluster, ledger):
    """Waiting would not help: one line says what is missing, and where."""
    cluster.schedule = {"plain": {"every": 1.0, "task": "plain"}}
    _, powerless = cluster.role()
    cluster.conf = {"beat_lease_auto_init": False}
    beats = {"no tables": cluster.beat("A"), "no rights": cluster.beat("B", lease=powerless)}

    for why, beat in beats.items():
        assert beat.container.wait() == 1, why
        [line] = [each for each in beat.logs().splitlines() if "CRITICAL" in each]
        print(f"{why}: {line}")
        assert "beat_lease_url" in line
        assert "Traceback" not in beat.logs()


@pytest.mark.slow
@on(POSTGRESQL, MARIADB)
@pytest.mark.parametrize("what", ["rights", "tables"])
def test_a_leader_that_loses_its_rights_or_tables_stands_by_until_it_has_them_again(
    cluster, ledger, what
):
    """No claim, no dispatch; and nobody has to start it again."""
    # What a worker could not look up in the meantime is left for the next leader.
    cluster.conf = {"beat_lease_redispatch_after": 1}
    cluster.schedule = {"often": {"every": 1.0}, "plain": {"every": 1.0, "task": "plain"}}
    assert cluster.celery("lease", "init")[0] == 0
    role, url = cluster.role()
    give = ddl.grants(ledger.engine.dialect.name, beat=role, worker=role)
    for statement in give[: len(ddl.BEAT)]:
        ledger.execute(statement)
    take, back = {
        "rights": (f"REVOKE UPDATE ON celery_lease FROM {role}", give[1]),
        "tables": (
            "ALTER TABLE celery_lease RENAME TO celery_lease_away",
            "ALTER TABLE celery_lease_away RENAME TO celery_lease",
        ),
    }[what]
    beat = cluster.leader("A", lease=url)
    cluster.worker(ready=False)
    ledger.committed("often")

    ledger.execute(take)
    taken_at = ledger.now()
    beat.wait_for_log(re.compile(r"lost epoch 1 and stands by"), timeout=TTL + 5)
    claims = "SELECT COUNT(*) FROM celery_lease_run"
    claimed = ledger.number(claims)
    beat.wait_for_log(re.compile(r"stands by; the lease database does not answer"))
    wait(ledger, 2 * RETRY)
    assert ledger.number(claims) == claimed
    assert beat.container.status == "running"
    ledger.execute(back)

    beat.wait_for_log("leads under epoch 2")
    ledger.first_claim(2)
    last = "SELECT MAX(claimed_at) AS last_at FROM celery_lease_run WHERE epoch = 1"
    assert seconds(ledger.number(last), taken_at) <= TTL - MARGIN
    ledger.assert_settled(taken_at)
    ledger.assert_sound()
