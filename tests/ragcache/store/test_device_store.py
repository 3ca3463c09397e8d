"""A store whose first tier is a device: what reads states there can read them nowhere else."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache.db import Database
from ragcache.errors import StoreBudgetExceeded
from ragcache.store import DeviceTier, KVStore, Lease, memory_tiers
from tests.ragcache.conftest import make_key, make_states, same
from tests.ragcache.store.conftest import keys
from tests.ragcache.store.played_streams import Streams

TOKENS = 40
SIZE = DeviceTier(0, "cpu").size_of(make_states(0, TOKENS))


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def store(tmp_path: Path, streams: Streams) -> Iterator[KVStore]:
    """A device for three modules, and ten on the disk."""
    device = DeviceTier(3 * SIZE, "cpu", streams=streams)
    database = Database.open(tmp_path / "ledger.sqlite")
    store = KVStore.open(tmp_path, database, 10**6, tiers=[device])
    for number in range(10):
        store.put_states(make_key(number), make_states(number, TOKENS))
    store.evict(keys(*range(10)), "device")
    store.evict(keys(*range(10)), "host")
    streams.log.clear()
    yield store
    store.close()


def check(lease: Lease, *numbers: int) -> None:
    for states, number in zip(lease.states, numbers, strict=True):
        assert same(states.restore(), make_states(number, TOKENS))


def test_the_keys_of_a_lease_are_copied_side_by_side(store: KVStore, streams: Streams) -> None:
    with store.lease(keys(0, 1, 2)) as lease:
        check(lease, 0, 1, 2)
        assert lease.source == dict.fromkeys(keys(0, 1, 2), "disk")
        first, *others = (states.arrival for states in lease.states)
        assert first is not None
        assert all(other is first for other in others)
    assert [line for line in streams.log if line.startswith("copy")] == ["copy on upload"]


def test_a_question_pushes_out_what_nobody_reads(store: KVStore) -> None:
    """States used once go for others that are, also on a device."""
    store.lease(keys(0, 1, 2)).release()
    with store.lease(keys(3, 4)) as lease:
        check(lease, 3, 4)
    with store.lease(keys(0, 4)) as lease:
        check(lease, 0, 4)
        assert lease.source[make_key(4)] == "device"


def test_states_that_leave_the_device_go_to_the_host(store: KVStore) -> None:
    for numbers in ((0, 1, 2), (3, 4, 5), (6, 7, 8)):
        for _ in range(2):
            store.lease(keys(*numbers)).release()
    with store.lease(keys(0, 3)) as lease:
        check(lease, 0, 3)
        assert set(lease.source.values()) == {"host"}


def test_states_of_several_sizes_find_room_in_one_piece(store: KVStore) -> None:
    """Room is made until what is free is in one piece."""
    store.lease(keys(0, 1, 2)).release()
    large = make_key(20)
    store.put_states(large, make_states(20, 2 * TOKENS))
    with store.lease([large]) as lease:
        assert same(lease.states[0].restore(), make_states(20, 2 * TOKENS))
        assert lease.source[large] == "device"


def test_a_device_full_of_leased_states_refuses_and_goes_on(store: KVStore) -> None:
    lease = store.lease(keys(0, 1, 2))
    with pytest.raises(StoreBudgetExceeded, match="Raise device_bytes"):
        store.lease(keys(3))
    with store.lease(keys(1)) as other:
        check(other, 1)
    check(lease, 0, 1, 2)
    lease.release()
    with store.lease(keys(3)) as other:
        check(other, 3)


def test_a_lease_waits_for_a_step_that_still_reads(store: KVStore) -> None:
    lease = store.lease(keys(0, 1, 2))
    held = [lease.states]
    lease.release()
    threading.Timer(0.1, held.clear).start()
    with store.lease(keys(3, 4)) as other:
        check(other, 3, 4)


def test_what_a_step_still_reads_is_not_written_after_its_lease(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_tiers, "_READING_SECONDS", 0.05)
    lease = store.lease(keys(0, 1, 2))
    held = lease.states  # as a step that was launched
    lease.release()
    del lease
    with pytest.raises(StoreBudgetExceeded):
        store.lease(keys(3))
    for states, number in zip(held, (0, 1, 2), strict=True):
        assert same(states.restore(), make_states(number, TOKENS))
    del held, states
    with store.lease(keys(3)) as other:
        check(other, 3)


def test_the_upkeep_lets_go_of_what_ended_copies_have_read(
    store: KVStore, streams: Streams
) -> None:
    lease = store.lease(keys(0))
    [states] = lease.states
    assert states.arrival is not None
    source = weakref.ref(states.arrival._sources[0].keys)  # type: ignore[index]
    assert source() is not None
    streams.end_all()
    store.sweep()
    assert source() is None
    lease.release()


def test_the_streams_of_engine_and_tier_are_bound(store: KVStore, streams: Streams) -> None:
    store.bind_device("the engine's")
    assert streams.compute == "the engine's"
    store.bind_device(None)
    assert streams.compute == "the engine's", "an engine on a CPU has none"
