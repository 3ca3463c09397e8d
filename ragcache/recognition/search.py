"""Which modules stand in a text, and where."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from ragcache.recognition.table import Table
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
    found: list[Found] = []
    for begin, end, number in _apart(text, table):
        floor = found[-1].end if found else 0
        found.append(_widened(text, table.modules[number], begin, end, floor))
    return found


def _apart(text: str, table: Table) -> list[tuple[int, int, int]]:
    """The modules that are taken: begin, end, number. Only the longest of a place waits for its
    turn; where no room is left for it by then, the longest that has room."""
    waiting = [(-table.lengths[number], at, number) for at, number in table.standing(text)]
    heapify(waiting)
    taken: list[tuple[int, int, int]] = []  # by begin
    while waiting:
        negative, at, number = heappop(waiting)
        after = bisect_left(taken, (at + 1,))
        if after and taken[after - 1][1] > at:
            continue
        room = (taken[after][0] if after < len(taken) else len(text)) - at
        if -negative <= room:
            taken.insert(after, (at, at - negative, number))
        elif (shorter := table.within(number, room)) >= 0:
            heappush(waiting, (-table.lengths[shorter], at, shorter))
    return taken


def _widened(text: str, module: ModuleRow, begin: int, end: int, floor: int) -> Found:
    """With the module's outer whitespace, where it stands in the text too."""
    first = begin - (len(module.text) - len(module.text.lstrip()))
    last = first + len(module.text)
    if first >= floor and text.startswith(module.text, first):
        return Found(module, first, last, True)
    return Found(module, begin, end, False)
