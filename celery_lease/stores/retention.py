"""How long records are kept: old ones are deleted in small batches."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import sqlalchemy as sa

from celery_lease.stores.dialects import from_now, translated
from celery_lease.stores.schema import commit_table, run_table, term_table

__all__ = ["PRUNE", "prune"]

#: Rows of each kind that one round of housekeeping deletes at most.
PRUNE = 500


def prune(engine: sa.Engine, lease: str, *, retention: float, limit: int) -> int:
    """Delete runs, commits and terms that are older than they are kept.

    Never a run that the leader may still have to act on; a commit only after its run.

    Args:
        engine: The lease database.
        lease: Name of the lease.
        retention: Seconds.
        limit: At most so many rows of each.

    Returns:
        How many rows were deleted.
    """
    deleted = 0
    with translated(engine), engine.begin() as connection:
        # As a value: PostgreSQL looks up no index for a clock that moves.
        old = connection.execute(sa.select(from_now(-retention))).scalar_one()
        # "= false", not "IS false", for which MariaDB looks up no index.
        runs = _oldest(run_table.c.id, run_table.c.claimed_at, old, limit).where(
            run_table.c.lease == lease, run_table.c.open == sa.false()
        )
        mine = commit_table.c.lease == lease
        commits = _oldest(commit_table.c.task_id, commit_table.c.at, old, limit).where(mine)
        terms = _oldest(term_table.c.epoch, term_table.c.ended_at, old, limit).where(
            term_table.c.name == lease
        )
        unused = ~sa.exists().where(run_table.c.id == commit_table.c.task_id)
        for query, statement in (
            (runs, sa.delete(run_table)),
            # A child's id may be there again, and younger, or of another lease.
            (commits, sa.delete(commit_table).where(mine, unused, commit_table.c.at < old)),
            (terms, sa.delete(term_table).where(term_table.c.name == lease)),
        ):
            # Keys first: MySQL neither limits a sub-select nor deletes from what it reads.
            keys = list(connection.execute(query).scalars())
            if keys:
                key = query.selected_columns[0]
                deleted += connection.execute(statement.where(key.in_(keys))).rowcount
    return deleted


def _oldest(key: Any, at: Any, before: datetime, limit: int) -> sa.Select[Any]:
    return sa.select(key).where(at < before).order_by(at).limit(limit)
