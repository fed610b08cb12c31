"""How long to wait between tries."""

from __future__ import annotations

import pytest

from celery_lease.clock import rising


@pytest.mark.parametrize(
    ("times", "seconds"), [(0, 5.0), (1, 10.0), (3, 40.0), (4, 60.0), (1_000_000, 60.0)]
)
def test_pauses_rise_to_their_longest_however_often_one_has_tried(times, seconds):
    """A database may be away for a weekend, and a message with it must not become an error."""
    assert rising(5.0, times, 60.0) == seconds
