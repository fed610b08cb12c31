"""Where self.fence is, and that it never turns into an unguarded transaction without a word."""

from __future__ import annotations

import asyncio
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from celery_lease import FencedTask, MissingEpoch, UnsafeTransaction
from celery_lease.testing import run
from tests.integration.workshop import Workshop


def send(workshop: Workshop, task: Any, *args: Any) -> str:
    """Send anything as a run under the lease; return its id."""
    task_id = str(uuid.uuid4())
    task.apply_async(args, **workshop.lease.options(task_id))
    return task_id


def adding(workshop: Workshop, **options: Any) -> Any:
    """Return a fenced task that writes what it is given."""

    @workshop.task(name="add", **options)
    def add(self: FencedTask, text: str) -> None:
        workshop.write(self, text)

    return add


@pytest.mark.parametrize("kind", ["map", "starmap", "chunks"])
@pytest.mark.parametrize("require_epoch", [False, True])
def test_a_map_of_a_fenced_task_under_a_stamp_writes_nothing(
    workshop: Workshop, kind: str, require_epoch: bool
) -> None:
    """Celery calls it like a function in a task of its own, which no fence stops when stale."""
    add = adding(workshop, require_epoch=require_epoch)
    sig = {
        "map": lambda: add.map(["a", "b"]),
        "starmap": lambda: add.starmap([("a",), ("b",)]),
        "chunks": lambda: add.chunks([("a",), ("b",)], 2).group().tasks[0],
    }[kind]()
    with workshop.worker():
        task_id = str(uuid.uuid4())
        sig.apply_async(**workshop.lease.options(task_id))
        assert workshop.wait(task_id) == "FAILURE"
    assert "as a task of its own" in str(workshop.app.AsyncResult(task_id).result)
    assert workshop.notes() == []


def test_a_map_without_a_stamp_goes_on(workshop: Workshop) -> None:
    """People call their tasks by hand."""
    add = adding(workshop)
    with workshop.worker():
        result = add.map(["a", "b"]).delay()
        assert workshop.wait(result.id) == "SUCCESS"
    assert workshop.notes() == [("a", 0), ("b", 0)]


def test_an_eager_map_in_a_body_does_not_settle_the_bodys_run(workshop: Workshop) -> None:
    """The map is another task, so its items are not part of the body."""
    workshop.app.conf.task_always_eager = True
    add = adding(workshop)

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> tuple[str, str | None]:
        inner = add.starmap([("a",)]).delay()
        return str(inner.result), workshop.lease.outcome(self.request.id)

    said, outcome = run(parent, under=workshop.lease).get()
    assert "self.fence is only in the body" in said
    assert outcome is None
    assert workshop.notes() == []


@pytest.mark.parametrize("eager", [False, True])
def test_a_stamped_plain_task_cannot_write_through_a_fenced_one(
    workshop: Workshop, eager: bool
) -> None:
    """Called like a function it has no fence of its own, and the caller has none either."""
    add = adding(workshop)
    seen: list[int | None] = []

    @workshop.plain(name="plain")
    def plain() -> None:
        seen.append(add.epoch)
        add("unguarded")

    @workshop.task(name="parent")
    def parent(self: FencedTask) -> str:
        return str(plain.apply().result)

    if eager:
        assert "as a task of its own" in run(parent, under=workshop.lease).get()
    else:
        with workshop.worker():
            assert workshop.wait(send(workshop, plain)) == "FAILURE"
    assert workshop.notes() == []
    assert seen == [1]


def test_a_task_that_must_not_inherit_may_be_called_anywhere(workshop: Workshop) -> None:
    """``inherit_epoch = False``: right under any epoch."""
    add = adding(workshop, inherit_epoch=False)

    @workshop.plain(name="plain")
    def plain() -> None:
        add("any")

    with workshop.worker():
        assert workshop.wait(send(workshop, plain)) == "SUCCESS"
    assert workshop.notes() == [("any", 0)]


@pytest.mark.parametrize("require_epoch", [False, True])
@pytest.mark.parametrize("hook", ["before_start", "on_success", "on_failure", "after_return"])
def test_a_hook_has_the_epoch_but_no_fence(
    workshop: Workshop, hook: str, require_epoch: bool
) -> None:
    """One comes before the body, the others after its end: neither is the run's own work."""
    seen: list[Any] = []

    def listen(self: FencedTask, *args: Any) -> None:
        seen.append((self.epoch, self.occurrence))
        with pytest.raises(UnsafeTransaction, match="only in the body"):
            workshop.write(self, "unguarded")
        seen.append(hook)

    listening = type("Listening", (FencedTask,), {"abstract": True, hook: listen})

    @workshop.plain(name="work", base=listening, bind=True, require_epoch=require_epoch)
    def work(self: FencedTask) -> None:
        if hook == "on_failure":
            raise ValueError

    with workshop.worker():
        workshop.wait(workshop.lease.dispatch(work).id)
    assert seen == [(1, None), hook]
    assert workshop.notes() == []


