"""From a claim to a message: publish, mark, and keep what the broker did not take.

A run is claimed before it is published and marked after. A crash between leaves it
claimed, and whoever leads then sends it under the same id; a broker that is away leaves
it claimed as well, and this leader sends it when the broker is back.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from celery_lease.clock import rising
from celery_lease.elector import Elector
from celery_lease.errors import StoreError
from celery_lease.interrupts import put_off
from celery_lease.lease import Term
from celery_lease.occurrence import Occurrence, Run, RunState
from celery_lease.publish import FLUSH, Flushed, Remedy, Undelivered, Unsent
from celery_lease.signals import announce_skipped
from celery_lease.stores.ledger import SQLLedger

__all__ = ["BATCH", "REMOVED", "Dispatcher", "Ending", "fields"]

logger = logging.getLogger("celery_lease.scheduler")

#: Runs in one claim, and in one round of recovery: what keeps the loop away for less
#: than half a second.
BATCH = 500
#: Seconds after which no further flush is begun: what is left is for the next tick.
SENDING = 0.25
#: Seconds until a broker that was away is tried again, at first and at most.
FIRST_PAUSE, LAST_PAUSE = 1.0, 5.0
#: Seconds at most until a message is tried again whose making raised an error.
PATIENCE = 60.0
#: Why a run is skipped whose entry is gone.
REMOVED = "entry removed"


#: How a run ends that is not sent, and why, in words.
Ending = tuple[RunState, str]


class Dispatcher:
    """Sends claimed runs.

    Args:
        ledger: Where the runs are.
        elector: Knows whether we may send.
        flush: Hands the broker the messages of some runs, and reports those that have none.
            Raises Undelivered.
        max_attempts: How many times a message is turned away before its run fails.
    """

    def __init__(
        self,
        ledger: SQLLedger,
        elector: Elector,
        flush: Callable[[Term, Sequence[Run]], Flushed],
        *,
        max_attempts: int,
    ) -> None:
        self.ledger = ledger
        self.elector = elector
        self._flush = flush
        self._max_attempts = max_attempts
        #: Runs that this term claimed and the broker does not have, by entry.
        self.waiting: dict[str, list[Run]] = {}
        #: Ids that the broker has, while the database could not be told.
        self._unmarked: list[str] = []
        #: How many times the broker turned a run's message away, once it was sent alone.
        self._suspects: dict[str, int] = {}
        #: Entries whose last message the broker turned away for what it is.
        self._unwanted: set[str] = set()
        #: Runs whose message could not be made: how many times, and when to try again.
        self._unmade: dict[str, tuple[int, float]] = {}
        self._away = False
        #: How many flushes in a row the broker did not take.
        self._turned_down = 0
        self._retry_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether something waits to be sent or marked."""
        return bool(self.waiting or self._unmarked)

    @property
    def retry_in(self) -> float:
        """Seconds until what waits should be tried again."""
        if not self.waiting and self._unmarked:
            return FIRST_PAUSE
        at = self._retry_at
        if self._unmade:
            waiting = (each for runs in self.waiting.values() for each in runs)
            at = max(at, min((self._not_before(each) for each in waiting), default=at))
        return max(0.0, at - self.elector.clock.now())

    def forget(self) -> None:
        """Forget what waits: the ledger knows it, and has to be read again."""
        self.waiting.clear()
        self._suspects.clear()
        self._unwanted.clear()
        self._unmade.clear()
        self._unmarked.clear()

    def send(self, term: Term, runs: Sequence[Run]) -> None:
        """Publish runs that this term claimed, and mark them. What cannot be sent waits.

        Raises:
            LeaseLost: The term is over. Its claimed runs are the next leader's.
        """
        if self._away and self.retry_in > 0:
            self._postpone(term, runs)
            return
        # A plain run that was sent and not marked would be sent again by the next leader.
        with put_off():
            self._send(term, runs)

    def _send(self, term: Term, runs: Sequence[Run]) -> None:
        sent: list[str] = []
        until = self.elector.clock.now() + SENDING
        left = list(runs)
        try:
            while left:
                self.elector.check()
                chunk = self._next_flush(left)
                left = left[len(chunk) :]
                try:
                    flushed = self._flush(term, chunk)
                except Undelivered as error:
                    self._note_sent([run for run in chunk if run.id in error.taken], sent)
                    chunk = [run for run in chunk if run.id not in error.taken]
                    if not error.turned_away:
                        self._broker_away(term, [*chunk, *left], error)
                        return
                    self._suspect(term, chunk, error)
                else:
                    self._away, self._turned_down = False, 0
                    left = [run for run in chunk if run.id in flushed.unreached] + left
                    self._flushed(term, chunk, flushed, sent)
                if self.elector.clock.now() > until:
                    break
            self._postpone_ahead(term, left)
        finally:
            self._mark(term, sent)

    def _flushed(
        self, term: Term, chunk: Sequence[Run], flushed: Flushed, sent: list[str]
    ) -> None:
        """Take note of what was sent, and then deal with what was not.

        In this order: to end a run is a write to the database, which may fail us.
        """
        done = [run for run in chunk if run.id not in flushed.unreached]
        self._note_sent([run for run in done if run.id not in flushed.unsent], sent)
        for run in done:
            if run.id in flushed.unsent:
                self._not_made(term, run, flushed.unsent[run.id])

    def _note_sent(self, runs: Sequence[Run], sent: list[str]) -> None:
        for run in runs:
            sent.append(run.id)
            self._suspects.pop(run.id, None)
            self._unmade.pop(run.id, None)
            self._unwanted.discard(run.entry)

    def resend(self, term: Term, over: Callable[[Run], Ending | None]) -> None:
        """Try again what waits, if it is time to.

        Args:
            term: Our term.
            over: Returns why a run is not to be sent any more; None if it is.
        """
        self._mark(term, [])
        if self.waiting and self.retry_in <= 0:
            now = self.elector.clock.now()
            waiting = [each for runs in self.waiting.values() for each in runs]
            self.waiting = {}
            runs: list[Run] = []
            for run in waiting:
                if self._not_before(run) > now:
                    self._postpone(term, [run])
                else:
                    runs.append(run)
            self._postpone(term, runs[BATCH:])
            self.send(term, self.end_some(term, runs[:BATCH], over))

    def end_some(
        self, term: Term, runs: Sequence[Run], over: Callable[[Run], Ending | None]
    ) -> list[Run]:
        """End those of *runs* that are not to be sent any more; return the others."""
        endings: dict[Ending, list[Run]] = defaultdict(list)
        others = []
        for run in runs:
            ending = over(run)
            if ending is None:
                others.append(run)
            else:
                endings[ending].append(run)
        for (state, reason), some in endings.items():
            self.end(term, some, state, reason)
        return others

    def end(self, term: Term, runs: Sequence[Run], state: RunState, reason: str) -> None:
        """End runs for good, and tell the log and, of skipped ones, the signal's receivers.

        Args:
            term: Our term.
            runs: The runs.
            state: SKIPPED or FAILED.
            reason: Why, in words.
        """
        self.ledger.end(term, runs, state, reason)
        for run in runs:
            self._suspects.pop(run.id, None)
            logger.log(
                logging.ERROR if state is RunState.FAILED else logging.WARNING,
                "lease %r: %s of %r, due %s, is %s: %s",
                term.name,
                run.id,
                run.entry,
                run.due_at.isoformat(),
                state.value,
                reason,
                extra={"action": f"run-{state.value}", **fields(term, run)},
            )
            if state is RunState.SKIPPED:
                occurrence = Occurrence(
                    lease=term.name, entry=run.entry, due_at=run.due_at, attempt=run.attempt
                )
                announce_skipped(occurrence, reason=reason, count=1, until=run.due_at)

    def _next_flush(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Return the first of *runs*; what was turned away in company goes out alone."""
        for count, run in enumerate(runs[:FLUSH]):
            if run.id in self._suspects or run.entry in self._unwanted:
                return runs[: max(count, 1)]
        return runs[:FLUSH]

    def _suspect(self, term: Term, runs: Sequence[Run], error: Undelivered) -> None:
        """Keep a flush of which the broker turned something away, each to be sent alone."""
        for run in runs:
            self._suspects.setdefault(run.id, 0)
        if len(runs) == 1 and error.lasting:
            # It was alone: it is to blame, and so will be the next one of its entry.
            (run,) = runs
            self._unwanted.add(run.entry)
            self._suspects[run.id] += 1
            if self._suspects[run.id] >= self._max_attempts:
                self._fail(term, run, str(error))
                return
        self._wait(term, runs, error)

    def _broker_away(self, term: Term, runs: Sequence[Run], error: Undelivered) -> None:
        """Keep what is left; what was in the flush may be with the broker, or not."""
        self._away = True
        self._wait(term, runs, error)

    def _wait(self, term: Term, runs: Sequence[Run], error: Undelivered) -> None:
        if not runs:
            return
        delay = rising(FIRST_PAUSE, self._turned_down, LAST_PAUSE)
        self._turned_down += 1
        self._retry_at = self.elector.clock.now() + delay
        self._postpone(term, runs)
        logger.warning(
            "lease %r: the broker did not take messages under epoch %d (%s); %d runs stay "
            "claimed and are sent again in %.0f s",
            term.name,
            term.epoch,
            error,
            len(runs),
            delay,
            extra={"action": "broker-away", "lease_name": term.name, "lease_epoch": term.epoch},
        )

    def _not_made(self, term: Term, run: Run, unsent: Unsent) -> None:
        """End a run that can never have a message; try any other again, ever less often."""
        times, _ = self._unmade.pop(run.id, (0, 0.0))
        if unsent.remedy is Remedy.SKIP:
            self.end(term, [run], RunState.SKIPPED, REMOVED)
            return
        if unsent.remedy is Remedy.FAIL:
            self._fail(term, run, unsent.reason)
            return
        delay = rising(FIRST_PAUSE, times, PATIENCE)
        self._unmade[run.id] = times + 1, self.elector.clock.now() + delay
        self._postpone(term, [run])
        logger.warning(
            "lease %r: no message can be made now for %s of %r, due %s (%s); it stays claimed "
            "and is tried again in %.0f s",
            term.name,
            run.id,
            run.entry,
            run.due_at.isoformat(),
            unsent.reason,
            delay,
            extra={"action": "run-not-made", **fields(term, run)},
        )

    def _not_before(self, run: Run) -> float:
        """Return when to try a run again, by the local clock."""
        return self._unmade.get(run.id, (0, 0.0))[1]

    def _postpone(self, term: Term, runs: Sequence[Run]) -> None:
        for run in runs:
            claimed = replace(run, epoch=term.epoch, term=term.uuid)
            self.waiting.setdefault(run.entry, []).append(claimed)

    def _postpone_ahead(self, term: Term, runs: Sequence[Run]) -> None:
        """Have runs that were not tried wait in front of those that were turned away."""
        behind, self.waiting = self.waiting, {}
        self._postpone(term, runs)
        for entry, others in behind.items():
            self.waiting.setdefault(entry, []).extend(others)

    def _mark(self, term: Term, ids: list[str]) -> None:
        ids, self._unmarked = self._unmarked + ids, []
        if not ids:
            return
        try:
            self.ledger.mark(term, ids)
        except StoreError as error:
            self._unmarked = ids
            logger.warning(
                "lease %r: %d published runs are not marked yet: %s",
                term.name,
                len(ids),
                error,
                extra={
                    "action": "runs-unmarked",
                    "lease_name": term.name,
                    "lease_epoch": term.epoch,
                },
            )

    def _fail(self, term: Term, run: Run, reason: str) -> None:
        self.end(term, [run], RunState.FAILED, f"not sent: {reason}")


def fields(term: Term, run: Run) -> dict[str, Any]:
    """Return the ``extra`` of a log line about a run."""
    return {
        "lease_name": term.name,
        "lease_epoch": term.epoch,
        "lease_run": run.id,
        "lease_entry": run.entry,
    }
