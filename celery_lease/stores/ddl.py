"""SQL for administrators: the tables, and the least that beats and workers must be granted."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.schema import CreateIndex, CreateTable

from celery_lease.stores.schema import (
    SCHEMA_VERSION,
    commit_table,
    entry_table,
    fence_table,
    lease_table,
    metadata,
    run_table,
    schema_table,
    term_table,
)

__all__ = ["BEAT", "DIALECTS", "WORKER", "grants", "tables"]

#: What :func:`tables` and :func:`grants` can be asked for.
DIALECTS = ("postgresql", "mysql", "mariadb", "sqlite")

#: What a beat needs. It deletes no lease and no fence: their epochs are never reset.
BEAT: Mapping[str, tuple[str, ...]] = {
    schema_table.name: ("SELECT",),
    lease_table.name: ("SELECT", "INSERT", "UPDATE"),
    fence_table.name: ("SELECT", "INSERT", "UPDATE"),
    term_table.name: ("SELECT", "INSERT", "UPDATE", "DELETE"),
    entry_table.name: ("SELECT", "INSERT", "UPDATE", "DELETE"),
    run_table.name: ("SELECT", "INSERT", "UPDATE", "DELETE"),
    commit_table.name: ("SELECT", "INSERT", "DELETE"),
}

#: What a worker needs, and ``celery lease status`` and ``history`` beside it. It can lock the
#: fence, record an outcome and mark a run refused; it can neither take a lease nor move an epoch.
WORKER: Mapping[str, tuple[str, ...]] = {
    schema_table.name: ("SELECT",),
    lease_table.name: ("SELECT",),
    fence_table.name: ("SELECT", "UPDATE (lockable)"),
    term_table.name: ("SELECT",),
    run_table.name: ("SELECT", "UPDATE (state, open)"),
    commit_table.name: ("SELECT", "INSERT"),
}


def tables(dialect: str) -> list[str]:
    """Return the statements that make the tables.

    Args:
        dialect: One of :data:`DIALECTS`.
    """
    spoken = _dialect(dialect)
    made: list[CreateTable | CreateIndex | sa.Insert] = []
    for table in metadata.sorted_tables:
        made.append(CreateTable(table))
        made += [CreateIndex(each) for each in sorted(table.indexes, key=lambda it: str(it.name))]
    made.append(sa.insert(schema_table).values(id=1, version=SCHEMA_VERSION))
    literally = {"literal_binds": True}
    return [str(each.compile(dialect=spoken, compile_kwargs=literally)).strip() for each in made]


def grants(dialect: str, *, beat: str, worker: str) -> list[str]:
    """Return the grants for the two roles, which must be there already.

    Args:
        dialect: One of :data:`DIALECTS`; SQLite has no roles.
        beat: The role that beats connect as. On MySQL and MariaDB ``user@host`` names the
            host, too.
        worker: The role that workers connect as.
    """
    if dialect == "sqlite":
        return []
    return [
        f"GRANT {', '.join(privileges)} ON {table} TO {_account(dialect, role)}"
        for role, needs in ((beat, BEAT), (worker, WORKER))
        for table, privileges in needs.items()
    ]


def _account(dialect: str, role: str) -> str:
    quote = _dialect(dialect).identifier_preparer.quote
    user, at, host = role.rpartition("@")
    parts = [role] if dialect == "postgresql" or not at else [user, host]
    # For drivers that fill in parameters it doubles them.
    return "@".join(quote(each.strip("'`")).replace("%%", "%") for each in parts)


def _dialect(name: str) -> sa.Dialect:
    return sa.make_url(f"{name}://").get_dialect()()
