"""django-celery-beat under the lease: rows, admin changes, and who may write."""

from datetime import timedelta

import pytest

from celery_lease.scheduler import leased
from celery_lease.task import FencedTask
from celery_lease.testing import hold, run
from tests.integration.beats import START, Cluster, no_broker, plain
from tests.integration.django_project import set_up

pytest.importorskip("django_celery_beat")


@pytest.fixture(scope="module", autouse=True)
def project():
    """Have Django set up."""
    set_up()
    yield
    from django.db import connections

    connections.close_all()


@pytest.fixture
def models():
    """django-celery-beat's models, without rows."""
    from django_celery_beat import models

    models.PeriodicTask.objects.all().delete()
    # Of the first change ever django-celery-beat cannot tell that it is one.
    models.PeriodicTasks.update_changed()
    return models


@pytest.fixture
def cluster(sqlite_url, models):
    """Beats over one lease and one Django database."""
    cluster = Cluster(sqlite_url, result_expires=None)
    yield cluster
    cluster.close()


def beat_of(cluster, cls=None):
    """Start a leased DatabaseScheduler."""
    from celery_lease.django import LeasedDatabaseScheduler

    class Steered(cls or LeasedDatabaseScheduler):
        before_flush = staticmethod(lambda runs: None)

        def flush(self, sendings):
            self.before_flush([each.run for each in sendings])
            super().flush(sendings)

        def go(self, times=4):
            for _ in range(times):
                self.tick()
            return self

    app = cluster.app({})
    app.conf.beat_schedule = {}
    beat = Steered(app=app)
    cluster.beats.append(beat)
    return beat


def daily(models, name="entry", **values):
    """Make a row that is due now, once."""
    every, _ = models.IntervalSchedule.objects.get_or_create(every=1, period="days")
    return models.PeriodicTask.objects.create(
        name=name,
        task="tasks.plain",
        interval=every,
        last_run_at=START - timedelta(hours=25),
        **values,
    )


def test_one_of_two_sends_and_saves(cluster, models):
    """The row's last run is saved before the message goes out."""
    row = daily(models)
    first, second = beat_of(cluster), beat_of(cluster)

    first.go()
    second.go()

    (message,) = cluster.messages()
    assert message.headers["stamps"]["lease_epoch"] == 1
    assert message.headers["periodic_task_name"] == "entry"
    row.refresh_from_db()
    assert row.total_run_count == 1
    assert row.last_run_at > START - timedelta(hours=1)


def test_a_standby_does_not_touch_djangos_database(cluster, models):
    """Its set-up writes rows: that is the leader's to do."""
    beat_of(cluster).go()
    standby = beat_of(cluster)
    standby.app.conf.beat_schedule = {"static": {"task": "tasks.plain", "schedule": 60.0}}

    standby.go()
    standby.close()

    assert not models.PeriodicTask.objects.filter(name="static").exists()


def test_the_next_leader_repeats_nothing(cluster, models):
    """However the first one died: the row was saved with the claim."""
    daily(models)
    beat_of(cluster).go()
    cluster.depose()

    second = beat_of(cluster).go()

    assert second.elector.leading
    assert len(cluster.messages()) == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_an_entry_that_never_ran_does_not_begin_anew_at_a_takeover(cluster, models, enabled):
    """Its row is written at each set-up: with a takeover a day a weekly entry would never run."""
    static = {"static": {"task": "tasks.plain", "schedule": timedelta(days=1)}}
    first, second = beat_of(cluster), beat_of(cluster)
    first.app.conf.beat_schedule = second.app.conf.beat_schedule = static
    first.go()
    first_seen = START - timedelta(hours=25)
    models.PeriodicTask.objects.update(date_changed=first_seen, enabled=enabled)
    cluster.depose()

    second.go()

    assert second.elector.leading
    assert len(cluster.messages()) == enabled, "one that is disabled begins when it is enabled"


