"""Versions of a collection, which indexes and caches compare with their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ragcache.db.documents import ModuleRow

EPOCH = 1 << 22
"""A collection's revisions start at a random multiple of this."""


class CollectionTexts(NamedTuple):
    """Texts that a collection's modules see when they are encoded."""

    instruction: str | None = None
    """Instruction of its prompts. Defaults to the folder's instruction."""
    priming: str | None = None
    """Text in front of modules in later places. Defaults to the built-in one."""


class CollectionVersion(NamedTuple):
    """Version of a collection. Every change of the collection changes it."""

    collection: int
    """Id of the collection."""
    revision: int
    scaffold: int = 0
    """Id of the newest scaffold. 0 without one."""
    instruction: str | None = None
    """As in `CollectionTexts`."""
    priming: str | None = None
    """As in `CollectionTexts`."""
    calibrations: str | None = None
    """Calibrations of its answers, as `ragcache.answers.confidence` writes them."""

    @property
    def texts(self) -> CollectionTexts:
        """Texts that its modules see when they are encoded."""
        return CollectionTexts(self.instruction, self.priming)

    def covers(self, other: CollectionVersion) -> bool:
        """Whether documents at this version are at least as new as at another version.

        Revisions are only compared within an epoch: ids of deleted collections are used again.
        """
        mine, its = self.revision, other.revision
        same = self.collection == other.collection and mine // EPOCH == its // EPOCH
        return same and mine >= its


@dataclass(frozen=True, slots=True)
class Contents:
    """The modules of a collection at a version."""

    version: CollectionVersion
    modules: Sequence[ModuleRow]
