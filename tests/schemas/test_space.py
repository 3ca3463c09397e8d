"""The white space rule; its effects on PML are in test_parser.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragcache_schemas.space import PARAMETER, tidy


@given(st.text(st.sampled_from(" \t\nab\r\u3000" + PARAMETER)))
def test_the_rule_is_idempotent_and_keeps_every_word(flow: str) -> None:
    once = tidy(flow)
    assert tidy(once) == once
    assert once.split() == flow.split()
    assert once.count(PARAMETER) == flow.count(PARAMETER)


@given(st.text(st.sampled_from(" ab")))
def test_one_line_is_kept_as_it_is(flow: str) -> None:
    assert tidy(flow) == (flow if flow.strip() else "")
