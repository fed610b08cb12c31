"""The tables: in one's own migrations, and found by index however many rows there are."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

import celery_lease
from celery_lease.errors import SchemaMismatch
from celery_lease.lease import Term
from celery_lease.stores.fences import FenceStore
from celery_lease.stores.guarded import guarded
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.stores.ledger import SQLLedger
from celery_lease.stores.probe import Probe
from celery_lease.stores.retention import prune
from celery_lease.stores.schema import SCHEMA_VERSION, metadata, schema_table
from tests.leases import NAME, grant, opened, own_schema, ticket
from tests.services.base import wait_until

#: So many that a planner prefers an index; the database makes them itself, in seconds.
#: Ten million take minutes, and want ``--timeout 3600``.
RUNS = int(os.environ.get("CELERY_LEASE_TEST_RUNS", "200_000"))


def test_the_tables_can_be_part_of_ones_own_metadata(database_url):
    """Whoever keeps all tables in Alembic takes ours in as well, and writes the version row."""
    mine = sa.MetaData()
    sa.Table("mine", mine, sa.Column("id", sa.Integer, primary_key=True))
    for table in celery_lease.metadata.sorted_tables:
        table.to_metadata(mine)
    engine = sa.create_engine(database_url)
    with engine.begin() as connection:
        mine.create_all(connection)
        connection.execute(sa.insert(schema_table).values(id=1, version=SCHEMA_VERSION))
    engine.dispose()

    store = SQLLeaseStore(database_url)
    store.prepare(create=False)
    store.dispose()


def test_our_names_are_all_prefixed():
    """They live among a user's own tables, constraints and indexes."""
    names = set(metadata.tables)
    for table in metadata.tables.values():
        names |= {str(index.name) for index in table.indexes}
        names |= {str(each.name) for each in table.constraints if each.name}

    assert all(name.startswith("celery_lease") for name in names)


def test_half_made_tables_are_completed(database_url):
    """A first start that was killed in the middle must not need an administrator."""
    engine = sa.create_engine(database_url)
    with engine.begin() as connection:
        metadata.create_all(connection, tables=[metadata.tables["celery_lease"]])
    engine.dispose()

    with opened(database_url) as store:
        assert grant(store).epoch == 1


def test_a_table_that_was_dropped_is_missed_and_made_again(database_url):
    """The version's row speaks for all of them, and may be the only thing that is left."""
    with opened(database_url) as store:
        for name, table in metadata.tables.items():
            table.drop(store.engine)

            with pytest.raises(SchemaMismatch, match="celery lease init") as told:
                store.prepare(create=False)
            assert name in str(told.value) or name == "celery_lease_schema"

            store.prepare(create=True)
            store.prepare(create=False)


def test_indexes_that_a_broken_start_left_out_are_made(database_url):
    """MySQL commits each table by itself; without its indexes a takeover reads a whole ledger."""
    engine = sa.create_engine(database_url)
    metadata.create_all(engine)
    for table in metadata.sorted_tables:
        for index in table.indexes:
            index.drop(engine)

    with opened(database_url):
        there = sa.inspect(engine)
        for table in metadata.sorted_tables:
            names = {each["name"] for each in there.get_indexes(table.name)}
            assert {index.name for index in table.indexes} <= names
    engine.dispose()


@pytest.mark.postgresql
@pytest.mark.parametrize("style", ["German", "SQL, DMY", "Postgres"])
def test_a_database_that_writes_dates_another_way_is_read(postgresql, postgresql_url, style):
    """The driver reads ISO alone; a grant whose row cannot be read would be nobody's."""
    name = sa.make_url(postgresql_url).database
    postgresql.execute(f"ALTER DATABASE {name} SET datestyle = '{style}'")
    with opened(postgresql_url) as store:
        term = grant(store)
        assert store.read(NAME).expires_at > term.acquired_at


@pytest.mark.postgresql
def test_a_leader_finds_the_tables_in_a_schema_of_their_own(postgresql_url):
    """Where ``beat_lease_engine_options`` says so: its own guard too."""
    options = own_schema(postgresql_url)
    store = SQLLeaseStore(postgresql_url, options)
    store.prepare(create=True)
    store.ensure(NAME)
    term = grant(store)
    store.raise_fence(term)

    with guarded(store.engine, term, 5.0):
        pass
    store.dispose()


@pytest.mark.postgresql
def test_what_is_wrong_with_tables_in_a_schema_of_their_own_is_found(postgresql_url):
    """They are looked for where they are, and not where the search path leads."""
    probe = Probe(postgresql_url, own_schema(postgresql_url, "Own"))
    probe.prepare(create=True)
    with probe.engine.begin() as connection:
        connection.exec_driver_sql('ALTER TABLE "Own".celery_lease_fence SET UNLOGGED')

    assert "celery_lease_fence is UNLOGGED: a crash empties it" in [
        each.text for each in probe.weaknesses() if each.certain
    ]
    probe.dispose()


