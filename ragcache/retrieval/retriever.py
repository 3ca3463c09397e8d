"""The retriever: modules for a question."""

# MERGED ragcache.retrieval.retrievers: The retrievers of one catalogue: one for each embedder.
# MERGED ragcache.retrieval.mmr: Maximal marginal relevance (Carbonell and Goldstein,
#   SIGIR 1998).

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from langchain_core.embeddings import Embeddings

from ragcache.db import Catalog, Database, ModuleRow, Vectors
from ragcache.errors import ConfigurationError, InvalidRequest
from ragcache.retrieval.embeddings import embedder_name
from ragcache.retrieval.filters import Test
from ragcache.retrieval.params import SearchParams
from ragcache.retrieval.search import CollectionIndex, Ranking, fuse, terms

_EMBED_BATCH = 64


@dataclass(frozen=True, slots=True)
class Hit:
    """A module that was selected. score: as `SearchParams.threshold` says."""

    module: ModuleRow
    score: float


@dataclass(frozen=True, slots=True)
class Selection:
    """The modules for a query, best first; with `mmr`, in the order of being picked."""

    query: str
    hits: tuple[Hit, ...]


@dataclass(frozen=True, slots=True)
class _Indexed:
    stamp: tuple[int, int]
    index: CollectionIndex
    modules: dict[int, ModuleRow]


class Retriever:
    """BM25, FAISS over an embedder's vectors, or both fused by reciprocal rank. Thread-safe:
    searches run side by side, and threads that need the same new index wait for one."""

    def __init__(
        self,
        catalogue: Catalog,
        embedder: Embeddings | None = None,
        vectors: Vectors | None = None,
    ) -> None:
        self.embedder = embedder
        self._catalogue = catalogue
        self._vectors = vectors
        self._indexed: dict[str, _Indexed] = {}
        self._building: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._guard = threading.Lock()  # of `_building` alone

    def using(self, embedder: Embeddings) -> Retriever:
        """One with another embedder of the same name, over the same vectors and indexes."""
        other = copy(self)
        other.embedder = embedder
        return other

    def retrieve(self, query: str, collection: str, params: SearchParams) -> Selection:
        """The modules of a collection that meet the params. Raises `UnknownCollection`,
        `InvalidRequest` for `dense` without an embedder, or `ConfigurationError` for an embedder
        whose vectors are of several lengths."""
        self._catalogue.stamp(collection)  # a collection that is unknown costs no embedding
        embedder = self._embedder_for(params)
        vector = None if embedder is None else _vector(embedder.embed_query(query))
        return self._select(query, vector, collection, params)

    async def aretrieve(self, query: str, collection: str, params: SearchParams) -> Selection:
        """As `retrieve`: the embedder is awaited, and the search runs in a thread."""
        await asyncio.to_thread(self._catalogue.stamp, collection)
        embedder = self._embedder_for(params)
        vector = None if embedder is None else _vector(await embedder.aembed_query(query))
        return await asyncio.to_thread(self._select, query, vector, collection, params)

    def near(self, vector: Sequence[float], collection: str, params: SearchParams) -> Selection:
        """As `retrieve` by meaning, for a vector [D] of the embedder. Raises also
        `ConfigurationError` for a vector of another length."""
        self._check_embedder()
        return self._select("", _vector(vector), collection, params)

    def embed(self, texts: Sequence[str]) -> np.ndarray | None:
        """Vectors of module texts, without the space around them, [N, D] float32; None without an
        embedder."""
        if self.embedder is None:
            return None
        rows: list[list[float]] = []
        stripped = [text.strip() for text in texts]
        for start in range(0, len(texts), _EMBED_BATCH):
            rows += self.embedder.embed_documents(stripped[start : start + _EMBED_BATCH])
        return np.asarray(rows, dtype=np.float32)

    def _embedder_for(self, params: SearchParams) -> Embeddings | None:
        if params.search == "sparse":
            return None
        return self.embedder if params.search == "hybrid" else self._check_embedder()

    def _check_embedder(self) -> Embeddings:
        if self.embedder is None:
            raise InvalidRequest(
                "a search by meaning needs an embedder; open with embedding='minilm' or with a "
                "LangChain Embeddings object, or search by words"
            )
        return self.embedder

    def _select(
        self, query: str, vector: np.ndarray | None, collection: str, params: SearchParams
    ) -> Selection:
        indexed = self._current(collection, None if vector is None else len(vector))
        if not indexed.modules:
            return Selection(query, ())
        ranking = _rank(query, vector, indexed, params)
        if params.threshold is not None:
            ranking = [(n, score) for n, score in ranking if score >= params.threshold]
        if params.mmr is not None:
            ranking = _reranked(ranking[: params.depth], indexed, params)
        hits = (Hit(indexed.modules[n], score) for n, score in ranking[: params.k])
        return Selection(query, tuple(hits))

    def _current(self, collection: str, dimension: int | None) -> _Indexed:
        """The index over what the collection holds now, whoever changed it, with vectors of a
        dimension where one is given."""
        indexed = self._indexed.get(collection)
        stamp = self._catalogue.stamp(collection)
        if indexed is not None and _serves(indexed, stamp, dimension):
            return indexed
        with self._guard:
            building = self._building[collection]
        with building:
            stamp = self._catalogue.stamp(collection)
            indexed = self._indexed.get(collection)
            if indexed is None or indexed.stamp != stamp:
                indexed = self._build(collection, stamp)
            if not _serves(indexed, stamp, dimension):
                assert dimension is not None
                vectors = self._vectors_of(collection, indexed.modules, dimension)
                index = indexed.index.with_vectors(vectors)
                indexed = _Indexed(stamp, index, indexed.modules)
            self._indexed[collection] = indexed
            return indexed

    def _build(self, collection: str, stamp: tuple[int, int]) -> _Indexed:
        modules = {row.id: row for row in self._catalogue.modules(collection)}
        ids = np.fromiter(modules, dtype=np.int64, count=len(modules))
        index = CollectionIndex(ids, [row.text for row in modules.values()])
        return _Indexed(stamp, index, modules)

    def _vectors_of(
        self, collection: str, modules: dict[int, ModuleRow], dimension: int
    ) -> np.ndarray:
        """Stored vectors [N, D]. Those that are missing are made now, and those of another length:
        then the embedder has changed under its name."""
        by_id: dict[int, np.ndarray] = {}
        if self._vectors is not None:
            stored = self._vectors.of(collection)
            by_id = {n: v for n, v in stored.items() if len(v) == dimension}
        missing = [number for number in modules if number not in by_id]
        if missing:
            made = self.embed([modules[number].text for number in missing])
            assert made is not None
            if made.shape[1] != dimension:
                raise ConfigurationError(
                    f"the question's vector has {dimension} numbers, those of texts have "
                    f"{made.shape[1]}; both must come from one embedder"
                )
            if self._vectors is not None:
                self._vectors.add(missing, made)
            by_id.update(zip(missing, made, strict=True))
        return np.stack([by_id[number] for number in modules])


