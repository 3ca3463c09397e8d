"""Streams of text: whole characters, no stop string, and nothing that may become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.engine.text import TextStream
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel

TEXTS = st.text(max_size=40) | st.text("ab 界🙂e\u0301\U0001f468\u200d", max_size=40)
FEW_LETTERS = st.text("ab", max_size=20)


class Letters:
    """A slow tokenizer with a text for every id."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def decode(self, ids: list[int], **options: bool) -> str:
        return "".join(self.texts[i] for i in ids)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return self.texts[token_id]


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The text up to the earliest stop string, and whether there is one."""
    starts = [text.find(each) for each in stop if each in text]
    return text[: min(starts, default=len(text))], bool(starts)


def check_stream(tokenizer: Any, ids: Sequence[int], stop: Sequence[str]) -> None:
    full = tokenizer.decode(ids, skip_special_tokens=True)
    expected, stops = before_stop(full, stop)
    stream, sent = TextStream(tokenizer, stop), ""
    for count, token in enumerate(ids, 1):
        sent += stream.push(token)
        assert expected.startswith(sent)
        if stream.stopped is not None:
            seen = tokenizer.decode(ids[:count], skip_special_tokens=True)
            assert seen[len(expected) :].startswith(stream.stopped)
            assert sent == expected
    assert sent + stream.finish() == expected
    assert (stream.stopped is not None) == stops
    assert stream.stopped is None or full[len(expected) :].startswith(stream.stopped)


def stream_pieces(texts: Sequence[str], stop: Sequence[str]) -> tuple[list[str], str | None]:
    stream = TextStream(Letters(*texts), stop)
    pieces = [stream.push(i) for i in range(len(texts))]
    return [*pieces, stream.finish()], stream.stopped


@given(TEXTS, st.data())
def test_texts_without_and_with_stops(reader: LoadedModel, text: str, data: st.DataObject) -> None:
    ids = reader.encode_untrusted(text)
    check_stream(reader.tokenizer, ids, [])
    begin = data.draw(st.integers(0, len(text)))
    inside = text[begin : begin + data.draw(st.integers(1, 12))]
    others = data.draw(st.lists(st.text("ab 界", min_size=1, max_size=3), max_size=3))
    check_stream(reader.tokenizer, ids, [*others, *([inside] if inside else [])])


@given(
    st.lists(st.integers(0, 8191), max_size=30), st.lists(st.sampled_from("e \ufffd"), max_size=2)
)
def test_random_tokens(reader: LoadedModel, ids: list[int], stop: list[str]) -> None:
    check_stream(reader.tokenizer, ids, stop)


@given(
    st.lists(FEW_LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)
)
def test_overlapping_stops_in_any_pieces(texts: list[str], stop: list[str]) -> None:
    check_stream(Letters(*texts), list(range(len(texts))), stop)


def test_a_stop_string_across_many_tokens(reader: LoadedModel) -> None:
    stop = "\n\nThe end of the answer 🙂."
    ids = reader.encode_untrusted(f"Yes.{stop} More.")
    assert len(ids) > 10
    check_stream(reader.tokenizer, ids, [stop])
    check_stream(reader.tokenizer, ids[:-4], [stop])


def test_text_is_held_only_while_it_may_become_a_stop() -> None:
    texts = ["Hi <", "/", "b> <", "/a", ">!"]
    assert stream_pieces(texts, ["</a>"]) == (["Hi ", "", "</b> ", "", "", ""], "</a>")
    assert stream_pieces(texts[:-1], ["</a>"]) == (["Hi ", "", "</b> ", "", "</a"], None)


def test_a_stop_inside_one_token() -> None:
    assert stream_pieces(["one STOP two", "three"], ["STOP"]) == (["one ", "", ""], "STOP")


def test_the_earliest_stop_wins_even_if_another_is_complete_before() -> None:
    assert stream_pieces([*"abcde"], ["c", "bcd"]) == (["a", "", "", "", "", ""], "bcd")
    assert stream_pieces([*"abcxe"], ["c", "bcd"]) == (["a", "", "", "b", "", ""], "c")
    assert stream_pieces([*"abc"], ["c", "bcd"]) == (["a", "", "", "b"], "c")


def test_the_longest_of_those_that_begin_together_wins() -> None:
    assert stream_pieces(["x\n\ny"], ["\n", "\n\n"]) == (["x", ""], "\n\n")
    assert stream_pieces(["x", "\n", "\n"], ["\n", "\n\n"]) == (["x", "", "", ""], "\n")


def test_special_tokens_are_skipped_unless_they_are_wanted(reader: LoadedModel) -> None:
    tokenizer = reader.tokenizer
    ids = [*reader.encode_untrusted("Yes"), tokenizer.eos_token_id]
    stream = TextStream(tokenizer, skip_special_tokens=False)
    text = "".join(stream.push(i) for i in ids) + stream.finish()
    assert text == tokenizer.decode(ids)
    assert text.endswith(tokenizer.eos_token)
    check_stream(tokenizer, ids, [tokenizer.eos_token])


def test_an_incomplete_character_is_replaced_at_the_end(reader: LoadedModel) -> None:
    ids = reader.encode_untrusted("🙂")
    stream = TextStream(reader.tokenizer)
    assert {stream.push(i) for i in ids[:-1]} == {""}
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("stop", [[""], ["x"] * 17, ["x" * 1001]])
def test_unusable_stop_strings_are_refused(reader: LoadedModel, stop: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        TextStream(reader.tokenizer, stop)
