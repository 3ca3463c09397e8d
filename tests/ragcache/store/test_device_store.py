"""A store whose first tier is a device: what reads states there can read them nowhere else."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from ragcache.db import Database, Ledger
from ragcache.engine import Context
from ragcache.errors import DeadlineExceeded, StoreBudgetExceeded
from ragcache.pipeline.conversations import PrefixRun, placed_segments
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates
from ragcache.store import DeviceTier, HostTier, KVStore, Lease, LeaseRequest, memory_tiers
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


def test_a_resumed_turn_begins_while_its_states_arrive(store: KVStore, streams: Streams) -> None:
    """The engine waits for each layer of a conversation's states when a step reads the layer."""
    after = 7  # tokens of a document between own tokens
    positions = (*range(10), *range(10 + after, TOKENS + after), TOKENS + after)
    context = Context((), tuple(range(TOKENS + 1)), positions, TOKENS + after + 1)
    run = PrefixRun(make_key(0), 0, TOKENS)
    with store.fetch([run.key]) as lease:
        assert lease.source == {run.key: "disk"}
        segments = list(placed_segments(run, lease.found[run.key], context))
        assert [(each.start, each.states.length) for each in segments] == [(0, 10), (17, 30)]
        for each in segments:
            assert each.states.arrival is not None
            assert not each.states.arrival.ready()
        streams.end_all()
        assert all(each.states.arrival.ready() for each in segments if each.states.arrival)
        check(lease, 0)


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


