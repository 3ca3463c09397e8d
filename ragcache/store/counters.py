"""What happened since a store was opened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """encoded: states that were computed. corrupt: blobs that failed their checksum or vanished;
    their states were encoded again. unreadable: tiers that could not be read or written when they
    were wanted. unclaimed: states that were computed without the ledger, which did not answer.
    hits: by tier, states that were found there. evictions: by (tier, reason)."""

    encoded: int = 0
    corrupt: int = 0
    unreadable: int = 0
    unclaimed: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    evictions: Counter[tuple[str, str]] = field(default_factory=Counter)

    def evicted(self, tier: str, reason: str, number: int) -> None:
        self.evictions[tier, reason] += number
