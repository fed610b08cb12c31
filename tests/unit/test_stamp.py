"""The stamp: read from any request, merged into any message, inherited, renewed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_lease.errors import MissingEpoch
from celery_lease.stamp import Stamp, current_stamp, inherit, lend

STAMP = Stamp(name="celery", epoch=7, term="t7", run="r")


def request(**stamps: Any) -> SimpleNamespace:
    """Return a request with these stamps."""
    return SimpleNamespace(stamps=stamps or None)


def headers(**given: Any) -> dict[str, Any]:
    """Return the headers of a message that is about to be published."""
    return {"stamped_headers": None, "stamps": {}, **given}


def test_a_stamp_survives_its_journey() -> None:
    """What is written into a message is what is read from the request."""
    message = headers()
    STAMP.write(message)
    assert Stamp.of(request(**message["stamps"])) == STAMP
    assert set(message["stamped_headers"]) == set(message["stamps"])


def test_eager_lists_are_read_as_what_they_hold() -> None:
    """Eager mode wraps each value in a list."""
    wrapped = {key: [value] for key, value in STAMP.stamps().items()}
    assert Stamp.of(request(**wrapped)) == STAMP


@pytest.mark.parametrize("stamps", [{}, {"colour": "red"}])
def test_a_request_without_our_stamps_has_none(stamps: dict[str, Any]) -> None:
    """Somebody else's stamps are none of our business."""
    assert Stamp.of(request(**stamps)) is None


@pytest.mark.parametrize("missing", ["lease_name", "lease_epoch", "lease_term", "lease_run"])
def test_half_a_stamp_is_an_error(missing: str) -> None:
    """It cannot be compared, and taken for none it would run unfenced."""
    stamps = {**STAMP.stamps(), missing: None}
    with pytest.raises(MissingEpoch, match="not complete"):
        Stamp.of(request(**stamps))
    del stamps[missing]
    with pytest.raises(MissingEpoch, match="not complete"):
        Stamp.of(request(**stamps))


@pytest.mark.parametrize("epoch", ["7", 7.0, True, 0, -5, 2**53, 10**30, []])
def test_an_epoch_that_is_no_number_of_a_grant_is_an_error(epoch: Any) -> None:
    """Compared as text, 10 would be older than 9; True would be 1; 10**30 fits no column."""
    with pytest.raises(MissingEpoch):
        Stamp.of(request(**{**STAMP.stamps(), "lease_epoch": epoch}))


@pytest.mark.parametrize("name", ["lease_name", "lease_term", "lease_run"])
@pytest.mark.parametrize("value", ["", "a\0b", 7, {"a": 1}])
def test_a_text_that_is_none_is_an_error(name: str, value: Any) -> None:
    """A database may not even compare it."""
    with pytest.raises(MissingEpoch):
        Stamp.of(request(**{**STAMP.stamps(), name: value}))


@pytest.mark.parametrize(
    "origin", ["abc", "1:", ":t", "-1:t", "0:t", "²:t", "9" * 5000 + ":t", ""]
)
def test_a_damaged_origin_is_an_error_of_the_stamp(origin: str) -> None:
    """The worker's parent process reads it too, and nothing else may be raised there."""
    with pytest.raises(MissingEpoch):
        Stamp.of(request(**{**STAMP.stamps(), "lease_origin": origin}))
    with pytest.raises(MissingEpoch):
        Stamp.of(request(lease_origin=origin))


def test_options_are_copied_and_the_users_stamps_kept() -> None:
    """The entry's own options are the same object with the same content afterwards."""
    own = {"queue": "q", "stamped_headers": ["colour"], "colour": "red"}
    before = {**own, "stamped_headers": list(own["stamped_headers"])}
    options = STAMP.options(own)
    assert own == before
    assert options["queue"] == "q"
    assert options["colour"] == "red"
    assert options["lease_epoch"] == 7
    assert set(options["stamped_headers"]) == {"colour", *STAMP.stamps()}


def test_writing_leaves_the_containers_of_the_signature_alone() -> None:
    """The list in the headers may be the one of a signature that is sent again."""
    names, stamps = ["colour"], {"colour": "red"}
    message = headers(stamped_headers=names, stamps=stamps)
    STAMP.write(message)
    assert (names, stamps) == (["colour"], {"colour": "red"})
    assert message["stamps"] == {"colour": "red", **STAMP.stamps()}


def test_writing_again_replaces_what_was_ours() -> None:
    """One name each, however often a message is stamped."""
    message = headers()
    STAMP.write(message)
    newer = STAMP.renewed(8, "t8")
    newer.write(message)
    assert Stamp.of(request(**message["stamps"])) == newer
    assert len(message["stamped_headers"]) == len(set(message["stamped_headers"]))


def test_a_renewed_stamp_remembers_where_it_comes_from() -> None:
    """After any number of takeovers: what it follows was settled under the first."""
    twice = STAMP.renewed(8, "t8").renewed(9, "t9")
    assert (twice.epoch, twice.term, twice.run) == (9, "t9", "r")
    assert STAMP.first == twice.first == (7, "t7")
    assert Stamp.of(request(**twice.stamps())) == twice


def test_nothing_is_inherited_where_no_task_runs() -> None:
    """A web request that sends a task."""
    message = headers()
    inherit(sender="child", headers=message)
    assert current_stamp() is None
    assert message["stamps"] == {}


def test_a_lent_stamp_is_inherited_and_given_back() -> None:
    """The worker's parent process runs no task of its own."""
    message = headers()
    with lend(STAMP):
        inherit(sender="child", headers=message)
    assert Stamp.of(request(**message["stamps"])) == STAMP
    assert current_stamp() is None


def test_a_stamp_that_is_there_is_left_alone() -> None:
    """The scheduler's own, a retry's, or another lease's."""
    message = headers()
    other = Stamp(name="other", epoch=1, term="t", run="x")
    other.write(message)
    with lend(STAMP):
        inherit(sender="child", headers=message)
    assert Stamp.of(request(**message["stamps"])) == other


def test_protocol_1_has_no_place_for_a_stamp() -> None:
    """Its headers are left as they are."""
    message: dict[str, Any] = {}
    with lend(STAMP):
        inherit(sender="child", headers=message)
    assert message == {}
