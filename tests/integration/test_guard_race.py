"""Guards against takeovers, in small: ``python -m tests.guard_race`` does it at length."""

from __future__ import annotations

import pytest

from tests.guard_load import load
from tests.guard_race import LEVELS, is_sound, race


@pytest.mark.parametrize(
    ("database", "level"),
    [
        pytest.param(
            database,
            level,
            marks=[] if database == "sqlite" else getattr(pytest.mark, database),
        )
        for database, levels in LEVELS.items()
        for level in levels
    ],
)
def test_nothing_stale_is_committed_on_any_isolation_level(request, database, level):
    """The takeover comes before, beside and after the guard; a twin shows that it would leak."""
    url = request.getfixturevalue(f"{database}_url")

    figures = race(url, level, rounds=12)

    assert is_sound(database, level, figures, rounds=12), figures


def test_takeovers_come_through_while_workers_commit_without_a_pause(server_url):
    """Sharers that starve the one who wants to write would cost a healthy leader its lease."""
    figures = load(server_url, workers=4, seconds=60, first=False, enough=20)

    assert figures.takeovers == 20
    assert figures.takeover_median < 250  # ms; one that the host stalls in does not count
    assert figures.commits_per_s > 20
    assert figures.out_of_order == 0
