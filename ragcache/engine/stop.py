"""Stop strings: finding the first in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from ragcache.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_LENGTH = 1000


def check_stops(stop: Sequence[str]) -> tuple[str, ...]:
    """Raises InvalidRequest unless these are at most 16 strings of 1 to 1,000 characters."""
    if isinstance(stop, str) or not all(isinstance(each, str) for each in stop):
        raise InvalidRequest(f"stop is {stop!r:.80}; it must be a list of strings")
    if len(stop) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stop)} strings; at most {MAX_STOPS} are allowed")
    for each in stop:
        if not 1 <= len(each) <= MAX_STOP_LENGTH:
            raise InvalidRequest(
                f"stop holds a string of {len(each)} characters; 1 to {MAX_STOP_LENGTH} are allowed"
            )
    return tuple(dict.fromkeys(stop))


class StopString:
    """Looks for one string by Knuth, Morris and Pratt's method: each character is seen once.

    start: where the first occurrence begins, in characters of the text; None before it is found.
    """

    __slots__ = ("_borders", "_matched", "_seen", "start", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.start: int | None = None
        self._seen = 0
        self._matched = 0  # how much of the string the text ends with
        self._borders = [0]  # of each prefix: the longest proper prefix that it ends with
        for character in text[1:]:
            self._borders.append(self._after(self._borders[-1], character))

    def feed(self, piece: str) -> None:
        """Takes the next piece of the text; nothing after the first occurrence matters."""
        for character in piece:
            if self.start is not None:
                return
            self._seen += 1
            self._matched = self._after(self._matched, character)
            if self._matched == len(self.text):
                self.start = self._seen - len(self.text)

    @property
    def earliest(self) -> int:
        """Where the first occurrence begins, or where it may if it is still to come."""
        return self._seen - self._matched if self.start is None else self.start

    def _after(self, matched: int, character: str) -> int:
        """How much is matched once the character follows, if `matched` was before it."""
        while matched and self.text[matched] != character:
            matched = self._borders[matched - 1]
        return matched + (self.text[matched] == character)
