"""From a claim to a message: publish, mark, and whatever was left on the way.

A run is claimed before it is published and marked after. A crash between leaves it
claimed, and whoever leads then sends it under the same id; a broker that is away leaves
it claimed as well, and this leader sends it when the broker is back.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from celery_lease.elector import Elector
from celery_lease.entry import PLAIN, Wishes
from celery_lease.errors import StoreError
from celery_lease.lease import Term
from celery_lease.occurrence import Run, RunState
from celery_lease.publish import FLUSH, Undelivered
from celery_lease.settings import Settings
from celery_lease.stores.ledger import SQLLedger

__all__ = ["BATCH", "Dispatcher"]

logger = logging.getLogger("celery_lease.scheduler")

#: Runs in one claim, and in one round of recovery: what keeps the loop away for less
#: than half a second.
BATCH = 500
#: Seconds until a broker that was away is tried again, at first and at most.
BACKOFF = (1.0, 5.0)
#: An attempt from which on it is worth a warning.
MANY_ATTEMPTS = 3


class Dispatcher:
    """Sends claimed runs, and claims again what was left or refused.

    Args:
        ledger: Where the runs are.
        elector: Knows whether we may send.
        settings: Limits and durations.
        find: Returns the entry of a name as it is now; None where there is none.
        flush: Gives the broker the messages of some runs; returns why those that can
            have none cannot, by id. Raises Undelivered.
        is_fenced: Returns whether an entry's task is fenced.
        now: Returns the instant, in UTC.
    """

    def __init__(
        self,
        ledger: SQLLedger,
        elector: Elector,
        settings: Settings,
        *,
        find: Callable[[str], Any],
        flush: Callable[[Term, Sequence[Run]], dict[str, str]],
        is_fenced: Callable[[Any], bool],
        now: Callable[[], datetime],
    ) -> None:
        self.ledger = ledger
        self.elector = elector
        self.settings = settings
        self._find = find
        self._flush = flush
        self._is_fenced = is_fenced
        self._now = now
        #: Runs that this term claimed and the broker does not have, by entry.
        self.waiting: dict[str, list[Run]] = {}
        #: Ids that the broker has, while the database could not be told.
        self._unmarked: list[str] = []
        self._suspects: dict[str, int] = {}
        self._delay = 0.0
        self._retry_at = 0.0

    # --- sending ------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something waits to be sent or marked."""
        return bool(self.waiting or self._unmarked)

    @property
    def retry_in(self) -> float:
        """Seconds until what waits should be tried again."""
        return max(0.0, self._retry_at - self.elector.clock.now())

    def forget(self) -> None:
        """Forget what waits: the ledger knows it, and has to be read again."""
        self.waiting.clear()
        self._suspects.clear()
        self._unmarked.clear()

    def send(self, term: Term, runs: Sequence[Run]) -> None:
        """Publish runs that this term claimed, and mark them. What cannot be sent waits.

        Raises:
            LeaseLost: The term is over. Its claimed runs are the next leader's.
        """
        if self.waiting and self.retry_in > 0:
            self._postpone(term, runs)
            return
        sent: list[str] = []
        left = list(runs)
        try:
            for chunk in self._flushes(runs):
                self.elector.check()
                failed = self._flush(term, chunk)
                del left[: len(chunk)]
                sent += [each.id for each in chunk if each.id not in failed]
                self._settle_failed(term, chunk, failed)
            self._delay = 0.0
        except Undelivered as error:
            self._broker_away(term, left, error)
        finally:
            self._mark(term, sent)

    def resend(self, term: Term) -> None:
        """Try again what waits, if it is time to."""
        self._mark(term, [])
        if self.waiting and self.retry_in <= 0:
            runs = [each for runs in self.waiting.values() for each in runs]
            self.waiting = {}
            self.send(term, runs[:BATCH])
            self._postpone(term, runs[BATCH:])

    def _flushes(self, runs: Sequence[Run]) -> Iterator[Sequence[Run]]:
        """Yield runs in flushes; what was turned away in company goes out alone."""
        start = 0
        while start < len(runs):
            end = start
            while end < min(start + FLUSH, len(runs)) and runs[end].id not in self._suspects:
                end += 1
            yield runs[start : max(end, start + 1)]
            start = max(end, start + 1)

    def _broker_away(self, term: Term, left: list[Run], error: Undelivered) -> None:
        """Keep what is left; its first flush may be with the broker, or not."""
        flushed = left[:1] if left[0].id in self._suspects else left[:FLUSH]
        if error.suspicious:
            for each in flushed:
                self._suspects[each.id] = self._suspects.get(each.id, -1) + 1
            guilty = [e for e in left if self._suspects.get(e.id, 0) >= self.settings.max_attempts]
            self._settle_failed(term, guilty, dict.fromkeys((e.id for e in guilty), str(error)))
            left = [each for each in left if each not in guilty]
        self._delay = min(max(self._delay * 2, BACKOFF[0]), BACKOFF[1])
        self._retry_at = self.elector.clock.now() + self._delay
        self._postpone(term, left)
        logger.warning(
            "lease %r: the broker did not take messages under epoch %d (%s); %d runs stay "
            "claimed and are sent again in %.0f s",
            term.name,
            term.epoch,
            error,
            len(left),
            self._delay,
            extra={"action": "broker-away", "lease_name": term.name, "lease_epoch": term.epoch},
        )

    def _postpone(self, term: Term, runs: Sequence[Run]) -> None:
        for run in runs:
            claimed = replace(run, epoch=term.epoch, term=term.uuid)
            self.waiting.setdefault(run.entry, []).append(claimed)

    def _mark(self, term: Term, ids: list[str]) -> None:
        ids, self._unmarked = self._unmarked + ids, []
        if not ids:
            return
        try:
            self.ledger.mark(term, ids)
        except StoreError as error:
            self._unmarked = ids
            logger.warning(
                "lease %r: %d published runs not marked yet: %s", term.name, len(ids), error
            )

    def _settle_failed(self, term: Term, runs: Sequence[Run], failed: dict[str, str]) -> None:
        for run in runs:
            if run.id in failed:
                self._end(term, [run], RunState.FAILED, f"not sent: {failed[run.id]}")

    # --- recovery -----------------------------------------------------------------------

    def recover(self, term: Term, *, own: bool) -> bool:
        """Do one bounded round: close what is settled, send again what was left.

        Args:
            term: Our term.
            own: Whether claims of this very term may have been left too, because what
                became of them was not known.

        Returns:
            Whether there may be more to do at once.
        """
        closed = self.ledger.close_settled(term, limit=BATCH)
        left = self.ledger.to_recover(term, limit=BATCH, own=own)
        lost = self._lost(term, BATCH - len(left))
        self._take_up(term, left + lost)
        return len(left) + len(lost) >= BATCH or closed >= BATCH

    def _lost(self, term: Term, limit: int) -> list[Run]:
        """Return published runs whose worker seems to have died with them."""
        if limit <= 0:
            return []
        age = self.settings.redispatch_after
        found = self.ledger.unsettled(term, age=age, limit=limit)
        now = self._now()
        return [each for each in found if self._given(each.entry, now, each.published_at) > age]

    def retry_lost(self, term: Term, wishes: dict[str, float]) -> None:
        """Send again runs that are lost even though their epoch is the current one.

        Args:
            term: Our term.
            wishes: Entries that ask for it, with the seconds after which.
        """
        now = self._now()
        names = list(wishes)
        for at in range(0, len(names), BATCH):
            some = names[at : at + BATCH]
            age = min(wishes[each] for each in some)
            found = self.ledger.unsettled(term, age=age, limit=BATCH, entries=some)
            late = [
                e for e in found if self._given(e.entry, now, e.published_at) > wishes[e.entry]
            ]
            self._take_up(term, late)

    def _given(self, name: str, now: datetime, published_at: datetime | None) -> float:
        """Return how many seconds a message had, its countdown left out."""
        entry = self._find(name)
        countdown = (getattr(entry, "options", None) or {}).get("countdown") or 0
        return (now - published_at).total_seconds() - countdown if published_at else 0.0

    def _take_up(self, term: Term, runs: Sequence[Run]) -> None:
        """Decide about runs that were left, claim again those worth it, and send them."""
        now = self._now()
        ours: list[Run] = []
        again: list[Run] = []
        endings: dict[tuple[RunState, str], list[Run]] = defaultdict(list)
        for run in runs:
            entry = self._find(run.entry)
            ending = self._ending(run, entry, now)
            if ending is not None:
                endings[ending].append(run)
            elif (run.state, run.epoch, run.term) == (RunState.CLAIMED, term.epoch, term.uuid):
                ours.append(run)
            else:
                again.append(replace(run, fenced=self._is_fenced(entry)))
        for (state, reason), some in endings.items():
            self._end(term, some, state, reason)
        got = self.ledger.reclaim(term, again)
        for run in again:
            if run.id in got:
                self._tell_again(term, run)
                ours.append(replace(run, attempt=run.attempt + 1))
        if ours:
            self.send(term, ours)

    def _ending(self, run: Run, entry: Any, now: datetime) -> tuple[RunState, str] | None:
        """Return why a run is not to be sent again; None if it is."""
        if entry is None:
            return RunState.SKIPPED, "entry removed"
        wishes: Wishes = getattr(entry, "wishes", PLAIN)
        misfire = wishes.on_misfire(self.settings)
        sent = run.published_at is not None or run.state is RunState.REFUSED
        if sent and run.attempt >= self.settings.max_attempts:
            return RunState.FAILED, f"gave up after {run.attempt} attempts"
        # What was sent in time once is late by accident: only a grace that was asked
        # for ends it, not the one that tells a misfire.
        asked = wishes.grace if wishes.grace is not None else self.settings.grace
        if (not sent or asked is not None) and misfire.too_late(run.due_at, now):
            return RunState.SKIPPED, f"more than {misfire.grace:g} s late"
        return None

    def _end(self, term: Term, runs: Sequence[Run], state: RunState, reason: str) -> None:
        self.ledger.end(term, runs, state, reason)
        for run in runs:
            logger.log(
                logging.ERROR if state is RunState.FAILED else logging.WARNING,
                "lease %r: %s of %r, due %s, is %s: %s",
                term.name,
                run.id,
                run.entry,
                run.due_at.isoformat(),
                state.value,
                reason,
                extra={"action": f"run-{state.value}", **_fields(term, run)},
            )

    def _tell_again(self, term: Term, run: Run) -> None:
        many = run.attempt + 1 >= MANY_ATTEMPTS
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
            run.attempt + 1,
            extra={"action": "run-again", **_fields(term, run)},
        )


def _fields(term: Term, run: Run) -> dict[str, Any]:
    return {
        "lease_name": term.name,
        "lease_epoch": term.epoch,
        "lease_run": run.id,
        "lease_entry": run.entry,
    }