@pytest.mark.postgresql
def test_our_statements_run_at_our_level_whatever_the_database_prefers(postgresql, postgresql_url):
    """At SERIALIZABLE, reads of ours would make users' current tasks fail."""
    name = sa.make_url(postgresql_url).database
    postgresql.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    level = sa.text("SHOW transaction_isolation")
    fences = FenceStore(postgresql_url)
    with opened(postgresql_url) as store, store.engine.connect() as connection:
        assert connection.scalar(level) == "read committed"
        connection.rollback()
        single = connection.execution_options(isolation_level="AUTOCOMMIT")
        assert single.scalar(level) == "read committed"
    with fences.engine.connect() as connection:
        assert connection.scalar(level) == "read committed"
    fences.dispose()


@pytest.mark.postgresql
def test_a_column_that_changed_its_type_costs_a_connection_and_no_task(
    postgresql_url: str,
):
    """A plan that was prepared before is of no use any more, as after an online migration."""
    fences = FenceStore(postgresql_url)
    with opened(postgresql_url) as store:
        store.raise_fence(term := grant(store))
        for _ in range(10):  # psycopg prepares what it has seen some times.
            fences.look(ticket(term, "x"))
        with store.engine.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE celery_lease_commit ALTER outcome TYPE text")
        assert fences.look(ticket(term, "x")).current
    fences.dispose()


def test_a_pool_of_ones_own_is_taken(sqlite_url):
    """SQLAlchemy takes no settings for a pool that is made already."""
    options = {"pool": sa.create_engine(sqlite_url).pool}
    store, fences = SQLLeaseStore(sqlite_url, options), FenceStore(sqlite_url, options)
    store.prepare(create=True)
    store.ensure(NAME)
    term = grant(store)
    assert fences.look(ticket(term, "x")).epoch == 1
    store.dispose()
    fences.dispose()


def test_where_sqlite_has_no_wal_nobody_waits_for_it(tmp_path, monkeypatch):
    """Some network file systems have none, and say so at once."""
    monkeypatch.setattr("celery_lease.stores.dialects.sqlite._INSISTENCE", 0.05)
    url = f"sqlite:///file:{tmp_path / 'lease.sqlite3'}?vfs=unix-dotfile&uri=true"
    began = time.monotonic()
    with opened(url) as store:
        grant(store)
    assert time.monotonic() - began < 30


# --- plans --------------------------------------------------------------------------------

FILL = {
    "postgresql": """
        INSERT INTO {table} ({columns})
        SELECT {values} FROM generate_series(1, {count}) AS g(n)
        """,
    "mysql": """
        INSERT INTO {table} ({columns})
        SELECT {values} FROM (SELECT seq AS n FROM seq_1_to_{count}) AS g
        """,
    "sqlite": """
        WITH RECURSIVE g(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g WHERE n < {count})
        INSERT INTO {table} ({columns}) SELECT {values} FROM g
        """,
}
AGES = {
    "postgresql": "now() - n * interval '3 second'",
    "mysql": "utc_timestamp(6) - INTERVAL 3 * n SECOND",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f000', 'now', (-3 * n) || ' seconds')",
}
TEXT = {"postgresql": "n::text", "mysql": "CAST(n AS CHAR)", "sqlite": "CAST(n AS TEXT)"}


@pytest.fixture(scope="module")
def filled(request) -> Iterator[dict[str, tuple[SQLLeaseStore, Term]]]:
    """Databases with a long history, made when they are first asked for."""
    made: dict[str, tuple[SQLLeaseStore, Term]] = {}
    yield made
    for store, _ in made.values():
        store.dispose()


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgresql", marks=pytest.mark.postgresql),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
    ]
)
def old(request, filled, tmp_path_factory) -> tuple[SQLLeaseStore, Term]:
    """A database with many runs: nearly all settled, a few open, all of some days."""
    if request.param not in filled:
        if request.param == "sqlite":
            url = f"sqlite:///{tmp_path_factory.mktemp('old')}/lease.sqlite3"
        else:
            url = request.getfixturevalue(request.param).create_database()
        filled[request.param] = _fill(url)
    return filled[request.param]


def _fill(url: str) -> tuple[SQLLeaseStore, Term]:
    store = SQLLeaseStore(url, statement_wait=max(120, RUNS / 5_000))
    store.prepare(create=True)
    store.ensure(NAME)
    term = grant(store, ttl=3600)
    _add_history(store.engine)
    _analyze(store.engine)
    return store, term


