"""Control tokens that contents spell stay apart from the template's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.errors import InvalidRequest
from ragcache.pipeline.guarding import Guard

CONTROL = ["<|user|>", "<|end|>", "<s>", "ab", "bc", "#"]
TEXTS = st.lists(
    st.sampled_from([*CONTROL, "<|", "|>", "<", "s>", "a", "b", "c", " ", "\n"]), max_size=8
).map("".join)


@given(TEXTS)
def test_no_control_token_is_left_and_the_text_comes_back(text: str) -> None:
    guard = Guard(CONTROL)
    hidden = guard.hide(text)
    assert not any(token in hidden for token in CONTROL)
    assert len(hidden) == len(text)
    assert guard.reveal(hidden) == text


@given(
    TEXTS, st.sampled_from(["", "|>", "nd|>", ">", "c"]), st.sampled_from(["", "<|us", "<", "a"])
)
def test_the_templates_text_completes_no_control_token(text: str, after: str, before: str) -> None:
    hidden = Guard(CONTROL).hide(text)
    for spelled in (hidden, hidden.strip()):
        if spelled:
            whole = before + spelled + after
            places = (whole.find(token) for token in CONTROL)
            assert all(at < 0 for at in places)


def test_texts_deep_in_a_message_are_hidden_and_numbers_are_not() -> None:
    guard = Guard(CONTROL)
    message = {"tool_calls": [{"arguments": {"city<|end|>": "<s>", "days": 3, "now": True}}]}
    hidden = guard.hide(message)
    assert "<s>" not in str(hidden)
    assert "<|end|>" not in str(hidden)
    assert hidden["tool_calls"][0]["arguments"]["days"] == 3
    assert guard.hide({"role": "user", "content": "Hello"}) == {"role": "user", "content": "Hello"}


def test_characters_that_marks_are_made_of_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"U\+10F000"):
        Guard(CONTROL).hide([{"a": "x\U0010f000"}])


def test_a_tokenizer_without_control_tokens_hides_nothing() -> None:
    assert Guard([]).hide("<|end|>") == "<|end|>"
