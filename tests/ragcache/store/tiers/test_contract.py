"""The contract of every tier, and of the device tier."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcache.errors import StateMissing, StoreBudgetExceeded
from ragcache.states import KVStates
from ragcache.states.quantization import KVDtype, QuantizedStates, kv_dtype_of, quantize
from ragcache.store.tiers import DeviceTier, HostTier
from tests.conftest import scaled
from tests.ragcache.conftest import make_key, make_maps, make_states, same
from tests.ragcache.store.tiers.conftest import Make


def found(tier: object, number: int) -> KVStates:
    return tier.get(make_key(number)).restore()  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_states_come_back_exact_to_the_bit(make: Make, dtype: torch.dtype) -> None:
    keys, values = torch.randn(2, 2, 3, 5, 8).to(dtype)
    keys[0, 0, 0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    tier = make()
    tier.put(make_key(1), KVStates(keys, values, 3))
    back = found(tier, 1)
    assert torch.equal(back.keys.view(torch.uint8), keys.view(torch.uint8))
    assert torch.equal(back.values.view(torch.uint8), values.view(torch.uint8))
    assert (back.start, back.keys.dtype) == (3, dtype)


def test_a_part_of_a_longer_run_takes_the_room_of_the_part(make: Make) -> None:
    tier = make()
    whole = make_states(1, 5000)
    part = whole.part(10, 12, 11)
    assert tier.put(make_key(1), part) < whole.nbytes / 10
    assert same(found(tier, 1), part)


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_latents_are_kept_once(make: Make, kv_dtype: str) -> None:
    """Their values have no width: the keys serve as values."""
    keys = torch.randn(2, 1, 500, 96)
    tier = make(kv_dtype=kv_dtype)
    latents = KVStates(keys, keys[..., :0], 3)
    once = tier.put(make_key(1), latents)
    assert once < 0.6 * tier.put(make_key(2), KVStates(keys, keys, 3))
    assert tier.size_of(latents) >= once
    back = found(tier, 1)
    assert back.values.shape == (2, 1, 500, 0)
    torch.testing.assert_close(back.keys, keys, rtol=0, atol=0.05 if kv_dtype == "int8" else 0)


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_maps_of_recurrent_layers_are_kept_as_they_are(make: Make, kv_dtype: str) -> None:
    """More recurrent layers than others, and in eight bits the maps as they were."""
    tier = make(kv_dtype=kv_dtype)
    states = replace(make_states(1, 40), recurrent=make_maps(torch.bfloat16))
    assert tier.put(make_key(1), states) <= tier.size_of(states)
    assert tier.size_of(states) > states.recurrent.nbytes
    for source in (states, quantize(states, "int8")):
        tier.put(make_key(2), source)
        back = tier.get(make_key(2)).restore().recurrent
        assert back is not None
        for name, tensor in states.recurrent.tensors().items():
            assert torch.equal(back.tensors()[name], tensor)


def test_a_put_beyond_the_budget_changes_nothing(make: Make) -> None:
    states = make_states(1, 300)
    size = make().size_of(states)
    tier = make(budget=int(1.5 * size))
    tier.put(make_key(1), states)
    used = tier.used_bytes
    for number in (1, 2):
        with pytest.raises(StoreBudgetExceeded, match=f"the {tier.name} tier may hold"):
            tier.put(make_key(number), make_states(number, 300))
    assert tier.used_bytes == used
    assert list(tier.keys()) == [make_key(1)]
    assert same(found(tier, 1), states)


def test_stored_states_change_with_nothing_else(make: Make) -> None:
    tier, source = make(), make_states(1, 100)
    tier.put(make_key(1), source)
    source.keys.zero_()
    held = tier.get(make_key(1))
    tier.put(make_key(1), make_states(1, 100))
    tier.delete(make_key(1))
    tier.put(make_key(2), make_states(2, 100))
    assert same(held.restore(), make_states(1, 100))


def test_quantized_states_are_kept_as_they_are(make: Make) -> None:
    states = make_states(1, 40)
    tier = make(kv_dtype="int8")
    nbytes = tier.put(make_key(1), states)
    assert nbytes <= tier.size_of(states)
    kept = tier.get(make_key(1))
    if isinstance(tier, DeviceTier):
        assert tier.kv_dtype == kv_dtype_of(kept) == "model"
        return
    assert isinstance(kept, QuantizedStates)
    expected = quantize(states, "int8")
    assert torch.equal(kept.keys.view(torch.uint8), expected.keys.view(torch.uint8))
    assert same(kept.restore(), expected.restore())
    tier.put(make_key(2), kept)
    assert same(found(tier, 2), kept.restore())


def test_quantized_states_from_below_are_restored_for_the_tier(make: Make) -> None:
    tier = make(kv_dtype="model")
    below = quantize(make_states(1, 40), "int8")
    assert tier.put(make_key(1), below) <= tier.size_of(below)
    assert kv_dtype_of(tier.get(make_key(1))) == "model"
    assert same(found(tier, 1), below.restore())


def test_threads_that_put_and_delete_lose_no_byte(make: Make) -> None:
    tier = make()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(12):
                number = (seed + turn) % 5
                tier.put(make_key(number), make_states(number, 3 + number))
                tier.delete(make_key(number)) if turn % 3 == seed % 3 else None
                with suppress(StateMissing):
                    assert same(found(tier, number), make_states(number, 3 + number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for key in list(tier.keys()):
        tier.delete(key)
    assert tier.used_bytes == 0


steps = st.lists(
    st.tuples(st.sampled_from(["put", "get", "delete"]), st.integers(0, 4), st.integers(0, 200)),
    max_size=25,
)


@given(steps=steps)
@settings(max_examples=scaled(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_tier_agrees_with_a_dictionary(make: Make, steps: list[tuple[str, int, int]]) -> None:
    tier = make(budget=40_000)
    for key in list(tier.keys()):  # the folder outlives an example
        tier.delete(key)
    model: dict[int, tuple[int, int]] = {}
    for action, number, tokens in steps:
        key, states = make_key(number), make_states(number, tokens)
        if action == "put":
            size = tier.size_of(states)
            in_pieces = isinstance(tier, DeviceTier) and tier._pool.largest < size
            if tier.used_bytes + size <= 40_000 and not in_pieces:
                model[number] = (tokens, tier.put(key, states))
                assert states.nbytes <= model[number][1] <= size
            else:
                with pytest.raises(StoreBudgetExceeded):
                    tier.put(key, make_states(number, 2000))
        elif action == "delete":
            tier.delete(key)
            model.pop(number, None)
        elif number in model:
            assert same(found(tier, number), make_states(number, model[number][0]))
        else:
            with pytest.raises(StateMissing, match=key):
                tier.get(key)
        del states
        assert (key in tier) == (number in model)
        assert set(tier.keys()) == {make_key(n) for n in model}
        assert tier.used_bytes == sum(size for _, size in model.values()) <= 40_000


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_are_counted_as_the_allocator_rounds_them(device: str) -> None:
    tier = DeviceTier(10**7, device)
    assert tier.put(make_key(1), make_states(1, 1)) == 2 * 512
    assert tier.put(make_key(2), make_states(2, 1000)) == 2 * 32_256
    with pytest.raises(StoreBudgetExceeded, match="Raise device_bytes"):
        tier.put(make_key(3), make_states(3, 200_000))
    assert tier.used_bytes == 1024 + 64_512


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_states_from_the_host_are_restored_on_the_device(device: str, kv_dtype: KVDtype) -> None:
    host, tier = HostTier(10**6, kv_dtype=kv_dtype), DeviceTier(10**6, device)
    host.put(make_key(1), make_states(1, 30))
    tier.put(make_key(1), host.get(make_key(1)))
    states = tier.get(make_key(1)).restore()
    assert states.keys.device.type == device
    there = KVStates(states.keys.cpu(), states.values.cpu(), states.start)
    assert same(there, quantize(make_states(1, 30), kv_dtype).restore())
