"""The errors of celery-lease, one tree::

    CeleryLeaseError
    ├── ConfigurationError       .setting
    ├── LeaseError               .name
    │   ├── LeaseLost            .held_epoch .current_epoch
    │   └── LeaseConflict        .held_epoch .current_epoch
    ├── FencingError             .name
    │   ├── StaleEpoch           .epoch .current_epoch
    │   ├── AlreadySettled       .task_id .outcome
    │   ├── MissingEpoch
    │   ├── MissingFence
    │   └── UnsafeTransaction
    └── StoreError               the driver's error is in __cause__
        ├── StoreUnavailable     passing: stand by, try again
        ├── StoreContention      passing: try the same statement again
        ├── NotWritable          a replica, or a read-only server or role
        └── SchemaMismatch       .found .expected

An answer of "no" (somebody else leads, the lease is lost) is a value, not an
exception, in everything the package does for itself; ``LeaseLost`` and
``StaleEpoch`` are raised where a user's own code asked and must not go on.
"""

from __future__ import annotations

__all__ = [
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
]


class CeleryLeaseError(Exception):
    """Base of every error that this package raises.

    A task's result in JSON keeps the class and the message of an error, not its
    attributes: those are empty or 0 there.
    """

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class ConfigurationError(CeleryLeaseError):
    """A setting is wrong, or two settings cannot both hold.

    The message names the setting, the value and the way out.
    """

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(message)
        #: Name of the setting to change.
        self.setting = setting


class LeaseError(CeleryLeaseError):
    """Something is wrong with a lease."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        #: Name of the lease.
        self.name = name


class LeaseLost(LeaseError):
    """The term is over: expired, taken over, or released."""

    def __init__(
        self,
        message: str,
        *,
        name: str = "",
        held_epoch: int = 0,
        current_epoch: int | None = None,
    ) -> None:
        super().__init__(message, name=name)
        #: The epoch that was held.
        self.held_epoch = held_epoch
        #: The epoch that the database holds now, where it is known.
        self.current_epoch = current_epoch


class LeaseConflict(LeaseLost):
    """One epoch was granted twice, or a larger one exists while ours should hold.

    A lossy failover of the database or a restored backup can do this. Nothing is
    scheduled until the epoch has been jumped (``celery lease raise --to N``).
    """


class FencingError(CeleryLeaseError):
    """A task, or a write of its own, was turned away."""

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        #: Name of the lease, where there is one.
        self.name = name


class StaleEpoch(FencingError):
    """The epoch of this work is not the current one any more. Nothing of the block was written."""

    def __init__(
        self,
        message: str,
        *,
        name: str | None = None,
        epoch: int = 0,
        current_epoch: int | None = None,
    ) -> None:
        super().__init__(message, name=name)
        #: The epoch that the work was stamped with.
        self.epoch = epoch
        #: The epoch that is stored now, where it is known.
        self.current_epoch = current_epoch


class AlreadySettled(FencingError):
    """This occurrence or child task already has its one final outcome.

    Nothing of the block was written.
    """

    def __init__(
        self,
        message: str,
        *,
        name: str | None = None,
        task_id: str = "",
        outcome: str | None = None,
        current_epoch: int | None = None,
    ) -> None:
        super().__init__(message, name=name)
        #: The task id that was settled before.
        self.task_id = task_id
        #: How it ended: committed, failed, expired or revoked.
        self.outcome = outcome
        #: The epoch that is stored now, where it is known.
        self.current_epoch = current_epoch


class MissingEpoch(FencingError):
    """A task that requires an epoch was called without a stamp."""


class MissingFence(FencingError):
    """The database has no fence row for this lease: it may be another database.

    Nothing of the block was written.
    """


class UnsafeTransaction(FencingError):
    """The guard cannot be the last word of a transaction, or there is no fence to ask here.

    What the block itself has committed before stays.
    """


class StoreError(CeleryLeaseError):
    """The lease database did not do what it was asked."""


class StoreUnavailable(StoreError):
    """The lease database cannot be reached, or did not answer in time."""


class StoreContention(StoreError):
    """A lock was not to be had in time, or the database chose this transaction as a victim."""


class NotWritable(StoreError):
    """The server is a replica or read-only, or the role lacks a privilege there."""

    def __init__(self, message: str, *, forbidden: bool = False) -> None:
        super().__init__(message)
        #: Whether it is this role that lacks a privilege: waiting does not help then.
        self.forbidden = forbidden


class SchemaMismatch(StoreError):
    """The tables are missing, or were made by another version of the package."""

    def __init__(self, message: str, *, found: int | None = None, expected: int = 0) -> None:
        super().__init__(message)
        #: Version of the schema found; None where there is none.
        self.found = found
        #: Version of the schema this package works with.
        self.expected = expected


def _rebuild(
    cls: type[CeleryLeaseError], args: tuple[object, ...], state: dict[str, object]
) -> CeleryLeaseError:
    """Unpickle an error: keyword-only arguments are carried as its attributes."""
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error
