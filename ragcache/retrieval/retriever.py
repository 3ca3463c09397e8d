"""The retriever, which finds the modules that answer a question best.

Sparse search is BM25 over words. Dense search is the cosine similarity of embeddings. Hybrid search
fuses the two by reciprocal rank.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from heapq import nlargest
from typing import TYPE_CHECKING

import numpy as np

from ragcache.db import Catalog, CollectionVersion, Database, ModuleRow, Vectors
from ragcache.errors import InvalidRequest
from ragcache.params import SearchParams
from ragcache.retrieval.bm25 import Ranking, terms
from ragcache.retrieval.filters import Test, compile_filters
from ragcache.retrieval.indexes import CollectionIndex, CollectionIndexes
from ragcache.retrieval.resolve import Reranker

if TYPE_CHECKING:  # slow to import, and sparse search does without
    from langchain_core.embeddings import Embeddings


class HeldOutSearch(SearchParams):
    """A search that leaves documents out, so that a question can have no answer."""

    left_out: frozenset[str] = frozenset()
    """Ids of the documents to leave out."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A module that a search found."""

    module: ModuleRow
    score: float
    """Score of the search: `bm25` in a sparse search, `cosine` in a dense one, and in a hybrid one
    the sum of `1 / (RANK_CONSTANT + rank)` over the rankings by words and by vectors.
    `SearchParams.threshold` is on the same scale. A reranker orders hits by `rerank` instead."""
    bm25: float | None = None
    """BM25 score, if the search by words found the module."""
    cosine: float | None = None
    """Cosine of its vector and the query's, if the search by vectors found the module."""
    rerank: float | None = None
    """Score of the reranker, if one ordered the hits."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The modules for a query, best first; with `mmr`, in the order of selection."""

    query: str
    hits: tuple[Hit, ...]
    version: CollectionVersion
    """Version of the collection at the time of the search."""
    rerank_seconds: float = field(default=0.0, compare=False)
    """Seconds that the reranker took."""
    words: Mapping[str, float] | None = field(default=None, compare=False)
    """Most that each query word can add to a BM25 score. Not set by a dense search."""
    best_bm25: tuple[float, ...] = field(default=(), compare=False)
    """The two best BM25 scores, including modules below the threshold."""


