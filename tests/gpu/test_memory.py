"""States on a GPU: streams, arrivals, slabs and pinned memory."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ragcache.errors import StoreBudgetExceeded, StoreFull
from ragcache.machine import device_memory
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import StoredStates, kv_dtype_of
from ragcache.store.tiers import DeviceTier, HostTier
from tests.ragcache.conftest import make_key, make_states, same

if not torch.cuda.is_available():
    pytest.skip("needs a GPU with CUDA", allow_module_level=True)

pytestmark = pytest.mark.gpu
TOKENS = 20_000
GIB = 1 << 30


def on_cpu(states: StoredStates) -> KVStates:
    plain = states.restore()
    if plain.arrival is not None:
        plain.arrival.synchronize()
    return KVStates(plain.keys.cpu(), plain.values.cpu(), plain.start)


def busy_stream(stream: torch.cuda.Stream, turns: int = 40) -> None:
    """Keeps a stream behind the host by some 10 ms."""
    with torch.cuda.stream(stream):
        matrix = torch.randn(4096, 4096, device=stream.device)
        for _ in range(turns):
            matrix = matrix @ matrix / 4096


def test_the_budget_is_reserved_at_once_and_no_key_allocates() -> None:
    before = torch.cuda.memory_allocated()
    tier = DeviceTier(10**8, "cuda")
    reserved = torch.cuda.memory_allocated() - before
    assert abs(10**8 - reserved) < 2**21  # the allocator rounds up
    for number in range(5):
        tier.put(make_key(number), make_states(number, 100 + 999 * number))
    assert torch.cuda.memory_allocated() - before == reserved
    assert all(same(on_cpu(tier.get(make_key(n))), make_states(n, 100 + 999 * n)) for n in range(5))


def test_a_put_from_pinned_memory_does_not_wait() -> None:
    host, tier = HostTier(GIB), DeviceTier(GIB, "cuda")
    host.put(make_key(1), make_states(1, 2_000_000))  # 128 MB
    busy_stream(tier._streams.upload)  # type: ignore[union-attr]
    tier.put(make_key(1), host.get(make_key(1)))
    states = tier.get(make_key(1))
    assert states.arrival is not None
    assert not states.arrival.ready()
    stream = torch.cuda.current_stream()
    for layer in range(2):
        states.arrival.wait(stream, layer)
        assert states.keys[layer].unique().tolist() == [1]
    assert same(on_cpu(states), make_states(1, 2_000_000))


def test_sources_may_leave_the_host_tier_before_they_are_copied() -> None:
    host, tier = HostTier(GIB), DeviceTier(GIB, "cuda")
    host.put(make_key(1), make_states(1, TOKENS))
    busy_stream(tier._streams.upload)  # type: ignore[union-attr]
    tier.put(make_key(1), host.get(make_key(1)))
    host.delete(make_key(1))
    assert host.used_bytes > 0, "the copy still reads it"
    host.put(make_key(2), make_states(2, TOKENS))
    assert same(on_cpu(tier.get(make_key(1))), make_states(1, TOKENS))
    assert tier.get(make_key(1)).arrival.ready()  # type: ignore[union-attr]
    host.delete(make_key(2))
    assert host.used_bytes == 0


@pytest.mark.parametrize("own_stream", [False, True])
def test_transfers_beside_compute_never_reach_what_is_being_read(own_stream: bool) -> None:
    """States go and others come while the device still computes with the first ones."""
    size = DeviceTier(0, "cpu").size_of(make_states(0, TOKENS))
    host, tier = HostTier(GIB), DeviceTier(2 * size, "cuda")
    engine = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    tier.bind(engine, keep_free=0)
    for number in range(8):
        host.put(make_key(number), make_states(number, TOKENS))

    def promote(key: KVKey) -> StoredStates:
        tier.put(key, host.get(key))
        return tier.get(key)

    sums = []
    with ThreadPoolExecutor(2) as transfers, torch.cuda.stream(engine):
        for turn in range(64):
            key = make_key(turn % 8)
            states = transfers.submit(promote, key).result()
            assert states.arrival is not None
            states.arrival.wait(engine)
            busy_stream(engine, 4)
            sums.append((turn % 8, states.keys.float().mean()))
            tier.delete(key)
            del states
        engine.synchronize()
        assert all(float(mean) == number for number, mean in sums)


def test_nan_in_freed_memory_is_seen_by_nobody() -> None:
    size = DeviceTier(0, "cpu").size_of(make_states(0, TOKENS))
    tier = DeviceTier(size, "cuda")
    good, trap = make_states(1, TOKENS), make_states(1, TOKENS)
    trap.keys.fill_(torch.nan)
    sums = []
    for _ in range(8):
        tier.put(make_key(1), good)
        states = tier.get(make_key(1))
        states.arrival.wait(torch.cuda.current_stream())  # type: ignore[union-attr]
        busy_stream(torch.cuda.current_stream(), 10)
        sums.append(states.keys.sum())
        del states
        tier.delete(make_key(1))
        tier.put(make_key(2), trap)
        tier.delete(make_key(2))
    assert [float(total) for total in sums] == [float(good.keys.sum())] * 8


@pytest.mark.parametrize("own_stream", [False, True])
def test_states_computed_on_the_device_are_waited_for(own_stream: bool) -> None:
    tier = DeviceTier(GIB, "cuda")
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    tier.bind(stream, keep_free=0)
    states = make_states(3, TOKENS)
    with torch.cuda.stream(stream):
        keys = states.keys.cuda() * 0
        busy_stream(stream)
        keys += 3
        tier.put(make_key(3), KVStates(keys, -keys, 3))
        kept = tier.get(make_key(3))
        assert kept.arrival is not None
        assert kept.arrival.ready(stream)
    assert same(on_cpu(kept), states)


def test_blocks_of_the_host_tier_are_pinned() -> None:
    host = HostTier(10**8)
    host.put(make_key(1), make_states(1, 3000))
    states = host.get(make_key(1))
    assert states.keys.is_pinned()
    assert states.values.is_pinned()
    assert same(states.restore(), make_states(1, 3000))
    del states
    for number in range(200):
        host.put(make_key(number % 3), make_states(number % 3, 1000 + number))


def test_computed_states_come_to_pinned_memory_as_they_are() -> None:
    host = HostTier(10**9)
    host.put(make_key(1), make_states(1, 10))  # registers the slab, which takes long
    states = make_states(3, TOKENS)
    keys = states.keys.cuda() * 0
    busy_stream(torch.cuda.current_stream())
    keys += 3
    copy = host.begin_copy(KVStates(keys, -keys, 3))
    assert copy.arrival is not None
    assert not copy.arrival.ready()
    copy.arrival.synchronize()
    assert same(copy.restore(), states)
    host.put(make_key(3), KVStates(keys, -keys, 3))
    assert same(host.get(make_key(3)).restore(), states)


def test_int8_states_stay_int8_or_are_restored_on_the_way() -> None:
    host = HostTier(10**7, kv_dtype="int8")
    host.put(make_key(1), KVStates(*torch.randn(2, 4, 2, 300, 64).bfloat16(), 5))
    below = host.get(make_key(1))
    for kind in ("int8", "model"):
        tier = DeviceTier(10**7, "cuda", kv_dtype=kind)  # type: ignore[arg-type]
        tier.put(make_key(1), below)
        kept = tier.get(make_key(1))
        assert kv_dtype_of(kept) == kind
        assert kept.keys.is_cuda
        assert same(on_cpu(kept), below.restore())


def test_a_budget_beyond_the_device_is_refused_with_advice() -> None:
    with pytest.raises(StoreFull, match="lower device_bytes"):
        DeviceTier(1 << 50, "cuda")


def test_a_full_tier_refuses_and_goes_on() -> None:
    tier = DeviceTier(10**6, "cuda")
    with pytest.raises(StoreBudgetExceeded, match="Raise device_bytes"):
        tier.put(make_key(1), make_states(1, 200_000))
    tier.put(make_key(2), make_states(2, 20))
    assert same(on_cpu(tier.get(make_key(2))), make_states(2, 20))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_tier_on_the_second_gpu_leaves_the_first_alone() -> None:
    gc.collect()  # models of earlier tests
    before = torch.cuda.memory_allocated(0)
    host, tier = HostTier(10**8), DeviceTier(10**7, "cuda:1")
    for number in range(20):
        host.put(make_key(number), make_states(number, 3000))
        tier.put(make_key(number % 4), host.get(make_key(number)))
        kept = tier.get(make_key(number % 4))
        assert kept.keys.device == torch.device("cuda:1")
        assert kept.arrival is not None
        kept.arrival.wait(torch.cuda.current_stream(1))
        assert same(on_cpu(kept), make_states(number, 3000))
    computed = make_states(5, 300).keys.to("cuda:1")
    tier.put(make_key(9), KVStates(computed, -computed, 5))
    host.put(make_key(9), tier.get(make_key(9)))
    assert same(host.get(make_key(9)).restore(), make_states(5, 300))
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_are_served_side_by_side() -> None:
    host = HostTier(10**8)
    tiers = [DeviceTier(10**7, f"cuda:{number}") for number in range(2)]
    for number in range(3):
        host.put(make_key(number), make_states(number, 3000))

    def serve(tier: DeviceTier) -> list[bool]:
        found = []
        for turn in range(60):
            tier.put(make_key(turn % 3), host.get(make_key(turn % 3)))
            found.append(same(on_cpu(tier.get(make_key(turn % 3))), make_states(turn % 3, 3000)))
        return found

    with ThreadPoolExecutor(2) as threads:
        assert all(all(found) for found in threads.map(serve, tiers))


def test_memory_of_a_gpu_is_told() -> None:
    kept = torch.empty(GIB // 4, device="cuda")
    told = device_memory(kept.device)
    assert 0 < told["free_bytes"] < told["total_bytes"]
    assert told["reserved_bytes"] >= GIB
    assert told["name"]
