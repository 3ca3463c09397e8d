"""Recognition of the texts of ingested modules in a prompt.

All windows of `WINDOW` characters of the prompt are hashed in numpy (Karp and Rabin, 1987), eight
characters of them as one number. A table of the hashes of modules' first windows gives the places
where a module may begin. Modules with the same first window are sorted by text, so that a bisection
finds the longest one at a place. Every match is compared in full.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain

import numpy as np
import numpy.typing as npt

from ragcache.db import Catalog, ModuleRow
from ragcache.errors import UnknownCollection

__all__ = [
    "NO_DOCUMENT",
    "WINDOW",
    "FingerprintTable",
    "Fingerprints",
    "RecognizedModule",
    "Recognizer",
    "find",
]

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Versions = dict[str, tuple[int, int]]

WINDOW = 32
"""Characters of a fingerprint, a power of two. Shorter texts have no fingerprint."""

NO_DOCUMENT = -1
"""Id of the module of a text that no document has."""

_BASE = 0x9E3779B97F4A7C15
_WORD = 8  # characters of a 64-bit number
_NONE: Hashes = np.empty(0, dtype=np.uint64)
_FILTER_BITS = 8  # 2^8 filter entries for each module rule out most windows
_MOST_BITS = 22  # maximum filter of 4 MiB; the filter of few modules fits into the L1 cache


@dataclass(frozen=True, slots=True)
class RecognizedModule:
    """A module whose text is part of a prompt."""

    module: ModuleRow
    begin: int
    """First character of the module's text in the prompt."""
    end: int
    """End of the module's text in the prompt, exclusive."""
    whole: bool
    """Whether the module's outer whitespace is included."""

    @property
    def ingested(self) -> bool:
        """Whether a document has the module. Otherwise its text has recurred in prompts."""
        return self.module.id != NO_DOCUMENT


class Recognizer:
    """Finds the modules of all collections of one catalog. Thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._index = _Index({}, {}, FingerprintTable(Fingerprints.joined(())))
        self._building = threading.Lock()

    def find(self, text: str) -> list[RecognizedModule]:
        """Return the modules in a text; see `find`.

        Of equal texts the first one matches, by collection name and module id.
        """
        return find(text, self._current().table)

    def _current(self) -> _Index:
        """Return the index over the current catalog, which any process may have changed.

        Costs one query if nothing changed; otherwise only the changed collections are read.
        """
        if self._index.versions == self._catalog.versions():
            return self._index
        with self._building:  # concurrent threads wait for one index
            versions, old = self._catalog.versions(), self._index
            if old.versions != versions:
                parts = {name: self._part(name, versions[name], old) for name in sorted(versions)}
                table = FingerprintTable(Fingerprints.joined(list(parts.values())))
                self._index = _Index(versions, parts, table)
            return self._index

    def _part(self, name: str, version: tuple[int, int], old: _Index) -> Fingerprints:
        if old.versions.get(name) == version:
            return old.parts[name]
        try:
            return Fingerprints.of(self._catalog.modules(name))
        except UnknownCollection:  # deleted meanwhile; its version will tell
            return Fingerprints.of(())


@dataclass(frozen=True, slots=True, eq=False)
class _Index:
    versions: Versions
    parts: dict[str, Fingerprints]
    table: FingerprintTable


def find(text: str, table: FingerprintTable) -> list[RecognizedModule]:
    """Return the modules in a text, by position, without overlaps.

    Longer matches win, then earlier ones. Of equal texts, the first in the index wins. Modules of
    fewer than `WINDOW` characters, without outer whitespace, are not searched for.
    """
    found: list[RecognizedModule] = []
    for begin, end, module in _apart(text, table):
        found.append(_widened(text, module, begin, end, found[-1].end if found else 0))
    return found


def _apart(text: str, table: FingerprintTable) -> list[tuple[int, int, ModuleRow]]:
    """Return matches that do not overlap: begin, end, module.

    The heap holds the longest match of each place. A match without enough room is replaced by the
    longest one that fits.
    """
    waiting = [(-group.lengths[n], at, n, group) for at, group, n in table.standing(text)]
    heapify(waiting)  # places differ: groups are not compared
    taken: list[tuple[int, int, ModuleRow]] = []  # sorted by begin
    while waiting:
        negative, at, number, group = heappop(waiting)
        after = bisect_left(taken, (at + 1,))
        if after and taken[after - 1][1] > at:
            continue
        room = (taken[after][0] if after < len(taken) else len(text)) - at
        if -negative <= room:
            taken.insert(after, (at, at - negative, group.modules[number]))
        elif (shorter := group.within(number, room)) >= 0:
            heappush(waiting, (-group.lengths[shorter], at, shorter, group))
    return taken


def _widened(text: str, module: ModuleRow, begin: int, end: int, floor: int) -> RecognizedModule:
    """Return the match extended by the module's outer whitespace, if the text has it too."""
    if end - begin == len(module.text):  # it has none
        return RecognizedModule(module, begin, end, True)
    first = begin - (len(module.text) - len(module.text.lstrip()))
    last = first + len(module.text)
    if first >= floor and text.startswith(module.text, first):
        return RecognizedModule(module, first, last, True)
    return RecognizedModule(module, begin, end, False)