def _add_history(engine: sa.Engine) -> None:
    kind = engine.dialect.name
    kind = "mysql" if kind == "mariadb" else kind
    age, text = AGES[kind], TEXT[kind]
    few = "n % 20000 = 7" if kind == "sqlite" else "mod(n, 20000) = 7"
    yes, no = ("1", "0") if kind == "sqlite" else ("true", "false")
    run = {
        "id": text, "lease": f"'{NAME}'", "entry": "'e'", "due_at": age, "epoch": "0",
        "term": "'t'", "attempt": "1", "fenced": yes, "state": "'published'",
        "open": f"CASE WHEN {few} THEN {yes} ELSE {no} END",
        "claimed_at": age, "published_at": age,
    }  # fmt: skip
    commit = {
        "task_id": text, "lease": f"'{NAME}'", "epoch": "0", "term": "'t'", "execution": "'x'",
        "outcome": "'committed'", "at": age,
    }  # fmt: skip
    with engine.begin() as connection:
        for table, row in (("celery_lease_run", run), ("celery_lease_commit", commit)):
            columns = ", ".join('"open"' if c == "open" and kind != "mysql" else c for c in row)
            statement = FILL[kind].format(
                table=table, columns=columns, values=", ".join(row.values()), count=RUNS
            )
            connection.exec_driver_sql(statement)
        # Ten runs are open because they were never settled.
        connection.exec_driver_sql(
            "DELETE FROM celery_lease_commit WHERE task_id IN "
            "(SELECT id FROM celery_lease_run WHERE {open} = {yes})".format(
                open="`open`" if kind == "mysql" else '"open"', yes=yes
            )
        )


def _analyze(engine: sa.Engine) -> None:
    tables = "celery_lease_run, celery_lease_commit"
    analyze = {"postgresql": f"ANALYZE {tables}", "sqlite": "ANALYZE"}
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(analyze.get(engine.dialect.name, f"ANALYZE TABLE {tables}"))


class Plans:
    """Collects the plan of each statement that reads or deletes."""

    def __init__(self, store: SQLLeaseStore) -> None:
        self.store = store
        self.found: list[tuple[str, list[str]]] = []

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Collect within the block."""
        sa.event.listen(self.store.engine, "before_cursor_execute", self._explain)
        try:
            yield
        finally:
            sa.event.remove(self.store.engine, "before_cursor_execute", self._explain)

    def _explain(self, conn, cursor, statement: str, parameters, context, many) -> None:
        kind = self.store.engine.dialect.name
        if many or not statement.startswith(("SELECT", "DELETE", "UPDATE")):
            return
        if "celery_lease_run" not in statement and "celery_lease_commit" not in statement:
            return
        word = "EXPLAIN QUERY PLAN" if kind == "sqlite" else "EXPLAIN"
        if kind == "postgresql":
            word = "EXPLAIN (FORMAT JSON)"
        # A cursor of its own: this one is about to be used.
        own = conn.connection.dbapi_connection.cursor()
        own.execute(f"{word} {statement}", parameters)
        self.found.append((statement, _scans(kind, own.fetchall())))
        own.close()


def _scans(kind: str, rows: list) -> list[str]:
    """Where a plan reads a whole table."""
    if kind == "postgresql":
        plan = rows[0][0] if not isinstance(rows[0][0], str) else json.loads(rows[0][0])
        return [
            n["Relation Name"] for n in _nodes(plan[0]["Plan"]) if n["Node Type"] == "Seq Scan"
        ]
    if kind == "sqlite":
        return [row[3] for row in rows if row[3].startswith("SCAN") and "celery_lease_" in row[3]]
    return [f"{row[2]} {row[3]}" for row in rows if row[3] in ("ALL", "index")]


def _nodes(node: dict) -> Iterator[dict]:
    yield node
    for each in node.get("Plans", []):
        yield from _nodes(each)


HOUSEKEEPING = {
    "the floor": lambda store, ledger, term: store.floor(term),
    "recover": lambda store, ledger, term: ledger.to_recover(term, limit=100, own=False),
    "unsettled": lambda store, ledger, term: ledger.unsettled(term, age=600, limit=100),
    "close settled": lambda store, ledger, term: ledger.close_settled(term, limit=100),
    "running": lambda store, ledger, term: ledger.running(NAME, ["e"]),
    "prune": lambda store, ledger, term: prune(store.engine, NAME, retention=86400, limit=100),
}


@pytest.mark.parametrize("chore", HOUSEKEEPING.values(), ids=HOUSEKEEPING)
def test_housekeeping_never_reads_a_whole_table(old, chore):
    """A leader does these between its ticks, with ten million runs as with ten."""
    store, term = old
    plans = Plans(store)
    with plans.listening():
        chore(store, SQLLedger(store.engine, idle=5.0), term)

    assert plans.found, "nothing was explained"
    for statement, scans in plans.found:
        assert scans == [], statement


@pytest.mark.parametrize("chore", HOUSEKEEPING.values(), ids=HOUSEKEEPING)
def test_housekeeping_reads_little_of_a_long_history(old, chore):
    """An index may lead to all of it, too: that of the rows' age has each run of the lease."""
    store, term = old
    with _counted(store.engine) as read:
        chore(store, SQLLedger(store.engine, idle=5.0), term)
    assert 0 < read() < RUNS // 20


