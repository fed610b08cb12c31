"""What a stamped task sends: it inherits the stamp, settles itself, and is never lost or hung."""

from __future__ import annotations

import contextlib
from datetime import datetime, timezone
from typing import Any

import pytest
import sqlalchemy as sa
from billiard.exceptions import WorkerLostError
from celery import VERSION as celery_version  # noqa: N811 - Celery's name
from celery import Task, chain, chord, group, signals
from celery.app.task import Context

from celery_lease import FencedTask, Occurrence, StoreUnavailable
from celery_lease.execution import fence_store
from celery_lease.testing import hold, run
from tests.integration.workshop import Workshop
from tests.services.base import wait_until


def stamps_of(workshop: Workshop, name: str) -> dict[str, Any]:
    """Return the stamps of the last message of a task."""
    return [stamps for each, _, stamps in workshop.published if each == name][-1]


def id_of(workshop: Workshop, name: str) -> str:
    """Return the id of the last message of a task."""
    return [task_id for each, task_id, _ in workshop.published if each == name][-1]


def published(workshop: Workshop, name: str, times: int = 1) -> str:
    """Wait until a task was published so many times; return its last id."""
    wait_until(lambda: sum(each == name for each, _, _ in workshop.published) >= times)
    return id_of(workshop, name)


def plain_run(workshop: Workshop) -> dict[str, Any]:
    """Record the run of a plain task; return the options of its message."""
    occurrence = Occurrence(lease="celery", entry="plain", due_at=datetime.now(timezone.utc))
    workshop.lease.record(occurrence, fenced=False)
    return workshop.lease.options(occurrence.run_id)


def test_everything_that_a_stamped_task_sends_inherits_its_stamp(  # noqa: C901 - many small tasks
    workshop: Workshop,
) -> None:
    """Nested calls, callbacks, chains, groups, a chord's header and body, plain tasks too."""

    @workshop.plain(name="plain_child")
    def plain_child() -> None:
        grandchild.delay()

    @workshop.task(name="grandchild")
    def grandchild(self: FencedTask) -> None:
        workshop.write(self, "grandchild")

    @workshop.plain(name="linked")
    def linked(value: Any) -> None:
        pass

    @workshop.plain(name="member")
    def member() -> int:
        return 1

    @workshop.plain(name="body")
    def body(values: list[int]) -> None:
        pass

    @workshop.plain(name="first")
    def first() -> None:
        pass

    @workshop.plain(name="second")
    def second() -> None:
        pass

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        plain_child.delay()
        chord([member.s(), member.s()], body.s()).delay()
        chain(first.si(), second.si()).delay()
        workshop.app.send_task("first")

    names = ("plain_child", "grandchild", "linked", "member", "body", "first", "second")
    with workshop.worker():
        result = workshop.lease.dispatch(parent, link=linked.s())
        expected = workshop.lease.stamp(result.id).stamps()
        for name in names:
            workshop.wait(published(workshop, name))
    for name in names:
        assert stamps_of(workshop, name) == expected, name
    assert workshop.notes() == [("grandchild", 1)]
    assert workshop.lease.outcome(id_of(workshop, "grandchild")) == "committed"


def test_the_users_own_stamps_travel_beside_ours(workshop: Workshop) -> None:
    """Merged on the way out, left alone on the way on."""

    @workshop.plain(name="child")
    def child() -> None:
        pass

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        child.apply_async(stamped_headers=["colour"], colour="green")

    with workshop.worker():
        result = workshop.lease.dispatch(parent, stamped_headers=["colour"], colour="red")
        workshop.wait(published(workshop, "child"))
    ours = workshop.lease.stamp(result.id).stamps()
    assert stamps_of(workshop, "parent") == {"colour": "red", **ours}
    assert stamps_of(workshop, "child") == {"colour": "green", **ours}


