"""Token ids to text, one id at a time, never in the middle of a character.

The concatenated pieces equal `tokenizer.decode` of all ids. `tokenizers.decoders.DecodeStream` is
close to that, but it raises where invalid bytes change what was decoded before, holds everything
back while invalid bytes go on, and has no end at which the rest could be asked for.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """Holds back what later ids could still change."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


def detokenizer(tokenizer: Any, skip_special_tokens: bool) -> Detokenizer:
    """The one that suits a Hugging Face tokenizer.

    Clean-up of spaces before punctuation, which `decode` can do for WordPiece, is not applied: it
    alters what a language model wrote, across pieces.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:

        def decode_slowly(ids: list[int]) -> str:
            text: str = tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
            return text

        return WindowDetokenizer(decode_slowly, tokenizer.convert_ids_to_tokens)

    def decode(ids: list[int]) -> str:
        text: str = backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    if type(backend.decoder).__name__ == "ByteLevel":
        return ByteDetokenizer(decode, backend.id_to_token)
    return WindowDetokenizer(decode, backend.id_to_token)


class ByteDetokenizer:
    """For byte-level BPE, where a text's bytes are those of its tokens, one after another."""

    def __init__(
        self, decode: Callable[[list[int]], str], token_of: Callable[[int], str | None]
    ) -> None:
        self._decode = decode
        self._token_of = token_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        text = self._decode([token_id])
        # Without the replacement character the token is whole characters, or skipped and empty.
        part = text.encode() if REPLACEMENT not in text else self._bytes(token_id)
        return self._utf8.decode(part)

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        token = self._token_of(token_id) or ""
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token that is no byte-level text stands for itself
            return token.encode()


class WindowDetokenizer:
    """For any tokenizer: decodes the ids since the text before the last, and takes what is new.

    The last piece stays in the window because some decoders treat the first token apart.
    A run of byte tokens (`<0xE5>`) is held back until another token ends it: if any byte of a run
    is invalid, all its characters become replacement characters.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], token_of: Callable[[int], str | None]
    ) -> None:
        self._decode = decode
        self._token_of = token_of
        self._ids: list[int] = []  # the window
        self._read = 0  # ids of the window whose text was given out
        self._shown = 0  # characters of the window's text that were given out
        self._in_run = False

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        if _BYTE_TOKEN.fullmatch(self._token_of(token_id) or ""):
            self._in_run = True
        elif self._in_run:
            self._in_run = not self._decode([token_id])  # skipped tokens end no run
        if self._in_run:
            return ""
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT):  # its last character may be incomplete
            return self._show(text[:-1])
        piece = self._show(text)
        if piece:
            del self._ids[: self._read]
            self._read = len(self._ids)
            self._shown = len(self._decode(self._ids))
        return piece

    def finish(self) -> str:
        return self._show(self._decode(self._ids))

    def _show(self, text: str) -> str:
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return piece


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes for U+0100
    and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    shifted = {chr(0x100 + n): byte for n, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _byte_of_character()