def test_hooks_of_a_task_without_a_stamp_write_as_ever(workshop: Workshop) -> None:
    """No stamp, no fence."""

    class Listening(FencedTask):
        abstract = True

        def before_start(self, *args: Any) -> None:
            workshop.write(self, "before")

    @workshop.plain(name="work", base=Listening, bind=True)
    def work(self: FencedTask) -> None:
        workshop.write(self, "body")

    with workshop.worker():
        assert workshop.wait(work.delay().id) == "SUCCESS"
    assert workshop.notes() == [("before", 0), ("body", 0)]


def test_a_body_that_is_run_twice_for_one_message_is_behind_the_fence_both_times(
    workshop: Workshop,
) -> None:
    """Nothing is on record before the whole of ``__call__`` has ended."""

    class Again(FencedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except ValueError:
                workshop.lease.depose()
                return super().__call__(*args, **kwargs)

    @workshop.plain(name="work", base=Again, bind=True)
    def work(self: FencedTask) -> None:
        workshop.write(self, "step", final=False)
        raise ValueError

    with workshop.worker():
        result = workshop.lease.dispatch(work)
        assert workshop.wait(result.id) == "IGNORED"
    assert workshop.notes() == [("step", 1)]
    assert [each["reason"] for each in workshop.refusals] == ["stale"]


def test_a_hook_after_the_end_cannot_run_the_body_again(workshop: Workshop) -> None:
    """How the message ended is on record, so that it would write behind no fence."""
    seen: list[str] = []

    class Again(FencedTask):
        abstract = True

        def on_success(self, *args: Any) -> None:
            with pytest.raises(UnsafeTransaction, match="cannot call it again"):
                self()
            seen.append("refused")

    @workshop.plain(name="work", base=Again, bind=True)
    def work(self: FencedTask) -> None:
        seen.append("body")

    with workshop.worker():
        assert workshop.wait(send(workshop, work)) == "SUCCESS"
    assert seen == ["body", "refused"]


@pytest.mark.parametrize("require_epoch", [False, True])
def test_an_errback_that_is_called_in_place_writes_nothing(
    workshop: Workshop, require_epoch: bool
) -> None:
    """Celery calls it like a function, in the worker that reports the failure."""
    heard: list[int | None] = []

    @workshop.task(name="errback", bind=False, require_epoch=require_epoch)
    def errback(request: Any, error: Any, traceback: Any) -> None:
        heard.append(errback.epoch)
        workshop.write(errback, "unguarded")

    @workshop.task(name="fail")
    def fail(self: FencedTask) -> None:
        raise ValueError

    with workshop.worker():
        result = workshop.lease.dispatch(fail, link_error=errback.s())
        workshop.wait(result.id)
    assert workshop.notes() == []
    assert heard == ([] if require_epoch else [1])


@pytest.mark.parametrize(
    ("require_epoch", "error"), [(False, UnsafeTransaction), (True, MissingEpoch)]
)
def test_a_thread_is_given_its_fence_by_the_body(
    workshop: Workshop, require_epoch: bool, error: type[Exception]
) -> None:
    """Context variables do not reach it."""

    @workshop.task(name="work", require_epoch=require_epoch)
    def work(self: FencedTask) -> None:
        fence = self.fence
        with ThreadPoolExecutor(1) as threads:
            with pytest.raises(error, match=r"fence = self\.fence"):
                threads.submit(workshop.write, self, "unguarded").result()
            assert threads.submit(lambda: fence.epoch).result() == 1
            assert threads.submit(lambda: self.epoch).result() is None

    assert run(work, under=workshop.lease).get() is None
    assert workshop.notes() == []


def test_a_thread_of_a_hook_writes_nothing_unguarded(workshop: Workshop) -> None:
    """It is not the body either, and cannot tell that there is a stamp."""

    class Listening(FencedTask):
        abstract = True

        def before_start(self, *args: Any) -> None:
            with ThreadPoolExecutor(1) as threads:
                threads.submit(workshop.write, self, "unguarded").result()

    @workshop.plain(name="work", base=Listening, bind=True)
    def work(self: FencedTask) -> None:
        raise AssertionError("the body ran")

    with workshop.worker():
        assert workshop.wait(send(workshop, work)) == "FAILURE"
    assert workshop.notes() == []


def test_a_thread_of_asyncio_has_the_fence(workshop: Workshop) -> None:
    """``asyncio.to_thread`` copies the context."""

    @workshop.task(name="work")
    def work(self: FencedTask) -> None:
        asyncio.run(asyncio.to_thread(workshop.write, self, "guarded"))

    result = run(work, under=workshop.lease)
    assert result.state == "SUCCESS"
    assert workshop.lease.outcome(result.id) == "committed"
