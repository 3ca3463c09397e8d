"""The device tier: extents of a slab, and the order of copies and reads on streams that a test
plays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ragcache.errors import StoreBudgetExceeded, StoreFull
from ragcache.states import KVStates
from ragcache.states.quantization import QuantizedStates, quantize
from ragcache.store.tiers import DeviceTier, HostTier
from ragcache.store.tiers import device as device_module
from tests.ragcache.conftest import make_key, make_states, same
from tests.ragcache.store.played_streams import Streams


def layered(number: int, layers: int, tokens: int = 4) -> KVStates:
    keys = torch.arange(layers, dtype=torch.float32).view(layers, 1, 1, 1) + 100 * number
    return KVStates(
        keys.expand(layers, 1, tokens, 8).contiguous(), -keys.expand(-1, 1, tokens, 8), 0
    )


def copied_layers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Notes the copies as (number of the states, first layer, last layer)."""
    copies: list[tuple[int, int, int]] = []
    copy_layers = device_module._Copy.copy_layers

    def noting(self: Any, begin: int, end: int, copy: Any) -> None:
        copy_layers(self, begin, end, copy)
        part = self.source.keys[begin:end, 0, 0, 0].tolist()
        copies.append((int(part[0]) // 100, int(part[0]) % 100, int(part[-1]) % 100))

    monkeypatch.setattr(device_module._Copy, "copy_layers", noting)
    return copies


def test_layer_by_layer_of_all_keys_with_an_event_after_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies = copied_layers(monkeypatch)
    monkeypatch.setattr(device_module, "_PIECE", 1)
    streams = Streams()
    tier = DeviceTier(10**6, "cpu", streams=streams)
    tier.put_all([(make_key(n), layered(n, 3)) for n in (1, 2)])
    assert copies == [(n, layer, layer) for layer in range(3) for n in (1, 2)]
    assert len(streams.events) == 3
    one, two = tier.get(make_key(1)), tier.get(make_key(2))
    assert one.arrival is two.arrival is not None
    one.arrival.wait("engine", 1)
    assert streams.log[-1] == "engine waits for upload 1"
    assert not one.arrival.ready()
    streams.end_all()
    assert one.arrival.ready()
    assert same(one.restore(), layered(1, 3))
    assert same(two.restore(), layered(2, 3))


def test_small_layers_share_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = copied_layers(monkeypatch)
    monkeypatch.setattr(device_module, "_PIECE", 2 * layered(1, 1).keys.nbytes)
    streams = Streams()
    tier = DeviceTier(10**6, "cpu", streams=streams)
    tier.put(make_key(1), layered(1, 5))
    assert copies == [(1, 0, 1), (1, 2, 3), (1, 4, 4)]
    arrival = tier.get(make_key(1)).arrival
    assert arrival is not None
    for layer in range(5):
        arrival.wait("engine", layer)
    waited = [line for line in streams.log if line.startswith("engine")]
    assert waited == [f"engine waits for upload {n}" for n in (0, 0, 1, 1, 2)]


def test_computed_states_are_copied_in_the_order_of_the_engine() -> None:
    streams = Streams()
    tier = DeviceTier(10**6, "cpu", streams=streams)
    states = layered(1, 3)
    streams.computed.append(states.keys)
    tier.put_all([(make_key(1), states), (make_key(2), layered(2, 3))])
    assert streams.log[:2] == ["compute follows the thread", "copy on compute"]
    computed, uploaded = tier.get(make_key(1)).arrival, tier.get(make_key(2)).arrival
    assert computed is not None
    assert uploaded is not None
    assert computed.ready("compute")
    assert not computed.ready("another")
    assert not uploaded.ready("compute")


def test_freed_memory_is_written_behind_what_still_reads_it() -> None:
    """NaN in memory that is read would be seen: states that are held keep their bytes, and memory
    is taken again only behind an event of the stream that read it."""
    streams = Streams()
    states = make_states(1, 40)
    tier = DeviceTier(2 * DeviceTier(0, "cpu").size_of(states), "cpu", streams=streams)
    trap = KVStates(states.keys * torch.nan, states.values * torch.nan, 0)
    tier.put(make_key(1), states)
    streams.end_all()
    held = tier.get(make_key(1))
    address = held.keys.data_ptr()
    tier.delete(make_key(1))
    tier.put(make_key(2), trap)
    with pytest.raises(StoreBudgetExceeded):
        tier.put(make_key(3), trap)
    assert same(held.restore(), states), "a step that is queued still reads these"
    del held
    begin = len(streams.log)
    tier.put(make_key(3), trap)
    assert tier.get(make_key(3)).keys.data_ptr() == address
    freed = [event for event in streams.events if event.name.startswith("compute")]
    assert streams.log[begin:] == [f"upload waits for {freed[-1].name}", "copy on upload"]


def test_memory_that_nothing_reads_is_taken_without_waiting() -> None:
    streams = Streams()
    tier = DeviceTier(10**6, "cpu", streams=streams)
    tier.put(make_key(1), make_states(1, 40))
    tier.delete(make_key(1))
    streams.end_all()
    tier.put(make_key(2), make_states(2, 40))
    assert not any("waits" in line for line in streams.log)


def test_the_engine_writes_memory_only_after_its_copy_has_ended() -> None:
    streams = Streams()
    states = make_states(1, 40)
    tier = DeviceTier(DeviceTier(0, "cpu").size_of(states), "cpu", streams=streams)
    tier.put(make_key(1), states)
    tier.delete(make_key(1))
    streams.computed.append(states.keys)
    tier.put(make_key(2), states)
    wait = streams.log.index("compute waits for upload 0")
    assert wait < streams.log.index("copy on compute")


def test_memory_of_a_failed_put_is_written_after_its_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Streams()
    states = make_states(1, 40)
    tier = DeviceTier(DeviceTier(0, "cpu").size_of(states), "cpu", streams=streams)

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(device_module._Copy, "copy_layers", no_memory)
        with pytest.raises(StoreFull):
            tier.put(make_key(1), states)
    streams.computed.append(states.keys)
    tier.put(make_key(2), states)
    queued = streams.events[0].name
    assert queued.startswith("upload")
    assert streams.log.index(f"compute waits for {queued}") < streams.log.index("copy on compute")


def test_a_put_of_several_that_do_not_fit_changes_nothing() -> None:
    states = make_states(1, 40)
    tier = DeviceTier(3 * DeviceTier(0, "cpu").size_of(states), "cpu")
    tier.put(make_key(1), states)
    used = tier.used_bytes
    with pytest.raises(StoreBudgetExceeded):
        tier.put_all([(make_key(n), make_states(n, 40)) for n in (2, 3, 4)])
    assert (tier.used_bytes, [*tier.keys()]) == (used, [make_key(1)])
    tier.put_all([(make_key(n), make_states(n, 40)) for n in (2, 3)])
    assert all(same(tier.get(make_key(n)).restore(), make_states(n, 40)) for n in (1, 2, 3))


def test_int8_states_are_kept_as_they_came() -> None:
    host, tier = HostTier(10**6, kv_dtype="int8"), DeviceTier(10**6, "cpu", kv_dtype="int8")
    host.put(make_key(1), KVStates(*torch.randn(2, 3, 2, 30, 8), 5))
    below = host.get(make_key(1))
    assert tier.size_of(below) == tier.put(make_key(1), below)
    kept = tier.get(make_key(1))
    assert isinstance(below, QuantizedStates)
    assert isinstance(kept, QuantizedStates)
    for name in ("keys", "values", "key_scales", "value_scales"):
        one, other = getattr(kept, name), getattr(below, name)
        assert torch.equal(one, other), name
        assert one.data_ptr() != other.data_ptr()
        assert one.is_contiguous()
    assert same(kept.restore(), below.restore())
    assert kept.nbytes < below.restore().nbytes / 2


def test_an_int8_tier_quantizes_encoded_states_if_possible() -> None:
    tier = DeviceTier(10**6, "cpu", kv_dtype="int8")
    states = KVStates(*torch.randn(2, 3, 2, 30, 8), 5)
    tier.put(make_key(1), states)
    assert same(tier.get(make_key(1)).restore(), quantize(states, "int8").restore())
    states.keys[0, 0, 0, 0] = torch.inf
    tier.put(make_key(2), states)
    assert same(tier.get(make_key(2)), states)  # type: ignore[arg-type]
