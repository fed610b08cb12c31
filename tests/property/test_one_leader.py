"""At most one trusted term, and epochs that only rise: whatever happens, in whatever order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from celery_lease.elector import Elector
from celery_lease.errors import LeaseLost, StoreContention, StoreUnavailable
from celery_lease.lease import Holder
from celery_lease.settings import Settings
from tests.leases import NAME
from tests.memory import ManualClock, MemoryStore

SETTINGS = Settings(
    ttl=30, renew_interval=10, margin=3, retry_interval=5, stall_timeout=20, name=NAME
)
NODES = 3

nodes = st.integers(0, NODES - 1)
#: Times that matter: a moment, an interval, just in and just after a window, a suspended night.
spans = st.sampled_from([0.1, 1.0, 5.0, 9.9, 13.0, 26.9, 27.1, 29.9, 30.0, 45.0])


@dataclass(frozen=True)
class Fault:
    """What happens to the first request of a verb, on its way there or back."""

    side: str
    kind: str
    seconds: float
    #: Who else acts meanwhile.
    node: int


faults = st.none() | st.builds(
    Fault,
    side=st.sampled_from(["before", "after"]),
    kind=st.sampled_from(["slow", "slow", "lost", "contended"]),
    seconds=spans,
    node=nodes,
)


class DriftingClock:
    """A local clock that goes a little faster or slower than the database's."""

    def __init__(self, clock: ManualClock, rate: float) -> None:
        self.clock = clock
        self.rate = rate

    def now(self) -> float:
        """Return the time."""
        return self.clock.now() * self.rate


class Node(Elector):
    """A process whose renewing threads are rules of the machine, old ones too."""

    def __init__(self, store: MemoryStore, number: int, incarnation: int, rate: float) -> None:
        self.tenures = []
        holder = Holder(host=f"node{number}", pid=incarnation, nonce=str(incarnation))
        clock = DriftingClock(store.clock, rate)
        super().__init__(store, SETTINGS, holder=holder, clock=clock)

    def _start(self, tenure) -> None:
        self.tenures.append(tenure)