def test_a_task_that_must_not_inherit_runs_unfenced(workshop: Workshop) -> None:
    """``inherit_epoch = False``: a clean-up, say, that is right under any epoch."""
    seen: list[int | None] = []

    @workshop.task(name="cleanup", inherit_epoch=False)
    def cleanup(self: FencedTask) -> None:
        seen.append(self.epoch)

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        cleanup.delay()

    with workshop.worker():
        workshop.lease.dispatch(parent)
        workshop.wait(published(workshop, "cleanup"))
    assert seen == [None]
    assert stamps_of(workshop, "cleanup") == {}


def test_a_stamp_of_another_lease_is_left_alone(workshop: Workshop) -> None:
    """Whoever stamps a message by hand knows why."""

    @workshop.plain(name="foreign")
    def foreign() -> None:
        pass

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        foreign.apply_async(
            stamped_headers=["lease_name", "lease_epoch", "lease_term", "lease_run"],
            lease_name="other",
            lease_epoch=9,
            lease_term="t",
            lease_run="r",
        )

    with workshop.worker():
        workshop.lease.dispatch(parent)
        published(workshop, "foreign")
    assert stamps_of(workshop, "foreign")["lease_name"] == "other"


def test_an_unstamped_task_in_the_same_process_stays_clean(workshop: Workshop) -> None:
    """Nothing leaks from one task to the next."""

    @workshop.plain(name="child")
    def child() -> None:
        pass

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        child.delay()

    with workshop.worker():
        workshop.wait(workshop.lease.dispatch(parent).id)
        workshop.wait(parent.delay().id)
        published(workshop, "child", times=2)
    assert stamps_of(workshop, "child") == {}


def test_a_fenced_child_that_goes_stale_before_its_run_is_settled_ends(
    workshop: Workshop,
) -> None:
    """Its run is dispatched again and sends children of its own, so this one must go."""

    @workshop.task(name="child")
    def child(self: FencedTask) -> None:
        workshop.write(self, "child")

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        child.apply_async(countdown=0.3)
        workshop.lease.depose()
        workshop.write(self, "parent")

    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        assert workshop.wait(result.id) == "IGNORED"
        child_id = published(workshop, "child")
        assert workshop.wait(child_id) == "IGNORED"
    assert workshop.notes() == []
    assert workshop.lease.run_state(result.id) == "refused"
    # A child's id belongs to one attempt: whoever waits for it has to hear of an end.
    assert workshop.result_state(child_id) == "FAILURE"
    assert "stale" in str(workshop.app.AsyncResult(child_id).result)


@pytest.mark.parametrize("takeovers", [1, 2])
def test_what_follows_a_settled_run_is_carried_on_under_the_new_epoch(
    workshop: Workshop, takeovers: int
) -> None:
    """Its run is not dispatched again, so it would be lost: once and twice taken over."""
    lease = workshop.lease

    @workshop.task(name="follow_up")
    def follow_up(self: FencedTask, value: str) -> None:
        nonlocal lease
        if self.epoch <= takeovers:
            lease = lease.depose()
        workshop.write(self, value)

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> str:
        workshop.write(self, "parent")
        return "follow-up"

    with workshop.worker():
        result = workshop.lease.dispatch(parent, link=follow_up.s())
        child_id = published(workshop, "follow_up", times=1 + takeovers)
        assert workshop.wait(child_id, times=1 + takeovers) == "SUCCESS"
    assert len({each for name, each, _ in workshop.published if name == "follow_up"}) == 1
    assert workshop.notes() == [("parent", 1), ("follow-up", 1 + takeovers)]
    assert workshop.lease.outcome(child_id) == "committed"
    assert stamps_of(workshop, "follow_up")["lease_run"] == result.id
    assert stamps_of(workshop, "follow_up")["lease_origin"] == f"1:{workshop.lease.term.uuid}"
    assert workshop.result_state(child_id) == "SUCCESS"