class Retriever:
    """Searches the collections of one catalog. Thread-safe: searches run in parallel.

    A question finds everything that any process has stored before it, and nothing that any process
    has deleted (`CollectionIndexes`). A hybrid search finds modules without a vector by their
    words. A dense search waits until they are embedded.

    Attributes:
        embedder: Embeds queries. Without one, all searches are sparse.
        reranker: Orders the best candidates again.
        indexes: Indexes of the collections, which also embed modules.
    """

    def __init__(
        self,
        catalog: Catalog,
        embedder: Embeddings | None = None,
        vectors: Vectors | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        self.embedder, self.reranker = embedder, reranker
        self.indexes = CollectionIndexes(catalog, embedder, vectors)

    def using(self, embedder: Embeddings) -> Retriever:
        """Return a retriever with another embedder of the same name, for the same indexes."""
        other = copy(self)
        other.embedder = self.indexes.embedder = embedder
        return other

    def retrieve(self, query: str, collection: str, params: SearchParams) -> Selection:
        """Search a collection.

        Raises:
            UnknownCollection: There is no such collection.
            InvalidRequest: A dense search has no embedder, or a filter is invalid.
            ConfigurationError: The vectors of query and modules differ in length.
        """
        wanted = _compiled(params)
        version = self.indexes.observe(collection)  # before an embedding is paid for
        embedder = self._embedder_for(params)
        vector = None if embedder is None else _vector(embedder.embed_query(query))
        return self._select(query, vector, collection, params, wanted, version)

    async def aretrieve(self, query: str, collection: str, params: SearchParams) -> Selection:
        """Search a collection as `retrieve`, awaiting the embedder and a thread for the search."""
        wanted = _compiled(params)
        version = await asyncio.to_thread(self.indexes.observe, collection)
        embedder = self._embedder_for(params)
        vector = None if embedder is None else _vector(await embedder.aembed_query(query))
        return await asyncio.to_thread(
            self._select, query, vector, collection, params, wanted, version
        )

    def retrieve_by_vector(
        self, vector: Sequence[float], collection: str, params: SearchParams
    ) -> Selection:
        """Search a collection by the vector [D] of a query.

        Raises the errors of `retrieve`.
        """
        self._check_embedder()
        version = self.indexes.observe(collection)
        wanted = _compiled(params)
        return self._select("", _vector(vector), collection, params, wanted, version)

    def _embedder_for(self, params: SearchParams) -> Embeddings | None:
        if params.search == "sparse":
            return None
        return self.embedder if params.search == "hybrid" else self._check_embedder()

    def _check_embedder(self) -> Embeddings:
        if self.embedder is None:
            raise InvalidRequest(
                "a dense search needs an embedder; open with embedding='minilm' or with a "
                "LangChain Embeddings object, or search with search='sparse'"
            )
        return self.embedder

    def _select(
        self,
        query: str,
        vector: np.ndarray | None,
        collection: str,
        params: SearchParams,
        wanted: Test | None,
        version: CollectionVersion,
    ) -> Selection:
        dimension = None if vector is None else len(vector)
        index = self.indexes.index_at(collection, version, dimension)
        while params.search == "dense" and index.missing:
            self.indexes.embed_some(collection)
            index = self.indexes.index_at(collection, version, dimension)
        if not index.modules:
            return Selection(query, (), version)
        ranking, bm25, cosine = _rank(query, vector, index, params, wanted)
        if params.threshold is not None:
            ranking = [(n, score) for n, score in ranking if score >= params.threshold]
        began = time.perf_counter()
        rescored = self._rescored(query, ranking, index, params)
        took = time.perf_counter() - began if rescored else 0.0
        if rescored:
            best = sorted(ranking[: len(rescored)], key=lambda pair: -rescored[pair[0]])
            ranking = _within(best, params.relative_threshold, rescored)
        else:
            ranking = _within(ranking, params.relative_threshold, bm25, cosine)
        if params.mmr is not None:
            relevant = [(n, rescored.get(n, score)) for n, score in ranking[: params.depth]]
            ranking = [ranking[place] for place in _diverse(relevant, index, params)]
        hits = (
            Hit(index.modules[n], score, bm25.get(n), cosine.get(n), rescored.get(n))
            for n, score in ranking[: params.k]
        )
        words = None if params.search == "dense" else index.words.word_weights(query)
        top = tuple(nlargest(2, bm25.values()))
        return Selection(query, tuple(hits), version, took, words, top)

    def _rescored(
        self, query: str, ranking: Ranking, index: CollectionIndex, params: SearchParams
    ) -> dict[int, float]:
        """Score the first candidates with the reranker, if there is one and the query has text."""
        if self.reranker is None or not params.rerank or not ranking or not query:
            return {}
        numbers = [number for number, _ in ranking[: max(params.rerank, params.k)]]
        scores = self.reranker.score_texts(query, [index.modules[n].text for n in numbers])
        return dict(zip(numbers, map(float, scores), strict=True))


def _compiled(params: SearchParams) -> Test | None:
    return compile_filters(params.filters) if params.filters else None


def _vector(numbers: Sequence[float]) -> np.ndarray:
    return np.asarray(numbers, dtype=np.float32)


def _rank(
    query: str,
    vector: np.ndarray | None,
    index: CollectionIndex,
    params: SearchParams,
    wanted: Test | None,
) -> tuple[Ranking, dict[int, float], dict[int, float]]:
    """Return the candidates, and their scores by words and by vectors.

    Filters apply before the cut to `depth`, so they cost no hits.
    """
    left_out = params.left_out if isinstance(params, HeldOutSearch) else frozenset[str]()
    allowed = _allowed(index.modules, wanted, left_out)
    sparse: Ranking = []
    dense: Ranking = []
    if params.search != "dense":
        sparse = index.words.search(query, params.depth, allowed)
    if vector is not None and index.vectors is not None:
        dense = index.vectors.search(vector, params.depth, allowed)
    ranking = sparse or dense
    if params.search == "hybrid":
        ranking = fuse([[number for number, _ in each] for each in (sparse, dense)])
    return ranking, dict(sparse), dict(dense)


def _within(ranking: Ranking, share: float, *scored: dict[int, float]) -> Ranking:
    """Keep the first hit, and hits that score at least a share of the best score of a kind.

    Fused scores are no such kind: they count ranks.
    """
    if not share or not ranking:
        return ranking
    kept = {ranking[0][0]}
    for scores in scored:
        best = max(scores.values(), default=0.0)
        kept |= {number for number, score in scores.items() if best > 0 and score >= share * best}
    return [(number, score) for number, score in ranking if number in kept]


def _allowed(
    modules: Mapping[int, ModuleRow], wanted: Test | None, left_out: frozenset[str]
) -> set[int] | None:
    """Return the ids of the modules that may be found, if not all may."""
    if wanted is None and not left_out:
        return None
    return {
        number
        for number, row in modules.items()
        if row.document not in left_out and (wanted is None or wanted(row.metadata))
    }


def _diverse(ranking: Ranking, index: CollectionIndex, params: SearchParams) -> list[int]:
    """Return the places in the ranking that MMR selects, in order.

    Relevance is the cosine, or else the score as a share of the best score. Similarity is the
    cosine of vectors or, if some modules have none, the overlap of words.
    """
    if not ranking or params.mmr is None:
        return []
    relevance = np.array([score for _, score in ranking])
    if params.search != "dense":
        relevance = relevance / relevance.max()
    numbers = [number for number, _ in ranking]
    if index.vectors is not None and not index.missing:
        vectors = index.vectors.vectors(numbers)
        similarity = vectors @ vectors.T  # cosines, since these are unit vectors
    else:
        similarity = overlaps([terms(index.modules[number].text) for number in numbers])
    return select_by_mmr(relevance, similarity, params.k, params.mmr)


RANK_CONSTANT = 60
"""Constant k of reciprocal-rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009)."""


def fuse(rankings: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """Fuse rankings of ids by the sum of `1 / (RANK_CONSTANT + rank)`, best first; ties by id."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, start=1):
            scores[number] = scores.get(number, 0.0) + 1.0 / (RANK_CONSTANT + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def select_by_mmr(relevance: np.ndarray, similarity: np.ndarray, k: int, mmr: float) -> list[int]:
    """Select `k` of N candidates by maximal marginal relevance.

    The first is the most relevant one. Each next one has the largest

        (1 - mmr) * relevance - mmr * (largest similarity to a selected one)

    (Carbonell and Goldstein, SIGIR 1998). Ties go to the first.

    Args:
        relevance: Relevance of each candidate [N], on the scale of a cosine.
        similarity: Similarity of each pair of candidates [N, N], on the same scale.
        k: Number of candidates to select.
        mmr: Weight of diversity, 0 to 1.

    Returns:
        Places of the selected candidates, in order of selection.
    """
    if not len(relevance) or k < 1:
        return []
    picked = [int(np.argmax(relevance))]
    closest = similarity[picked[0]]
    while len(picked) < min(k, len(relevance)):
        marginal = (1 - mmr) * relevance - mmr * closest
        marginal[picked] = -np.inf
        picked.append(int(np.argmax(marginal)))
        closest = np.maximum(closest, similarity[picked[-1]])
    return picked


def overlaps(texts: Sequence[Collection[str]]) -> np.ndarray:
    """Return the similarity [N, N] of texts: the Jaccard index of their sets of words."""
    words = [set(text) for text in texts]
    rows = [[len(a & b) / max(1, len(a | b)) for b in words] for a in words]
    return np.array(rows).reshape(len(words), len(words))


class Retrievers:
    """The retrievers of a namespace, one for each embedder. Thread-safe.

    Embedders of the same name share vectors and indexes.
    """

    def __init__(
        self,
        catalog: Catalog,
        database: Database,
        embedder: Embeddings | None,
        reranker: Reranker | None = None,
    ) -> None:
        self._catalog, self._database, self._reranker = catalog, database, reranker
        self._known: dict[str, Retriever] = {}
        self._finding = threading.Lock()
        self._first = (
            Retriever(catalog, reranker=reranker)
            if embedder is None
            else self.retriever_for(embedder)
        )

    def retriever_for(self, embedder: Embeddings | None = None) -> Retriever:
        """Return the retriever of an embedder.

        Without one, it has the namespace's own embedder, or searches by words.
        """
        if embedder is None:
            return self._first
        name = embedder_name(embedder)
        with self._finding:
            found = self._known.get(name)
            if found is None:
                vectors = Vectors(self._database, name, self._catalog.namespace)
                found = self._known[name] = Retriever(
                    self._catalog, embedder, vectors, self._reranker
                )
        return found if found.embedder is embedder else found.using(embedder)


def embedder_name(embedder: Embeddings) -> str:
    """Name an embedder's vectors in the ledger by its class and, if known, its model."""
    model = getattr(embedder, "model_name", None) or getattr(embedder, "model", None)
    kind = f"{type(embedder).__module__}.{type(embedder).__qualname__}"
    return f"{kind}:{model}" if isinstance(model, str) else kind
