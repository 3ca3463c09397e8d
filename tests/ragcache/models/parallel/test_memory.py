"""Memory that ranks map: extents, views of one mapping in another, pages that are given back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.models.parallel.memory import HEAD, MappedMemory, SharedArena
from tests.conftest import scaled

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool)


@pytest.fixture(scope="module")
def arena() -> SharedArena:
    return SharedArena.create()


def resident_pages(arena: SharedArena) -> int:
    return Path(f"/proc/self/fd/{arena.descriptor}").stat().st_blocks * 512


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=scaled(100))
def test_a_view_is_the_same_elements_in_another_mapping(arena, shape, dtype, order) -> None:
    tensor = arena.copy(torch.randint(0, 2, shape).to(dtype))
    dims = list(range(len(shape)))
    order.shuffle(dims)
    begins = [order.randrange(size) for size in shape]
    view = tensor[tuple(slice(begin, None) for begin in begins)].permute(dims)
    other = MappedMemory(arena.descriptor, arena.nbytes)
    place = arena.place_of(view)
    assert place is not None
    found = other.tensor(place, dtype, view.shape, view.stride())
    assert torch.equal(found, view)
    found.fill_(1)
    assert view.bool().all(), "one memory"


def test_memory_is_zero_again_and_given_back_with_its_last_view() -> None:
    nbytes, arena = 2**22, SharedArena.create()
    before = resident_pages(arena)
    tensor = arena.empty((nbytes,), torch.uint8).fill_(7)
    place, view = arena.place_of(tensor), tensor[5:].view(-1)[3:]
    assert place is not None
    assert place >= HEAD
    assert resident_pages(arena) >= before + nbytes
    del tensor
    gc.collect()
    assert arena.place_of(arena.empty((nbytes,), torch.uint8)) != place, "a view is left"
    del view
    gc.collect()
    again = arena.empty((nbytes,), torch.uint8)
    assert arena.place_of(again) == place
    assert not again.any()
    del again
    gc.collect()
    arena.allocate(1)
    assert resident_pages(arena) <= before + 2 * HEAD


def test_other_memory_has_no_place(arena: SharedArena) -> None:
    assert arena.place_of(torch.ones(3)) is None
    assert arena.place_of(arena.empty((0, 3), torch.float32)) is None
    assert arena.empty((0, 3), torch.float32).shape == (0, 3)


def test_more_than_there_is_is_out_of_memory(arena: SharedArena) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="in one piece"):
        arena.allocate(arena.nbytes)
