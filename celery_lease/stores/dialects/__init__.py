"""All that differs between PostgreSQL, MySQL/MariaDB and SQLite: a file for each of them.

Nothing outside this package asks which database it talks to.
"""

from celery_lease.stores.dialects.base import Database
from celery_lease.stores.dialects.clock import from_now, seconds_until, utcnow
from celery_lease.stores.dialects.direct import Direct, direct, within
from celery_lease.stores.dialects.engine import create_engine, database_of, file_of, masked
from celery_lease.stores.dialects.failure import is_certainly_wrong, translated, translated_own

__all__ = [
    "Database",
    "Direct",
    "create_engine",
    "database_of",
    "direct",
    "file_of",
    "from_now",
    "is_certainly_wrong",
    "masked",
    "seconds_until",
    "translated",
    "translated_own",
    "utcnow",
    "within",
]
