"""The operator's queries to an open `RagCache`: its figures, schemas, verification and plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil

from ragcache import RagCache, SourceDocument
from ragcache.db import SchemaTexts
from ragcache.engine import LLMEngine
from ragcache.errors import ConfigurationError, UnknownSchema
from ragcache.machine import device_memory, host_memory, process_memory
from ragcache.models import LoadedModel, dtype_name
from ragcache.planning import (
    Budgets,
    Corpus,
    advise,
    corpus_of_collection,
    corpus_of_sources,
    make_plan,
)
from ragcache.store import KVStore
from ragcache.store.verify import VerifyReport, verify
from ragcache_api.http.protocol import PlanRequest, SchemaResponse
from ragcache_schemas import write_schema


@dataclass(frozen=True, slots=True)
class AdminQueries:
    """Queries, which change nothing except where they say so. All methods may block."""

    rag: RagCache
    model: LoadedModel
    engine: LLMEngine
    store: KVStore

    @classmethod
    def of(cls, rag: RagCache) -> AdminQueries:
        shared = rag.internals.shared
        return cls(rag, shared.model, shared.engine, shared.store)

    @property
    def is_open(self) -> bool:
        """Whether the engine takes requests."""
        return self.engine.is_open

    def count_leased(self) -> int:
        """States that requests are reading."""
        self.rag.internals.shared.deferred.release()
        return len(self.store.memory.leases)

    def engine_figures(self) -> dict[str, float]:
        """Steps, batches and waits of the engine since it began."""
        stats = self.engine.stats
        rows = stats.prompt_tokens + stats.decoded_tokens + stats.encoded_tokens
        mean = rows / stats.steps if stats.steps else 0.0
        return {
            "steps": stats.steps, "batch_mean": mean, "queued_s": stats.queued,
            "preempted": stats.preempted,
        }  # fmt: skip

    def memory(self) -> dict[str, Any]:
        """The memory of the process, the host, the model's GPU and the tiers, in bytes."""
        device = self.model.causal.device
        return {
            "process": process_memory(), "host": host_memory(), "tiers": self.rag.tiers(),
            "device": device_memory(device) if device.type == "cuda" else None,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """The model with its dtypes, and how far its modes are from `exact`."""
        causal = self.model.causal
        return {
            "model": self.model.name, "device": str(causal.device), "window": causal.window,
            "dtype": dtype_name(causal.dtype), "states_dtype": dtype_name(causal.states_dtype),
            "force_modes": self.rag.gate.forced, "modes": self.rag.gate.results(),
        }  # fmt: skip

    def flush(self) -> None:
        """Writes uses and evictions to the ledger."""
        self.store.ledger.flush()

    def verify(self, *, repair: bool) -> VerifyReport:
        """Checks each row against its blob; `repair` mends the rows that it can."""
        return verify(self.store, repair=repair)

    def schemas(self, namespace: str) -> list[SchemaResponse]:
        """Hand-written schemas of a namespace."""
        texts = self._texts(namespace)
        found = [(name, texts.get_schema(name)) for name in texts.names()]
        return [SchemaResponse(name=name, placement=s.placement) for name, s in found if s]

    def schema(self, namespace: str, name: str) -> SchemaResponse:
        """Raises `UnknownSchema`."""
        found = self._texts(namespace).get_schema(name)
        if found is None:
            raise UnknownSchema(f"there is no schema {name!r}")
        return SchemaResponse(name=name, placement=found.placement, text=found.text)

    def generated_schema(self, namespace: str, collection: str) -> str:
        """The schema of a collection as PML, with one slot. Raises `UnknownCollection`."""
        return write_schema(self.rag.within(namespace).schema(collection, k=1))

    def plan(self, namespace: str, wanted: PlanRequest, module_tokens: int) -> dict[str, Any]:
        """Costs and gains of caching a corpus; a sample is measured while requests run.

        Raises `DocumentError`, `ConfigurationError` or `UnknownCollection`.
        """
        corpus = self._corpus(namespace, wanted, module_tokens)
        budgets = Budgets.parse(wanted.host_bytes, wanted.device_bytes, wanted.disk_bytes)
        made = make_plan(self.model, corpus, budgets, self.store.disk.folder, sample=wanted.sample)
        return made.to_dict() | {"advice": advise(made, psutil.virtual_memory().total)}

    def _corpus(self, namespace: str, wanted: PlanRequest, module_tokens: int) -> Corpus:
        if (wanted.texts is None) == (wanted.collection is None):
            raise ConfigurationError("give either a collection or texts")
        if wanted.texts is not None:
            texts = [SourceDocument(str(n), text) for n, text in enumerate(wanted.texts, start=1)]
            return corpus_of_sources(self.model, texts, module_tokens)
        catalog = self.rag.within(namespace).internals.catalog
        return corpus_of_collection(self.model, catalog, wanted.collection or "")

    def _texts(self, namespace: str) -> SchemaTexts:
        return SchemaTexts(self.store.ledger.database, namespace)
