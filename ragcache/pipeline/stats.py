"""What is kept and what happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ragcache.pipeline.wiring import Parts


@dataclass(frozen=True, slots=True)
class Stats:
    """tiers: by tier, states, bytes, tokens and hits of all time.

    encoded: modules encoded since this process opened the state folder; corrupt: blobs that failed
    their checksum and were encoded again; host_evictions: states that left memory for lack of room.
    """

    model: str
    collections: dict[str, int]
    tiers: dict[str, dict[str, int]]
    host_budget_bytes: int
    encoded: int
    corrupt: int
    host_evictions: int

    @classmethod
    def of(cls, parts: Parts) -> Stats:
        store = parts.store
        return cls(
            model=parts.model.name,
            collections=parts.catalogue.collections(),
            tiers={tier: asdict(sums) for tier, sums in store.ledger.totals().items()},
            host_budget_bytes=store.host.budget_bytes,
            encoded=store.counters.encoded,
            corrupt=store.counters.corrupt,
            host_evictions=store.host.evictions,
        )
