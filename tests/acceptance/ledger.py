"""What happened, read by plain SQL: the product's own tables and those of the app."""

import itertools
from datetime import datetime, timedelta, timezone

import sqlalchemy as sa

from tests.services import wait_until

_NOW = {
    "postgresql": "clock_timestamp()",
    "mysql": "UTC_TIMESTAMP(6)",
    "mariadb": "UTC_TIMESTAMP(6)",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now')",
}

metadata = sa.MetaData()
_name, _epoch, _id = sa.String(200), sa.BigInteger, sa.String(50)
sa.Table(
    "register",
    metadata,
    sa.Column("entry", _name, primary_key=True),
    sa.Column("writes", sa.Integer, nullable=False),
    sa.Column("epoch", _epoch, nullable=False),
)
for _table, *_columns in (
    ("target", ("entry", _name), ("run_id", _id), ("epoch", _epoch), ("epoch_before", _epoch)),
    (
        "started",
        ("entry", _name),
        ("task_id", _id),
        ("epoch", _epoch),
        ("worker", _name),
        ("pid", sa.Integer),
    ),
    (
        "refusal",
        ("task_id", _id),
        ("epoch", _epoch),
        ("current_epoch", _epoch),
        ("stage", _id),
        ("reason", _id),
    ),
):
    sa.Table(
        _table,
        metadata,
        sa.Column("id", sa.Integer, primary_key=True),
        *(sa.Column(name, kind) for name, kind in _columns),
    )


