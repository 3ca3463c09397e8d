"""Slabs and their extents."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.store.tiers.slabs import ALIGNMENT, Extent, FreeExtents, SlabPool, rounded
from tests.conftest import scaled

sizes = st.integers(1, 40)
steps = st.lists(st.tuples(st.booleans(), sizes), max_size=60)


@given(total=st.integers(1, 120), steps=steps)
@settings(max_examples=scaled(100))
def test_extents_agree_with_a_list_of_bytes(total: int, steps: list[tuple[bool, int]]) -> None:
    free = FreeExtents(total)
    model = [False] * total  # whether each byte is taken
    taken: list[tuple[int, int]] = []
    for takes, number in steps:
        if takes:
            fits = [b for b in range(total - number + 1) if not any(model[b : b + number])]
            begin = free.take(number)
            assert begin == (fits[0] if fits else None)
            if begin is not None:
                model[begin : begin + number] = [True] * number
                taken.append((begin, number))
        elif taken:
            begin, nbytes = taken.pop(number % len(taken))
            free.give_back(begin, nbytes)
            model[begin : begin + nbytes] = [False] * nbytes
        runs = "".join("x" if byte else "." for byte in model).split("x")
        assert free.largest == max(map(len, runs))


def test_bytes_that_are_free_cannot_be_freed() -> None:
    free = FreeExtents(10)
    assert free.take(4) == 0
    assert free.take(4) == 4
    free.give_back(0, 4)
    for begin, nbytes in ((0, 4), (2, 2), (3, 2), (8, 1)):
        with pytest.raises(AssertionError, match="twice"):
            free.give_back(begin, nbytes)


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