def _vector(numbers: Sequence[float]) -> np.ndarray:
    return np.asarray(numbers, dtype=np.float32)


def _serves(indexed: _Indexed, stamp: tuple[int, int], dimension: int | None) -> bool:
    if indexed.stamp != stamp:
        return False
    return dimension in (None, indexed.index.dimension) or not indexed.modules


def _rank(
    query: str, vector: np.ndarray | None, indexed: _Indexed, params: SearchParams
) -> Ranking:
    """All candidates. What the filters leave out is no candidate, so that they cost no hits."""
    index, depth = indexed.index, params.depth
    allowed = None if params.wanted is None else _allowed(indexed, params.wanted)
    dense = [] if vector is None else index.search_dense(vector, depth, allowed)
    if params.search == "dense":
        return dense
    sparse = index.search_sparse(query, depth, allowed)
    if params.search == "sparse":
        return sparse
    return fuse([[number for number, _ in ranking] for ranking in (sparse, dense)])


def _allowed(indexed: _Indexed, wanted: Test) -> np.ndarray:
    """[N] bool, in the order of the index."""
    rows = indexed.modules.values()
    return np.fromiter((wanted(row.attributes) for row in rows), dtype=bool, count=len(rows))


def _reranked(ranking: Ranking, indexed: _Indexed, params: SearchParams) -> Ranking:
    """Maximal marginal relevance. Relevance is the score, the cosine itself or else a share of the
    best one's; likeness is the cosine of vectors or, without, the overlap of words."""
    if not ranking or params.mmr is None:
        return ranking
    relevance = np.array([score for _, score in ranking])
    if params.search != "dense":
        relevance = relevance / relevance.max()
    vectors = indexed.index.vectors([number for number, _ in ranking])
    if vectors is not None:
        likeness = cosines(vectors)
    else:
        likeness = overlaps([terms(indexed.modules[number].text) for number, _ in ranking])
    picked = select_by_mmr(relevance, likeness, params.k, params.mmr)
    return [ranking[position] for position in picked]


class Retrievers:
    """Retrievers by embedder. Thread-safe; embedders of one name share vectors and index."""

    def __init__(self, catalogue: Catalog, database: Database, embedder: Embeddings | None) -> None:
        self._catalogue = catalogue
        self._database = database
        self._known: dict[str, Retriever] = {}
        self._finding = threading.Lock()
        self._first = Retriever(catalogue) if embedder is None else self.of(embedder)

    def of(self, embedder: Embeddings | None = None) -> Retriever:
        """The retriever of an embedder; without, that of the embedder that there is, or by words
        alone."""
        if embedder is None:
            return self._first
        name = embedder_name(embedder)
        with self._finding:
            found = self._known.get(name)
            if found is None:
                vectors = Vectors(self._database, name, self._catalogue.namespace)
                found = self._known[name] = Retriever(self._catalogue, embedder, vectors)
        return found if found.embedder is embedder else found.using(embedder)


def select_by_mmr(relevance: np.ndarray, likeness: np.ndarray, k: int, mmr: float) -> list[int]:
    """Picks `k` of N candidates: the most relevant, then one after the other that with the largest

        (1 - mmr) * relevance - mmr * (largest likeness to what was picked)

    relevance: [N]; likeness: [N, N], both on the scale of a cosine. Of equals the first.
    """
    if not len(relevance) or k < 1:
        return []
    picked = [int(np.argmax(relevance))]
    nearest = likeness[picked[0]]
    while len(picked) < min(k, len(relevance)):
        marginal = (1 - mmr) * relevance - mmr * nearest
        marginal[picked] = -np.inf
        picked.append(int(np.argmax(marginal)))
        nearest = np.maximum(nearest, likeness[picked[-1]])
    return picked


def cosines(vectors: np.ndarray) -> np.ndarray:
    """Likeness [N, N] of unit vectors [N, D]."""
    products: np.ndarray = vectors @ vectors.T
    return products


def overlaps(texts: Sequence[Collection[str]]) -> np.ndarray:
    """Likeness [N, N] of texts by their words: those that two share, of those that either has
    (Jaccard)."""
    words = [set(text) for text in texts]
    rows = [[len(a & b) / max(1, len(a | b)) for b in words] for a in words]
    return np.array(rows).reshape(len(words), len(words))