class Beats(RuleBasedStateMachine):
    """Some beats on one database, a network that loses and delays, and an operator."""

    @initialize(
        # The margin is a tenth of the ttl: clocks that are 4 % off are well within it.
        rates=st.lists(st.sampled_from([0.96, 1.0, 1.04]), min_size=NODES, max_size=NODES)
    )
    def start(self, rates: list[float]) -> None:
        """Start the beats."""
        self.store = MemoryStore()
        self.store.ensure(NAME)
        self.clock = self.store.clock
        self.rates = rates
        self.incarnations = 0
        self.acting: set[int] = set()
        self.beats = [self._new(number) for number in range(NODES)]
        self.highest = 0
        self.fence = 0
        self.published: list[tuple[int, str]] = []

    def _new(self, number: int) -> Node:
        self.incarnations += 1
        return Node(self.store, number, self.incarnations, self.rates[number])

    # --- what beats do

    @rule(node=nodes, verb=st.sampled_from(["acquire", "floor", "raise_fence"]), fault=faults)
    def campaign(self, node: int, verb: str, fault: Fault | None) -> None:
        """A loop passes."""
        self._act(node, self.beats[node].campaign, verb, fault)

    @rule(node=nodes, which=st.sampled_from([0, 0, 0, 1, 2]), fault=faults)
    def wake_thread(self, node: int, which: int, fault: Fault | None) -> None:
        """A renewing thread wakes up, perhaps one of an older term."""
        beat = self.beats[node]
        if beat.tenures:
            tenure = beat.tenures[-1 - which % len(beat.tenures)]
            self._act(node, lambda: beat._step(tenure), "renew", fault)

    @rule(node=nodes)
    def publish(self, node: int) -> None:
        """The check before something goes on the wire."""
        try:
            term = self.beats[node].check()
        except LeaseLost:
            return
        self.beats[node].progress(5)
        self.published.append((term.epoch, term.uuid))

    @rule(node=nodes, fault=faults)
    def close(self, node: int, fault: Fault | None) -> None:
        """A graceful stop, and a new process in its place."""
        self._act(node, self.beats[node].close, "release", fault)
        self.beats[node] = self._new(node)

    @rule(node=nodes)
    def kill(self, node: int) -> None:
        """A crash: nothing is released."""
        self.beats[node] = self._new(node)

    @rule(node=nodes)
    def concede(self, node: int) -> None:
        """The ledger said that somebody else leads."""
        self.beats[node].concede("refused")

    # --- what happens to them

    @rule(seconds=spans)
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.clock.advance(seconds)

    @rule(by=st.integers(1, 5))
    def operator_raises(self, by: int) -> None:
        """``celery lease raise``: no term may be trusted through it for longer than a renewal."""
        lease = self.store._seen(NAME)
        if not any(each.leading for each in self.beats):
            self.store.raise_epoch(NAME, lease.epoch + by)

    def _act(
        self, node: int, action: Callable[[], object], verb: str, fault: Fault | None
    ) -> None:
        if fault is not None:
            getattr(self.store, fault.side)[verb] = lambda: self._strike(fault)
        self.acting.add(node)
        try:
            action()
        finally:
            self.acting.discard(node)
            self._quiet()

    def _strike(self, fault: Fault) -> None:
        self._quiet()
        self.clock.advance(fault.seconds if fault.kind == "slow" else 1.0)
        self.check_all()
        if fault.node not in self.acting:  # that one waits for its own answer
            self._act(fault.node, self.beats[fault.node].campaign, "acquire", None)
        self.check_all()
        if fault.kind == "lost":
            raise StoreUnavailable("away")
        if fault.kind == "contended" and fault.side == "before":
            raise StoreContention("a guard is under way")

    def _quiet(self) -> None:
        self.store.before.clear()
        self.store.after.clear()

    # --- what must hold

    @invariant()
    def check_all(self) -> None:
        """Also while somebody waits for an answer."""
        if hasattr(self, "store"):
            self.at_most_one_term_is_trusted()
            self.a_trusted_term_is_what_the_database_shows()
            self.epochs_only_rise()
            self.no_epoch_has_two_terms()

    def at_most_one_term_is_trusted(self) -> None:
        """Two leaders at one moment, by true time, is what a lease is there to prevent."""
        leading = [each.term for each in self.beats if each.term]
        assert len(leading) <= 1, leading

    def a_trusted_term_is_what_the_database_shows(self) -> None:
        """Trust that outlives the lease, or comes before the fence, begins two leaders."""
        row, fence = self.store.rows[NAME], self.store.fences[NAME]
        for term in (each.term for each in self.beats if each.term):
            assert (row.epoch, row.term) == (term.epoch, term.uuid)
            assert (fence.epoch, fence.term) == (term.epoch, term.uuid)
            assert row.expires_at > self.clock.now()

    def epochs_only_rise(self) -> None:
        """In the lease and in the fence, which never leads."""
        epoch, fence = self.store.rows[NAME].epoch, self.store.fences[NAME].epoch
        assert epoch >= self.highest
        assert epoch >= fence >= self.fence
        self.highest, self.fence = epoch, fence

    def no_epoch_has_two_terms(self) -> None:
        """A stamp tells one term by its epoch, as long as the database keeps its commits."""
        terms = set(self.published)
        assert len({epoch for epoch, _ in terms}) == len(terms)


Beats.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestBeats = Beats.TestCase


@pytest.mark.slow
class TestBeatsAtLength(Beats.TestCase):
    """The same with many more examples."""

    settings = settings(Beats.TestCase.settings, max_examples=10_000)


def test_a_margin_that_is_too_small_for_the_clocks_is_found():
    """The machine would see two leaders: without a margin, a slow clock trusts too long."""
    clock = ManualClock()
    store = MemoryStore(clock)
    store.ensure(NAME)
    reckless = dataclasses.replace(SETTINGS, margin=0.001)
    slow = Node(store, 0, 1, rate=0.96)
    slow.settings = reckless
    other = Node(store, 1, 2, rate=1.0)
    slow.campaign()
    clock.advance(30)

    assert other.campaign()
    assert slow.leading
