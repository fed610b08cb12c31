"""The schedule's state, which all beats share: since when, and how far, each entry has come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from celery_lease.lease import Term
from celery_lease.stores.dialects import database_of, translated
from celery_lease.stores.guarded import guarded
from celery_lease.stores.schema import entry_table

__all__ = ["EntryState", "SQLEntries", "write_states"]

#: Rows read, or written, at a time.
ROWS = 5000
#: Names in one IN.
NAMES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryState:
    """What all beats share about one entry."""

    #: Name of the entry.
    name: str
    #: When a leader first saw it, in UTC.
    first_seen_at: datetime
    #: The last occurrence that was accounted for, in UTC; None before the first.
    last_run_at: datetime | None
    #: How many times it was dispatched.
    total_run_count: int


def write_states(connection: sa.Connection, term: Term, states: Sequence[EntryState]) -> None:
    """Write states of entries: new rows whole, of known ones all but first_seen_at.

    Args:
        connection: In a guarded transaction.
        term: The leader's term.
        states: What to write.
    """
    if states:
        statement = database_of(connection.dialect).insert_or_update(
            entry_table, ["last_run_at", "total_run_count", "epoch"]
        )
        connection.execute(statement, [_row(term, each) for each in states])


class SQLEntries:
    """The entries of one lease.

    Args:
        engine: The lease database.
        idle: Seconds that the database waits for a commit after its last statement.
    """

    def __init__(self, engine: sa.Engine, *, idle: float) -> None:
        self.engine = engine
        self.idle = idle

    def load(self, lease: str) -> Iterator[EntryState]:
        """Yield what is known of all entries of a lease."""
        query = sa.select(
            entry_table.c.entry,
            entry_table.c.first_seen_at,
            entry_table.c.last_run_at,
            entry_table.c.total_run_count,
        ).where(entry_table.c.lease == lease)
        with translated(self.engine), self.engine.connect() as connection:
            for name, first_seen_at, last_run_at, count in connection.execution_options(
                yield_per=ROWS
            ).execute(query):
                yield EntryState(
                    name=name,
                    first_seen_at=first_seen_at,
                    last_run_at=last_run_at,
                    total_run_count=count,
                )

    def write(self, term: Term, states: Sequence[EntryState]) -> None:
        """Store states of entries, as :func:`write_states` does."""
        for at in range(0, len(states), ROWS):
            with guarded(self.engine, term, self.idle) as connection:
                write_states(connection, term, states[at : at + ROWS])

    def reconcile(
        self, term: Term, *, added: Sequence[EntryState], removed: Sequence[str]
    ) -> None:
        """Store entries that are new in the schedule, and forget those that left it.

        An entry that comes back later is new: it starts from then, not from its old
        last run.
        """
        self.write(term, added)
        for at in range(0, len(removed), NAMES):
            with guarded(self.engine, term, self.idle) as connection:
                connection.execute(
                    sa.delete(entry_table).where(
                        entry_table.c.lease == term.name,
                        entry_table.c.entry.in_(removed[at : at + NAMES]),
                    )
                )


def _row(term: Term, state: EntryState) -> dict[str, Any]:
    return {
        "lease": term.name,
        "entry": state.name,
        "first_seen_at": state.first_seen_at,
        "last_run_at": state.last_run_at,
        "total_run_count": state.total_run_count,
        "epoch": term.epoch,
    }