class FingerprintTable:
    """Groups of modules whose first `WINDOW` characters have the same hash. Thread-safe.

    Groups are sorted on demand: a change of the catalog costs one sort of hashes, and a sort of
    each group when a prompt first meets it.
    """

    def __init__(self, prints: Fingerprints) -> None:
        self._modules = prints.modules
        self._order = np.argsort(prints.firsts, kind="stable")
        self._hashes, starts = np.unique(prints.firsts[self._order], return_index=True)
        self._edges = np.append(starts, len(self._order))  # [groups + 1]
        bits = min(len(self._hashes).bit_length() + _FILTER_BITS, _MOST_BITS)
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, dtype=np.bool_)
        self._filter[self._hashes >> self._shift] = True
        self._groups: dict[int, PrefixGroup] = {}

    def pairs(self, text: str) -> tuple[Numbers, Numbers]:
        """Return the places where a module may begin, in order, and the number of the group there.

        The first window of the group's modules has the hash of the window at that place.
        """
        nothing = np.empty(0, dtype=np.int64)
        if len(text) < WINDOW or not self._modules:
            return nothing, nothing
        windows = window_hashes(text)
        [places] = self._filter.take((windows >> self._shift).view(np.int64)).nonzero()
        likely = windows[places]
        groups = self._hashes.searchsorted(likely, "right") - 1
        same = self._hashes[groups] == likely
        return places[same], groups[same]

    def standing(self, text: str) -> Iterator[tuple[int, PrefixGroup, int]]:
        """Yield every place where modules match, with the group and number of the longest one."""
        places, groups = self.pairs(text)
        for place, number in zip(places.tolist(), groups.tolist(), strict=True):
            group = self._groups.get(number) or self._ordered(number)
            module = group.at(text, place)
            if module >= 0:
                yield place, group, module

    def _ordered(self, number: int) -> PrefixGroup:
        """Sort a group. Concurrent threads may both do it, with equal results."""
        begin, end = self._edges[number : number + 2]
        group = PrefixGroup.of([self._modules[n] for n in self._order[begin:end]])
        return self._groups.setdefault(number, group)


