"""How long records are kept: old ones are deleted in small batches."""

from __future__ import annotations

import sqlalchemy as sa

from celery_lease.stores.dialects import from_now, translated
from celery_lease.stores.schema import commit_table, run_table, term_table

__all__ = ["prune"]


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
    old = from_now(-retention)
    runs = sa.select(run_table.c.id).where(
        run_table.c.lease == lease,
        run_table.c.claimed_at < old,
        run_table.c.open.is_(sa.false()),
    )
    commits = sa.select(commit_table.c.task_id).where(
        commit_table.c.lease == lease,
        commit_table.c.at < old,
        ~sa.exists().where(run_table.c.id == commit_table.c.task_id),
    )
    terms = sa.select(term_table.c.epoch).where(
        term_table.c.name == lease, term_table.c.ended_at < old
    )
    deleted = 0
    with translated(engine), engine.begin() as connection:
        # Ids first: MySQL neither limits a sub-select nor deletes from what it reads.
        for query, key in (
            (runs, run_table.c.id),
            (commits, commit_table.c.task_id),
        ):
            ids = list(connection.execute(query.limit(limit)).scalars())
            if ids:
                table = key.table
                deleted += connection.execute(sa.delete(table).where(key.in_(ids))).rowcount
        epochs = list(connection.execute(terms.limit(limit)).scalars())
        if epochs:
            deleted += connection.execute(
                sa.delete(term_table).where(
                    term_table.c.name == lease, term_table.c.epoch.in_(epochs)
                )
            ).rowcount
    return deleted
