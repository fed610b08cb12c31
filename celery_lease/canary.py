"""``celery lease check``: does this database keep what a lease relies on?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["UNKNOWN", "Finding", "run"]

UNKNOWN: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    #: What was checked.
    check: str
    #: Whether the database keeps it.
    ok: bool
    #: What was seen.
    detail: str


def run(url: str, options: Mapping[str, Any], *, rounds: int) -> list[Finding]:
    """Run all checks."""
    return []
