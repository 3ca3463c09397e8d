"""Modules that begin alike, to be looked up by what stands at a place."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.recognition.prefixes import Prefixes, common_prefix
from ragcache.store import ModuleRow


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Modules of distinct texts, numbered in the order of their texts.

    lengths: in characters without outer whitespace: [modules]. shared: what all begin with.
    """

    modules: list[ModuleRow]
    lengths: list[int]
    shared: str
    longest: int
    prefixes: Prefixes

    @classmethod
    def of(cls, rows: Sequence[ModuleRow]) -> Group:
        """Of one row or more; of equal texts the first is kept."""
        every = [row.text.strip() for row in rows]
        order = sorted(range(len(rows)), key=every.__getitem__)
        order = [n for i, n in enumerate(order) if not i or every[n] != every[order[i - 1]]]
        texts = [every[n] for n in order]
        lengths = list(map(len, texts))
        shared = common_prefix(texts[0], texts[-1])
        modules = [rows[n] for n in order]
        return cls(modules, lengths, shared, max(lengths), Prefixes.of(texts))

    def at(self, text: str, place: int) -> int:
        """The number of the longest that stands at a place of a text, or -1.

        One that stands there is not after `here` in order. The last that is not after it lies
        between `here` and each of those, so it begins with them all.
        """
        if not text.startswith(self.shared, place):
            return -1
        here = text[place : place + self.longest]
        last = bisect_right(range(len(self.modules)), here, key=self._text) - 1
        return self.prefixes.longest(last, lambda n: text.startswith(self._text(n), place))

    def within(self, number: int, size: int) -> int:
        """The longest that begins a module's text, or is it, and has at most `size` characters; -1
        where none does."""
        return self.prefixes.longest(number, lambda n: self.lengths[n] <= size)

    def _text(self, number: int) -> str:
        return self.modules[number].text.strip()
