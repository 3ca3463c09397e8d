"""Fingerprints of modules' texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ragcache.recognition.rolling import WINDOW, Hashes, Rolling
from ragcache.store import ModuleRow

_BATCH = 4096  # modules whose beginnings are hashed as one text
_NONE: Hashes = np.empty(0, dtype=np.uint64)


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
        kept.sort(key=_text)  # a group merges what is in order in linear time
        parts = [_hashed(kept[i : i + _BATCH]) for i in range(0, len(kept), _BATCH)]
        return cls(np.concatenate([_NONE, *parts]), tuple(kept))

    @classmethod
    def joined(cls, parts: Sequence[Prints]) -> Prints:
        """Those of all parts, one part after the other."""
        return cls(
            np.concatenate([_NONE, *(part.firsts for part in parts)]),
            tuple(chain.from_iterable(part.modules for part in parts)),
        )


def _hashed(rows: Sequence[ModuleRow]) -> Hashes:
    rolling = Rolling("".join(_text(row)[:WINDOW] for row in rows))
    return rolling.parts(np.arange(len(rows)) * WINDOW, WINDOW)


def _text(row: ModuleRow) -> str:
    return row.text.strip()
