"""Slabs and their extents."""

from __future__ import annotations

import gc

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.store.tiers.slabs import ALIGNMENT, Extent, SlabPool, rounded
from tests.conftest import scaled


def reserve(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def reserved(pool: SlabPool) -> int:
    return sum(slab.nbytes for slab in pool._slabs)


@given(requests=st.lists(st.integers(0, 9000), max_size=30), budget=st.integers(0, 30_000))
@settings(max_examples=scaled(50))
def test_slabs_keep_to_the_budget_and_extents_are_apart(requests: list[int], budget: int) -> None:
    pool, taken = SlabPool(budget, reserve, 8192), list[Extent]()
    for nbytes in requests:
        largest, extent = pool.largest, pool.take(nbytes)
        assert (extent is not None) == (rounded(max(1, nbytes)) <= largest)
        if extent is not None:
            assert extent.nbytes >= nbytes
            assert extent.begin % ALIGNMENT == extent.nbytes % ALIGNMENT == 0
            for other in taken:
                apart = extent.begin >= other.begin + other.nbytes
                apart |= other.begin >= extent.begin + extent.nbytes
                assert apart or extent.slab != other.slab
            taken.append(extent)
    assert reserved(pool) <= budget


def test_a_slab_holds_a_whole_number_of_large_extents() -> None:
    pool = SlabPool(10 * 8192, reserve, 8192)
    for _ in range(2):
        assert pool.take(5120) is not None
    assert reserved(pool) == 2 * 5120
    assert pool.take(20_480) is not None
    assert reserved(pool) == 2 * 5120 + 20_480


def test_the_end_of_memory_is_the_end_of_its_last_view() -> None:
    pool = SlabPool(8192, reserve)
    extent = pool.take(1000)
    assert extent is not None
    ends: list[str] = []
    memory = pool.memory(extent, lambda: ends.append("end"))
    view = memory[10:20].view(2, 5)[1]
    whole = memory.untyped_storage().nbytes()
    assert whole == extent.nbytes, "it has a storage of its own"
    del memory
    gc.collect()
    assert not ends
    del view
    assert ends == ["end"]
