"""pytest fixtures: ``pytest_plugins = ["celery_lease.fixtures"]`` in the top ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_lease.testing import HeldLease, hold

__all__ = ["held_lease", "lease_url"]


@pytest.fixture
def lease_url(tmp_path: Path) -> str:
    """The URL of a lease database that is this test's own; set ``beat_lease_url`` to it."""
    return f"sqlite:///{tmp_path / 'lease.sqlite3'}"


@pytest.fixture
def held_lease(lease_url: str) -> Iterator[HeldLease]:
    """A lease in that database, held at epoch 1."""
    lease = hold(lease_url)
    yield lease
    lease.close()
