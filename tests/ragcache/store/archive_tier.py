"""`ArchiveTier`: the file of a tier that the package does not know."""

from __future__ import annotations

from typing import Any

import torch

from ragcache.config import parse_bytes
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates
from ragcache.store.tiers.base import MemoryTier, check_budget
from ragcache.store.tiers.ranks import RankCopies
from ragcache.tiers import TierTraits

ARCHIVE: dict[KVKey, StoredStates] = {}
"""Content of the tier, which outlives a store."""


class ArchiveTier(MemoryTier):
    """States in a dict that stands for a medium of its own."""

    name = "archive"
    traits = TierTraits(persistent=True)

    def __init__(self, budget_bytes: int, shelf: str = "") -> None:
        super().__init__()
        self.budget_bytes, self.shelf, self._states = budget_bytes, shelf, ARCHIVE

    @classmethod
    def from_options(
        cls, options: Any, device: torch.device, ranks: RankCopies | None = None
    ) -> ArchiveTier | None:
        assert device.type == "cpu"
        assert ranks is None
        if options.archive is None:
            return None
        return cls(parse_bytes(options.archive_bytes), options.archive)

    @property
    def used_bytes(self) -> int:
        return sum(states.nbytes for states in ARCHIVE.values())

    def size_of(self, states: StoredStates) -> int:
        return states.nbytes

    def put(self, key: KVKey, states: StoredStates) -> int:
        check_budget(self.name, self.budget_bytes, self.used_bytes, states.nbytes)
        ARCHIVE[key] = states
        return states.nbytes
