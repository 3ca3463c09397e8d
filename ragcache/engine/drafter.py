"""Drafts of answers: tokens that a prompt suggests, and that the model checks in one step.

An answer over documents repeats their words. Where the answer's last tokens also stand in the
prompt, the tokens behind them there are a draft of its next ones (prompt lookup decoding, Saxena,
2023). The model computes all of them in one step, and a token is sampled at each place, with the
random number of its place. Drafts count as long as the sampled tokens equal them, so the answer is
the same as without drafts (speculative decoding, Leviathan et al., 2023, with a certain draft).

The drafter compares its guess with every token, drafted or not. It therefore knows for each answer
how often guesses are right, and drafts only while that pays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

MATCH: Final = 3
"""Tokens that must be equal before a guess."""

LONGEST_MATCH: Final = 16
"""Tokens that are compared to choose between several places."""

PLACES: Final = 64
"""Most places that are compared, the last ones."""

FIRST_RATE: Final = 0.6
"""Share of right guesses that an answer begins with."""

LEAST_RATE: Final = 0.5
"""Share of right guesses below which nothing is drafted."""

MEMORY: Final = 0.75
"""Weight of all earlier guesses beside the last one."""


class Drafter:
    """Guesses the next tokens of one answer.

    Args:
        known: Tokens of the prompt's segments that are known.
        length: Most tokens of the prompt's own text and the answer together.

    Attributes:
        rate: Share of guesses that were right, of which later ones count more.

    Example:
        >>> drafter = Drafter([7, 1, 2, 3, 4, 5, 6], length=10)
        >>> drafter.follow([9, 1, 2, 3])
        >>> drafter.propose(2)
        [4, 5]
    """

    def __init__(self, known: Iterable[int], length: int) -> None:
        before = np.fromiter(known, np.int32)
        self._tokens = np.concatenate([before, np.zeros(length, dtype=np.int32)])
        self._begin = self._end = len(before)
        self._next = 0  # place of the guess of the next token, if there is one
        self.rate = FIRST_RATE

    @property
    def expects(self) -> bool:
        """Whether a draft is worth its step, if the guess of the next token is right."""
        return self._next > 0 and self.rate >= LEAST_RATE

    def follow(self, tokens: Sequence[int]) -> None:
        """Take the tokens of the prompt's own text and of the answer so far."""
        first = self._begin == self._end
        for token in tokens[self._end - self._begin :]:
            if self._next:
                right = self._tokens[self._next] == token
                self.rate = MEMORY * self.rate + (1 - MEMORY) * bool(right)
                self._next = self._next + 1 if right else 0
            self._tokens[self._end] = token
            self._end += 1
            if not (self._next or first):
                self._next = self._find()
        if first:
            self._next = self._find()

    def propose(self, most: int) -> list[int]:
        """Return up to `most` tokens that may come next, as many as guesses were right in a row."""
        if not self.expects:
            return []
        count = min(most, int(1 / max(1 - self.rate, 0.01)) + 1)
        found: list[int] = self._tokens[self._next : min(self._next + count, self._end)].tolist()
        return found

    def _find(self) -> int:
        """Return the place behind the longest earlier match of the last tokens, or 0."""
        tokens, end = self._tokens, self._end
        if end <= MATCH:
            return 0
        last = np.flatnonzero(tokens[MATCH - 1 : end - 1] == tokens[end - 1]) + MATCH - 1
        for back in range(1, MATCH):
            last = last[tokens[last - back] == tokens[end - 1 - back]]
        best, longest = 0, 0
        for place in last[-PLACES:].tolist():
            length = self._equal(place + 1)
            if length >= longest:
                best, longest = place + 1, length
        return best

    def _equal(self, place: int) -> int:
        """Number of equal tokens before `place` and before the end."""
        most = min(LONGEST_MATCH, place)
        pairs = self._tokens[place - most : place] == self._tokens[self._end - most : self._end]
        wrong = np.flatnonzero(~pairs)
        return most if not len(wrong) else most - 1 - int(wrong[-1])
