"""The text of one answer while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragcache.engine.detokenize import detokenizer
from ragcache.engine.stop import StopString, check_stops


class TextStream:
    """Turns token ids into pieces of text that are safe to send.

    A piece never ends within a character, never holds a stop string, and never holds text that may
    turn out to begin one. Together the pieces are `tokenizer.decode` of all ids (without clean-up
    of spaces), cut before the stop string that begins first in it.

    stopped: the stop string that ended the text, None before. Of two that begin at one place it is
    the longer if one token completed both, else the one complete first; the text is the same.

    Raises InvalidRequest for stop strings that cannot be used.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), skip_special_tokens: bool = True
    ) -> None:
        self._stops = [StopString(each) for each in check_stops(stop)]
        self._detokenizer = detokenizer(tokenizer, skip_special_tokens)
        self._held = ""
        self._sent = 0  # characters
        self.stopped: str | None = None

    def push(self, token_id: int) -> str:
        """Takes the next token. Returns the text that is now safe, "" if none is or if stopped."""
        if self.stopped is not None:
            return ""
        self._feed(self._detokenizer.push(token_id))
        end = self._sent + len(self._held)
        first = min((stop.earliest for stop in self._stops), default=end)
        self._stop_at(first)
        return self._send(first)

    def finish(self) -> str:
        """Ends the text. Returns what was held back; an incomplete character becomes U+FFFD.

        `stopped` may be set only here: by a string within one that began earlier and never ended.
        """
        if self.stopped is not None:
            return ""
        self._feed(self._detokenizer.finish())
        end = self._sent + len(self._held)
        first = min((stop.start for stop in self._stops if stop.start is not None), default=end)
        self._stop_at(first)
        return self._send(first)

    def _feed(self, piece: str) -> None:
        self._held += piece
        for stop in self._stops:
            stop.feed(piece)

    def _stop_at(self, place: int) -> None:
        """Notes the longest of the stop strings found at the place, if there is one."""
        found = [stop.text for stop in self._stops if stop.start == place]
        self.stopped = max(found, key=len, default=None)

    def _send(self, end: int) -> str:
        """Lets go of the text up to `end`."""
        count = end - self._sent
        piece, self._held = self._held[:count], self._held[count:]
        self._sent = end
        return piece
