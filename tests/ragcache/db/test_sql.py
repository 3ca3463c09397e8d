"""Cursors and pages: any text that no page gave is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.db.sql import after, check_limit, cursor_of, cut
from ragcache.errors import InvalidRequest


@given(st.integers(-(2**63), 2**63 - 1), st.text(), st.floats(allow_nan=False))
def test_a_cursor_gives_back_what_it_was_made_of(number: int, text: str, at: float) -> None:
    assert after(cursor_of(number, text, at), int, str, float) == [number, text, at]
    assert after(cursor_of(None, number), (int, type(None)), int) == [None, number]
    assert after(None, int) is None


@given(st.one_of(st.text(), st.binary().map(repr)))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="begin without a cursor"):
        after(text, int, str, int, str)


@pytest.mark.parametrize("values", [("a",), (True,), (2**63,), (1, 2), (), (1.5,)])
def test_values_of_another_kind_are_refused(values: tuple[int | float | str, ...]) -> None:
    with pytest.raises(InvalidRequest):
        after(cursor_of(*values), int)


@pytest.mark.parametrize("limit", [0, -1, 1001])
def test_a_page_has_a_size(limit: int) -> None:
    with pytest.raises(InvalidRequest, match=f"limit is {limit}"):
        check_limit(limit)
    assert cut([1, 2, 3], 2) == ((1, 2), True)
    assert cut([1, 2], 2) == ((1, 2), False)
