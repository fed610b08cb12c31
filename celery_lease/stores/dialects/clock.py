"""The database's clock, as SQL. Each database's file says how it is spelled there.

Time is the database's: two hosts need not agree on it, two statements on one server do.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.functions import FunctionElement

from celery_lease.stores.schema import UTCDateTime

__all__ = ["from_now", "seconds_until", "utcnow"]


class utcnow(FunctionElement[Any]):  # noqa: N801 - reads as the SQL function it is
    """The database's clock, at this statement."""

    type = UTCDateTime()
    inherit_cache = True


class from_now(FunctionElement[Any]):  # noqa: N801
    """The database's clock plus so many seconds (a number, which may be negative)."""

    type = UTCDateTime()
    inherit_cache = True


class seconds_until(FunctionElement[Any]):  # noqa: N801
    """Seconds from the database's clock until a column's instant; negative when past."""

    type = sa.Float()
    inherit_cache = True
