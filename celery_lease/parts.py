"""What a leased scheduler is made of: nothing of it is there before it is needed.

So ``lazy=True`` touches nothing, and threads and connections begin in the process that
ticks.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from celery import __version__ as celery_version

from celery_lease import __version__
from celery_lease.elector import Elector
from celery_lease.journal import TransitionLog
from celery_lease.lease import Holder
from celery_lease.settings import Settings
from celery_lease.signals import announce
from celery_lease.stores.leases import SQLLeaseStore
from celery_lease.transition import Transition

if TYPE_CHECKING:
    from celery.beat import Scheduler as _Scheduler
else:
    _Scheduler = object

__all__ = ["LeaseParts", "logger", "part", "taken"]

#: All of beat's side speaks with one voice.
logger = logging.getLogger("celery_lease.scheduler")


T = TypeVar("T")


def taken(cls: str, names: str) -> TypeError:
    """Return the error of a scheduler that uses names which are ours."""
    return TypeError(f"{cls} uses {names}, which leased() needs for itself; rename it there")


class part(cached_property[T]):  # noqa: N801 - a decorator
    """A part that is made when it is first asked for, and that nobody else may set."""

    def __set__(self, instance: object, value: Any) -> None:
        """Refuse what a led scheduler would keep under our name.

        Raises:
            TypeError: Always.
        """
        raise taken(type(instance).__name__, repr(self.attrname))


class LeaseParts(_Scheduler):
    """The settings, the lease database and the elector of a scheduler."""

    @part
    def settings(self) -> Settings:
        """The ``beat_lease_*`` settings."""
        return Settings.from_conf(self.app.conf)

    @part
    def store(self) -> SQLLeaseStore:
        """The lease database."""
        return SQLLeaseStore.of(self.settings)

    @part
    def elector(self) -> Elector:
        """Whether this process leads."""
        return Elector(
            self.store,
            self.settings,
            holder=Holder.current(**self.holder_info()),
            observe=self.tell,
        )

    @part
    def _log(self) -> TransitionLog:
        return TransitionLog(logger)

    def tell(self, transition: Transition) -> None:
        """Tell a transition to the log and to the receivers of its signal."""
        self._log(transition)
        announce(transition)

    def holder_info(self) -> dict[str, Any]:
        """Return what others may see of this process."""
        return {"celery": celery_version, "celery_lease": __version__}