def test_what_follows_a_plain_tasks_run_is_carried_on_too(workshop: Workshop) -> None:
    """Nobody settles a plain task's run, and it is not dispatched again either."""

    @workshop.task(name="child")
    def child(self: FencedTask) -> None:
        workshop.write(self, "child")

    @workshop.plain(name="parent")
    def parent() -> None:
        child.apply_async(ignore_result=True)
        workshop.lease.depose()

    options = plain_run(workshop)
    with workshop.worker():
        parent.apply_async(**options)
        child_id = published(workshop, "child", times=2)
        assert workshop.wait(child_id, times=2) == "SUCCESS"
    assert workshop.notes() == [("child", 2)]
    assert workshop.result_state(child_id) == "PENDING"


def test_what_a_plain_task_calls_eagerly_after_a_takeover_is_done_as_well(
    workshop: Workshop,
) -> None:
    """It has no message that could be carried on, and nobody calls it again."""

    @workshop.task(name="child")
    def child(self: FencedTask) -> None:
        workshop.write(self, "child")

    @workshop.plain(name="parent")
    def parent() -> str:
        return child.apply().state

    result = parent.apply_async(**plain_run(workshop))
    workshop.lease.depose()
    with workshop.worker():
        assert workshop.wait(result.id) == "SUCCESS"
    assert result.get() == "SUCCESS"
    assert workshop.notes() == [("child", 2)]


def test_a_refused_member_does_not_hang_its_chord(workshop: Workshop) -> None:
    """Its part of the chord is returned as a failure."""
    heard: list[str] = []

    @workshop.task(name="member")
    def member(self: FencedTask, depose: bool) -> int:
        if depose:
            workshop.lease.depose()
        workshop.write(self, "member")
        return 1

    @workshop.plain(name="body")
    def body(values: list[int]) -> None:
        heard.append("body")

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> str:
        result = chord([member.s(False), member.s(True)], body.s()).delay()
        self.fence.ticket  # noqa: B018 - fenced
        self.retry(countdown=60, throw=False)
        return result.id

    workshop.app.conf.result_backend = "cache+memory://"
    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        assert workshop.wait(result.id) == "SUCCESS"
        body_id = workshop.app.AsyncResult(result.id).result
        wait_until(lambda: workshop.result_state(body_id) == "FAILURE", timeout=20)
    assert heard == []


def test_a_refused_step_ends_its_chain(workshop: Workshop) -> None:
    """``.get()`` on the last step comes back."""

    @workshop.task(name="step")
    def step(self: FencedTask) -> None:
        workshop.lease.depose()
        workshop.write(self, "step")

    @workshop.plain(name="last")
    def last() -> None:
        pass

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> str:
        last_id = chain(step.si(), last.si()).delay().id
        self.retry(countdown=60, throw=False)
        return last_id

    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        assert workshop.wait(result.id) == "SUCCESS"
        last_id = workshop.app.AsyncResult(result.id).result
        wait_until(lambda: workshop.result_state(last_id) == "FAILURE", timeout=20)


@pytest.mark.parametrize("kind", ["fenced", "plain", "chain", "group", "unfenced"])
def test_a_replaced_task_settles_its_run_once(workshop: Workshop, kind: str) -> None:
    """By the task that takes over the id, or at the replacement where that one cannot."""
    workshop.app.conf.result_backend = "cache+memory://"

    @workshop.task(name="fenced")
    def fenced(self: FencedTask) -> str:
        workshop.write(self, "fenced")
        return "end"

    @workshop.task(name="unfenced", inherit_epoch=False)
    def unfenced(self: FencedTask) -> str:
        return "end"

    @workshop.plain(name="plain")
    def plain() -> str:
        return "end"

    sigs = {
        "fenced": fenced.si,
        "unfenced": unfenced.si,
        "plain": plain.si,
        "chain": lambda: chain(plain.si(), fenced.si()),
        "group": lambda: group(plain.si(), plain.si()),
    }
    seen: list[str | None] = []

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        raise self.replace(sigs[kind]())

    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        workshop.wait(result.id)
        seen.append(workshop.lease.outcome(result.id))
        wait_until(lambda: workshop.result_state(result.id) == "SUCCESS", timeout=20)
    settles_itself = kind in ("fenced", "chain")
    if not settles_itself:
        assert seen == ["committed"]
    assert workshop.lease.outcome(result.id) == "committed"
    assert workshop.notes() == ([("fenced", 1)] if settles_itself else [])
    assert workshop.refusals == []