class Ledger:
    """Questions to the database."""

    def __init__(self, url):
        self.engine = sa.create_engine(url, poolclass=sa.NullPool)
        metadata.create_all(self.engine)

    def register(self, entries):
        """Make the entries' rows that are not there yet."""
        known = {entry for (entry,) in self.rows("SELECT entry FROM register")}
        with self.engine.begin() as connection:
            for entry in entries:
                if entry not in known:
                    connection.execute(
                        sa.text("INSERT INTO register VALUES (:entry, 0, 0)"), {"entry": entry}
                    )

    def rows(self, query, **values):
        """Return the rows of a query; instants as aware datetimes."""
        with self.engine.connect() as connection:
            found = connection.execute(sa.text(query), values)
            return [
                tuple(
                    instant(value) if key.endswith("at") or key == "skipped_until" else value
                    for key, value in zip(found.keys(), row, strict=True)
                )
                for row in found
            ]

    def number(self, query, **values):
        """Return the one number of a query."""
        return self.rows(query, **values)[0][0]

    def execute(self, statement):
        """Write."""
        with self.engine.begin() as connection:
            connection.execute(sa.text(statement))

    def now(self):
        """Return the database's instant."""
        return self.rows(f"SELECT {_NOW[self.engine.dialect.name]} AS now_at")[0][0]

    def wait(self, query, count=1, timeout=30.0, **values):
        """Wait until a query has so many rows; return them."""

        def look():
            try:
                found = self.rows(query, **values)
            except (sa.exc.OperationalError, sa.exc.ProgrammingError):
                return None  # The tables are still being made, or the server comes back.
            return len(found) >= count and found

        return wait_until(
            look, timeout=timeout, interval=0.05, message=f"{count} rows of {query!r} {values}"
        )

    # --- the product's tables -------------------------------------------------------------

    def epoch(self):
        """Return the lease's epoch."""
        return self.number("SELECT MAX(epoch) FROM celery_lease")

    def acquired_at(self, epoch):
        """Return when a term began."""
        [(at,)] = self.rows(
            "SELECT acquired_at FROM celery_lease_term WHERE epoch = :epoch", epoch=epoch
        )
        return at

    def first_claim(self, epoch, timeout=30.0):
        """Wait until a leader has claimed something under an epoch; return when it first did.

        Only then is its fence raised and its schedule loaded. Of the runs that are in the
        ledger now: a later epoch may have claimed some of them again.
        """
        query = "SELECT claimed_at FROM celery_lease_run WHERE epoch = :epoch ORDER BY claimed_at"
        return self.wait(query, timeout=timeout, epoch=epoch)[0][0]

    def next_claim(self, after, timeout=30.0):
        """Wait until a leader has claimed something after then; return when it first did."""
        claims = "SELECT claimed_at FROM celery_lease_run"
        later = wait_until(
            lambda: [at for (at,) in self.rows(claims) if at > after],
            timeout=timeout,
            message=f"a claim after {after}",
        )
        return min(later)

    def committed(self, entry, count=1, timeout=30.0):
        """Wait until an entry has so many committed runs; return (id, epoch, due_at) of all."""
        return self.wait(
            "SELECT r.id, c.epoch, r.due_at FROM celery_lease_run r JOIN celery_lease_commit c "
            "ON c.task_id = r.id WHERE r.entry = :entry AND c.outcome = 'committed' "
            "ORDER BY r.due_at",
            count=count,
            timeout=timeout,
            entry=entry,
        )

    def started(self, entry, count=1, timeout=30.0):
        """Wait until an entry was started so many times; return (task_id, epoch) of all."""
        query = "SELECT task_id, epoch FROM started WHERE entry = :entry ORDER BY id"
        return self.wait(query, count=count, timeout=timeout, entry=entry)

    def refused(self, task_id, count=1, timeout=30.0):
        """Wait until a task was turned away so many times; return (epoch, stage, reason)."""
        query = "SELECT epoch, stage, reason FROM refusal WHERE task_id = :task_id ORDER BY id"
        return self.wait(query, count=count, timeout=timeout, task_id=task_id)

    def renewals(self, count, timeout=30.0):
        """Watch so many renewals; return the seconds between each and the one before."""
        seen = []

        def look():
            [(at,)] = self.rows("SELECT renewed_at FROM celery_lease")
            if at is not None and at not in seen:
                seen.append(at)
            return len(seen) > count

        wait_until(look, timeout=timeout, interval=0.1, message=f"{count} renewals")
        return [seconds(later, earlier) for earlier, later in itertools.pairwise(seen)]

    # --- what must always hold --------------------------------------------------------------

    def assert_sound(self):
        """Stale never wins, and nothing guarded happens twice."""
        backwards = (
            "SELECT entry, run_id, epoch, epoch_before FROM target WHERE epoch < epoch_before"
        )
        assert self.rows(backwards) == [], "a lower epoch was committed after a higher one"
        twice = "SELECT run_id FROM target GROUP BY run_id HAVING COUNT(*) > 1"
        assert self.rows(twice) == [], "a run was committed twice"
        astray = (
            "SELECT t.run_id, t.epoch, c.epoch FROM target t LEFT JOIN celery_lease_commit c "
            "ON c.task_id = t.run_id WHERE c.task_id IS NULL OR c.epoch <> t.epoch "
            "OR c.outcome <> 'committed'"
        )
        assert self.rows(astray) == [], "a row was committed without its outcome"

    def unsettled(self, before):
        """Return the fenced runs, due before then, that neither committed nor were skipped."""
        return [
            row
            for row in self.rows(
                "SELECT r.entry, r.due_at, r.state, r.epoch, r.attempt, c.outcome "
                "FROM celery_lease_run r LEFT JOIN celery_lease_commit c ON c.task_id = r.id "
                "WHERE r.fenced AND r.state <> 'skipped' "
                "AND (c.outcome IS NULL OR c.outcome <> 'committed')"
            )
            if row[1] < before
        ]

    def gaps(self, entry, every):
        """Return the occurrences of an interval entry that the ledger knows nothing of."""
        step, missing, expected = timedelta(seconds=every), [], None
        for first, last in self.rows(
            "SELECT due_at, skipped_until FROM celery_lease_run WHERE entry = :entry "
            "ORDER BY due_at",
            entry=entry,
        ):
            while expected is not None and expected < first:
                missing.append(expected)
                expected += step
            assert expected in (None, first), f"{entry}: {first} is out of phase"
            expected = (last or first) + step
        return missing

    def assert_settled(self, before, timeout=30.0):
        """Whatever was going on comes to its end."""
        try:
            wait_until(lambda: not self.unsettled(before), timeout=timeout, interval=0.2)
        except TimeoutError:
            assert self.unsettled(before) == [], f"not settled within {timeout:g} s"

    def assert_accounted(self, schedule, before, timeout=30.0):
        """Nothing is lost: each occurrence is committed, or its skip is recorded."""
        for entry in schedule:
            self._goes_on(entry, before, timeout)
        self.assert_settled(before, timeout)
        for entry, how in schedule.items():
            assert self.gaps(entry, how["every"]) == []

    def _goes_on(self, entry, before, timeout):
        """Wait for an occurrence after then: what was due until then is in the ledger."""
        newest = "SELECT MAX(due_at) AS due_at FROM celery_lease_run WHERE entry = :entry"
        wait_until(
            lambda: (due_at := self.number(newest, entry=entry)) and due_at > before,
            timeout=timeout,
            interval=0.2,
            message=f"{entry} to go on",
        )


def instant(value):
    """Return what a driver gave as an aware datetime: SQLite gives text, MariaDB naive ones."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    if isinstance(value, datetime) and value.tzinfo is None:
        value = value.replace(tzinfo=timezone.utc)
    return value


def seconds(later, earlier):
    """Return the seconds between two instants."""
    return (later - earlier).total_seconds()