def test_what_was_changed_in_the_admin_is_picked_up(cluster, models):
    """As before: by the leader, without a restart."""
    beat = beat_of(cluster).go()

    row = daily(models, name="new", args="[1]")
    beat.go()
    assert [message.payload[0] for message in cluster.messages()] == [[1]]

    row.refresh_from_db()
    row.args = "[2]"
    row.last_run_at = START - timedelta(hours=26)
    row.save()
    beat.go()
    assert [message.payload[0] for message in cluster.messages()] == [[2]]


def test_a_deposed_leader_writes_no_old_rows(cluster, models):
    """Neither when it notices, nor when it is closed, nor when the process ends."""
    row = daily(models)
    first = beat_of(cluster).go()
    first._dirty.add("entry")
    cluster.depose()
    second = beat_of(cluster).go()
    assert second.elector.leading
    models.PeriodicTask.objects.filter(name="entry").update(total_run_count=77)

    first.elector.concede("another beat leads")
    first.sync()
    first.go()
    first._dirty.add("entry")
    first._finalize()
    first.close()

    row.refresh_from_db()
    assert row.total_run_count == 77


def test_a_leader_frozen_while_it_saves_writes_no_old_row(cluster, models, monkeypatch):
    """Nobody asks it again whether it leads before the row is written."""
    from django.db.models import QuerySet

    row = daily(models)
    later, update = START + timedelta(hours=1), QuerySet.update

    def frozen(rows, **values):
        if "total_run_count" in values:
            monkeypatch.undo()
            # As another beat saves it meanwhile.
            models.PeriodicTask.objects.update(last_run_at=later, total_run_count=7)
        return update(rows, **values)

    monkeypatch.setattr(QuerySet, "update", frozen)
    beat_of(cluster).go()

    row.refresh_from_db()
    assert (row.last_run_at, row.total_run_count) == (later, 7)


def test_a_beat_that_leads_again_repeats_nothing(cluster, models):
    """It read the row in its last term, and another beat has sent the next since then."""
    row = daily(models)
    beat = beat_of(cluster).go()
    assert len(cluster.messages()) == 1
    beat.elector.concede("another beat leads")
    beat.go(1)
    soon = START + timedelta(hours=1)
    # As another beat saves it: without a sign of change.
    models.PeriodicTask.objects.update(last_run_at=soon)
    models.PeriodicTasks.objects.update(last_update=soon - timedelta(days=1))
    cluster.depose()

    beat.go()

    assert beat.elector.leading
    assert beat.schedule["entry"].last_run_at == soon
    row.refresh_from_db()
    assert row.last_run_at == soon


def test_leased_makes_of_djangos_scheduler_what_there_is_for_it(cluster, models):
    """Of a class made from it, too: without that its runs could not be found again."""
    from django_celery_beat.schedulers import DatabaseScheduler

    from celery_lease.django import DatabaseLeaseMixin

    own = type("Own", (DatabaseScheduler,), {})
    daily(models, one_off=True)
    first = beat_of(cluster, leased(own))
    assert isinstance(first, DatabaseLeaseMixin)
    first.before_flush = no_broker
    first.go()
    models.PeriodicTask.objects.update(enabled=False)
    cluster.depose()

    beat_of(cluster, leased(DatabaseScheduler)).go()

    assert [m.headers["stamps"]["lease_epoch"] for m in cluster.messages()] == [2]


@pytest.fixture
def expired(cluster, models):
    """Make a row that has expired; return it with its entry, of a beat that leads."""
    soon = START + timedelta(days=1)
    row = daily(models, expires=soon, description="as it was read")
    beat = beat_of(cluster).go()
    entry = beat.schedule["entry"]
    entry._default_now = lambda: soon
    return beat, row, entry


def test_a_row_that_has_expired_is_disabled(expired, models):
    """As django-celery-beat does; what another has written beside stays."""
    _, row, entry = expired
    models.PeriodicTask.objects.update(description="changed")

    assert not entry.is_due().is_due

    row.refresh_from_db()
    assert (row.enabled, row.last_run_at, row.description) == (False, None, "changed")


