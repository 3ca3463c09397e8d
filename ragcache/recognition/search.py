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
    for begin, end, module in _apart(text, table):
        floor = found[-1].end if found else 0
        found.append(_widened(text, module, begin, end, floor))
    return found


def _apart(text: str, table: Table) -> list[tuple[int, int, ModuleRow]]:
    """The modules that are taken: begin, end, module. Only the longest of a place waits for its
    turn; where no room is left for it by then, the longest that has room waits instead."""
    waiting = [(-group.lengths[n], at, n, group) for at, group, n in table.standing(text)]
    heapify(waiting)  # places differ: groups are not compared
    taken: list[tuple[int, int, ModuleRow]] = []  # by begin
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


def _widened(text: str, module: ModuleRow, begin: int, end: int, floor: int) -> Found:
    """With the module's outer whitespace, where it stands in the text too."""
    first = begin - (len(module.text) - len(module.text.lstrip()))
    last = first + len(module.text)
    if first >= floor and text.startswith(module.text, first):
        return Found(module, first, last, True)
    return Found(module, begin, end, False)
