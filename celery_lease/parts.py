"""What a leased scheduler is made of: nothing of it is there before it is needed.

So ``lazy=True`` touches nothing, and threads and connections begin in the process that
ticks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

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

__all__ = ["LeaseParts", "logger", "taken"]

#: All of beat's side speaks with one voice.
logger = logging.getLogger("celery_lease.scheduler")


def taken(cls: str, names: str) -> TypeError:
    """Return the error of a scheduler that uses names which are ours."""
    return TypeError(f"{cls} uses {names}, which leased() needs for itself; rename it there")


class LeaseParts(_Scheduler):
    """The settings, the lease database and the elector of a scheduler."""

    #: The names of what is ours, where a led scheduler could keep something of its own.
    _parts: ClassVar[Mapping[str, type]] = {
        "settings": Settings,
        "store": SQLLeaseStore,
        "elector": Elector,
    }

    def _check_parts(self) -> None:
        """Refuse what a led scheduler keeps under the name of a part of ours.

        Not at the assignment: what could notice that would cost each tick.

        Raises:
            TypeError: It does.
        """
        for name, kind in self._parts.items():
            found = vars(self).get(name)
            if found is not None and not isinstance(found, kind):
                raise taken(type(self).__name__, repr(name))

    @cached_property
    def settings(self) -> Settings:
        """The ``beat_lease_*`` settings."""
        return Settings.from_conf(self.app.conf)

    @cached_property
    def store(self) -> SQLLeaseStore:
        """The lease database."""
        return SQLLeaseStore.of(self.settings)

    @cached_property
    def elector(self) -> Elector:
        """Whether this process leads."""
        return Elector(
            self.store,
            self.settings,
            holder=Holder.current(**self.holder_info()),
            observe=self.tell,
        )

    @cached_property
    def _log(self) -> TransitionLog:
        return TransitionLog(logger)

    def tell(self, transition: Transition) -> None:
        """Tell a transition to the log and to the receivers of its signal."""
        self._log(transition)
        announce(transition)

    def holder_info(self) -> dict[str, Any]:
        """Return what others may see of this process."""
        return {"celery": celery_version, "celery_lease": __version__}
