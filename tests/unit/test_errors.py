"""The errors: one tree, with data."""

from __future__ import annotations

import inspect
import pickle

import pytest
from celery import Celery

import celery_lease
from celery_lease import errors
from celery_lease.errors import (
    AlreadySettled,
    CeleryLeaseError,
    ConfigurationError,
    LeaseConflict,
    LeaseLost,
    SchemaMismatch,
    StaleEpoch,
    StoreContention,
    StoreError,
)

EXAMPLES = [
    ConfigurationError("wrong", setting="beat_lease_ttl"),
    LeaseLost("lost", name="celery", held_epoch=1, current_epoch=2),
    LeaseConflict("conflict", name="celery", held_epoch=1),
    StaleEpoch("stale", name="celery", epoch=1, current_epoch=2),
    AlreadySettled("settled", task_id="t", outcome="committed"),
    SchemaMismatch("missing", found=None, expected=1),
    StoreContention("locked"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_from_a_workers_child_to_its_parent(error):
    """An error with keyword arguments that does not unpickle ends the pool's result thread."""
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_through_a_result(error):
    """Celery rebuilds it from its message alone; ``get()`` raises something else if it cannot."""
    task_id = f"{__name__}.{type(error).__name__}"
    with Celery("results", set_as_current=False, backend="cache+memory://") as app:
        app.backend.store_result(task_id, error, "FAILURE")
        with pytest.raises(CeleryLeaseError, match=str(error)) as caught:
            app.AsyncResult(task_id).get(timeout=1)

    assert type(caught.value) is type(error)


def _classes() -> list[type]:
    found = inspect.getmembers(errors, inspect.isclass)
    return [each for _, each in found if each.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", _classes(), ids=lambda cls: cls.__name__)
def test_every_error_belongs_to_the_tree_and_is_public(cls):
    """One `except CeleryLeaseError` catches all; each can be imported from the package."""
    assert issubclass(cls, CeleryLeaseError)
    assert cls.__name__ in errors.__all__
    assert getattr(celery_lease, cls.__name__) is cls
    assert cls.__name__ in errors.__doc__


def test_what_passes_by_itself_is_a_store_error():
    """Whoever waits for a database catches one class."""
    assert issubclass(StoreContention, StoreError)
    assert not issubclass(StaleEpoch, StoreError)