def test_pruning_is_bounded_and_keeps_what_is_open(old):
    """It runs between ticks, and an open fenced run may still be dispatched again."""
    store, _ = old
    with store.engine.connect() as connection:
        before = connection.execute(sa.text("SELECT COUNT(*) FROM celery_lease_run")).scalar_one()
    deleted = prune(store.engine, NAME, retention=0, limit=100)

    with store.engine.connect() as connection:
        after = connection.execute(sa.text("SELECT COUNT(*) FROM celery_lease_run")).scalar_one()
        found = connection.execute(
            sa.select(sa.func.count())
            .select_from(metadata.tables["celery_lease_run"])
            .where(metadata.tables["celery_lease_run"].c.open.is_(sa.true()))
        ).scalar_one()
    assert 0 < deleted <= 300
    assert before - after <= 100
    assert found == RUNS // 20_000


# --- what workers ask ---------------------------------------------------------------------

#: A run of the history that is not settled.
OPEN = "20007"
ADMISSION = {
    "look": lambda fences, ticket: fences.look(ticket),
    "refuse": lambda fences, ticket: fences.refuse(ticket),
    "settle": lambda fences, ticket: fences.settle(ticket, "committed"),
}


@pytest.mark.postgresql
@pytest.mark.parametrize("verb", ADMISSION.values(), ids=ADMISSION)
def test_a_plan_made_while_the_tables_were_empty_stays_good(postgresql_url, verb):
    """A worker's connection keeps its plans, until the first statistics at the earliest.

    With two indexes to choose from and no rows yet, PostgreSQL takes any. One of the two
    reads every run of the lease.
    """
    fences = FenceStore(postgresql_url)
    with opened(postgresql_url, statement_wait=120) as store:
        term = grant(store, ttl=3600)
        store.raise_fence(term)
        with store.engine.begin() as connection:
            for table in ("celery_lease_run", "celery_lease_commit"):
                connection.exec_driver_sql(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        # Often enough for the driver to prepare it, and for the server to keep its plan.
        for number in range(20):
            verb(fences, ticket(term, f"before-{number}"))
        _add_history(store.engine)
        before = _rows_read(store.engine)
        verb(fences, ticket(term, OPEN))
        fences.dispose()
        read = _rows_read(store.engine, more_than=before) - before

    assert read < 100


@contextlib.contextmanager
def _counted(engine: sa.Engine) -> Iterator[Callable[[], int]]:
    """Yield what returns how many rows were read, or how many steps SQLite took."""
    if engine.dialect.name == "postgresql":
        before = _rows_read(engine)
        yield lambda: _rows_read(engine, more_than=before) - before
        return
    engine.dispose()  # for a session that has read nothing yet
    if engine.dialect.name == "sqlite":
        steps: list[None] = []

        def listen(dbapi, record):
            dbapi.set_progress_handler(lambda: steps.append(None), 10)

        sa.event.listen(engine, "connect", listen)
        yield lambda: len(steps)
        sa.event.remove(engine, "connect", listen)
        engine.dispose()
        return

    def read() -> int:
        with engine.connect() as connection:
            rows = connection.exec_driver_sql("SHOW SESSION STATUS LIKE 'Handler_read%%'")
            return sum(int(value) for _, value in rows)

    before = read()
    yield lambda: read() - before


def _rows_read(engine: sa.Engine, more_than: int = -1) -> int:
    """Return how many rows and index entries the server has read in our tables."""
    query = sa.text(
        "SELECT sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))"
        " FROM pg_stat_user_tables WHERE relname LIKE 'celery_lease%'"
    )

    def read() -> int:
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
            connection.commit()
            return int(connection.execute(query).scalar_one())

    # A session tells what it read when it ends, which is a moment after its client left.
    return wait_until(lambda: (found := read()) > more_than and found)
