"""Highly available periodic tasks for Celery that stay correct when a leader pauses.

One beat holds a time-limited lease in a SQL database and ticks; the others stand by
and take over, each time under a larger epoch. Tasks carry the epoch, and what they
write to refuses an older one.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_lease.election import LeaderElection, Leadership
    from celery_lease.errors import (
        AlreadySettled,
        CeleryLeaseError,
        ConfigurationError,
        FencingError,
        LeaseConflict,
        LeaseError,
        LeaseLost,
        MissingEpoch,
        MissingFence,
        NotWritable,
        SchemaMismatch,
        StaleEpoch,
        StoreContention,
        StoreError,
        StoreUnavailable,
        UnsafeTransaction,
    )
    from celery_lease.lease import Lease
    from celery_lease.logs import LeaseFilter
    from celery_lease.occurrence import MisfirePolicy, Occurrence
    from celery_lease.scheduler import LeasedScheduler, leased
    from celery_lease.signals import install
    from celery_lease.stores.schema import metadata
    from celery_lease.task import FencedTask

    #: The version that is installed.
    __version__: str

__all__ = [
    # Beat's side
    "LeasedScheduler",
    "leased",
    # The tasks' side
    "FencedTask",
    "install",
    # Anything else that one process at a time may do
    "LeaderElection",
    "Leadership",
    # Logs
    "LeaseFilter",
    # Values
    "Lease",
    "MisfirePolicy",
    "Occurrence",
    # Tables, for one's own migrations
    "metadata",
    # Errors
    "AlreadySettled",
    "CeleryLeaseError",
    "ConfigurationError",
    "FencingError",
    "LeaseConflict",
    "LeaseError",
    "LeaseLost",
    "MissingEpoch",
    "MissingFence",
    "NotWritable",
    "SchemaMismatch",
    "StaleEpoch",
    "StoreContention",
    "StoreError",
    "StoreUnavailable",
    "UnsafeTransaction",
    "__version__",
]

_HOME = {
    "LeasedScheduler": "scheduler",
    "leased": "scheduler",
    "FencedTask": "task",
    "LeaderElection": "election",
    "Leadership": "election",
    "install": "signals",
    "LeaseFilter": "logs",
    "Lease": "lease",
    "MisfirePolicy": "occurrence",
    "Occurrence": "occurrence",
    "metadata": "stores.schema",
}


if not TYPE_CHECKING:  # A type checker would take it for any name.

    def __getattr__(name: str) -> Any:
        """Load a public name when it is first asked for: a worker needs no scheduler."""
        if name == "__version__":
            try:
                return version("celery-lease")
            except PackageNotFoundError:
                return "0+unknown"
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    """List the public names without loading them."""
    return sorted(__all__)
