"""Prints in order, to be looked up by what stands at a place."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ragcache.recognition.prefixes import Prefixes, common_prefix
from ragcache.recognition.prints import Prints
from ragcache.recognition.rolling import WINDOW, Numbers, Rolling
from ragcache.store import ModuleRow

_FILTER_BITS = 20  # a table of 1 MiB says of most windows that no module begins so


_SHIFT = np.uint64(64 - _FILTER_BITS)


class Table:
    """Modules of distinct texts, numbered in the order of their texts; of equal texts the first.

    Those that begin with the same `WINDOW` characters are a group: a run of that order. lengths: in
    characters: [modules].
    """

    def __init__(self, prints: Prints) -> None:
        texts = [row.text.strip() for row in prints.modules]
        order = sorted(range(len(texts)), key=texts.__getitem__)
        order = [n for i, n in enumerate(order) if not i or texts[n] != texts[order[i - 1]]]
        texts = [texts[n] for n in order]
        self.modules: list[ModuleRow] = [prints.modules[n] for n in order]
        self.lengths = [len(text) for text in texts]
        self._prefixes = Prefixes.of(texts)
        firsts = prints.firsts[np.array(order, dtype=np.int64)]
        # Neighbours whose hashes agree by chance make one group: it need only be a run.
        starts = np.flatnonzero(np.diff(firsts, prepend=~firsts[:1]))
        self._groups = _groups(texts, starts.tolist())
        self._by_hash = np.argsort(firsts[starts], kind="stable")
        self._hashes = firsts[starts][self._by_hash]
        self._filter = np.zeros(1 << _FILTER_BITS, dtype=np.bool_)
        self._filter[self._hashes >> _SHIFT] = True

    def pairs(self, text: str) -> tuple[Numbers, Numbers]:
        """Where a module may begin: places in order, and numbers of groups whose first `WINDOW`
        characters have the hash of those there."""
        nothing = np.empty(0, dtype=np.int64)
        if len(text) < WINDOW or not self.modules:
            return nothing, nothing
        windows = Rolling(text).windows(WINDOW)
        places = np.flatnonzero(self._filter[windows >> _SHIFT])
        low = np.searchsorted(self._hashes, windows[places], "left")
        counts = np.searchsorted(self._hashes, windows[places], "right") - low
        ends = np.cumsum(counts)
        ranks = np.arange(ends[-1] if len(ends) else 0) + np.repeat(low - ends + counts, counts)
        return np.repeat(places, counts), self._by_hash[ranks]

    def standing(self, text: str) -> Iterator[tuple[int, int]]:
        """Every place where modules stand in the text, and the number of the longest there."""
        places, groups = self.pairs(text)
        for place, group in zip(places.tolist(), groups.tolist(), strict=True):
            number = self._longest(text, place, self._groups[group])
            if number >= 0:
                yield place, number

    def within(self, number: int, size: int) -> int:
        """The longest module that begins a module's text, or is it, and has at most `size`
        characters; -1 where none does."""
        return self._prefixes.longest(number, lambda n: self.lengths[n] <= size)

    def _longest(self, text: str, place: int, group: _Group) -> int:
        """Texts that begin what stands at the place are not after it in order; nor is the longest
        of them after any other that is not: the last one that is not after it begins with them all.
        """
        if not text.startswith(group.shared, place):
            return -1
        here = text[place : place + group.longest]
        last = bisect_right(range(group.end), here, group.start, key=self._text) - 1
        if last < group.start:
            return -1
        return self._prefixes.longest(last, lambda n: text.startswith(self._text(n), place))

    def _text(self, number: int) -> str:
        return self.modules[number].text.strip()


@dataclass(frozen=True, slots=True)
class _Group:
    """Numbers from start to end; all texts begin with `shared`. longest: characters of one."""

    start: int
    end: int
    shared: str
    longest: int


def _groups(texts: Sequence[str], starts: Sequence[int]) -> list[_Group]:
    result = []
    for start, end in pairwise([*starts, len(texts)]):
        shared = common_prefix(texts[start], texts[end - 1]) if end - start > 1 else ""
        result.append(_Group(start, end, shared, max(map(len, texts[start:end]))))
    return result
