"""What a leader finds left: runs that were claimed and not sent, refused, or lost.

They are claimed again under the current epoch and sent from the entry as it is now.
Each round is bounded, so that a takeover never becomes a storm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from numbers import Real
from time import monotonic
from typing import Any, NamedTuple

from celery_lease.clock import rising
from celery_lease.dispatch import BATCH, REMOVED, Dispatcher, Ending, fields
from celery_lease.entry import deadline_of, wishes_of
from celery_lease.lease import Term
from celery_lease.occurrence import Run, RunState
from celery_lease.settings import Settings

__all__ = ["Recovery"]

logger = logging.getLogger("celery_lease.scheduler")

#: An attempt from which on it is worth a warning.
MANY_ATTEMPTS = 3
#: How many times longer a lost run is waited for, at most, than its first attempt was.
LONGEST_FACTOR = 16
#: A lookup that fails after more than SLOW seconds says that the entries' store is away: none is
#: looked up for AWAY seconds.
SLOW, AWAY = 1.0, 10.0
#: How many batches of unsettled runs one round looks through.
PAGES = 10


class _Fate(NamedTuple):
    """What is to become of a run."""

    #: How it ends; None where it is to be sent again.
    ending: Ending | None
    #: Whether its task is fenced, if it is sent again.
    fenced: bool


class Recovery:
    """Looks at the ledger, and sends again what was left.

    Args:
        dispatcher: What sends.
        settings: Limits and durations.
        find: Returns the entry of a name as it is now; None where there is none. Where it
            raises an error, that entry's runs stay as they are.
        is_fenced: Returns whether an entry's task is fenced.
        now: Returns the instant, in UTC.
        deadline: Celery's ``beat_cron_starting_deadline``, in seconds.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: Settings,
        *,
        find: Callable[[str], Any],
        is_fenced: Callable[[Any], bool],
        now: Callable[[], datetime],
        deadline: float | None,
    ) -> None:
        self._dispatcher = dispatcher
        self._ledger = dispatcher.ledger
        self._settings = settings
        self._find = find
        self._is_fenced = is_fenced
        self._now = now
        self._deadline = deadline
        #: Runs that are left as they are, since their entries could not be read.
        self._unread: set[str] = set()
        #: Entries that the log was told of, as they cannot be read.
        self._told: set[str] = set()
        #: Until when no entry is looked up, since their store seems to be away.
        self._away_until = 0.0

    def round(self, term: Term, *, own: bool) -> bool:
        """Do one bounded round: close what is settled, send again what was left.

        Args:
            term: Our term.
            own: Whether claims of this very term may have been left too, because what
                became of them was not known.

        Returns:
            Whether there may be more to do at once.
        """
        closed = self._ledger.close_settled(term, limit=BATCH)
        waiting = {each.id for runs in self._dispatcher.waiting.values() for each in runs}
        # Where our own claims are among those found, so are the ones that wait here.
        limit = BATCH + len(self._unread) + (len(waiting) if own else 0)
        found = self._ledger.to_recover(term, limit=limit, own=own)
        left = [each for each in found if each.id not in waiting]
        # What could not be read comes last: it must not hide the others.
        left = sorted(left, key=lambda run: run.id in self._unread)[:BATCH]
        left += self._lost(term, BATCH - len(left))
        more = len(left) >= BATCH and any(each.id not in self._unread for each in left)
        fates = self._fates_of(left)
        unread = {each.id for each in found if each.id in self._unread}
        self._unread = unread.union(each.id for each in left) - fates.keys()
        self._take_up(term, left, fates)
        return more or closed >= BATCH

    def _lost(self, term: Term, limit: int) -> list[Run]:
        """Return published runs whose worker seems to have died with them."""
        if limit <= 0:
            return []
        age = self._settings.redispatch_after
        return self._late(term, lambda _run: age, age=age, limit=limit)

    def retry_lost(self, term: Term, wishes: dict[str, float]) -> None:
        """Send again runs that are lost even though their epoch is the current one.

        Each attempt gets twice the time of the one before, up to :data:`LONGEST_FACTOR` times the
        first: where messages only wait in a long queue, sending them again must not make it
        longer and longer.

        Args:
            term: Our term.
            wishes: Entries that ask for it, with the seconds after which.
        """

        def allowed(run: Run) -> float:
            first = wishes[run.entry]
            return rising(first, run.attempt - 1, LONGEST_FACTOR * first)

        names = list(wishes)
        for at in range(0, len(names), BATCH):
            some = names[at : at + BATCH]
            age = min(wishes[each] for each in some)
            late = self._late(term, allowed, age=age, limit=BATCH, entries=some)
            self._take_up(term, late, self._fates_of(late))

    def _late(
        self,
        term: Term,
        allowed: Callable[[Run], float],
        *,
        age: float,
        limit: int,
        entries: Sequence[str] | None = None,
    ) -> list[Run]:
        """Return unsettled runs that had more time than they are allowed, oldest first.

        Those that are still allowed some are passed over: they must not hide the others.
        """
        late: list[Run] = []
        for page in range(PAGES):
            found = self._ledger.unsettled(
                term, age=age, limit=BATCH, offset=page * BATCH, entries=entries
            )
            late += [each for each in found if self._given(each) > allowed(each)]
            if len(found) < BATCH or len(late) >= limit:
                break
        return late[:limit]

    def _given(self, run: Run) -> float:
        """Return how many seconds a message had, its countdown left out."""
        read, countdown = self._read(run.entry, _countdown)
        if not read or run.published_for is None:
            return 0.0
        return run.published_for - float(countdown)

    def over(self, run: Run) -> Ending | None:
        """Return why a run that waits to be sent is not to be any more; None if it is."""
        read, ending = self._read(run.entry, partial(self._ending, run))
        return ending if read else None

    def _fates_of(self, runs: Sequence[Run]) -> dict[str, _Fate]:
        """Return what is to become of runs, by id, where their entries can be read."""
        found = {run.id: self._read(run.entry, partial(self._fate, run)) for run in runs}
        return {run_id: fate for run_id, (read, fate) in found.items() if read}

    def _fate(self, run: Run, entry: Any) -> _Fate:
        ending = self._ending(run, entry)
        return _Fate(ending, fenced=ending is None and self._is_fenced(entry))

    def _read(self, name: str, what: Callable[[Any], Any]) -> tuple[bool, Any]:
        """Return whether an entry can be read, and *what* says of it as it is now."""
        began = monotonic()
        if began < self._away_until:
            return False, None
        try:
            said = what(self._find(name))
        except Exception as error:  # noqa: BLE001 - whatever the store, or the entry, raises
            self._tell_unread(name, error)
            if monotonic() - began > SLOW:
                # It is not this entry: hundreds of time-outs would hold up the loop.
                self._away_until = monotonic() + AWAY
            return False, None
        self._told.discard(name)
        return True, said

    def _tell_unread(self, name: str, error: Exception) -> None:
        """Name an entry that stops no other: loudly once, until it could be read."""
        logger.log(
            logging.DEBUG if name in self._told else logging.ERROR,
            "the entry %r cannot be read; its runs stay as they are until it can",
            name,
            exc_info=error,
            extra={"action": "entry-unread", "lease_entry": name},
        )
        self._told.add(name)

    def _take_up(self, term: Term, runs: Sequence[Run], fates: dict[str, _Fate]) -> None:
        """Do what was decided about runs that were left: end them, or claim and send them again.

        Args:
            term: Our term.
            runs: The runs.
            fates: What was decided, by the run's id; nothing where the entry cannot be read.
                What is ours already waits for its entry then.
        """
        ours: list[Run] = []
        again: list[Run] = []
        for run in self._dispatcher.end_some(
            term,
            runs,
            lambda run: fates[run.id].ending if run.id in fates else None,
        ):
            if (run.state, run.epoch, run.term) == (RunState.CLAIMED, term.epoch, term.uuid):
                ours.append(run)
            elif run.id in fates:
                again.append(replace(run, fenced=fates[run.id].fenced))
        got = self._ledger.reclaim(term, again)
        for run in again:
            if run.id in got:
                self._tell_again(term, run)
                ours.append(replace(run, attempt=run.next_attempt, state=RunState.CLAIMED))
        if ours:
            self._dispatcher.send(term, ours)

    def _ending(self, run: Run, entry: Any) -> Ending | None:
        """Return why a run is not to be sent again; None if it is."""
        if entry is None:
            return RunState.SKIPPED, REMOVED
        wishes = wishes_of(entry)
        misfire = wishes.on_misfire(self._settings)
        if run.published_for is not None or run.state is RunState.REFUSED:
            # What is claimed is an attempt that is still to be made, as far as is known.
            made = run.attempt - (run.state is RunState.CLAIMED)
            if made >= self._settings.max_attempts:
                return RunState.FAILED, f"gave up after {made} attempts"
            # What was sent in time once is late by accident: only a grace that was asked
            # for ends it, not the one that tells a misfire.
            if wishes.grace is None and self._settings.grace is None:
                return None
        else:
            misfire = misfire.within(deadline_of(entry, self._deadline))
        if misfire.too_late(run.due_at, self._now()):
            return RunState.SKIPPED, misfire.lateness
        return None

    def _tell_again(self, term: Term, run: Run) -> None:
        many = run.next_attempt >= MANY_ATTEMPTS
        logger.log(
            logging.WARNING if many else logging.INFO,
            "lease %r: %s of %r, due %s, was %s under epoch %s and is sent again under epoch "
            "%d, attempt %d",
            term.name,
            run.id,
            run.entry,
            run.due_at.isoformat(),
            run.state.value,
            run.epoch,
            term.epoch,
            run.next_attempt,
            extra={"action": "run-again", **fields(term, run)},
        )


def _countdown(entry: Any) -> float:
    """Return the seconds that an entry's message waits before it may run."""
    countdown = (getattr(entry, "options", None) or {}).get("countdown")
    # Of anything else Celery makes no message, which is told when the run is sent again.
    return float(countdown) if isinstance(countdown, Real) else 0.0
