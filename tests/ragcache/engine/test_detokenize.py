"""Pieces of text equal the decoding of all ids, for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from ragcache.engine.detokenize import (
    ByteDetokenizer,
    WindowDetokenizer,
    detokenizer,
)
from ragcache.models import LoadedModel

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
    stream = detokenizer(tokenizer, skip)
    return [*(stream.push(token) for token in ids), stream.finish()]


@given(st.lists(st.integers(0, SPECIAL + 2), max_size=30), st.booleans())
def test_byte_fallback(ids: list[int], skip: bool) -> None:
    assert isinstance(detokenizer(SENTENCEPIECE, skip), WindowDetokenizer)
    expected = SENTENCEPIECE.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(SENTENCEPIECE, ids, skip)) == expected


@given(st.lists(st.sampled_from([*"é🙂".encode(), 0xFF, THE, SPECIAL]), max_size=20), st.booleans())
def test_runs_of_byte_tokens(ids: list[int], skip: bool) -> None:
    expected = SENTENCEPIECE.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(SENTENCEPIECE, ids, skip)) == expected


@given(st.lists(st.integers(0, len(BYTE_LEVEL) + 3), max_size=30), st.booleans())
def test_byte_level(ids: list[int], skip: bool) -> None:
    assert isinstance(detokenizer(BYTE_LEVEL, skip), ByteDetokenizer)
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


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), SENTENCEPIECE])
def test_a_character_comes_whole(tokenizer: Any) -> None:
    assert pieces(tokenizer, [*"界".encode(), *"é".encode()])[:2] == ["", ""]
    assert "".join(pieces(tokenizer, "界é".encode())) == "界é"


def test_what_precedes_an_incomplete_character_is_not_held() -> None:
    assert pieces(ByteTokenizer(), [258, 0x8C, 65, 0xE7]) == [" a", "界", "A", "", "\ufffd"]


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    run = list("é".encode())
    assert pieces(SENTENCEPIECE, [*run, THE]) == ["", "", "é the", ""]
    assert pieces(SENTENCEPIECE, [*run, SPECIAL, 0xFF, THE])[-2] == "\ufffd\ufffd\ufffd the"
    assert pieces(SENTENCEPIECE, run) == ["", "", "é"]
