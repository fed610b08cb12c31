"""The values that a lease is spoken of in."""

from __future__ import annotations

import dataclasses
import os
from datetime import datetime, timezone

from celery_lease.lease import Holder, Lease, Term

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def lease(**changes: object) -> Lease:
    """A lease that is held."""
    held = Lease(
        name="celery",
        holder="host:1:aa",
        epoch=3,
        acquired_at=NOW,
        renewed_at=NOW,
        expires_at=NOW,
        remaining=5.0,
    )
    return dataclasses.replace(held, **changes)


def test_two_holders_of_one_process_are_two():
    """A host name, or a process id that was used again, would let two beats be one holder."""
    first, second = Holder.current(), Holder.current()

    assert first != second
    assert str(first) != str(second)


def test_a_holder_says_host_process_and_which_incarnation():
    """An operator finds the process by it."""
    host, pid, nonce = str(Holder.current()).rsplit(":", 2)

    assert host
    assert int(pid) == os.getpid()
    assert len(nonce) == 8


def test_what_a_holder_shows_is_not_part_of_who_it_is():
    """The schedule's hash may change; the holder stays the same one."""
    holder = Holder(host="h", pid=1, nonce="n", info={"schedule": "a"})

    assert holder == dataclasses.replace(holder, info={"schedule": "b"})
    assert Holder.current(schedule="a").info["schedule"] == "a"


def test_a_lease_is_held_until_the_database_says_that_it_expired():
    """A holder in the row is not enough: it may be dead."""
    assert lease().held
    assert not lease(remaining=0.0).held
    assert not lease(holder=None).held


def test_what_a_loser_sees_has_no_place_for_the_terms_uuid():
    """Whoever knows it could forge a stamp."""
    shown = {each.name for each in dataclasses.fields(Lease)}
    secret = {"uuid", "term"}

    assert not shown & secret
    assert secret & {each.name for each in dataclasses.fields(Term)}
