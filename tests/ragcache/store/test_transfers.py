"""Transfers: each key once, a bounded line, and none that outlives its pool."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ragcache.errors import StateMissing
from ragcache.states.quantization import StoredStates
from ragcache.store.tiers import DeviceTier, DiskTier, HostTier
from ragcache.store.transfers import Transfers, promote
from tests.ragcache.store.conftest import make_key, make_states, same


class Gate:
    """A transfer that waits until it is let through, and counts how often it was made."""

    def __init__(self) -> None:
        self.open, self.entered, self.made = threading.Event(), threading.Event(), 0

    def __call__(self) -> StoredStates:
        self.made += 1
        self.entered.set()
        assert self.open.wait(10)
        return make_states(1)


def test_a_key_in_flight_is_not_moved_twice() -> None:
    gate = Gate()
    with Transfers(workers=2) as transfers:
        first = transfers.start(make_key(1), gate)
        assert transfers.start(make_key(1), gate) is first
        assert transfers.under_way(make_key(1)) is first
        gate.open.set()
        assert first is not None
        assert same(first.result(10), make_states(1))  # type: ignore[arg-type]
    assert gate.made == 1
    assert transfers.under_way(make_key(1)) is None


def test_a_key_that_has_landed_can_be_moved_again() -> None:
    with Transfers() as transfers:
        for _ in range(3):
            future = transfers.start(make_key(1), lambda: make_states(1))
            assert future is not None
            future.result(10)
            while transfers.under_way(make_key(1)) is not None:
                threading.Event().wait(0.001)


def test_a_full_line_takes_no_more() -> None:
    gate = Gate()
    with Transfers(workers=1, waiting=1) as transfers:
        assert transfers.start(make_key(1), gate) is not None
        assert transfers.start(make_key(2), gate) is not None
        assert transfers.start(make_key(3), gate) is None
        assert len(transfers) == 2
        gate.open.set()


def test_what_waits_can_be_cancelled_and_what_runs_is_finished() -> None:
    gate, late = Gate(), Gate()
    with Transfers(workers=1) as transfers:
        running = transfers.start(make_key(1), gate)
        assert gate.entered.wait(10)
        waiting = transfers.start(make_key(2), late)
        assert transfers.cancel([make_key(1), make_key(2), make_key(3)]) == 1
        assert waiting is not None
        assert waiting.cancelled()
        assert transfers.under_way(make_key(2)) is None
        gate.open.set()
        assert running is not None
        running.result(10)
    assert (gate.made, late.made) == (1, 0)


def test_a_closed_pool_takes_nothing_and_leaves_nothing_behind() -> None:
    gate, late = Gate(), Gate()
    transfers = Transfers(workers=1)
    transfers.start(make_key(1), gate)
    assert gate.entered.wait(10)
    transfers.start(make_key(2), late)
    gate.open.set()
    transfers.close()
    assert late.made == 0
    assert len(transfers) == 0
    assert transfers.start(make_key(3), gate) is None


def test_an_error_is_that_of_the_future(tmp_path: Path) -> None:
    disk, host = DiskTier(tmp_path), HostTier(10**6)
    with Transfers() as transfers:
        future = transfers.start(make_key(1), lambda: promote(make_key(1), disk, host))
        assert future is not None
        with pytest.raises(StateMissing):
            future.result(10)


def test_from_disk_by_way_of_the_host_to_the_device(tmp_path: Path) -> None:
    disk, host, device = DiskTier(tmp_path), HostTier(10**6), DeviceTier(10**6, "cpu")
    disk.put(make_key(1), make_states(1, 40))

    def move() -> StoredStates:
        promote(make_key(1), disk, host)
        return promote(make_key(1), host, device)

    with Transfers() as transfers:
        future = transfers.start(make_key(1), move)
        assert future is not None
        assert same(future.result(10), make_states(1, 40))  # type: ignore[arg-type]
    assert host.used_bytes == host.size_of(make_states(1, 40)), "loaded where it stays"
    assert make_key(1) in device
