"""What is due next, and whether the schedule changed."""

from datetime import datetime, timedelta, timezone

import pytest

from celery_lease.heap import DueHeap, ScheduleDict

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


def test_the_first_due_comes_out_first():
    """Across entries, what was due earlier is sent earlier."""
    heap = DueHeap((NOON + timedelta(minutes=each), f"e{each}") for each in (3, 1, 2))
    heap.push(NOON, "e0")

    out = [heap.pop(NOON + timedelta(hours=1))[1] for _ in range(len(heap))]

    assert out == ["e0", "e1", "e2", "e3"]


def test_what_is_not_due_stays():
    """An idle tick looks at one place and takes nothing out."""
    heap = DueHeap([(NOON, "e")])

    assert heap.pop(NOON - timedelta(microseconds=1)) is None
    assert heap.next_due == NOON
    assert heap.pop(NOON) == (NOON, "e")
    assert heap.next_due is None


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.__setitem__("b", 2),
        lambda d: d.__delitem__("a"),
        lambda d: d.pop("a"),
        lambda d: d.popitem(),
        lambda d: d.clear(),
        lambda d: d.update(b=2),
        lambda d: d.setdefault("b", 2),
        lambda d: d.__ior__({"b": 2}),
    ],
)
def test_every_way_to_change_the_schedule_is_counted(change):
    """A change that is not noticed is an entry that never runs."""
    schedule = ScheduleDict(a=1)
    before = schedule.changes

    change(schedule)

    assert schedule.changes > before


def test_reading_the_schedule_is_not_a_change():
    """A heap that is rebuilt on each tick would cost what stock beat's does."""
    schedule = ScheduleDict(a=1)
    before = schedule.changes

    assert (schedule["a"], schedule.get("b"), list(schedule.items())) == (1, None, [("a", 1)])
    assert schedule.changes == before
