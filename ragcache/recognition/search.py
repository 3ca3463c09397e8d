"""Which modules stand in a text, and where."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from ragcache.recognition.prints import Table
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
    lengths, modules = table.prints.lengths, table.prints.modules
    seen = [
        (-int(lengths[number]), at, number)
        for places, numbers in table.candidates(text)
        for at, number in zip(places.tolist(), numbers.tolist(), strict=True)
    ]
    taken: list[tuple[int, int, int]] = []  # begin, end, number of a module
    for length, at, number in sorted(seen):
        end, place = at - length, bisect_left(taken, (at,))
        free = (place == 0 or taken[place - 1][1] <= at) and (
            place == len(taken) or end <= taken[place][0]
        )
        if free and text.startswith(modules[number].text.strip(), at):
            insort(taken, (at, end, number))
    found: list[Found] = []
    for begin, end, number in taken:
        floor = found[-1].end if found else 0
        found.append(_widened(text, modules[number], begin, end, floor))
    return found


def _widened(text: str, module: ModuleRow, begin: int, end: int, floor: int) -> Found:
    """With the module's outer whitespace, where it stands in the text too."""
    first = begin - (len(module.text) - len(module.text.lstrip()))
    last = first + len(module.text)
    if first >= floor and text.startswith(module.text, first):
        return Found(module, first, last, True)
    return Found(module, begin, end, False)