@pytest.mark.parametrize("kind", ["chain", "chord", "chord of a chain", "chain of a chord"])
@pytest.mark.parametrize("stale", [False, True])
def test_a_step_of_a_replacement_that_fails_ends_the_run_where_it_is_current(
    workshop: Workshop, kind: str, stale: bool
) -> None:
    """What comes last has the run's id: FAILURE is stored for it once that is settled."""
    workshop.app.conf.result_backend = "cache+memory://"

    @workshop.task(name="step")
    def step(self: FencedTask) -> None:
        if stale:
            workshop.lease.depose()
        raise ValueError("the first step")

    @workshop.task(name="last")
    def last(self: FencedTask, *values: Any) -> None:
        raise AssertionError("a step failed")

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        raise self.replace(
            {
                "chain": lambda: chain(step.si(), step.si(), last.si()),
                "chord": lambda: chord([step.si()], last.s()),
                "chord of a chain": lambda: chord([step.si()], chain(last.s(), last.s())),
                "chain of a chord": lambda: chain(step.si(), group(step.si()), last.s()),
            }[kind]()
        )

    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        assert workshop.wait(published(workshop, "step")) == ("IGNORED" if stale else "FAILURE")
    if stale or celery_version >= (5, 7) or kind in ("chain", "chord"):
        # An older Celery itself does not get through to what comes last.
        assert workshop.result_state(result.id) == ("PENDING" if stale else "FAILURE")
    assert workshop.lease.outcome(result.id) == (None if stale else "failed")
    assert workshop.lease.run_state(result.id) == ("refused" if stale else "published")
    assert len(workshop.refusals) == stale


def test_a_step_that_fails_stale_ends_a_run_that_nobody_sends_again(workshop: Workshop) -> None:
    """It was settled when it was replaced by what ends in a plain task."""
    workshop.app.conf.result_backend = "cache+memory://"

    @workshop.plain(name="last")
    def last() -> None:
        raise AssertionError("a step failed")

    @workshop.task(name="step")
    def step(self: FencedTask) -> None:
        workshop.write(self, "step")
        workshop.lease.depose()
        raise ValueError("after the final block")

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        raise self.replace(chain(step.si(), last.si()))

    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        assert workshop.wait(published(workshop, "step")) == "FAILURE"
    assert workshop.lease.outcome(result.id) == "committed"
    assert workshop.result_state(result.id) == "FAILURE"


@pytest.mark.parametrize("fenced", [False, True])
def test_a_stale_step_that_is_lost_ends_a_run_that_nobody_sends_again(
    workshop: Workshop, fenced: bool
) -> None:
    """One that is settled, or a plain task's: who waits for it waits for this attempt."""
    workshop.app.conf.result_backend = "cache+memory://"
    messages: dict[str, dict[str, Any]] = {}

    def note(headers: Any, body: Any, **_: Any) -> None:
        messages[headers["id"]] = {**headers, **body[2]}

    @workshop.task(name="step", ignore_result=True)
    def step(self: FencedTask) -> None:
        raise AssertionError("its process was lost")

    @workshop.plain(name="parent", bind=True, base=FencedTask if fenced else Task)
    def parent(self: Any) -> None:
        raise self.replace(group(step.si().set(countdown=60), step.si().set(countdown=60)))

    signals.before_task_publish.connect(note, weak=False)
    with workshop.worker():
        occurrence = Occurrence(lease="celery", entry="e", due_at=datetime.now(timezone.utc))
        workshop.lease.record(occurrence, fenced=fenced)
        parent.apply_async(**workshop.lease.options(occurrence.run_id))
        published(workshop, "step", times=2)
    signals.before_task_publish.disconnect(note)
    workshop.lease.depose()
    for message in [each for each in messages.values() if each["task"] == "step"]:
        lost = Context(message)
        step.backend.mark_as_failure(lost.id, WorkerLostError("killed"), request=lost)
    assert workshop.result_state(occurrence.run_id) == "FAILURE"
    assert workshop.lease.run_state(occurrence.run_id) == "published"
    assert workshop.lease.outcome(occurrence.run_id) == ("committed" if fenced else None)