@pytest.mark.parametrize("who", ["a deposed leader", "a leader that read it before"])
def test_a_row_that_has_not_expired_any_more_is_left_as_it_is(expired, models, who):
    """The process may have been stopped while it asked: the row is another leader's then."""
    beat, row, entry = expired
    if who == "a deposed leader":
        beat.elector.concede("another beat leads")
    else:
        models.PeriodicTask.objects.update(expires=row.expires + timedelta(days=365))

    assert not entry.is_due().is_due

    row.refresh_from_db()
    assert row.enabled
    assert row.last_run_at is not None


@pytest.fixture
def once(cluster, models):
    """Make a row that was to run once, and has; return it with its entry, of a beat that leads."""
    beat = beat_of(cluster).go()
    row = daily(models, one_off=True, total_run_count=1)
    return row, beat.Entry(models.PeriodicTask.objects.get(), app=beat.app)


def test_a_row_that_is_to_run_once_is_disabled_after_that(once, models):
    """And the schedule is read again, as that is a change of it."""
    row, entry = once
    before = models.PeriodicTasks.last_change()

    assert not entry.is_due().is_due

    row.refresh_from_db()
    assert (row.enabled, row.total_run_count, row.last_run_at) == (False, 0, None)
    assert models.PeriodicTasks.last_change() > before


def test_a_row_that_is_to_run_once_more_is_left_as_it_is(once, models):
    """Another leader had disabled it, and somebody enabled it again."""
    row, entry = once
    models.PeriodicTask.objects.update(total_run_count=0)

    assert not entry.is_due().is_due

    row.refresh_from_db()
    assert row.enabled


def test_a_row_that_is_to_run_once_waits_for_its_start(cluster, models):
    """Its start was put off after it had run."""
    later = START + timedelta(days=1)
    row = daily(models, one_off=True, total_run_count=1, start_time=later)
    beat = beat_of(cluster).go()

    assert not beat.schedule["entry"].is_due().is_due

    row.refresh_from_db()
    assert row.enabled


def test_a_scheduler_keeps_the_entries_of_its_own(cluster, models):
    """They may have hooks of the user's."""
    from django_celery_beat.schedulers import DatabaseScheduler, ModelEntry

    own = type("OwnEntry", (ModelEntry,), {})
    daily(models)
    beat = beat_of(cluster, leased(type("Own", (DatabaseScheduler,), {"Entry": own}))).go()

    assert isinstance(beat.schedule["entry"], own)


def test_a_run_is_found_again_where_the_schedule_leaves_its_row_out(cluster, models):
    """A one-off row is disabled once it was sent; its run may still have to go out."""
    daily(models, one_off=True)
    first = beat_of(cluster)
    first.before_flush = no_broker
    first.go()
    assert cluster.messages() == []
    models.PeriodicTask.objects.update(enabled=False)
    cluster.depose()

    beat_of(cluster).go()

    assert [m.headers["stamps"]["lease_epoch"] for m in cluster.messages()] == [2]


def test_a_run_whose_row_was_deleted_is_skipped(cluster, models):
    """Removed in the admin between claim and send."""
    daily(models)
    first = beat_of(cluster)
    first.before_flush = no_broker
    first.go()
    models.PeriodicTask.objects.all().delete()
    cluster.depose()

    beat_of(cluster).go()

    assert cluster.messages() == []
    assert cluster.runs("state", "reason") == [("skipped", "entry removed")]


def test_a_row_that_cannot_be_read_stops_no_other(cluster, models, caplog):
    """The schedule leaves it out, but its run was claimed before, and is found by every leader."""
    daily(models, "bad")
    first = beat_of(cluster)
    first.before_flush = no_broker
    first.go()
    models.PeriodicTask.objects.update(headers="{not json")
    daily(models, "good")
    cluster.depose()

    second = beat_of(cluster).go()
    second.elector.renewals += 1
    second.go()
    assert cluster.runs("entry", "state") == [("bad", "claimed"), ("good", "published")]
    (told,) = [each for each in caplog.records if getattr(each, "action", "") == "entry-unread"]
    assert (told.levelname, told.lease_entry) == ("ERROR", "bad")

    models.PeriodicTask.objects.update(headers="{}")
    second.elector.renewals += 1
    second.go()
    assert cluster.runs("entry", "state") == [("bad", "published"), ("good", "published")]


