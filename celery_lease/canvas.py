"""Chains, groups and chords as messages carry them: which ids they are made of and lead to."""

from __future__ import annotations

from typing import Any

from celery.app.task import Context

__all__ = ["ends", "free_steps", "with_id", "without"]


def ends(request: Any, task_id: str) -> bool:
    """Return whether *task_id*, another one's, fails with this request.

    After ``replace(chain(…))`` the last step has the id of the task that was replaced.
    """
    if request.id == task_id:
        return False
    follow = [*(request.chain or ()), request.chord]
    return any(task_id in _ids(each) for each in follow if each)


def without(request: Any, task_id: str) -> Context:
    """Return the request, leading to nothing that fails together with *task_id*."""
    kept = [each for each in request.chain or () if task_id not in _ids(each)]
    chord = request.chord if request.chord and task_id not in _ids(request.chord) else None
    return Context(vars(request), chain=kept, chord=chord)


def _ids(step: Any) -> set[Any]:
    """Return the ids that fail with a step: its own, and of what it is made of and leads to."""
    options, inner = step["options"], step.get("kwargs") or {}
    kind = step.get("subtask_type")
    follow = [*(options.get("chain") or ()), options.get("chord")]
    if kind == "chord":
        follow.append(inner.get("body"))
    elif kind == "chain":
        follow += (inner.get("tasks") or ())[-1:]
    return {options.get("task_id")}.union(*(_ids(each) for each in follow if each))


def free_steps(sig: Any) -> None:
    """Let each step of a chain keep its own id: an eager one gives them all the chain's."""
    if sig.get("subtask_type") == "chain":
        sig.options.pop("task_id", None)
    steps = getattr(sig, "tasks", None) or ()  # of a chord, its header
    for each in [*getattr(steps, "tasks", steps), getattr(sig, "body", None)]:
        if each is not None:
            free_steps(each)


def with_id(sig: Any, task_id: str) -> Any:
    """Return the signature inside *sig* that has this id; None if there is none."""
    body = getattr(sig, "body", None)
    inner = [body] if body is not None else getattr(sig, "tasks", None)
    if inner:
        found = (with_id(each, task_id) for each in reversed(inner))
        return next((each for each in found if each is not None), None)
    return sig if sig.options.get("task_id") == task_id else None
