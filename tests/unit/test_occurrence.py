"""Which occurrences to fire, and what they are called."""

from datetime import datetime, timedelta, timezone

import pytest

from celery_lease.occurrence import Misfire, MisfirePolicy, Missed, Occurrence, run_id

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
LATEST, ALL, SKIP = MisfirePolicy.LATEST, MisfirePolicy.ALL, MisfirePolicy.SKIP


def hours(*numbers):
    """Return instants so many hours before noon."""
    return tuple(NOON - timedelta(hours=each) for each in numbers)


def decide(policy, *due, grace=None, limit=100, count=-1):
    """Decide at noon about occurrences that were due so many hours ago."""
    missed = Missed(
        first=hours(*due)[0], newest=hours(*due), count=len(due) if count == -1 else count
    )
    return Misfire(policy=policy, grace=grace, limit=limit).decide(missed, NOON)


def test_an_id_depends_on_lease_entry_and_instant_alone():
    """It is the task id on every attempt, whoever leads and in whichever zone it thinks."""
    berlin = timezone(timedelta(hours=1))
    occurrence = Occurrence(lease="l", entry="e", due_at=NOON, attempt=3)

    assert occurrence.run_id == run_id("l", "e", NOON.astimezone(berlin))
    assert run_id("l", "e", NOON) == "9cdbd2f9-0859-5110-b9ef-cd35a1c89739"


def test_names_do_not_run_into_each_other():
    """Two occurrences with one id would be one occurrence."""
    assert run_id("ab", "c", NOON) != run_id("a", "bc", NOON)


@pytest.mark.parametrize("policy", [LATEST, ALL, SKIP])
def test_what_is_on_time_is_fired_under_every_policy(policy):
    """A policy is about what was missed."""
    decision = decide(policy, 0, grace=5.0)

    assert decision.fire == (NOON,)
    assert decision.skipped is None


def test_latest_fires_the_newest_and_records_the_others():
    """Made up once, however long the outage was; what is left out can be read later."""
    decision = decide(LATEST, 3, 2, 1)

    assert decision.fire == hours(1)
    skipped = decision.skipped
    assert (skipped.first, skipped.last, skipped.count) == (*hours(3, 2), 2)
    assert skipped.reason == "a newer one was due"


def test_latest_beyond_the_grace_fires_nothing():
    """Late is late, even for the newest."""
    decision = decide(LATEST, 3, 2, 1, grace=3599)

    assert decision.fire == ()
    assert (decision.skipped.count, decision.skipped.last) == (3, hours(1)[0])
    assert decision.skipped.reason == "more than 3599 s late"


def test_all_fires_each_of_them_oldest_first():
    """For entries whose runs each cover a span of time of their own."""
    decision = decide(ALL, 3, 2, 1)

    assert decision.fire == hours(3, 2, 1)
    assert decision.skipped is None


def test_all_is_bounded_and_keeps_the_newest():
    """A year of minutes after an outage would be another outage."""
    decision = decide(ALL, 3, 2, 1, limit=2)

    assert decision.fire == hours(2, 1)
    assert (decision.skipped.count, decision.skipped.first) == (1, hours(3)[0])
    assert decision.skipped.reason == "more than 2 missed"


def test_all_leaves_out_what_is_beyond_the_grace():
    """Grace and policy hold together."""
    decision = decide(ALL, 3, 2, 1, grace=2 * 3600)

    assert decision.fire == hours(2, 1)
    assert decision.skipped.reason == "more than 7200 s late"


def test_skip_fires_nothing_that_is_late():
    """For runs that are only worth something at their time."""
    decision = decide(SKIP, 3, 2, 1, grace=60)

    assert decision.fire == ()
    assert decision.skipped.count == 3


def test_skip_fires_the_one_that_is_on_time_and_none_before_it():
    """An outage that ends just at an occurrence does not cost that one."""
    decision = decide(SKIP, 2, 1, 0, grace=60)

    assert decision.fire == (NOON,)
    assert (decision.skipped.count, decision.skipped.last) == (2, hours(1)[0])


@pytest.mark.parametrize(
    ("grace", "deadline", "fire", "reason"),
    [
        (None, 5400, (1,), "beat_cron_starting_deadline"),
        (9000, 5400, (1,), "beat_cron_starting_deadline"),
        (5400, 9000, (1,), "more than 5400 s late"),
    ],
)
def test_of_grace_and_deadline_the_tighter_one_counts_and_is_named(grace, deadline, fire, reason):
    """Each says how late is too late; who asks why should read which of them it was."""
    misfire = Misfire(policy=ALL, grace=grace, limit=100).within(deadline)
    missed = Missed(first=hours(3)[0], newest=hours(3, 2, 1), count=3)

    decision = misfire.decide(missed, NOON)

    assert decision.fire == hours(*fire)
    assert decision.skipped.reason == reason


def test_an_unknown_count_stays_unknown():
    """Years of missed crontab minutes are not counted one by one."""
    assert decide(LATEST, 2, 1, count=None).skipped.count is None


@pytest.mark.parametrize("wrong", [NOON.replace(tzinfo=None), "2025-03-30T06:00:00Z", None])
def test_an_occurrence_is_due_at_an_instant(wrong):
    """A naive datetime would have another run id on each host with another zone."""
    with pytest.raises(TypeError, match=r"due_at = .* is not an aware datetime"):
        Occurrence(lease="l", entry="e", due_at=wrong)
