"""The tables. Include :data:`metadata` in your own migrations if you keep them there."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.types import TypeDecorator, TypeEngine

__all__ = [
    "SCHEMA_VERSION",
    "UTCDateTime",
    "commit_table",
    "entry_table",
    "fence_table",
    "lease_table",
    "metadata",
    "run_table",
    "schema_table",
    "term_table",
]

#: Version of the tables; a change here needs a migration.
SCHEMA_VERSION = 1


class UTCDateTime(TypeDecorator[datetime]):
    """An instant, aware and in UTC here, with microseconds on every database."""

    impl = sa.DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> TypeEngine[Any]:
        """Return the type that keeps microseconds: MySQL drops them by default."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.TIMESTAMP(timezone=True))
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.DATETIME(fsp=6))
        return dialect.type_descriptor(sa.DateTime())

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Refuse a naive instant; store UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"a naive datetime cannot be stored: {value!r}")
        value = value.astimezone(timezone.utc)
        return value if dialect.name == "postgresql" else value.replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        """Return an aware instant in UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            return value.replace(tzinfo=timezone.utc)
        return value.astimezone(timezone.utc)


def _name(length: int) -> sa.String:
    """Return a string type that tells "a" from "A", which MySQL's default does not."""
    binary = mysql.VARCHAR(length, charset="utf8mb4", collation="utf8mb4_bin")
    return sa.String(length).with_variant(binary, "mysql", "mariadb")


_ENGINE: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mariadb_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mariadb_charset": "utf8mb4",
}

#: All tables of this package.
metadata = sa.MetaData()

#: One row: the version of the tables.
schema_table = sa.Table(
    "celery_lease_schema",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.CheckConstraint("id = 1", name="celery_lease_schema_one_row"),
    **_ENGINE,
)

#: One row a lease, never deleted. A renewal writes here and nowhere else.
lease_table = sa.Table(
    "celery_lease",
    metadata,
    sa.Column("name", _name(128), primary_key=True),
    sa.Column("holder", _name(255)),
    sa.Column("term", sa.String(36)),
    sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("acquired_at", UTCDateTime),
    sa.Column("renewed_at", UTCDateTime),
    sa.Column("expires_at", UTCDateTime),
    sa.Column("holder_info", sa.Text),
    # SQLite turns an integer that overflows into a float, silently.
    sa.CheckConstraint("epoch >= 0 AND epoch <= 9007199254740991", name="celery_lease_epoch"),
    **_ENGINE,
)

#: What guarded writes are compared with. A row of its own, so that no guarded
#: transaction can hold up a renewal. Nobody reads ``lockable``: PostgreSQL wants the
#: UPDATE privilege on some column for FOR SHARE, and workers are granted this one.
fence_table = sa.Table(
    "celery_lease_fence",
    metadata,
    sa.Column("name", _name(128), primary_key=True),
    sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("term", sa.String(36)),
    sa.Column("lockable", sa.SmallInteger),
    sa.CheckConstraint(
        "epoch >= 0 AND epoch <= 9007199254740991", name="celery_lease_fence_epoch"
    ),
    **_ENGINE,
)

#: The history of terms.
term_table = sa.Table(
    "celery_lease_term",
    metadata,
    sa.Column("name", _name(128), primary_key=True),
    sa.Column("epoch", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("term", sa.String(36), nullable=False),
    sa.Column("holder", _name(255), nullable=False),
    sa.Column("acquired_at", UTCDateTime, nullable=False),
    sa.Column("ended_at", UTCDateTime),
    sa.Column("ended", sa.String(16)),
    **_ENGINE,
)

#: The schedule's state, shared by all beats.
entry_table = sa.Table(
    "celery_lease_entry",
    metadata,
    sa.Column("lease", _name(128), primary_key=True),
    sa.Column("entry", _name(255), primary_key=True),
    sa.Column("first_seen_at", UTCDateTime, nullable=False),
    sa.Column("last_run_at", UTCDateTime),
    sa.Column("total_run_count", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("epoch", sa.BigInteger, nullable=False, server_default="0"),
    **_ENGINE,
)

#: The leader's side of an occurrence. ``open``: the leader may still have to act on it.
run_table = sa.Table(
    "celery_lease_run",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("lease", _name(128), nullable=False),
    sa.Column("entry", _name(255), nullable=False),
    sa.Column("due_at", UTCDateTime, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("term", sa.String(36), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False, server_default="1"),
    sa.Column("fenced", sa.Boolean, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("open", sa.Boolean, nullable=False),
    sa.Column("claimed_at", UTCDateTime, nullable=False),
    sa.Column("published_at", UTCDateTime),
    # Of a skipped series: why, how many where known, and the last of them.
    sa.Column("reason", sa.String(255)),
    sa.Column("skipped", sa.Integer),
    sa.Column("skipped_until", UTCDateTime),
    sa.UniqueConstraint("lease", "entry", "due_at", name="celery_lease_run_occurrence"),
    sa.Index("celery_lease_run_open", "lease", "open", "state", "claimed_at"),
    sa.Index("celery_lease_run_age", "lease", "claimed_at"),
    **_ENGINE,
)

#: The workers' side: the one final outcome of an occurrence or a child task.
#:
#: ``origin`` is empty for a run. For a child it tells of which run it is one, dispatched under
#: which term: ids of children repeat, where a body sends a canvas that was made once and for
#: all, or gives an id of its own.
commit_table = sa.Table(
    "celery_lease_commit",
    metadata,
    sa.Column("task_id", _name(255), primary_key=True),
    sa.Column("origin", sa.String(36), primary_key=True, server_default=""),
    sa.Column("lease", _name(128), nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("term", sa.String(36), nullable=False),
    sa.Column("execution", sa.String(36), nullable=False),
    sa.Column("outcome", sa.String(16), nullable=False),
    sa.Column("at", UTCDateTime, nullable=False),
    sa.Index("celery_lease_commit_age", "lease", "at"),
    **_ENGINE,
)
