"""Token ids to text, one id at a time: whole characters, cut before the first stop string.

The concatenated texts equal `tokenizer.decode` of all ids. For byte-level tokenizers,
`tokenizers.decoders.DecodeStream` guarantees that. For others it does not: it raises if an invalid
byte token (`<0xFF>`) changes the text of the valid ones before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ragcache.engine.request import check_stop_strings
from ragcache.engine.sampler import SampledToken

REPLACEMENT = "\ufffd"
_LEAST = -9999.0  # OpenAI's value for a log-probability of minus infinity, which JSON has not
Decode = Callable[[list[int]], str]
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BLANK = "\u2581"  # sentencepiece's sign for a space


class TextStream:
    """Turns token ids into pieces of text that are safe to send.

    A piece never ends within a character, never holds a stop string, and never holds text that may
    begin one. Concatenated, the pieces are `tokenizer.decode` of all ids (without clean-up of
    spaces), cut before the stop string that begins first.

    Raises:
        InvalidRequest: The stop strings cannot be used.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), skip_special_tokens: bool = True
    ) -> None:
        self._stops = StopChecker(stop)
        self._detokenizer = create_detokenizer(tokenizer, skip_special_tokens)

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if any (see `StopChecker`)."""
        return self._stops.stopped

    def push(self, token_id: int) -> str:
        """Add the next token. Returns the text that is now safe, possibly empty."""
        if not self._stops.strings:
            return self._detokenizer.push(token_id)
        if self.stopped is not None:
            return ""
        return self._stops.push(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """End the text. Returns the rest; an incomplete character becomes U+FFFD.

        May set `stopped`: to a string within one that began earlier and never ended.
        """
        if self.stopped is not None:
            return ""
        return self._stops.finish(self._detokenizer.finish())


class StopChecker:
    """Cuts a text that arrives in pieces before the stop string that begins first in it.

    Keeps a window: the text from the first place where a stop string may still begin. It is always
    shorter than the longest stop string.

    Attributes:
        stopped: The stop string that ended the text, if any. Of two that begin at one place it
            is the longer one if one piece completed both, else the one complete first; the text
            is the same.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.strings = check_stop_strings(stop)
        self._window = ""
        self._begins = [0] * len(self.strings)  # in the window: where each begins, or first may
        self.stopped: str | None = None

    def push(self, piece: str) -> str:
        """Add the next piece. Returns the text before every place where a string may begin."""
        self._extend(piece)
        return self._cut(min(self._begins, default=len(self._window)))

    def finish(self, piece: str) -> str:
        """Add the last piece. Returns the text before the first complete stop string."""
        self._extend(piece)
        pairs = zip(self.strings, self._begins, strict=True)
        complete = [begin for stop, begin in pairs if self._window.startswith(stop, begin)]
        return self._cut(min(complete, default=len(self._window)))

    def _extend(self, piece: str) -> None:
        self._window += piece
        pairs = zip(self.strings, self._begins, strict=True)
        self._begins = [self._next(stop, begin) for stop, begin in pairs]

    def _next(self, stop: str, begin: int) -> int:
        """The first place from `begin` on where the string begins, or may begin.

        Earlier places were ruled out, so each is tried once.
        """
        window = self._window
        while begin >= 0 and not stop.startswith(window[begin : begin + len(stop)]):
            begin = window.find(stop[0], begin + 1)
        return begin if begin >= 0 else len(window)

    def _cut(self, end: int) -> str:
        """Release the window up to `end`; record the longest stop string that is complete there."""
        pairs = zip(self.strings, self._begins, strict=True)
        found = [
            stop for stop, begin in pairs if begin == end and self._window.startswith(stop, end)
        ]
        self.stopped = max(found, key=len, default=None)
        piece, self._window = self._window[:end], self._window[end:]
        self._begins = [begin - end for begin in self._begins]
        return piece


def create_detokenizer(
    tokenizer: Any, skip_special_tokens: bool
) -> ByteLevelDetokenizer | WindowDetokenizer:
    """Create the detokenizer that suits a Hugging Face tokenizer.

    It holds back text that later ids could still change. Clean-up of spaces before punctuation,
    which `decode` can do for WordPiece, is not applied: it would alter the model's text across
    pieces.
    """
    skip = skip_special_tokens
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        slow = partial(
            tokenizer.decode, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        return WindowDetokenizer(slow, tokenizer.convert_ids_to_tokens)
    if type(backend.decoder).__name__ == "ByteLevel":
        return ByteLevelDetokenizer(backend, skip)
    decode = partial(backend.decode, skip_special_tokens=skip)
    return WindowDetokenizer(decode, backend.id_to_token)


class ByteLevelDetokenizer:
    """For byte-level BPE, in which each token stands for some bytes of the text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []  # ids whose text the stream holds back

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text: str | None = self._stream.step(self._tokenizer, token_id)
        if text:
            self._held.clear()
        return text or ""

    def finish(self) -> str:
        return self._tokenizer.decode(self._held, skip_special_tokens=self._skip)


class WindowDetokenizer:
    """For any tokenizer: decodes the ids since the text before the last piece; the rest is new.

    The last piece stays in the window because some decoders treat the first token differently. A
    run of byte tokens (`<0xE5>`) is held back until another token ends it: if any byte of a run is
    invalid, all its characters become replacement characters.
    """

    def __init__(self, decode: Decode, token_of: Callable[[int], str | None]) -> None:
        self._decode, self._token_of = decode, token_of
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


def token_to_bytes(tokenizer: Any) -> Callable[[str], bytes]:
    """Create a function from a token of the vocabulary to its bytes.

    Added tokens stand for themselves.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        byte_level = hasattr(tokenizer, "byte_decoder")
    else:
        byte_level = b'"ByteLevel"' in backend.decoder.__getstate__()
    added = {each.content for each in tokenizer.added_tokens_decoder.values()}

    def spell(token: str) -> bytes:
        if byte_level and token not in added and all(map(_BYTE_OF.__contains__, token)):
            return bytes(_BYTE_OF[character] for character in token)
        if not byte_level and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.encode() if byte_level else token.replace(_BLANK, " ").encode()

    return spell


@dataclass(frozen=True, slots=True)
class LogprobFormat:
    """Writes log-probabilities of sampled tokens in OpenAI's formats."""

    tokenizer: Any

    def chat(self, chosen: Sequence[SampledToken]) -> dict[str, Any]:
        """The `logprobs` of a chat's choice."""
        content = []
        for each in chosen:
            top = [self._entry(*pair) for pair in each.alternatives]
            content.append({**self._entry(each.token, each.logprob or 0.0), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def text(self, chosen: Sequence[SampledToken], offset: int = 0) -> dict[str, Any]:
        """The `logprobs` of a text completion's choice. `offset` is the place of its first token,
        in characters. The first token of a prompt has none: its entries are null."""
        tokens = [self._token(each.token) for each in chosen]
        offsets = list(accumulate(map(len, tokens[:-1]), initial=offset)) if tokens else []
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if each.logprob is None else _finite(each.logprob) for each in chosen
            ],
            "top_logprobs": [
                None if each.logprob is None else self._likeliest(each) for each in chosen
            ],
            "text_offset": offsets,
        }

    def _likeliest(self, chosen: SampledToken) -> dict[str, float]:
        """Alternatives by their text. Of equal texts, the likeliest counts."""
        found: dict[str, float] = {}
        for token, value in chosen.alternatives:
            found.setdefault(self._token(token), _finite(value))
        return found

    def _token(self, token_id: int) -> str:
        text: str = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token(token_id)
        # a part of a character has bytes that its text does not show
        known = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(logprob), "bytes": known}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
