from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_connectors.langchain.replies import Trim, _unparsable

pieces = st.lists(st.text(alphabet=" \n\tab", max_size=4), max_size=12)


@given(pieces)
def test_white_space_around_is_left_out_however_the_text_comes(some: list[str]) -> None:
    trim = Trim()
    shown = [trim.feed(piece) for piece in some]
    assert "".join(shown) == "".join(some).strip()


@given(pieces)
def test_text_comes_as_soon_as_it_ends_no_white_space(some: list[str]) -> None:
    trim, seen = Trim(), ""
    for n, piece in enumerate(some, start=1):
        seen += trim.feed(piece)
        assert seen == "".join(some[:n]).strip()


def test_text_that_langchain_would_take_for_arguments_is_quoted() -> None:
    assert _unparsable('{"a": 1}') == '"{\\"a\\": 1}"'
    assert _unparsable("") == '""'
    assert _unparsable("no call") == "no call"