def test_a_run_whose_row_cannot_be_read_any_more_waits_for_it(cluster, models):
    """Under the leader that claimed it as under the next: nobody has decided against it."""
    daily(models)
    beat = beat_of(cluster)
    beat.before_flush = no_broker
    beat.go()
    models.PeriodicTask.objects.update(headers="{not json")
    beat.before_flush = lambda runs: None
    beat.dispatcher._retry_at = 0.0
    beat.go()
    assert cluster.runs("state") == [("claimed",)]

    models.PeriodicTask.objects.update(headers="{}")
    beat.dispatcher._unmade.clear()
    beat.go()

    assert cluster.runs("state") == [("published",)]


def kill_connection():
    """End Django's connection as a restarted database does: Django does not know yet."""
    from django.db import connection

    connection.ensure_connection()
    connection.connection.close()


def test_a_standby_whose_connection_died_leads_all_the_same(cluster, models):
    """It lies idle for as long as another leads, and databases end idle connections."""
    daily(models)
    beat = beat_of(cluster).go()
    beat.elector.concede("another beat leads")
    beat.go(1)
    models.PeriodicTask.objects.update(last_run_at=START - timedelta(hours=26))
    kill_connection()
    cluster.depose()

    beat.go()

    assert [m.headers["stamps"]["lease_epoch"] for m in cluster.messages()] == [1, 2]


def test_a_first_read_that_failed_is_made_again(cluster, models):
    """Whatever it was: django-celery-beat counts it as made before it begins."""
    daily(models)
    beat = beat_of(cluster)
    beat.enabled_models = fail
    beat.go(1)

    del beat.enabled_models
    beat.go()

    assert len(cluster.messages()) == 1


def test_a_change_whose_read_failed_is_read_again(cluster, models):
    """Not minutes later, when django-celery-beat reads all anew."""
    beat = beat_of(cluster).go()
    daily(models)
    beat.enabled_models = fail
    beat.go(1)

    del beat.enabled_models
    beat.go(2)

    assert len(cluster.messages()) == 1


def fail():
    """Stand for a database that is busy."""
    from django.db import OperationalError

    raise OperationalError("database is locked")


def test_a_leader_whose_connection_died_recovers_what_was_refused(cluster, models):
    """Recovery asks Django for the entry, and comes before the turn that would reconnect."""
    daily(models)
    beat = beat_of(cluster).go()
    ((run,),) = cluster.runs("id")
    cluster.refuse(run)
    kill_connection()
    beat.elector.renewals += 1

    beat.go()

    assert [m.headers["id"] for m in cluster.messages()] == [run, run]
    assert cluster.runs("state", "attempt") == [("published", 2)]


def test_a_fenced_task_can_be_djangos_as_well(cluster, models):
    """Celery gives a Django project's tasks ``delay_on_commit``: a base of one's own has not."""
    from celery.contrib.django.task import DjangoTask
    from django.db import connection

    class Fenced(FencedTask, DjangoTask):
        pass

    url = f"sqlite:///{connection.settings_dict['NAME']}"
    beat = beat_of(cluster)
    beat.app.conf.beat_lease_url = url

    @beat.app.task(base=Fenced, bind=True)
    def write(self):
        with self.fence.atomic():
            daily(models)
            follow_up.delay_on_commit()
            assert cluster.messages() == []

    follow_up = beat.app.task(name="follow_up", base=Fenced)(plain)
    lease = hold(url)

    assert run(write, under=lease).state == "SUCCESS"
    (message,) = cluster.messages()
    assert message.headers["task"] == "follow_up"
    assert message.headers["stamps"]["lease_epoch"] == lease.epoch
    assert models.PeriodicTask.objects.count() == 1
    lease.depose().close()
    assert run(write, under=lease).state == "IGNORED"
    lease.close()
