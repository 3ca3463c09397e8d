"""When the leader's watch takes a rank with a device for one that hangs."""

from __future__ import annotations

import pytest

from ragcache.models.parallel.collectives import SignsOfLife
from ragcache.models.parallel.memory import SharedArena
from ragcache.models.parallel.ranks import FollowerProcesses

NOW = 1000.0


@pytest.fixture
def watch() -> FollowerProcesses:
    """The watch of three ranks without their processes."""
    made = FollowerProcesses.__new__(FollowerProcesses)
    made.ranks, made._devices = 3, True
    made._signs = SignsOfLife(SharedArena.create(), 3)
    made._signs.beats[:] = NOW
    return made


def test_ranks_without_a_message_are_not_late(watch: FollowerProcesses) -> None:
    assert not watch._first_hanging(NOW)


def test_a_rank_without_a_heartbeat_is_named(watch: FollowerProcesses) -> None:
    watch._signs.beats[2] = NOW - 4
    assert watch._first_hanging(NOW) == "rank 2 of 3 gives no sign of life"


def test_a_rank_that_is_much_slower_than_the_leader_is_named(watch: FollowerProcesses) -> None:
    watch._signs.waiting[1] = NOW - 4
    assert watch._first_hanging(NOW) == "rank 1 of 3 hangs in a pass"


def test_a_rank_may_take_three_times_as_long_as_the_leader(watch: FollowerProcesses) -> None:
    watch._signs.waiting[1], watch._signs.worked[0] = NOW - 50, 20
    assert not watch._first_hanging(NOW)
    watch._signs.beats[:] = NOW + 20
    assert watch._first_hanging(NOW + 20) == "rank 1 of 3 hangs in a pass"


def test_a_halted_leader_excuses_all_ranks(watch: FollowerProcesses) -> None:
    watch._signs.waiting[1] = NOW
    watch._excuse(NOW + 60)
    assert not watch._first_hanging(NOW + 62)
    assert watch._signs.waiting[2] == 0, "it has no message"
    watch._signs.beats[:] = NOW + 64
    assert watch._first_hanging(NOW + 64) == "rank 1 of 3 hangs in a pass"


def test_ranks_compile_as_long_as_the_leader_does(watch: FollowerProcesses) -> None:
    watch._signs.waiting[:2] = NOW - 200
    assert not watch._first_hanging(NOW)
