"""Prints, to be looked up by the characters that a module begins with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ragcache.recognition.group import Group
from ragcache.recognition.prints import Prints
from ragcache.recognition.rolling import WINDOW, Hashes, Numbers, Rolling

_FILTER_BITS = 20  # a table of 1 MiB says of most windows that no module begins so
_SHIFT = np.uint64(64 - _FILTER_BITS)


class Table:
    """Groups of modules whose first `WINDOW` characters have one hash. Thread-safe.

    A group is put in order when a text first needs it: a namespace that changed costs one sort of
    hashes, and what is asked for.
    """

    def __init__(self, prints: Prints) -> None:
        self._modules = prints.modules
        self._order = np.argsort(prints.firsts, kind="stable")
        self._hashes, starts = np.unique(prints.firsts[self._order], return_index=True)
        self._edges = np.append(starts, len(self._order))  # [groups + 1]
        self._filter = np.zeros(1 << _FILTER_BITS, dtype=np.bool_)
        self._filter[_filtered(self._hashes)] = True
        self._groups: dict[int, Group] = {}

    def pairs(self, text: str) -> tuple[Numbers, Numbers]:
        """Where a module may begin: places in order, each with the number of the one group whose
        hash is that of the `WINDOW` characters there."""
        nothing = np.empty(0, dtype=np.int64)
        if len(text) < WINDOW or not self._modules:
            return nothing, nothing
        windows = Rolling(text).windows(WINDOW)
        places = np.flatnonzero(self._filter[_filtered(windows)])
        groups = np.searchsorted(self._hashes, windows[places], "right") - 1
        same = self._hashes[groups] == windows[places]
        return places[same], groups[same]

    def standing(self, text: str) -> Iterator[tuple[int, Group, int]]:
        """Every place where modules stand in the text; the longest there, by its group and its
        number."""
        places, groups = self.pairs(text)
        for place, number in zip(places.tolist(), groups.tolist(), strict=True):
            group = self._groups.get(number) or self._ordered(number)
            module = group.at(text, place)
            if module >= 0:
                yield place, group, module

    def _ordered(self, number: int) -> Group:
        """Threads that ask at once may both do it; either result serves."""
        begin, end = self._edges[number : number + 2]
        group = Group.of([self._modules[n] for n in self._order[begin:end]])
        self._groups[number] = group
        return group


def _filtered(hashes: Hashes) -> Hashes:
    return hashes >> _SHIFT
