"""The device tier, on whichever devices there are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ragcache.errors import StoreBudgetExceeded
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates, quantize, restored
from ragcache.store.tiers import DeviceTier, HostTier
from tests.ragcache.conftest import make_key, make_states, same

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def on_cpu(tier: DeviceTier, number: int) -> object:
    states = tier.get(make_key(number))
    return type(states)(states.keys.cpu(), states.values.cpu(), states.start)


@pytest.mark.parametrize("device", DEVICES)
def test_states_are_on_the_device_and_the_same(device: str) -> None:
    tier = DeviceTier(10**6, device)
    tier.put(make_key(1), make_states(1, 30))
    assert tier.get(make_key(1)).keys.device.type == device
    assert same(on_cpu(tier, 1), make_states(1, 30))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_are_counted_as_the_allocator_rounds_them(device: str) -> None:
    tier = DeviceTier(10**7, device)
    assert tier.put(make_key(1), make_states(1, 1)) == 2 * 512
    assert tier.put(make_key(2), make_states(2, 1000)) == 2 * 32_256
    with pytest.raises(StoreBudgetExceeded, match="Raise device_bytes"):
        tier.put(make_key(3), make_states(3, 200_000))
    assert tier.used_bytes == 1024 + 64_512


@pytest.mark.parametrize("device", DEVICES)
def test_quantized_states_cross_as_they_are_and_are_restored_there(device: str) -> None:
    host, tier = HostTier(10**6, kv_dtype="int8"), DeviceTier(10**6, device)
    host.put(make_key(1), make_states(1, 30))
    tier.put(make_key(1), host.get(make_key(1)))
    expected = restored(quantize(make_states(1, 30), "int8"))
    assert same(on_cpu(tier, 1), expected)  # type: ignore[arg-type]


@needs_gpu
def test_the_device_allocates_what_is_counted() -> None:
    before = torch.cuda.memory_allocated()
    tier = DeviceTier(10**8, "cuda")
    for number in range(5):
        tier.put(make_key(number), make_states(number, 100 + 999 * number))
    assert torch.cuda.memory_allocated() - before == tier.used_bytes


@needs_gpu
def test_transfers_beside_compute_never_reach_what_is_being_read() -> None:
    """States go and others come while the device still computes with the first ones."""
    host, tier = HostTier(10**9), DeviceTier(10**9, "cuda")
    for number in range(8):
        host.put(make_key(number), make_states(number, 20_000))

    def promote(key: KVKey) -> StoredStates:
        tier.put(key, host.get(key))
        return tier.get(key)

    busy = torch.randn(4096, 4096, device="cuda")
    sums = []
    with ThreadPoolExecutor(2) as transfers:
        for turn in range(64):
            key = make_key(turn % 8)
            states = transfers.submit(promote, key).result()
            busy = busy @ busy / 4096  # keeps the stream behind
            sums.append((turn % 8, states.keys.float().mean()))
            tier.delete(key)
            del states
    assert all(float(mean) == number for number, mean in sums)


@needs_gpu
def test_states_computed_on_the_device_are_waited_for() -> None:
    tier = DeviceTier(10**9, "cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    states = make_states(3, 20_000)
    keys = states.keys.cuda() * 0
    for _ in range(20):
        busy = busy @ busy / 4096
    keys += 3 + 0 * busy.sum()
    tier.put(make_key(3), type(states)(keys, -keys, 3))
    assert float(tier.get(make_key(3)).keys.mean()) == 3
