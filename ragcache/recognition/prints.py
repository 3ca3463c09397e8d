"""Fingerprints of modules' texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ragcache.recognition.rolling import WINDOW, Hashes, Rolling
from ragcache.store import ModuleRow


@dataclass(frozen=True, slots=True, eq=False)
class Prints:
    """Of modules' texts without outer whitespace; those under `WINDOW` characters are left out.

    firsts: hashes of the first `WINDOW` characters: [modules]. modules: of one part, in the order
    of their texts.
    """

    firsts: Hashes
    modules: tuple[ModuleRow, ...]

    @classmethod
    def of(cls, rows: Sequence[ModuleRow]) -> Prints:
        kept = [row for row in rows if len(row.text.strip()) >= WINDOW]
        kept.sort(key=_text)  # parts in order are merged by `Table` in linear time
        firsts = Rolling("".join(_text(row)[:WINDOW] for row in kept))
        starts = np.arange(len(kept)) * WINDOW
        return cls(firsts.parts(starts, WINDOW), tuple(kept))

    @classmethod
    def joined(cls, parts: Sequence[Prints]) -> Prints:
        """Those of all parts, one part after the other."""
        if not parts:
            return cls(np.empty(0, dtype=np.uint64), ())
        return cls(
            np.concatenate([part.firsts for part in parts]),
            tuple(chain.from_iterable(part.modules for part in parts)),
        )


def _text(row: ModuleRow) -> str:
    return row.text.strip()
