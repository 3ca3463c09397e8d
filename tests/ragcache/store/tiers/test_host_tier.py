"""The host tier: memory of its own, counted as long as anything refers to it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragcache.errors import StateCorrupt, StoreBudgetExceeded, StoreError
from ragcache.states import KVStates
from ragcache.states.quantization import quantize
from ragcache.store.tiers import DiskTier, HostTier
from ragcache.store.tiers import host as host_module
from ragcache.store.tiers.slabs import rounded
from tests.ragcache.conftest import make_key, make_states, same


def test_states_that_were_loaded_into_its_memory_are_not_copied(tmp_path: Path) -> None:
    disk, host = DiskTier(tmp_path), HostTier(10**6)
    disk.put(make_key(1), make_states(1, 30))
    loaded = disk.load(make_key(1), host.allocate)
    used = host.used_bytes
    host.put(make_key(1), loaded)
    assert host.get(make_key(1)) is loaded
    assert host.used_bytes == used


def test_part_of_a_block_is_copied_so_that_the_rest_can_go() -> None:
    host = HostTier(10**6, pinned=False)
    host.put(make_key(1), make_states(1, 1000))
    states = host.get(make_key(1))
    assert isinstance(states, KVStates)
    nbytes = host.put(make_key(2), states.part(0, 1, 1))
    del states
    host.delete(make_key(1))
    assert host.used_bytes == nbytes < 1000


def test_deleted_states_are_counted_until_their_reader_lets_go() -> None:
    host = HostTier(10_000, pinned=False)
    nbytes = host.put(make_key(1), make_states(1, 100))
    held = host.get(make_key(1)).keys
    host.delete(make_key(1))
    assert host.used_bytes == nbytes
    with pytest.raises(StoreBudgetExceeded, match=f"{nbytes:,} are taken"):
        host.put(make_key(2), make_states(2, 100))
    del held
    assert host.used_bytes == 0
    host.put(make_key(2), make_states(2, 100))


def test_memory_that_nothing_was_loaded_into_is_given_back(tmp_path: Path) -> None:
    disk, host = DiskTier(tmp_path), HostTier(10**6)
    disk.put(make_key(1), make_states(1, 30))
    path = disk.path(make_key(1))
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(StateCorrupt):
        host.put(make_key(1), disk.load(make_key(1), host.allocate))
    gc.collect()
    assert (host.used_bytes, [*host.keys()]) == (0, [])


def test_blocks_are_counted_with_their_alignment() -> None:
    host = HostTier(10**6, pinned=False)
    blocks = [host.allocate(nbytes) for nbytes in (1, 63, 64, 65, 1000)]
    assert all(block.data_ptr() % 64 == 0 for block in blocks)
    assert host.used_bytes == sum((128, 128, 128, 192, 1088))


def test_quantized_states_fill_one_block() -> None:
    host = HostTier(10**6, kv_dtype="int8")
    host.put(make_key(1), make_states(1, 30))
    kept = host.get(make_key(1))
    assert kept.keys.untyped_storage().data_ptr() == kept.values.untyped_storage().data_ptr()
    assert quantize(kept, "int8") is kept
    host.put(make_key(1), kept)
    assert host.get(make_key(1)) is kept


class Pages:
    """CUDA's registrations, as it would refuse them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.fails = fails
        self.registered: dict[int, int] = {}
        monkeypatch.setattr(host_module, "pin", self.pin)
        monkeypatch.setattr(host_module, "unpin", self.unpin)

    def pin(self, address: int, nbytes: int) -> None:
        if self.fails:
            raise StoreError("cannot pin")
        assert address % 4096 == nbytes % 4096 == 0
        for begin, size in self.registered.items():
            assert address + nbytes <= begin or begin + size <= address
        self.registered[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.registered[address]


def test_pinned_blocks_are_parts_of_one_registered_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch)
    host = HostTier(10**7, pinned=True)
    assert pages.registered == {}
    for turn in range(300):
        host.put(make_key(turn % 5), make_states(turn % 5, 1 + 97 * turn % 400))
    [(begin, nbytes)] = pages.registered.items()
    assert nbytes < 10**7 + 4096
    for number in range(5):
        keys = host.get(make_key(number)).keys
        assert begin <= keys.data_ptr() < begin + nbytes
        assert keys.data_ptr() % 64 == 0
        assert keys.unique().tolist() == [number]
        del keys
    held = host.get(make_key(0)).keys
    for key in list(host.keys()):
        host.delete(key)
    assert host.used_bytes > 0
    del host
    assert pages.registered, "what is held is still in the slab"
    del held
    gc.collect()
    assert pages.registered == {}


def test_slabs_are_registered_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch)
    host = HostTier(3 * 64_000, pinned=True, slab_bytes=60_000)
    for number in range(3):
        host.put(make_key(number), make_states(number, 990))  # 63,360 bytes
        assert len(pages.registered) == number + 1
    with pytest.raises(StoreBudgetExceeded):
        host.put(make_key(3), make_states(3, 990))
    host.delete(make_key(1))
    host.put(make_key(3), make_states(3, 990))
    assert len(pages.registered) == 3


def test_pages_are_mapped_before_they_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registration would map them otherwise, and holds up every launch."""
    reserved: list[Any] = []
    seen = list[bool]()

    def reserve(nbytes: int) -> Any:
        reserved.append(np.full(nbytes, 7, np.uint8))
        return reserved[-1]

    monkeypatch.setattr(
        host_module, "pin", lambda *_: seen.append(bool(reserved[-1][4096:8192].any()))
    )
    monkeypatch.setattr(host_module, "unpin", lambda _: None)
    host_module.pinned_slab(3 * 4096, reserve=reserve)
    assert seen == [False], "written over"


def test_free_bytes_in_two_pieces_hold_no_larger_states(monkeypatch: pytest.MonkeyPatch) -> None:
    Pages(monkeypatch)
    size = 6400
    host = HostTier(3 * rounded(size), pinned=True)
    for number in range(3):
        host.put(make_key(number), make_states(number, size // 64))
    for number in (0, 2):
        host.delete(make_key(number))
    with pytest.raises(StoreBudgetExceeded, match="not free in one piece"):
        host.put(make_key(3), make_states(3, 2 * size // 64))
    host.delete(make_key(1))
    host.put(make_key(3), make_states(3, 2 * size // 64))


def test_a_block_that_cannot_be_pinned_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    Pages(monkeypatch, fails=True)
    host = HostTier(10**6, pinned=True)
    with pytest.raises(StoreError, match="cannot pin"):
        host.put(make_key(1), make_states(1))
    assert (host.used_bytes, [*host.keys()]) == (0, [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_blocks_are_pinned_beside_a_gpu() -> None:
    host = HostTier(10**8)
    host.put(make_key(1), make_states(1, 3000))
    states = host.get(make_key(1))
    assert states.keys.is_pinned()
    assert states.values.is_pinned()
    assert same(states, make_states(1, 3000))  # type: ignore[arg-type]
    assert host.used_bytes % 512 == 0
    del states
    for number in range(200):  # registering and ending it, at addresses that come again
        host.put(make_key(number % 3), make_states(number % 3, 1000 + number))
