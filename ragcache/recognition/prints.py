"""Fingerprints of modules' texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ragcache.recognition.rolling import WINDOW, Hashes, Numbers, Rolling
from ragcache.store import ModuleRow

_BATCH = 512  # modules whose texts are hashed as one
_FILTER_BITS = 20  # a table of 1 MiB says of most windows that no module begins so
_PAIRS = 1 << 20  # of a window and a module that may begin there: what one text may cost


@dataclass(frozen=True, slots=True, eq=False)
class Prints:
    """Of modules' texts without outer whitespace; those under `WINDOW` characters are left out.

    firsts, wholes: hashes of the first `WINDOW` characters, and of all: [modules]. lengths: in
    characters: [modules].
    """

    firsts: Hashes
    wholes: Hashes
    lengths: Numbers
    modules: tuple[ModuleRow, ...]

    @classmethod
    def of(cls, rows: Sequence[ModuleRow]) -> Prints:
        kept = [row for row in rows if len(row.text.strip()) >= WINDOW]
        parts = [_hashed(kept[i : i + _BATCH]) for i in range(0, len(kept), _BATCH)]
        return cls.joined(parts)

    @classmethod
    def joined(cls, parts: Sequence[Prints]) -> Prints:
        """Those of all parts, in their order."""
        if not parts:
            hashes = np.empty(0, dtype=np.uint64)
            return cls(hashes, hashes, np.empty(0, dtype=np.int64), ())
        return cls(
            np.concatenate([part.firsts for part in parts]),
            np.concatenate([part.wholes for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            tuple(chain.from_iterable(part.modules for part in parts)),
        )


class Table:
    """Prints, to be looked up by the characters that a module begins with."""

    def __init__(self, prints: Prints) -> None:
        self.prints = prints
        self._order = np.argsort(prints.firsts, kind="stable")
        self._sorted = prints.firsts[self._order]
        self._filter = np.zeros(1 << _FILTER_BITS, dtype=np.bool_)
        self._filter[_filtered(prints.firsts)] = True

    def candidates(self, text: str) -> tuple[Numbers, Numbers]:
        """Where a module seems to stand in the text: places, and numbers of modules. Hashes of
        their whole texts agree; the texts may yet differ.

        A text that repeats itself, among modules that do, could have a pair for every window and
        module: places are looked at in order until there are `_PAIRS`.
        """
        nothing = np.empty(0, dtype=np.int64)
        if len(text) < WINDOW or not self.prints.modules:
            return nothing, nothing
        rolling = Rolling(text)
        windows = rolling.windows(WINDOW)
        places = np.flatnonzero(self._filter[_filtered(windows)])
        low = np.searchsorted(self._sorted, windows[places], "left")
        counts = np.searchsorted(self._sorted, windows[places], "right") - low
        ends = np.cumsum(counts)
        some = int(np.searchsorted(ends, _PAIRS, "right"))
        ranks = np.arange(int(ends[some - 1]) if some else 0)
        ranks += np.repeat((low - ends + counts)[:some], counts[:some])
        at = np.repeat(places[:some], counts[:some])
        return self._agreeing(rolling, at, self._order[ranks], len(text))

    def _agreeing(
        self, rolling: Rolling, at: Numbers, numbers: Numbers, size: int
    ) -> tuple[Numbers, Numbers]:
        fitting = at + self.prints.lengths[numbers] <= size
        at, numbers = at[fitting], numbers[fitting]
        hashes = rolling.parts(at, self.prints.lengths[numbers])
        same = hashes == self.prints.wholes[numbers]
        return at[same], numbers[same]


def _hashed(rows: Sequence[ModuleRow]) -> Prints:
    texts = [row.text.strip() for row in rows]
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    starts = np.cumsum(lengths) - lengths
    rolling = Rolling("".join(texts))
    return Prints(
        rolling.parts(starts, WINDOW), rolling.parts(starts, lengths), lengths, tuple(rows)
    )


def _filtered(hashes: Hashes) -> Hashes:
    return hashes >> np.uint64(64 - _FILTER_BITS)
