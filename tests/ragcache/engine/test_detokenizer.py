"""Text of token ids: whole characters, no stop string, and nothing that may become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from ragcache.engine.detokenizer import (
    ByteLevelDetokenizer,
    StopChecker,
    TextStream,
    WindowDetokenizer,
    create_detokenizer,
)
from ragcache.engine.request import check_stop_strings
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel

TEXTS = st.text(max_size=40) | st.text("ab 界🙂e\u0301\U0001f468\u200d", max_size=40)
FEW_LETTERS = st.text("ab", max_size=30)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁the", "▁cat", "s", ".", "é", "▁界", "\ufffd", "🙂"]
THE = len(BYTES) + WORDS.index("▁the")
SPECIAL = len(BYTES) + len(WORDS)


class ByteTokenizer:
    """A slow tokenizer whose ids are bytes; 256 is special, 257 and 258 hold more than one byte."""

    def decode(
        self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert not clean_up_tokenization_spaces
        special = b"" if skip_special_tokens else b"<s>"
        more = {256: special, 257: "é".encode(), 258: b" a\xe7\x95"}
        return b"".join(more.get(i, bytes([i % 256])) for i in ids).decode(errors="replace")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return f"token {token_id}"


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral: byte fallback, and the first space stripped."""
    vocabulary = {token: n for n, token in enumerate([*BYTES, *WORDS])}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3 and Qwen; the added tokens are no byte-level text, or only look like it."""
    vocabulary = {c: n for n, c in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["two words", "日本", "é", "\ufffd"])
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


SENTENCEPIECE, BYTE_LEVEL = sentencepiece_like(), byte_level()


def pieces(tokenizer: Any, ids: Sequence[int], skip: bool = True) -> list[str]:
    stream = create_detokenizer(tokenizer, skip)
    return [*(stream.push(token) for token in ids), stream.finish()]


@given(st.lists(st.integers(0, SPECIAL + 2), max_size=30), st.booleans())
def test_byte_fallback(ids: list[int], skip: bool) -> None:
    assert isinstance(create_detokenizer(SENTENCEPIECE, skip), WindowDetokenizer)
    expected = SENTENCEPIECE.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(SENTENCEPIECE, ids, skip)) == expected


@given(st.lists(st.sampled_from([*"é🙂".encode(), 0xFF, THE, SPECIAL]), max_size=20), st.booleans())
def test_runs_of_byte_tokens(ids: list[int], skip: bool) -> None:
    expected = SENTENCEPIECE.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(SENTENCEPIECE, ids, skip)) == expected


@given(st.lists(st.integers(0, len(BYTE_LEVEL) + 3), max_size=30), st.booleans())
def test_byte_level(ids: list[int], skip: bool) -> None:
    assert isinstance(create_detokenizer(BYTE_LEVEL, skip), ByteLevelDetokenizer)
    expected = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(BYTE_LEVEL, ids, skip)) == expected


@given(st.lists(st.sampled_from([65, 32, *"界🙂".encode(), 255, 256, 257, 258])), st.booleans())
def test_a_slow_tokenizer(ids: list[int], skip: bool) -> None:
    expected = ByteTokenizer().decode(ids, skip, clean_up_tokenization_spaces=False)
    assert "".join(pieces(ByteTokenizer(), ids, skip)) == expected


@given(st.lists(st.integers(0, 8191), max_size=25), st.booleans())
def test_the_embedded_readers_tokenizer(reader: LoadedModel, ids: list[int], skip: bool) -> None:
    expected = reader.tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(reader.tokenizer, ids, skip)) == expected


def test_what_precedes_an_incomplete_character_is_not_held() -> None:
    assert pieces(ByteTokenizer(), [258, 0x8C, 65, 0xE7]) == [" a", "界", "A", "", "\ufffd"]


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    run = list("é".encode())
    assert pieces(SENTENCEPIECE, [*run, THE]) == ["", "", "é the", ""]
    assert pieces(SENTENCEPIECE, [*run, SPECIAL, 0xFF, THE])[-2] == "\ufffd\ufffd\ufffd the"
    assert pieces(SENTENCEPIECE, run) == ["", "", "é"]


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
@example([*"No. The end of the answer, and more"], ["The end of the answer"])  # of many tokens
@example(["one STOP two", "three"], ["STOP"])  # inside one token
@example(["aaab"], ["aab"])  # its first occurrence begins within what looked like one
@example([*"abababb"], ["ababb"])
@example(["abxab", "ab"], ["ab"])  # of several occurrences the first
def test_overlapping_stops_in_any_pieces(texts: list[str], stop: list[str]) -> None:
    check_stream(Letters(*texts), list(range(len(texts))), stop)


def test_text_is_held_only_while_it_may_become_a_stop() -> None:
    texts = ["Hi <", "/", "b> <", "/a", ">!"]
    assert stream_pieces(texts, ["</a>"]) == (["Hi ", "", "</b> ", "", "", ""], "</a>")
    assert stream_pieces(texts[:-1], ["</a>"]) == (["Hi ", "", "</b> ", "", "</a"], None)


def test_the_earliest_stop_wins_over_one_complete_before() -> None:
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


@given(st.text("ab", min_size=1, max_size=8), FEW_LETTERS)
def test_text_is_sent_up_to_where_a_stop_string_may_still_begin(stop: str, seen: str) -> None:
    checker = StopChecker([stop])
    sent = checker.push(seen)
    if checker.stopped is None:
        begins = (i for i in range(len(seen)) if stop.startswith(seen[i:]))
        assert len(sent) == next(begins, len(seen))
    else:
        assert len(sent) == seen.find(stop)


@given(
    st.lists(FEW_LETTERS, max_size=6), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4)
)
def test_the_window_is_shorter_than_the_longest_stop_string(
    pieces: list[str], stop: list[str]
) -> None:
    checker, sent, seen = StopChecker(stop), "", ""
    for piece in pieces:
        if checker.stopped is not None:
            break
        seen += piece
        sent += checker.push(piece)
        assert checker.stopped or len(seen) - len(sent) < max(map(len, stop), default=1)


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
        check_stop_strings(stop)


def test_the_largest_allowed_are_taken_and_repeats_are_dropped() -> None:
    largest = [chr(65 + n) * 1000 for n in range(16)]
    assert check_stop_strings(largest) == tuple(largest)
    assert check_stop_strings(["b", "a", "b"]) == ("b", "a")
