"""What is kept and what happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ragcache.pipeline.wiring import Parts


@dataclass(frozen=True, slots=True)
class Stats:
    """tiers: by tier, states, bytes, tokens and hits of all time. evictions: by tier and reason,
    and how many of them were fetched again.

    encoded: modules encoded since this process opened the state folder; corrupt: blobs that failed
    their checksum or vanished, and were encoded again; unreadable: times that a tier or the ledger
    could not be read or written when it was wanted; unclaimed: states that were encoded for one
    question because the ledger did not answer; host_evictions: states that left memory for lack of
    room.
    """

    model: str
    collections: dict[str, int]
    tiers: dict[str, dict[str, int]]
    evictions: dict[str, dict[str, int]]
    host_budget_bytes: int
    encoded: int
    corrupt: int
    unreadable: int
    unclaimed: int
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
            unreadable=store.counters.unreadable,
            unclaimed=store.counters.unclaimed,
            host_evictions=store.counters.evictions["host", "pressure"],
        )