@pytest.mark.parametrize("kind", ["chain", "chord of a chain", "chord with a chain"])
def test_an_eager_replacement_by_steps_runs_each_of_them(workshop: Workshop, kind: str) -> None:
    """The last one settles the run, and not the first, for which the others are duplicates."""
    ran: list[str] = []

    @workshop.task(name="step")
    def step(self: FencedTask, number: int) -> int:
        ran.append(f"step {number}")
        return number

    @workshop.task(name="last")
    def last(self: FencedTask, *values: Any) -> str:
        ran.append("last")
        return "end"

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> Any:
        return self.replace(
            {
                "chain": lambda: chain(step.si(1), step.si(2), last.si()),
                "chord of a chain": lambda: chord([step.si(1)], chain(step.si(2), last.si())),
                "chord with a chain": lambda: chord([chain(step.si(1), step.si(2))], last.si()),
            }[kind]()
        )

    result = run(parent, under=workshop.lease)
    assert (result.state, ran) == ("SUCCESS", ["step 1", "step 2", "last"])
    assert workshop.lease.outcome(result.id) == "committed"
    assert workshop.refusals == []


def test_an_eager_replacement_that_fails_is_the_failure_of_the_task(workshop: Workshop) -> None:
    """Taken for a duplicate, a test that looks for its error would pass without it."""

    @workshop.task(name="fenced")
    def fenced(self: FencedTask) -> None:
        raise KeyError("in the replacement")

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> Any:
        return self.replace(fenced.si())

    result = run(parent, under=workshop.lease)
    assert result.state == "FAILURE"
    assert isinstance(result.result, KeyError)
    assert workshop.lease.outcome(result.id) == "failed"
    assert workshop.refusals == []


def test_a_stale_step_leaves_the_result_of_the_current_attempt(workshop: Workshop) -> None:
    """The run was dispatched again, and ended, while the old attempt's step waited."""

    @workshop.task(name="step")
    def step(self: FencedTask) -> None:
        pass

    @workshop.task(name="last")
    def last(self: FencedTask) -> None:
        raise AssertionError("a step was refused")

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> str:
        if self.epoch == 1:
            raise self.replace(chain(step.si().set(countdown=1), last.si()))
        return "current"

    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        step_id = published(workshop, "step")
        again = workshop.lease.depose()
        parent.apply_async(**again.options(result.id))
        assert workshop.wait(result.id, times=2) == "SUCCESS"
        assert workshop.wait(step_id) == "IGNORED"
        assert workshop.result_state(step_id) == "FAILURE"
    assert workshop.result_state(result.id) == "SUCCESS"
    assert again.outcome(result.id) == "committed"


def test_a_refused_child_whose_result_is_wanted_ends(workshop: Workshop) -> None:
    """What a call says of its result goes before what the task says, where Celery has it so."""

    @workshop.task(name="child", ignore_result=True)
    def child(self: FencedTask) -> None:
        workshop.lease.depose()

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> str:
        child_id = child.apply_async(ignore_result=False).id
        self.retry(countdown=60, throw=False)
        return child_id

    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        child_id = published(workshop, "child")
        assert workshop.wait(result.id) == "SUCCESS"
        assert workshop.wait(child_id) == "IGNORED"
    expected = "FAILURE" if celery_version >= (5, 6) else "PENDING"
    assert workshop.result_state(child_id) == expected


