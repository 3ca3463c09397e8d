"""What is kept and what happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ragcache.pipeline.wiring import Parts


@dataclass(frozen=True, slots=True)
class Stats:
    """tiers: by tier, states, bytes, tokens and hits of all time. evictions: by tier and reason,
    and how many of them were fetched again.

    encoded: modules encoded since this process opened the state folder; corrupt: blobs that failed
    their checksum and were encoded again; host_evictions: states that left memory for lack of room.
    """

    model: str
    collections: dict[str, int]
    tiers: dict[str, dict[str, int]]
    evictions: dict[str, dict[str, int]]
    host_budget_bytes: int
    encoded: int
    corrupt: int
    host_evictions: int

    @classmethod
    def of(cls, parts: Parts) -> Stats:
        store = parts.store
        store.ledger.flush()
        return cls(
            model=parts.model.name,
            collections=parts.catalogue.collections(),
            tiers={tier: asdict(sums) for tier, sums in store.ledger.totals().items()},
            evictions=store.ledger.evictions(),
            host_budget_bytes=store.host.budget_bytes or 0,
            encoded=store.counters.encoded,
            corrupt=store.counters.corrupt,
            host_evictions=store.counters.evictions["host", "pressure"],
        )
