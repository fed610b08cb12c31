"""How the rows of the lease tables are picked, and what is read out of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from celery_lease.lease import Lease, Term
from celery_lease.stores.dialects import seconds_until, utcnow
from celery_lease.stores.schema import lease_table, term_table

__all__ = ["SEEN", "end", "is_term", "seen"]

#: What anybody may know of a lease: everything but the uuid of its term.
SEEN = sa.select(
    *(each for each in lease_table.c if each.name != "term"),
    seconds_until(lease_table.c.expires_at).label("remaining"),
)


def seen(row: Any) -> Lease:
    """Return a row of :data:`SEEN` as a value."""
    return Lease(
        name=row.name,
        holder=row.holder,
        epoch=row.epoch,
        acquired_at=row.acquired_at,
        renewed_at=row.renewed_at,
        expires_at=row.expires_at,
        remaining=max(0.0, float(row.remaining or 0.0)) if row.holder is not None else 0.0,
        holder_info=_info(row.holder_info),
    )


def is_term(table: sa.Table, term: Term) -> list[sa.ColumnElement[bool]]:
    """Return the conditions that a row of *table* is exactly this term's."""
    return [
        table.c.name == term.name,
        table.c.term == term.uuid,
        table.c.epoch == term.epoch,
    ]


def end(term: Term, how: str) -> sa.Update:
    """Return the statement that records how a term ended, if nothing else did before."""
    return (
        sa.update(term_table)
        .where(*is_term(term_table, term), term_table.c.ended_at.is_(None))
        .values(ended_at=utcnow(), ended=how)
    )


def _info(text: str | None) -> Mapping[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