@dataclass(frozen=True, slots=True, eq=False)
class PrefixGroup:
    """Modules of distinct texts with the same hash of their first window, sorted by text."""

    modules: list[ModuleRow]
    lengths: list[int]
    """Characters without outer whitespace [modules]."""
    shared: str
    """Common prefix of all texts."""
    longest: int
    parents: list[int]
    """Longest other text that is a prefix of each text, or -1 [modules]."""

    @classmethod
    def of(cls, rows: Sequence[ModuleRow]) -> PrefixGroup:
        """Return the group of one or more rows. Keeps the first of equal texts."""
        if len(rows) == 1:
            text = rows[0].text.strip()
            return cls([*rows], [len(text)], text, len(text), [-1])
        every = [row.text.strip() for row in rows]
        order = sorted(range(len(rows)), key=every.__getitem__)
        order = [n for i, n in enumerate(order) if not i or every[n] != every[order[i - 1]]]
        texts = [every[n] for n in order]
        lengths = list(map(len, texts))
        shared = common_prefix(texts[0], texts[-1])
        return cls([rows[n] for n in order], lengths, shared, max(lengths), _parents(texts))

    def at(self, text: str, place: int) -> int:
        """Return the number of the longest module at a place of a text, or -1.

        A module that matches there does not sort after `here`. The last one that does not lies
        between each match and `here`, so all matches are prefixes of it.
        """
        if not text.startswith(self.shared, place):
            return -1
        if len(self.modules) == 1:  # nearly always
            return 0
        here = text[place : place + self.longest]
        last = bisect_right(range(len(self.modules)), here, key=self._text) - 1
        if last < 0 or text.startswith(self._text(last), place):
            return last
        if self.parents[last] < 0:
            return -1
        return self.within(last, len(common_prefix(here, self._text(last))))

    def within(self, number: int, size: int) -> int:
        """Return the longest module of at most `size` characters that begins a module, or -1.

        The module itself counts, too. Texts with its first `size` characters as a prefix are
        adjacent. The first of them equals these characters, or its parent is the longest that is
        shorter.
        """
        if self.lengths[number] <= size:
            return number
        if self.parents[number] < 0:
            return -1
        start = self._text(number)[:size]
        first = bisect_left(range(number), start, key=self._text)
        return first if self.lengths[first] == size else self.parents[first]

    def _text(self, number: int) -> str:
        return self.modules[number].text.strip()


def _parents(texts: Sequence[str]) -> list[int]:
    """Return the longest other text that is a prefix of each of sorted, distinct texts, or -1."""
    if not any(map(str.startswith, texts[1:], texts)):  # then no text begins with another
        return [-1] * len(texts)
    parents: list[int] = []
    begun: list[int] = []  # previous text and its prefixes, the longest last
    for number, text in enumerate(texts):
        while begun and not text.startswith(texts[begun[-1]]):
            begun.pop()
        parents.append(begun[-1] if begun else -1)
        begun.append(number)
    return parents


def common_prefix(one: str, other: str) -> str:
    """Return the common prefix of two texts, by bisection over slices."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if other.startswith(one[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return one[:low]


@dataclass(frozen=True, slots=True, eq=False)
class Fingerprints:
    """Hashes of modules' texts without outer whitespace, from `WINDOW` characters on."""

    firsts: Hashes
    """Hashes of the first `WINDOW` characters [modules]."""
    modules: tuple[ModuleRow, ...]
    """Modules, sorted by text in each part."""

    @classmethod
    def of(cls, rows: Sequence[ModuleRow]) -> Fingerprints:
        kept = [row for row in rows if len(row.text.strip()) >= WINDOW]
        kept.sort(key=lambda row: row.text.strip())  # a group merges sorted parts in linear time
        beginnings = "".join(row.text.strip()[:WINDOW] for row in kept)
        return cls(window_hashes(beginnings)[::WINDOW], tuple(kept))

    @classmethod
    def joined(cls, parts: Sequence[Fingerprints]) -> Fingerprints:
        """Return the fingerprints of all parts, in order."""
        return cls(
            np.concatenate([_NONE, *(part.firsts for part in parts)]),
            tuple(chain.from_iterable(part.modules for part in parts)),
        )


def window_hashes(text: str, window: int = WINDOW) -> Hashes:
    """Return hashes of all runs of `window` characters, modulo 2^64.

    Each character counts as a byte. The hash of eight is their 64-bit number times B. The hash of
    2n characters is the sum of the hash of the first half and B^n times the one of the second
    (Karp and Rabin, 1987). The high bits are better distributed than the low.

    Args:
        text: The text.
        window: Characters of a run, a power of two of at least 8.

    Returns:
        [characters - window + 1], in order; empty for a shorter text.
    """
    if len(text) < window:
        return _NONE
    words = np.ndarray(len(text) - _WORD + 1, "<u8", _letters(text), strides=(1,))
    hashes = words * np.uint64(_BASE)
    size = _WORD
    while size < window:
        longer = hashes[size:] * np.uint64(pow(_BASE, size, 2**64))
        longer += hashes[:-size]
        hashes, size = longer, 2 * size
    return hashes


def _letters(text: str) -> bytes:
    """Return a byte for each character: its code, or a digest of a code above 255."""
    if text.isascii():
        return text.encode("ascii")
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    folded: npt.NDArray[np.uint8] = (codes ^ (codes >> 8) ^ (codes >> 16)).astype(np.uint8)
    return folded.tobytes()
