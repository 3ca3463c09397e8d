"""Which texts begin with which others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Of distinct texts in sorted order. parents: the longest other text that each begins with, or
    -1. jumps: one of those that its parent begins with, further up, or -1.

    The jumps reach any of the d texts that one begins with in O(log d) steps (Myers, An
    applicative random-access stack, 1983).
    """

    parents: list[int]
    jumps: list[int]

    @classmethod
    def of(cls, texts: Sequence[str]) -> Prefixes:
        if not any(map(str.startswith, texts[1:], texts)):  # then none begins with any
            return cls([-1] * len(texts), [-1] * len(texts))
        parents: list[int] = []
        jumps: list[int] = []
        depths: list[int] = []
        begun: list[int] = []  # the text before and those that it begins with; the longest last
        for number, text in enumerate(texts):
            while begun and not text.startswith(texts[begun[-1]]):
                begun.pop()
            parent = begun[-1] if begun else -1
            jump = parent
            if parent >= 0:
                near = jumps[parent]
                far = jumps[near] if near >= 0 else -1
                above, below = _depth(depths, near), depths[parent]
                if below - above == above - _depth(depths, far):
                    jump = far
            parents.append(parent)
            jumps.append(jump)
            depths.append(len(begun) + 1)
            begun.append(number)
        return cls(parents, jumps)

    def longest(self, number: int, fits: Callable[[int], bool]) -> int:
        """The longest that fits of a text and those that it begins with; -1 where none does. Where
        one fits, those that it begins with must fit too."""
        while number >= 0 and not fits(number):
            jump = self.jumps[number]
            number = jump if jump >= 0 and not fits(jump) else self.parents[number]
        return number


def _depth(depths: Sequence[int], number: int) -> int:
    return depths[number] if number >= 0 else 0


def common_prefix(one: str, other: str) -> str:
    """By halving: each step compares slices, not characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if other.startswith(one[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return one[:low]