def test_a_replacement_that_this_worker_does_not_know_is_an_error(workshop: Workshop) -> None:
    """Taken for a plain one, its run would be settled here, and itself refused as a duplicate."""

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        raise self.replace(workshop.app.signature("other.service"))

    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        assert workshop.wait(result.id) == "FAILURE"
    assert "send_task" in str(workshop.app.AsyncResult(result.id).result)
    assert [name for name, _, _ in workshop.published] == ["parent"]
    assert workshop.lease.outcome(result.id) == "failed"


def test_a_replaced_task_in_a_chain_leaves_the_rest_to_the_chain(workshop: Workshop) -> None:
    """The replacement has the id; the steps after it have theirs."""

    @workshop.task(name="fenced")
    def fenced(self: FencedTask) -> None:
        workshop.write(self, "fenced")

    @workshop.task(name="rest")
    def rest(self: FencedTask) -> None:
        workshop.write(self, "rest")

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        raise self.replace(fenced.si())

    with workshop.worker():
        result = workshop.lease.dispatch(parent, chain=[rest.si()])
        workshop.wait(published(workshop, "rest"))
    assert workshop.notes() == [("fenced", 1), ("rest", 1)]
    assert workshop.lease.outcome(result.id) == "committed"
    assert workshop.lease.outcome(id_of(workshop, "rest")) == "committed"


@pytest.mark.parametrize("kind", ["fenced", "plain"])
def test_a_stale_task_publishes_no_replacement(workshop: Workshop, kind: str) -> None:
    """It is refused where it would hand its id on, or settle for one that cannot."""

    @workshop.task(name="fenced")
    def fenced(self: FencedTask) -> None:
        pass

    @workshop.plain(name="plain")
    def plain() -> None:
        pass

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        workshop.lease.depose()
        raise self.replace(fenced.si() if kind == "fenced" else plain.si())

    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        assert workshop.wait(result.id) == "IGNORED"
    assert [name for name, _, _ in workshop.published] == ["parent"]
    assert workshop.lease.run_state(result.id) == "refused"


def test_an_eager_replacement_settles_the_run_once(workshop: Workshop) -> None:
    """It runs inside the body that it replaces, under the same id."""

    @workshop.task(name="fenced")
    def fenced(self: FencedTask) -> str:
        workshop.write(self, "fenced")
        return "end"

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> Any:
        return self.replace(fenced.si())

    result = run(parent, under=workshop.lease)
    assert result.get() == "end"
    assert workshop.notes() == [("fenced", 1)]
    assert workshop.lease.outcome(result.id) == "committed"


@pytest.mark.parametrize("flushed", [False, True])
def test_a_replacement_inside_a_guarded_block_is_refused(
    workshop: Workshop, flushed: bool
) -> None:
    """It would settle the run, and take back what the block wrote."""

    @workshop.plain(name="plain")
    def plain() -> None:
        pass

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        with self.fence.transaction(workshop.Session) as session:
            if flushed:
                session.execute(sa.text("DELETE FROM note"))
            self.replace(plain.si())

    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        assert workshop.wait(result.id) == "FAILURE"
    assert "replace() inside a guarded block" in str(workshop.app.AsyncResult(result.id).result)
    assert workshop.lease.outcome(result.id) == "failed"


@pytest.mark.skipif(celery_version < (5, 7), reason="Celery calls it from 5.7 on")
@pytest.mark.parametrize("stale", [False, True])
def test_a_chord_that_cannot_be_polled_ends_a_run_where_it_is_current(
    workshop: Workshop, stale: bool
) -> None:
    """Its last step has the run's id, and the poller is a task of Celery's, without a fence."""

    @workshop.task(name="member")
    def member(self: FencedTask) -> None:
        raise ValueError("a member")

    @workshop.task(name="last")
    def last(self: FencedTask, *values: Any) -> None:
        raise AssertionError("a member failed")

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        header = [member.si().set(countdown=1), member.si().set(countdown=1)]
        raise self.replace(chain(chord(header, last.s()), last.s()))

    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        published(workshop, "member", times=2)
        if stale:
            workshop.lease.depose()
        # Once it has found a member that failed.
        wait_until(
            lambda: ("celery.chord_unlock", "SUCCESS") in {(n, s) for n, _, s in workshop.ended}
        )
    assert workshop.result_state(result.id) == ("PENDING" if stale else "FAILURE")
    assert workshop.lease.outcome(result.id) == (None if stale else "failed")
    assert workshop.lease.run_state(result.id) == ("refused" if stale else "published")