def test_states_that_go_down_can_be_leased_all_the_time(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave the device when the host has them; states that a lease takes meanwhile stay."""
    store.lease(keys(0, 1, 2)).release()
    put, taken = HostTier.put, list[Lease]()

    def take_and_put(tier: HostTier, key: KVKey, states: StoredStates) -> int:
        if not taken:
            taken.append(store.lease([key]))
            assert taken[0].source == {key: "device"}
        return put(tier, key, states)

    monkeypatch.setattr(HostTier, "put", take_and_put)
    with store.lease(keys(3)) as lease:
        check(lease, 3)
    leased = taken[0].keys[0]
    assert leased in store.memory.top.entries
    assert len([key for key in keys(0, 1, 2) if key in store.memory.top.entries]) == 2
    taken[0].release()


def test_room_is_made_while_a_device_encodes(store: KVStore) -> None:
    store.lease(keys(0, 1, 2)).release()
    request = LeaseRequest(size_of=lambda _: SIZE)
    with store.lease(keys(20, 21), request) as lease:
        assert lease.claim() == keys(20, 21)
        store._leases._evicting.submit(int).result()  # behind the evictions
        assert len(store.memory.top.entries) == 1
        assert len([key for key in keys(0, 1, 2) if key in store.host]) == 2
        for number in (20, 21):
            lease.put(make_key(number), make_states(number, TOKENS))
        assert len(store.memory.top.entries) == 3
        check(lease, 20, 21)


def test_states_of_several_sizes_find_room_in_one_piece(store: KVStore) -> None:
    """Room is made until what is free is in one piece."""
    store.lease(keys(0, 1, 2)).release()
    large = make_key(20)
    store.put_states(large, make_states(20, 2 * TOKENS))
    with store.lease([large]) as lease:
        assert same(lease.states[0].restore(), make_states(20, 2 * TOKENS))
        assert lease.source[large] == "device"


def test_a_full_device_refuses_who_does_not_wait_and_goes_on(store: KVStore) -> None:
    lease = store.lease(keys(0, 1, 2))
    with pytest.raises(StoreBudgetExceeded, match="Raise device_bytes"):
        store.lease(keys(3), LeaseRequest(patience=0.0))
    with store.lease(keys(1)) as other:
        check(other, 1)
    check(lease, 0, 1, 2)
    lease.release()
    with store.lease(keys(3)) as other:
        check(other, 3)


def in_thread(pool: ThreadPoolExecutor, store: KVStore, *numbers: int) -> Future[Lease]:
    """Leases keys in another thread, and returns when that lease waits or is there."""
    before = len(store._leases.queue._waiting)
    request = LeaseRequest(size_of=lambda _: SIZE)
    future = pool.submit(store.lease, keys(*numbers), request)
    while not future.done() and len(store._leases.queue._waiting) == before:
        time.sleep(0.001)
    return future


def test_leases_wait_in_order_for_a_full_device(store: KVStore) -> None:
    """The second one would fit at once when the first does not, and stays behind it."""
    lease, small = store.lease(keys(0, 1)), store.lease(keys(2))
    with ThreadPoolExecutor(2) as pool:
        first = in_thread(pool, store, 3, 4)
        second = in_thread(pool, store, 5)
        small.release()
        assert not first.done()
        assert not second.done()
        lease.release()
        with first.result(10) as one, second.result(10) as two:
            check(one, 3, 4)
            check(two, 5)
            assert one.tick < two.tick
    assert not store._leases.queue._holding
    assert store._leases.queue._total == 0


def test_a_lease_of_present_states_waits_for_no_room(store: KVStore) -> None:
    with store.lease(keys(0, 1, 2)), store.lease(keys(1, 2)) as other:
        check(other, 1, 2)


def test_a_lease_larger_than_the_device_is_refused_once_alone(store: KVStore) -> None:
    lease = store.lease(keys(0))
    with ThreadPoolExecutor(1) as pool:
        large = in_thread(pool, store, 1, 2, 3, 4)
        assert not large.done()
        lease.release()
        with pytest.raises(StoreBudgetExceeded, match="Raise device_bytes"):
            large.result(10)
    with store.lease(keys(4)) as other:
        check(other, 4)


def test_the_patience_of_a_waiting_lease_ends(store: KVStore) -> None:
    with (
        store.lease(keys(0, 1, 2)),
        pytest.raises(DeadlineExceeded, match="waited for room in the device tier"),
    ):
        store.lease(keys(3), LeaseRequest(patience=0.05))
    assert set(store.memory.leases) == set()


def test_a_waiting_extension_lets_another_one_finish(store: KVStore) -> None:
    """Two leases hold a state each, and want two more of the device's three."""
    one, two = store.lease(keys(0)), store.lease(keys(1))
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(one.extend, keys(2, 3), LeaseRequest())
        while not store._leases.queue._waiting:
            time.sleep(0.001)
        two.release()
        waiting.result(10)
    check(one, 0, 2, 3)
    one.release()


def test_states_to_encode_are_counted_before_they_are_made(store: KVStore) -> None:
    new = make_key(30)
    lease = store.lease([new], LeaseRequest(size_of=lambda _: SIZE))
    assert lease.claim() == [new]
    with ThreadPoolExecutor(1) as pool:
        other = in_thread(pool, store, 0, 1, 2)
        assert not other.done(), "room for the state that is being encoded"
        lease.put(new, make_states(30, TOKENS))
        lease.release()
        with other.result(10) as held:
            check(held, 0, 1, 2)


def test_device_and_host_hold_nearly_their_sum(tmp_path: Path, database: Database) -> None:
    """Twelve states over a device for six and a host for nine, three of which are being moved."""
    host_size = HostTier(1 << 20).size_of(make_states(0, TOKENS))
    streams = Streams()
    device = DeviceTier(6 * SIZE, "cpu", streams=streams)
    store = KVStore(Ledger(database), [device, HostTier(9 * host_size, pinned=False)])
    store.ledger.begin()
    rng, encoded = random.Random(1), list[KVKey]()
    for number in range(12):
        store.put_states(make_key(number), make_states(number, TOKENS))
    for _ in range(200):
        numbers = rng.sample(range(12), 3)
        streams.end_all()
        with store.lease(keys(*numbers)) as lease:
            while missing := lease.claim():
                for key in missing:
                    encoded.append(key)
                    lease.put(key, make_states(int(key[:2], 16), TOKENS))
            check(lease, *numbers)
    held = {key for index in store.memory.indexes for key in index.entries}
    assert held == set(keys(*range(12)))
    assert encoded == []
    store.close()


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
