"""Fixtures of the integration tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.workshop import Workshop

_keys = (f"k{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no turn of a beat in this process end early, as they do where the host is slow.

    Tests of just that set the limits themselves.
    """
    monkeypatch.setattr("celery_lease.sending.MAKING", 60.0)
    monkeypatch.setattr("celery_lease.dispatch.SENDING", 60.0)
    monkeypatch.setattr("celery_lease.recovery.SLOW", 60.0)
    monkeypatch.setattr("celery_lease.scheduler.PLANNING", 60.0)


@pytest.fixture
def key() -> str:
    """A name for the task of this test, or for the first part of its name."""
    return next(_keys)


@pytest.fixture
def workshops(tmp_path: Path) -> Iterator[Callable[..., Workshop]]:
    """Make workshops; close them in the end."""
    made: list[Workshop] = []

    def make(url: str, **conf: Any) -> Workshop:
        made.append(Workshop(url, tmp_path, **conf))
        return made[-1]

    yield make
    for workshop in made:
        workshop.close()


@pytest.fixture
def workshop(sqlite_url: str, workshops: Callable[..., Workshop]) -> Workshop:
    """A workshop on a SQLite file."""
    return workshops(sqlite_url)
