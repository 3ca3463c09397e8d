"""What an operator asks: what is kept where, what left, what was used."""

from __future__ import annotations

from collections.abc import Callable

from ragcache.pipeline import Modules, Parts, Stats
from ragcache.pipeline.batches import Batch, batch_of
from ragcache.pipeline.ingesting import IngestionJobs
from ragcache.pipeline.observing import Observer, RunningRequest
from ragcache.store import (
    EvictionRow,
    Keys,
    ModuleListing,
    Page,
    TierStatus,
    eviction_page,
    list_modules,
    tier_status,
)


class Administration:
    """The methods of `RagCache` for operators."""

    _parts: Parts

    @property
    def modules(self) -> Modules:
        """Listing, warming, pinning, moving and evicting the states of documents."""
        return self._parts.modules

    @property
    def jobs(self) -> IngestionJobs:
        """Ingestion in the background, and what became of every ingestion."""
        return self._parts.jobs

    @property
    def keys(self) -> Keys:
        """The API keys of the service, of all namespaces."""
        return self._parts.common.keys

    def list_modules(self, collection: str | None = None) -> list[ModuleListing]:
        """Every module with the size, tiers and hits of its states."""
        self._parts.returned.release()
        self._parts.store.ledger.flush()
        return list_modules(self._parts.database, collection, self._parts.namespace)

    def stats(self) -> Stats:
        """What is kept and what happened since this process opened it. Collections are those of
        the namespace, everything else is of the folder."""
        self._parts.returned.release()
        return Stats.of(self._parts)

    def tiers(self) -> list[TierStatus]:
        """How full each tier is, the fastest first; of the folder, not of the namespace alone."""
        return tier_status(self._parts.store)

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Calls `observer(record)` with every request of all namespaces that ends from now on, in
        a thread of its own; calling the result ends that."""
        return self._parts.common.observing.observe(observer)

    def running(self) -> list[RunningRequest]:
        """The requests of the namespace that are under way, the oldest first."""
        return self._parts.common.observing.running(self._parts.namespace)

    def batch(self) -> Batch:
        """What the engine computes now."""
        return batch_of(self._parts.engine.core.view, self._parts.database, self._parts.namespace)

    def evictions(self, cursor: str | None = None, limit: int = 100) -> Page[EvictionRow]:
        """States that left a tier, the newest first; those of the last second may lack. Raises
        `InvalidRequest`."""
        return eviction_page(self._parts.database, self._parts.namespace, cursor, limit)
