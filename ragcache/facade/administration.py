"""What an operator asks: what is kept where, what left, what was used."""

from __future__ import annotations

from ragcache.pipeline import Modules, Parts, Stats
from ragcache.pipeline.ingesting import IngestionJobs
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

    def evictions(self, cursor: str | None = None, limit: int = 100) -> Page[EvictionRow]:
        """States that left a tier, the newest first; those of the last second may lack. Raises
        `InvalidRequest`."""
        return eviction_page(self._parts.database, self._parts.namespace, cursor, limit)
