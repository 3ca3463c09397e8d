"""Extents of a range of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache.extents import FreeExtents
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
