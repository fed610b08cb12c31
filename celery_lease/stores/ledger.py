"""The ledger: every occurrence that was due, and what the leader did about it.

What a leader writes is checked last, in the same transaction, against the lease and the
fence: a deposed one changes nothing. A run goes from ``claimed`` to ``published``;
``refused`` goes back to ``claimed`` under the current epoch. How it ended is read from
the workers' commits, so nothing here can undo one.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from celery_lease.lease import Term
from celery_lease.occurrence import Run, RunState, Skipped, run_id
from celery_lease.stores.dialects import (
    Database,
    database_of,
    from_now,
    seconds_until,
    translated,
    utcnow,
)
from celery_lease.stores.entries import EntryState, write_states
from celery_lease.stores.guarded import guarded
from celery_lease.stores.schema import UTCDateTime, commit_table, run_table

__all__ = ["SQLLedger", "pending"]

#: No more ids than this go into one IN.
CHUNK = 500
#: What fits into the column: an entry that begins at year 1 has missed more.
MANY = 2**31 - 1


class SQLLedger:
    """The runs of one lease, over SQLAlchemy Core.

    Every verb may raise StoreUnavailable, StoreContention or LeaseLost. After
    StoreUnavailable its outcome may be unknown: what is in the ledger has to be
    read again.

    Args:
        engine: The lease database.
        idle: Seconds that the database waits for a commit after its last statement.
    """

    def __init__(self, engine: sa.Engine, *, idle: float) -> None:
        self.engine = engine
        self.idle = idle

    @property
    def database(self) -> Database:
        """What this kind of database does its own way."""
        return database_of(self.engine.dialect)

    # --- claim, publish, mark -----------------------------------------------------------

    def claim(
        self,
        term: Term,
        runs: Sequence[Run],
        *,
        skipped: Sequence[tuple[str, Skipped]] = (),
        moved: Sequence[EntryState] = (),
    ) -> set[str]:
        """Claim runs, record what is skipped, and move the entries on, in one transaction.

        Args:
            term: The leader's term.
            runs: New runs, to be sent once this has returned.
            skipped: Names of entries, with occurrences of theirs that are not fired.
            moved: The entries' new state.

        Returns:
            Ids that the ledger held before: those are not claimed again.
        """
        with guarded(self.engine, term, self.idle) as connection:
            now = connection.execute(sa.select(utcnow())).scalar_one()
            rows = [_claim_row(term, each, now) for each in runs]
            insert = self.database.insert_ignore(run_table)
            known: set[str] = set()
            if rows and connection.execute(insert, rows).rowcount != len(rows):
                known = {each.id for each in runs} - self._claimed(connection, term, runs, now)
            lines = [_skip_row(term, name, each, now) for name, each in skipped]
            if lines and connection.execute(insert, lines).rowcount != len(lines):
                self._skip_rest(connection, term, lines)
            write_states(connection, term, moved)
        return known

    def mark(self, term: Term, ids: Sequence[str]) -> int:
        """Mark runs as published, where they are still claimed by exactly this term.

        Returns:
            How many were marked: a worker may have refused one in the meantime.
        """
        marked = 0
        with translated(self.engine), self.engine.begin() as connection:
            for chunk in _chunks(ids):
                marked += connection.execute(
                    sa.update(run_table)
                    .where(
                        run_table.c.id.in_(chunk),
                        run_table.c.state == RunState.CLAIMED,
                        *_under(term),
                    )
                    .values(
                        state=RunState.PUBLISHED,
                        published_at=utcnow(),
                        # Of a plain task nothing more will be known.
                        open=run_table.c.fenced,
                    )
                ).rowcount
        return marked

    # --- recovery -----------------------------------------------------------------------

    def to_recover(self, term: Term, *, limit: int, own: bool) -> list[Run]:
        """Return runs that wait to be sent again: claimed and left, or refused.

        Args:
            term: The leader's term.
            limit: At most so many, oldest first.
            own: Whether runs that are claimed under this very term count as left.
        """
        claimed = run_table.c.state == RunState.CLAIMED
        if not own:
            claimed &= sa.not_(sa.and_(*_under(term)))
        refused = run_table.c.state == RunState.REFUSED
        return self._open_runs(term.name, claimed, refused, limit=limit)

    def unsettled(
        self,
        term: Term,
        *,
        age: float,
        limit: int,
        offset: int = 0,
        entries: Sequence[str] | None = None,
    ) -> list[Run]:
        """Return fenced runs that were published long ago and are not settled.

        Args:
            term: The leader's term.
            age: Seconds since they were published, at least.
            limit: At most so many, oldest first.
            offset: How many to pass over.
            entries: Of these entries, under whatever epoch; None for runs of every
                entry that were published under an older epoch.
        """
        found = sa.and_(
            run_table.c.state == RunState.PUBLISHED, run_table.c.published_at < from_now(-age)
        )
        if entries is None:
            found &= run_table.c.epoch < term.epoch
        else:
            found &= run_table.c.entry.in_(entries)
        return self._open_runs(term.name, found, limit=limit, offset=offset)

    def reclaim(self, term: Term, runs: Sequence[Run]) -> set[str]:
        """Claim runs again under this term, each where it is still as it was read.

        Returns:
            Ids of those that are this term's now.
        """
        if not runs:
            return set()
        bind = sa.bindparam
        statement = (
            sa.update(run_table)
            .where(
                run_table.c.id == bind("run"),
                run_table.c.state == bind("was"),
                run_table.c.epoch == bind("old_epoch"),
                run_table.c.term == bind("old_term"),
                run_table.c.attempt == bind("old_attempt"),
            )
            .values(
                epoch=term.epoch,
                term=term.uuid,
                attempt=bind("new_attempt"),
                fenced=bind("is_fenced"),
                state=RunState.CLAIMED,
                open=True,
                claimed_at=bind("now"),
            )
        )
        with guarded(self.engine, term, self.idle) as connection:
            now = connection.execute(sa.select(utcnow())).scalar_one()
            connection.execute(statement, [{**_as_read(each), "now": now} for each in runs])
            return self._claimed(connection, term, runs, now)

    def end(self, term: Term, runs: Sequence[Run], state: RunState, reason: str) -> None:
        """End runs: ``skipped``, or ``failed``, which settles them.

        Args:
            term: The leader's term.
            runs: The runs as they were read, or as this term claimed them.
            state: SKIPPED or FAILED.
            reason: Why, in words.
        """
        ended = sa.and_(
            run_table.c.id.in_([each.id for each in runs]), run_table.c.open == sa.true()
        )
        commits = [
            {
                "task_id": each.id,
                "lease": term.name,
                "epoch": term.epoch,
                "term": term.uuid,
                "execution": str(uuid.uuid4()),
                "outcome": "failed",
            }
            for each in runs
        ]
        with guarded(self.engine, term, self.idle) as connection:
            connection.execute(
                sa.update(run_table)
                .where(ended)
                .values(state=state, open=False, reason=reason[:255])
            )
            if state is RunState.FAILED:
                insert = self.database.insert_ignore(commit_table).values(at=utcnow())
                connection.execute(insert, commits)

    def close_settled(self, term: Term, *, limit: int) -> int:
        """Take settled runs out of what recovery looks at; return how many."""
        settled = (
            sa.select(run_table.c.id)
            .join(commit_table, commit_table.c.task_id == run_table.c.id)
            .where(run_table.c.lease == term.name, run_table.c.open == sa.true())
            .limit(limit)
        )
        with translated(self.engine), self.engine.begin() as connection:
            ids = list(connection.execute(settled).scalars())
            for chunk in _chunks(ids):
                connection.execute(
                    sa.update(run_table).where(run_table.c.id.in_(chunk)).values(open=False)
                )
        return len(ids)

    def running(self, lease: str, entries: Sequence[str]) -> dict[str, float]:
        """Return for how many seconds entries have a fenced run that is not settled, by entry.

        Of several the newest counts: the message of an older one may be lost.
        """
        ages: dict[str, float] = {}
        for chunk in _chunks(entries):
            query = (
                _OPEN.with_only_columns(
                    run_table.c.entry, sa.func.max(seconds_until(run_table.c.claimed_at))
                )
                .where(
                    run_table.c.lease == lease,
                    run_table.c.open == sa.true(),
                    run_table.c.entry.in_(chunk),
                    commit_table.c.task_id.is_(None),
                )
                .group_by(run_table.c.entry)
            )
            with translated(self.engine), self.engine.connect() as connection:
                for entry, seconds in connection.execute(query):
                    ages[entry] = -seconds
        return ages

    # --- inside -------------------------------------------------------------------------

    def _skip_rest(
        self, connection: sa.Connection, term: Term, lines: Sequence[dict[str, Any]]
    ) -> None:
        """Record series of which the ledger has the first already: the rest, under its last."""
        ids, now = [each["id"] for each in lines], lines[0]["claimed_at"]
        recorded = self._written(connection, term, ids, now, RunState.SKIPPED)
        insert = self.database.insert_ignore(run_table)
        for line in lines:
            if line["id"] in recorded:
                continue
            count, last = line["skipped"], line["skipped_until"]
            if count is not None:
                # A row is one occurrence, or a series of them.
                known = sa.select(sa.func.sum(sa.func.coalesce(run_table.c.skipped, 1))).where(
                    run_table.c.lease == term.name,
                    run_table.c.entry == line["entry"],
                    run_table.c.due_at.between(line["due_at"], last),
                )
                count -= int(connection.execute(known).scalar_one() or 0)
            if count is None or count > 0:
                rest = {"id": run_id(term.name, line["entry"], last), "due_at": last}
                connection.execute(insert, {**line, **rest, "skipped": count})

    def _open_runs(
        self, lease: str, *conditions: sa.ColumnElement[bool], limit: int, offset: int = 0
    ) -> list[Run]:
        # Each condition is about one state: the index of open runs has those in this order.
        # For two states at once a planner may read all runs in the order of their age.
        queries = (
            _OPEN.where(
                run_table.c.lease == lease,
                run_table.c.open == sa.true(),
                commit_table.c.task_id.is_(None),
                each,
            )
            .order_by(run_table.c.claimed_at)
            .limit(limit)
            .offset(offset)
            for each in conditions
        )
        with translated(self.engine), self.engine.connect() as connection:
            rows = [row for query in queries for row in connection.execute(query)]
        return [_run(row) for row in sorted(rows, key=lambda row: row.claimed_at)[:limit]]

    def _claimed(
        self, connection: sa.Connection, term: Term, runs: Sequence[Run], now: datetime
    ) -> set[str]:
        """Return which of *runs* this very transaction claimed."""
        ids = [each.id for each in runs]
        return self._written(connection, term, ids, now, RunState.CLAIMED)

    def _written(
        self,
        connection: sa.Connection,
        term: Term,
        ids: Sequence[str],
        now: datetime,
        state: RunState,
    ) -> set[str]:
        """Return which of the rows with these ids this very transaction wrote."""
        found: set[str] = set()
        for chunk in _chunks(ids):
            found.update(
                connection.execute(
                    sa.select(run_table.c.id).where(
                        run_table.c.id.in_(chunk),
                        run_table.c.claimed_at == now,
                        run_table.c.state == state,
                        *_under(term),
                    )
                ).scalars()
            )
        return found


def pending(engine: sa.Engine, lease: str) -> tuple[int, datetime | None]:
    """Return how many fenced runs are not settled, and since when the oldest one is not."""
    query = (
        sa.select(sa.func.count(), sa.func.min(run_table.c.claimed_at, type_=UTCDateTime()))
        .select_from(run_table)
        .outerjoin(commit_table, commit_table.c.task_id == run_table.c.id)
        .where(
            run_table.c.lease == lease,
            run_table.c.open == sa.true(),
            run_table.c.fenced == sa.true(),
            commit_table.c.task_id.is_(None),
        )
    )
    with translated(engine), engine.connect() as connection:
        count, since = connection.execute(query).one()
    return count, since


#: Runs beside their commit, if there is one. (No child has a run's id, so this needs no origin,
#: for which SQLite would read all commits.)
_OPEN = sa.select(
    run_table, (-seconds_until(run_table.c.published_at)).label("published_for")
).outerjoin(commit_table, commit_table.c.task_id == run_table.c.id)


def _under(term: Term) -> list[sa.ColumnElement[bool]]:
    return [run_table.c.epoch == term.epoch, run_table.c.term == term.uuid]


def _chunks(ids: Sequence[str]) -> Iterable[Sequence[str]]:
    return (ids[at : at + CHUNK] for at in range(0, len(ids), CHUNK))


def _as_read(run: Run) -> dict[str, Any]:
    return {
        "run": run.id,
        "was": run.state,
        "old_epoch": run.epoch,
        "old_term": run.term,
        "old_attempt": run.attempt,
        "new_attempt": run.next_attempt,
        "is_fenced": run.fenced,
    }


def _claim_row(term: Term, run: Run, now: datetime) -> dict[str, Any]:
    return {
        "id": run.id,
        "lease": term.name,
        "entry": run.entry,
        "due_at": run.due_at,
        "epoch": term.epoch,
        "term": term.uuid,
        "attempt": run.attempt,
        "fenced": run.fenced,
        "state": RunState.CLAIMED,
        "open": True,
        "claimed_at": now,
        "reason": None,
        "skipped": None,
        "skipped_until": None,
    }


def _skip_row(term: Term, name: str, skipped: Skipped, now: datetime) -> dict[str, Any]:
    return {
        "id": run_id(term.name, name, skipped.first),
        "lease": term.name,
        "entry": name,
        "due_at": skipped.first,
        "epoch": term.epoch,
        "term": term.uuid,
        "attempt": 0,
        "fenced": False,
        "state": RunState.SKIPPED,
        "open": False,
        "claimed_at": now,
        "reason": skipped.reason,
        "skipped": None if skipped.count is None else min(skipped.count, MANY),
        "skipped_until": skipped.last,
    }


def _run(row: Any) -> Run:
    return Run(
        id=row.id,
        entry=row.entry,
        due_at=row.due_at,
        fenced=row.fenced,
        attempt=row.attempt,
        state=RunState(row.state),
        epoch=row.epoch,
        term=row.term,
        published_for=row.published_for,
    )
