"""Finding stop strings in a text that arrives in pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.engine.stop import StopString, check_stops
from ragcache.errors import InvalidRequest

FEW_LETTERS = st.text("ab", max_size=30)


@given(st.text("ab", min_size=1, max_size=8), st.lists(FEW_LETTERS, max_size=5))
def test_the_first_occurrence_is_found_in_any_pieces(text: str, pieces: list[str]) -> None:
    stop = StopString(text)
    for piece in pieces:
        stop.feed(piece)
    start = "".join(pieces).find(text)
    assert stop.start == (None if start < 0 else start)


@given(st.text("ab", min_size=1, max_size=8), FEW_LETTERS)
def test_earliest_is_where_it_may_still_begin(text: str, seen: str) -> None:
    stop = StopString(text)
    stop.feed(seen)
    if stop.start is None:
        begins = (i for i in range(len(seen)) if text.startswith(seen[i:]))
        assert stop.earliest == next(begins, len(seen))
    else:
        assert stop.earliest == stop.start


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ([""], "0 characters"),
        (["ok", "x" * 1001], "1001 characters"),
        (["x"] * 17, "17 strings"),
        ("END", "list of strings"),
        (["a", 3], "list of strings"),
    ],
)
def test_unusable_stop_strings_are_refused(stop: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_stops(stop)


def test_the_largest_allowed_are_taken_and_repeats_are_dropped() -> None:
    largest = [chr(65 + n) * 1000 for n in range(16)]
    assert check_stops(largest) == tuple(largest)
    assert check_stops(["b", "a", "b"]) == ("b", "a")