def test_a_lost_child_ends_though_the_database_is_away(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sends it again, and chord, chain and ``get()`` wait for its end."""

    @workshop.task(name="child")
    def child(self: FencedTask) -> None:
        raise AssertionError("its process was lost")

    def away(*_: Any) -> None:
        raise StoreUnavailable("connection refused")

    monkeypatch.setattr(fence_store(workshop.app), "settle", away)
    stamps = workshop.lease.stamp("a-run").stamps()
    for lost in (Context(id="child", stamps=stamps), Context(id="a-run", stamps=stamps)):
        child.backend.mark_as_failure(lost.id, WorkerLostError("killed"), request=lost)
    assert workshop.result_state("child") == "FAILURE"
    assert workshop.result_state("a-run") == "PENDING", "it is another attempt's as well"


def test_a_stale_child_does_not_report_in_its_runs_name(workshop: Workshop) -> None:
    """That id is another attempt's as well."""
    seen: list[str] = []

    @workshop.task(name="child")
    def child(self: FencedTask, deposed: bool) -> None:
        if deposed:
            workshop.lease.depose()
        self.update_state(task_id=self.request.root_id, state="PROGRESS", meta={})
        seen.append(workshop.result_state(self.request.root_id))

    for deposed, expected in ((False, "PROGRESS"), (True, "PENDING")):
        lease = workshop.lease if not deposed else workshop.lease.depose()
        workshop.lease = lease
        root = f"run-{deposed}"
        occurrence = Occurrence(lease="celery", entry=root, due_at=datetime.now(timezone.utc))
        lease.record(occurrence)
        options = lease.options(occurrence.run_id)
        options["task_id"] = f"child-{deposed}"
        with workshop.worker():
            child.apply_async((deposed,), root_id=occurrence.run_id, **options)
            workshop.wait(f"child-{deposed}")
        assert seen.pop() == expected


def test_a_consequence_outlives_the_record_of_its_run(workshop: Workshop) -> None:
    """A run that is still to be dispatched is never deleted: this one is over."""

    @workshop.task(name="child")
    def child(self: FencedTask) -> None:
        workshop.write(self, "child")

    options = {**workshop.lease.options("a-run-of-last-month"), "task_id": "its-child"}
    child.apply_async(**options)
    workshop.lease.depose()
    with workshop.worker():
        assert workshop.wait("its-child", times=2) == "SUCCESS"
    assert workshop.notes() == [("child", 2)]


def test_a_child_of_an_attempt_that_never_counted_is_refused_without_its_run_too(
    workshop: Workshop,
) -> None:
    """Another attempt settled it: the outcome says so for as long as it is kept."""

    @workshop.task(name="child")
    def child(self: FencedTask) -> None:
        workshop.write(self, "of the first attempt")

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        pass

    again = workshop.lease.depose()
    with workshop.worker():
        parent.apply_async(**again.options("the-run"))
        assert workshop.wait("the-run") == "SUCCESS"
        child.apply_async(**{**workshop.lease.options("the-run"), "task_id": "the-child"})
        assert workshop.wait("the-child") == "IGNORED"
    assert workshop.result_state("the-child") == "FAILURE"
    assert workshop.notes() == []


def test_the_poller_of_a_chord_has_no_fence_where_every_task_has_one(workshop: Workshop) -> None:
    """Refused, it would leave the chord's body without an end."""
    workshop.app.Task = FencedTask
    assert isinstance(workshop.app.tasks["celery.chord_unlock"], FencedTask)
    bodies: list[str] = []

    @workshop.task(name="member")
    def member(self: FencedTask) -> None:
        pass

    @workshop.task(name="body")
    def body(self: FencedTask, values: list[Any]) -> None:
        raise AssertionError("its members are stale")

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        bodies.append(chord([member.si(), member.si()], body.s()).delay().id)
        workshop.lease.depose()

    with workshop.worker():
        result = workshop.lease.dispatch(parent)
        assert workshop.wait(result.id) == "IGNORED"
        wait_until(lambda: workshop.result_state(bodies[0]) == "FAILURE", timeout=20)


# --- ids that repeat ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["chain", "chord", "own id"])
def test_what_a_task_sends_under_an_old_id_is_done_at_each_occurrence(
    workshop: Workshop, shape: str
) -> None:
    """A canvas that is made once, as the module is imported, keeps ids from its first sending."""

    @workshop.task(name="first")
    def first(self: FencedTask) -> None:
        workshop.write(self, "first")

    @workshop.task(name="second")
    def second(self: FencedTask) -> None:
        workshop.write(self, "second")

    made_once = chain(first.si(), second.si())
    if shape == "chord":
        made_once = chord([first.si(), first.si()], second.si())
    elif shape == "own id":
        made_once = second.si().set(task_id="second-of-all")

    @workshop.task(name="daily")
    def daily(self: FencedTask) -> None:
        made_once.delay()

    for times in (1, 2):
        with workshop.worker():
            workshop.lease.dispatch(daily)
            done = ("second", 1)
            wait_until(lambda done=done, times=times: workshop.notes().count(done) >= times)
    expected = {"chain": 2, "chord": 4, "own id": 0}[shape]
    assert workshop.notes().count(("first", 1)) == expected
    assert workshop.notes().count(("second", 1)) == 2
    assert workshop.refusals == []


def test_what_became_of_an_id_that_repeats_is_told_of_its_last(workshop: Workshop) -> None:
    """In people's tests, who know of one."""

    @workshop.task(name="child")
    def child(self: FencedTask, fails: bool) -> None:
        if fails:
            raise ValueError("the first time")

    with workshop.worker():
        for fails in (True, False):
            for each in range(3):  # the rows are in the order of a hash
                options = {**workshop.lease.options(f"run-{each}"), "task_id": f"child-{each}"}
                child.apply_async((fails,), **options)
                workshop.wait(f"child-{each}", times=1 if fails else 2)
            workshop.lease = workshop.lease.depose()
    assert [workshop.lease.outcome(f"child-{each}") for each in range(3)] == ["committed"] * 3
    assert [workshop.lease.epoch_of(f"child-{each}") for each in range(3)] == [2] * 3


def test_a_childs_id_may_be_another_leases_too(workshop: Workshop) -> None:
    """Two apps, two leases, one database: an id that both give says nothing of the other's."""

    @workshop.task(name="child")
    def child(self: FencedTask) -> None:
        workshop.write(self, "child")

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> None:
        child.apply_async(task_id="of-both")

    with workshop.worker(), contextlib.closing(hold(workshop.url, "other")) as other:
        for lease in (workshop.lease, other):
            lease.dispatch(parent)
        wait_until(lambda: len(workshop.notes()) == 2)
    assert workshop.refusals == []


def test_a_redelivered_child_is_a_duplicate_however_often_its_id_is_sent(
    workshop: Workshop,
) -> None:
    """One message, one outcome."""

    @workshop.task(name="child")
    def child(self: FencedTask) -> None:
        workshop.write(self, "child")

    stamp = workshop.lease.stamp("a-run")
    with workshop.worker():
        for times in (1, 2):
            child.apply_async(task_id="the-child", **stamp.options())
            workshop.wait("the-child", times)
    assert workshop.notes() == [("child", 1)]
    assert [each["reason"] for each in workshop.refusals] == ["duplicate"]
