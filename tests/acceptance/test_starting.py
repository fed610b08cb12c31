"""How beats start: with settings that cannot be, and beside other apps."""

import re
import socket

from tests.acceptance.cluster import MARIADB, POSTGRESQL, SQLITE, on

#: Wrong settings, with what the one line about each must name: setting and way out.
WRONG = {
    "renewal": (
        {"beat_lease_renew_interval": 5},
        ["beat_lease_renew_interval", "beat_lease_ttl", "beat_lease_margin", "lower"],
    ),
    "loop": ({"beat_max_loop_interval": 10}, ["beat_max_loop_interval", "beat_lease_ttl"]),
    "unknown": ({"beat_lease_tll": 6}, ["beat_lease_tll", "did you mean beat_lease_ttl?"]),
    "policy": ({"beat_lease_misfire": "newest"}, ["beat_lease_misfire", "'latest'"]),
    "protocol": ({"task_protocol": 1}, ["task_protocol", "= 2"]),
}


@on(SQLITE, POSTGRESQL, MARIADB)
def test_wrong_settings_are_refused_before_anything_is_touched(cluster, ledger):
    """Each names the setting and the way out; nobody leads by accident."""
    cluster.schedule = {"plain": {"every": 1.0, "task": "plain"}}
    beats = {}
    for why, (conf, _) in WRONG.items():
        cluster.conf = conf
        beats[why] = cluster.beat(why)

    for why, beat in beats.items():
        assert beat.container.wait() == 1, why
        said = beat.logs()
        missing = [each for each in WRONG[why][1] if each not in said]
        assert missing == [], said
    tables = {
        "sqlite": "SELECT name FROM sqlite_master WHERE name LIKE 'celery_lease%'",
    }.get(
        ledger.engine.dialect.name,
        "SELECT table_name FROM information_schema.tables WHERE table_name LIKE 'celery_lease%' "
        "AND table_schema NOT IN ('information_schema', 'pg_catalog')",
    )
    assert [name for (name,) in ledger.rows(tables)] == []


@on(MARIADB, POSTGRESQL, SQLITE)
def test_two_apps_lead_side_by_side_and_two_schedules_under_one_name_are_told(cluster, ledger):
    """One lease for each schedule; where it is forgotten, one schedule silently would not run."""
    cluster.schedule = {"often": {"every": 1.0}}
    cluster.conf = {"beat_lease_name": "one"}
    cluster.worker(ready=False)
    one = cluster.leader("one")
    cluster.schedule = {"other": {"every": 1.0}}
    astray = cluster.beat("astray")
    cluster.conf = {"beat_lease_name": "two"}
    cluster.beat("two")

    ledger.committed("often")
    ledger.committed("other")
    leases = ledger.rows("SELECT DISTINCT lease, entry FROM celery_lease_run ORDER BY lease")
    assert leases == [("one", "often"), ("two", "other")]
    assert ledger.rows("SELECT name, epoch FROM celery_lease ORDER BY name") == [
        ("one", 1),
        ("two", 1),
    ]
    host = re.escape(socket.gethostname())
    astray.wait_for_log(
        re.compile(
            rf"WARNING.* lease 'one': the leader on host {host} has another schedule .* this "
            rf"beat on host {host} .*beat_lease_name"
        )
    )
    assert "another schedule" not in one.logs()
