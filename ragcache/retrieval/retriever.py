"""The retriever: modules for a question."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from langchain_core.embeddings import Embeddings

from ragcache.retrieval.fusion import fuse
from ragcache.retrieval.index import CollectionIndex
from ragcache.store import Catalogue, ModuleRow, Vectors

CANDIDATES = 50  # modules that each ranking hands to the fusion
_EMBED_BATCH = 64


@dataclass(frozen=True, slots=True)
class Hit:
    """A module that was selected, with its fused score."""

    module: ModuleRow
    score: float


@dataclass(frozen=True, slots=True)
class Selection:
    """The modules for a query, best first."""

    query: str
    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True)
class _Indexed:
    stamp: tuple[int, int]
    index: CollectionIndex
    modules: dict[int, ModuleRow]


class Retriever:
    """BM25 alone or, with an embedder, fused with FAISS by reciprocal rank. Thread-safe."""

    def __init__(
        self,
        catalogue: Catalogue,
        embedder: Embeddings | None = None,
        vectors: Vectors | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._embedder = embedder
        self._vectors = vectors
        self._indexed: dict[str, _Indexed] = {}
        self._building = threading.Lock()

    def retrieve(self, query: str, collection: str, k: int) -> Selection:
        """At most `k` modules. Raises `UnknownCollection`."""
        indexed = self._current(collection)
        if not indexed.modules:
            return Selection(query, ())
        rankings = [indexed.index.by_words(query, CANDIDATES)]
        if self._embedder is not None:
            vector = np.asarray(self._embedder.embed_query(query), dtype=np.float32)
            rankings.append(indexed.index.by_meaning(vector, CANDIDATES))
        best = fuse(rankings)[:k]
        return Selection(query, tuple(Hit(indexed.modules[n], score) for n, score in best))

    def embed(self, texts: Sequence[str]) -> np.ndarray | None:
        """Vectors of module texts, [N, D] float32; None without an embedder."""
        if self._embedder is None:
            return None
        rows: list[list[float]] = []
        for start in range(0, len(texts), _EMBED_BATCH):
            rows += self._embedder.embed_documents(list(texts[start : start + _EMBED_BATCH]))
        return np.asarray(rows, dtype=np.float32)

    def _current(self, collection: str) -> _Indexed:
        """The index over what the collection holds now, whoever changed it."""
        indexed = self._indexed.get(collection)
        if indexed is not None and indexed.stamp == self._catalogue.stamp(collection):
            return indexed
        with self._building:  # threads that ask at once wait for one index
            stamp = self._catalogue.stamp(collection)
            indexed = self._indexed.get(collection)
            if indexed is None or indexed.stamp != stamp:
                indexed = self._indexed[collection] = self._build(collection, stamp)
            return indexed

    def _build(self, collection: str, stamp: tuple[int, int]) -> _Indexed:
        modules = {row.id: row for row in self._catalogue.modules(collection)}
        ids = np.fromiter(modules, dtype=np.int64, count=len(modules))
        texts = [row.text for row in modules.values()]
        vectors = self._vectors_of(collection, modules) if modules else None
        index = CollectionIndex(ids, texts, vectors)
        return _Indexed(stamp, index, modules)

    def _vectors_of(self, collection: str, modules: dict[int, ModuleRow]) -> np.ndarray | None:
        """Stored vectors; those that are missing (another embedder was used) are made now."""
        if self._embedder is None or self._vectors is None:
            return None
        ids, stored = self._vectors.of(collection)
        by_id = dict(zip(ids.tolist(), stored, strict=True))
        missing = [number for number in modules if number not in by_id]
        if missing:
            made = self.embed([modules[number].text for number in missing])
            assert made is not None
            self._vectors.add(missing, made)
            by_id.update(zip(missing, made, strict=True))
        return np.stack([by_id[number] for number in modules])
