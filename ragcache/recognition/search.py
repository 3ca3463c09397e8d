"""Which modules stand in a text, and where."""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ragcache.recognition.prints import Table
from ragcache.recognition.rolling import Numbers
from ragcache.store import ModuleRow


@dataclass(frozen=True, slots=True)
class Found:
    """text[begin:end] is a module's text. whole: with its outer whitespace; else without it."""

    module: ModuleRow
    begin: int
    end: int
    whole: bool


def find(text: str, table: Table) -> list[Found]:
    """The modules in a text, by their places; no two overlap.

    The longest is taken first, then the one that begins first; of equal texts the one that was
    indexed first. Every one of them is compared in full. Modules of fewer than `WINDOW` characters
    without outer whitespace are not looked for.
    """
    places, numbers = table.candidates(text)
    lengths, modules = table.prints.lengths[numbers], table.prints.modules
    order = np.lexsort((numbers, places, -lengths))
    places, numbers, lengths = places[order], numbers[order], lengths[order]
    edges = np.flatnonzero(np.diff(lengths, prepend=0, append=0))
    taken: list[tuple[int, int, int]] = []  # begin, end, number of a module
    for first, last in pairwise(edges.tolist()):
        length, here = int(lengths[first]), slice(first, last)
        free = _free(places[here], length, taken)
        for at, number in _apart(text, modules, places[here][free], numbers[here][free], length):
            insort(taken, (at, at + length, number))
    found: list[Found] = []
    for begin, end, number in taken:
        floor = found[-1].end if found else 0
        found.append(_widened(text, modules[number], begin, end, floor))
    return found


def _free(places: Numbers, length: int, taken: list[tuple[int, int, int]]) -> npt.NDArray[np.bool_]:
    """Which texts of one length overlap nothing that is taken."""
    spans = np.array([(0, 0, 0), *taken, (sys.maxsize, 0, 0)], dtype=np.int64)
    after = np.searchsorted(spans[:, 0], places, "right")
    fits: npt.NDArray[np.bool_] = (spans[after - 1, 1] <= places) & (
        places + length <= spans[after, 0]
    )
    return fits


def _apart(
    text: str, modules: Sequence[ModuleRow], places: Numbers, numbers: Numbers, length: int
) -> Iterator[tuple[int, int]]:
    """Those of one length that are what their hashes say, from the front, without overlaps."""
    next_one = 0
    while next_one < len(places):
        at, number = int(places[next_one]), int(numbers[next_one])
        if text.startswith(modules[number].text.strip(), at):
            yield at, number
            next_one = int(np.searchsorted(places, at + length))
        else:
            next_one += 1


def _widened(text: str, module: ModuleRow, begin: int, end: int, floor: int) -> Found:
    """With the module's outer whitespace, where it stands in the text too."""
    first = begin - (len(module.text) - len(module.text.lstrip()))
    last = first + len(module.text)
    if first >= floor and text.startswith(module.text, first):
        return Found(module, first, last, True)
    return Found(module, begin, end, False)
