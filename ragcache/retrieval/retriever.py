"""The retriever: a question in, the modules that answer it best out.

Sparse search is BM25 over words, dense search the cosine of embeddings, hybrid search both, fused
by reciprocal rank. The catalog is the truth: an index (`CollectionIndex`) is built from it in
memory. When the catalog changes, questions are served at once by the index with the change applied
to it, and one that is built anew aside takes its place (`_Rebuilder`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from heapq import nlargest
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from ragcache.config import DEFAULT_RELATIVE_THRESHOLD, DEFAULT_RERANK, check_k
from ragcache.db import Catalog, Database, ModuleRow, Stamp, Vectors
from ragcache.db.catalog import Contents
from ragcache.errors import (
    ConfigurationError,
    EngineClosed,
    InvalidRequest,
    LedgerUnavailable,
    UnknownCollection,
)
from ragcache.retrieval.filters import Filters, Test, compile_filters
from ragcache.retrieval.reranking import Reranker
from ragcache.retrieval.search import (
    MOST_FUSED,
    CollectionIndex,
    Ranking,
    fuse,
    overlaps,
    select_by_mmr,
)
from ragcache.retrieval.words import terms

if TYPE_CHECKING:  # slow to import, and sparse search does without
    from langchain_core.embeddings import Embeddings

_log = logging.getLogger(__name__)

SearchKind = Literal["hybrid", "sparse", "dense"]

CANDIDATES = 50
"""Modules that each ranking passes to fusion and to `mmr`."""

APPLIED_AT_ONCE = 500
"""New modules that are applied to an index within a question: it takes 0.2 s. More are found when
they are indexed aside, but for those of documents whose earlier modules the index held."""

EMBEDDED_AT_ONCE = 8
"""Modules without a vector that are embedded within a question. More of them are found by their
words until they are embedded aside."""

_EMBED_BATCH = 64
_EMBEDDED_ASIDE = 32  # until other collections have their turn
_EXIT_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds after a build that failed; each twice the last


@dataclass(frozen=True, slots=True)
class SearchParams:
    """What a search returns; the values are described at `ragcache.options.SearchOptions`.

    A `hybrid` search is sparse where there is no embedder. Filters apply before anything is
    counted, and so do ids of documents that are `left_out`. Each ranking passes at least `k`
    candidates. Raises `ConfigurationError` for `k`, and
    `InvalidRequest` where another value cannot be used.
    """

    k: int
    search: SearchKind = "hybrid"
    filters: Filters | None = None
    threshold: float | None = None
    mmr: float | None = None
    candidates: int = CANDIDATES
    relative_threshold: float = DEFAULT_RELATIVE_THRESHOLD
    rerank: int = DEFAULT_RERANK
    left_out: frozenset[str] = frozenset()
    wanted: Test | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_k(self.k)
        if self.search not in get_args(SearchKind):
            kinds = ", ".join(get_args(SearchKind))
            raise InvalidRequest(f"unknown search {self.search!r}; searches: {kinds}")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise InvalidRequest(f"threshold is {self.threshold}; give a finite score")
        if self.search == "hybrid" and (self.threshold or 0.0) > MOST_FUSED:
            raise InvalidRequest(
                f"threshold is {self.threshold}; a hybrid search fuses ranks, and its scores are "
                f"at most {MOST_FUSED:.4f}. Give relative_threshold, a share of the best BM25 "
                "score or cosine, or retrieve with search 'sparse' or 'dense'"
            )
        if not 0 <= self.relative_threshold <= 1:
            raise InvalidRequest(
                f"relative_threshold is {self.relative_threshold}; it lies between 0 and 1"
            )
        if self.mmr is not None and not 0 <= self.mmr <= 1:
            raise InvalidRequest(f"mmr is {self.mmr}; it lies between 0 and 1")
        if self.candidates < 1:
            raise InvalidRequest(f"candidates is {self.candidates}; at least one is needed")
        if self.rerank < 0:
            raise InvalidRequest(f"rerank is {self.rerank}; give a number of candidates, or 0")
        object.__setattr__(self, "wanted", compile_filters(self.filters))

    @property
    def depth(self) -> int:
        """The number of modules in a ranking."""
        return max(self.k, self.candidates)


@dataclass(frozen=True, slots=True)
class Hit:
    """A module that was found. score: on the scale of `SearchParams.threshold`. bm25, cosine: of
    its words and of its vector; None where that ranking did not find it. rerank: of the reranker,
    which ordered the hits; None without one."""

    module: ModuleRow
    score: float
    bm25: float | None = None
    cosine: float | None = None
    rerank: float | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The modules for a query, best first; with `mmr`, in the order of selection. stamp: of the
    collection when it was asked for. rerank_seconds: what the reranker took. words: of each word
    of the query what it adds to a BM25 score at most; None where only vectors were searched.
    best_bm25: the two best of these scores, those of modules that a threshold left out too."""

    query: str
    hits: tuple[Hit, ...]
    stamp: Stamp
    rerank_seconds: float = field(default=0.0, compare=False)
    words: Mapping[str, float] | None = field(default=None, compare=False)
    best_bm25: tuple[float, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class _Indexed:
    """behind: whether it lacks modules that are new at the stamp."""

    stamp: Stamp
    index: CollectionIndex
    modules: dict[int, ModuleRow]
    behind: bool = False

    @property
    def is_outdated(self) -> bool:
        """Whether another one should be built."""
        return self.behind or self.index.has_old_words or self.index.lacks_vectors


def _applied(before: _Indexed, read: Contents) -> _Indexed:
    """The index with what has changed since."""
    modules = {row.id: row for row in read.modules}
    index = before.index.update(*_ids_and_texts(modules))
    return _Indexed(read.stamp, index, modules, behind=not read.complete)


class Retriever:
    """Searches the collections of one catalog. Thread-safe: searches run in parallel, and threads
    that need the same first index wait for one of them to build it.

    What any process has stored is found by the next question, and what any has deleted is not. No
    question waits for a large index to be built again: it takes what came and what went since into
    account, at a cost in proportion to that, and one thread builds another aside. More than
    `APPLIED_AT_ONCE` new modules are found when that is built, but for those that replace others,
    which are found at once. What this process ingests it takes into account itself
    (`update_index`), before `ingest` returns. A build that fails is tried again by a question
    after a pause, of a second at first and of a minute at most.

    Modules without a vector of the embedder are embedded aside, too, unless there are few
    (`EMBEDDED_AT_ONCE`). Hybrid searches find them by their words until then; dense ones wait."""

    def __init__(
        self, catalog: Catalog, embedder: Embeddings | None = None, vectors: Vectors | None = None,
        reranker: Reranker | None = None,
    ) -> None:  # fmt: skip
        self.embedder, self.reranker = embedder, reranker
        self._catalog, self._vectors = catalog, vectors
        self._indexed: dict[str, _Indexed] = {}
        self._changing: dict[str, threading.Lock] = {}  # held to change an entry of `_indexed`
        self._building: dict[str, threading.Lock] = {}  # held to build aside; taken first
        self._rebuilder = _Rebuilder(self._rebuild)

    def using(self, embedder: Embeddings) -> Retriever:
        """A retriever with another embedder of the same name, sharing vectors and indexes."""
        other = copy(self)
        other.embedder = embedder
        return other

    def retrieve(self, query: str, collection: str, params: SearchParams) -> Selection:
        """Searches a collection. Raises `UnknownCollection`, `InvalidRequest` for a `dense` search
        without an embedder, or `ConfigurationError` where its vectors differ in length."""
        stamp = self._observe(collection)  # one that is unknown costs no embedding
        embedder = self._embedder_for(params)
        vector = None if embedder is None else _vector(embedder.embed_query(query))
        return self._select(query, vector, collection, params, stamp)

    async def aretrieve(self, query: str, collection: str, params: SearchParams) -> Selection:
        """`retrieve` for asyncio: awaits the embedder and searches in a thread."""
        stamp = await asyncio.to_thread(self._observe, collection)
        embedder = self._embedder_for(params)
        vector = None if embedder is None else _vector(await embedder.aembed_query(query))
        return await asyncio.to_thread(self._select, query, vector, collection, params, stamp)

    def retrieve_by_vector(
        self, vector: Sequence[float], collection: str, params: SearchParams
    ) -> Selection:
        """A dense `retrieve` for a vector [D] of the embedder. Raises `ConfigurationError` for a
        vector of another length."""
        self._check_embedder()
        stamp = self._observe(collection)
        return self._select("", _vector(vector), collection, params, stamp)

    def update_index(self, collection: str) -> None:
        """Applies a change of a collection to its index, if there is one, so that no question has
        to. Where the ledger does not answer, the next question does it."""
        if collection in self._indexed:
            with contextlib.suppress(LedgerUnavailable, UnknownCollection):  # deleted meanwhile
                if self._current(collection, None, self._catalog.stamp(collection)).behind:
                    self._rebuild(collection)  # not in its turn after other collections

    def prepare_index(self, collection: str) -> None:
        """Has the first index of a collection built aside, with its vectors, so that its first
        question need not wait, or not for as long. Returns at once."""
        if collection not in self._indexed:
            self._rebuilder.request(collection)

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray | None:
        """Vectors [N, D] float32 of stripped texts; None without an embedder."""
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
                "a dense search needs an embedder; open with embedding='minilm' or with a "
                "LangChain Embeddings object, or search with search='sparse'"
            )
        return self.embedder

    def _select(
        self, query: str, vector: np.ndarray | None, collection: str, params: SearchParams,
        stamp: Stamp,
    ) -> Selection:  # fmt: skip
        dimension = None if vector is None else len(vector)
        indexed = self._current(collection, dimension, stamp)
        while params.search == "dense" and indexed.index.lacks_vectors:
            self._build(collection)
            indexed = self._current(collection, dimension, stamp)
        if not indexed.modules:
            return Selection(query, (), stamp)
        ranking, bm25, cosine = _rank(query, vector, indexed, params)
        if params.threshold is not None:
            ranking = [(n, score) for n, score in ranking if score >= params.threshold]
        began = time.perf_counter()
        rescored = self._rescored(query, ranking, indexed, params)
        took = time.perf_counter() - began if rescored else 0.0
        if rescored:
            read = ranking[: len(rescored)]
            best = sorted(read, key=lambda pair: -rescored[pair[0]])
            ranking = _within(best, params.relative_threshold, rescored)
        else:
            ranking = _within(ranking, params.relative_threshold, bm25, cosine)
        if params.mmr is not None:
            relevant = [(n, rescored.get(n, score)) for n, score in ranking[: params.depth]]
            order = _diverse(relevant, indexed, params)
            ranking = [ranking[place] for place in order]
        hits = (
            Hit(indexed.modules[n], score, bm25.get(n), cosine.get(n), rescored.get(n))
            for n, score in ranking[: params.k]
        )
        words = None if params.search == "dense" else indexed.index.word_weights(query)
        return Selection(query, tuple(hits), stamp, took, words, tuple(nlargest(2, bm25.values())))

    def _rescored(
        self, query: str, ranking: Ranking, indexed: _Indexed, params: SearchParams
    ) -> dict[int, float]:
        """The reranker's scores of the first candidates; empty without a reranker or a text."""
        if self.reranker is None or not params.rerank or not ranking or not query:
            return {}
        numbers = [number for number, _ in ranking[: max(params.rerank, params.k)]]
        texts = [indexed.modules[number].text for number in numbers]
        scores = self.reranker.score_texts(query, texts)
        return dict(zip(numbers, map(float, scores), strict=True))

    def _observe(self, collection: str) -> Stamp:
        """The stamp of a collection. What has changed since that of its index is read in the same
        snapshot, and taken into account."""
        before = self._indexed.get(collection)
        if before is None:
            return self._catalog.stamp(collection)
        stamp, changes = self._catalog.stamp_and_changes(
            collection, before.stamp, before.modules, APPLIED_AT_ONCE
        )
        if changes is not None and changes.stamp.collection == before.stamp.collection:
            with self._changing.setdefault(collection, threading.Lock()):
                if self._indexed.get(collection) is before:  # nobody else has changed it meanwhile
                    self._indexed[collection] = _applied(before, changes)
        return stamp

    def _current(self, collection: str, dimension: int | None, stamp: Stamp) -> _Indexed:
        """The index over what the collection held at the stamp, by any process, or later; where
        `dimension` is given, with those vectors of that length that there are, or nearly are."""
        indexed = self._indexed.get(collection)
        if indexed is None or not _serves(indexed, stamp, dimension):
            with self._changing.setdefault(collection, threading.Lock()):
                indexed = self._indexed.get(collection)
                if indexed is None or not indexed.stamp.covers(stamp):
                    indexed = self._updated(collection, stamp, indexed)
                if not _serves(indexed, indexed.stamp, dimension):
                    assert dimension is not None
                    indexed = self._with_vectors(collection, indexed, dimension)
                self._indexed[collection] = indexed
        if indexed.is_outdated:  # again, where building failed before
            self._rebuilder.request(collection)
        return indexed

    def _updated(self, collection: str, stamp: Stamp, before: _Indexed | None) -> _Indexed:
        """The index with what has changed since; a new one for a new collection."""
        if before is not None and before.stamp.collection != stamp.collection:
            before = None
        if before is None:
            return self._first(collection)
        read = self._catalog.reread_modules(collection, before.modules, APPLIED_AT_ONCE)
        return _applied(before, read)

    def _first(self, collection: str, known: Mapping[int, ModuleRow] | None = None) -> _Indexed:
        """A new index of all that a collection holds; it is not built yet. known: modules that
        need not be read."""
        read = self._catalog.reread_modules(collection, known or {})
        modules = {row.id: row for row in read.modules}
        return _Indexed(read.stamp, CollectionIndex(*_ids_and_texts(modules)), modules)

    def _rebuild(self, collection: str) -> bool:
        """Builds as `_build`, and logs errors: the index before serves. Returns whether there is
        nothing left to build."""
        try:
            self._build(collection)
        except (EngineClosed, UnknownCollection):
            return True  # closed or deleted meanwhile
        except LedgerUnavailable as error:
            _log.warning("the index of %r is built by a later question: %s", collection, error)
            return False
        except Exception:
            _log.exception("the index of %r was not rebuilt; the old one serves", collection)
            return False
        return True

    def _build(self, collection: str) -> None:
        """Builds the index of a collection where there is none, and what is outdated of one. One
        thread at a time does, and others find it done."""
        with self._building.setdefault(collection, threading.Lock()):
            before = self._indexed.get(collection)
            if before is None:
                before = self._current(collection, None, self._catalog.stamp(collection))
                before.index.build()
            elif not before.is_outdated:
                return
            built = self._built(collection, before)
            if built is not before:
                self._replace(collection, built)

    def _built(self, collection: str, before: _Indexed) -> _Indexed:
        """An index with new words where they are outdated, and with vectors where there is an
        embedder."""
        built = before
        if before.behind or before.index.has_old_words:
            built = self._first(collection, before.modules)
            built.index.build()
            built.index.take_vectors(before.index)
        if self.embedder is None or not built.modules:
            return built
        return self._with_vectors(collection, built, built.index.last_dimension, aside=True)

    def _replace(self, collection: str, built: _Indexed) -> None:
        """Puts a built index in the place of the one that serves, with what has changed
        meanwhile."""
        with self._changing.setdefault(collection, threading.Lock()):
            stamp = self._indexed[collection].stamp
            if not built.stamp.covers(stamp):
                built = self._updated(collection, stamp, built)
            self._indexed[collection] = built
        if built.index.lacks_vectors:
            self._rebuilder.request(collection)

    def _with_vectors(
        self, collection: str, indexed: _Indexed, dimension: int | None, *, aside: bool = False
    ) -> _Indexed:
        """With vectors: those of the index before, and stored ones. Missing ones are computed, as
        are those of another length, which an embedder leaves that changed under its name: where
        they are few, or else some of them, if aside. dimension: None for that of stored ones."""
        modules = indexed.modules
        by_id = {} if dimension is None else indexed.index.known_vectors(dimension)
        wanted = [number for number in modules if number not in by_id]
        if self._vectors is not None and wanted:
            stored = self._vectors.read_vectors(collection, wanted if by_id else None)
            if stored and dimension is None:
                dimension = len(stored[max(stored)])
            by_id |= {
                n: v for n, v in stored.items()
                if len(v) == dimension and n in modules and n not in by_id
            }  # fmt: skip
        missing = [number for number in modules if number not in by_id]
        if aside:
            missing = missing[:_EMBEDDED_ASIDE]
        if aside or len(missing) <= EMBEDDED_AT_ONCE:
            by_id |= self._embed_modules([modules[number] for number in missing], dimension)
        if dimension is None:
            dimension = len(next(iter(by_id.values())))
        return replace(indexed, index=indexed.index.with_vectors(by_id, dimension))

    def _embed_modules(
        self, modules: Sequence[ModuleRow], dimension: int | None
    ) -> dict[int, np.ndarray]:
        """Vectors [D] of modules by their ids, which are stored. Raises `ConfigurationError`."""
        found: dict[int, np.ndarray] = {}
        for start in range(0, len(modules), EMBEDDED_AT_ONCE):
            if self._rebuilder.ended:
                raise EngineClosed("the process ends")
            batch = modules[start : start + EMBEDDED_AT_ONCE]
            made = self.embed_texts([module.text for module in batch])
            assert made is not None
            if dimension is not None and made.shape[1] != dimension:
                raise ConfigurationError(
                    f"the question's vector has {dimension} numbers, those of texts have "
                    f"{made.shape[1]}; both must come from one embedder"
                )
            ids = [module.id for module in batch]
            if self._vectors is not None:
                self._vectors.add_vectors(ids, made)
            found.update(zip(ids, made, strict=True))
        return found


class _Rebuilder:
    """Calls `rebuild`, which raises nothing and says whether it has succeeded, for collections, one
    after another, in a thread that lives while there are some. A collection that is requested
    meanwhile gets its turn again; one that could not be rebuilt is not until a pause is over, which
    each failure doubles.
    At exit it is awaited: PyTorch aborts a process whose threads are killed within it. Thread-safe.

    ended: whether the process ends."""

    def __init__(self, rebuild: Callable[[str], bool]) -> None:
        self._rebuild = rebuild
        self._pauses: dict[str, tuple[float, float]] = {}  # until when, and how long, in seconds
        self._requested: dict[str, None] = {}  # in the order of requests
        self._thread: threading.Thread | None = None
        self.ended = False
        self._guard = threading.Lock()

    def request(self, collection: str) -> None:
        """Has a collection rebuilt soon, at most once for all requests until that begins."""
        with self._guard:
            until, _ = self._pauses.get(collection, (0.0, 0.0))
            if self.ended or time.monotonic() < until:
                return
            self._requested[collection] = None
            if self._thread is None:
                run = threading.Thread(target=self._run, name="ragcache-index", daemon=True)
                self._thread = run
                atexit.register(self._end)
                run.start()

    def _run(self) -> None:
        while (collection := self._next()) is not None:
            done = self._rebuild(collection)
            with self._guard:
                self._note(collection, done=done)

    def _note(self, collection: str, *, done: bool) -> None:
        _, before = self._pauses.pop(collection, (0.0, 0.0))
        if not done:
            pause = min(2 * before or _FIRST_PAUSE, _LONGEST_PAUSE)
            self._pauses[collection] = time.monotonic() + pause, pause
            self._requested.pop(collection, None)

    def _next(self) -> str | None:
        with self._guard:
            collection = next(iter(self._requested), None)
            if collection is None:
                self._thread = None
                atexit.unregister(self._end)
            else:
                del self._requested[collection]
            return collection

    def _end(self) -> None:
        with self._guard:
            self.ended, thread = True, self._thread
            self._requested.clear()
        if thread is not None:
            thread.join(_EXIT_SECONDS)


def _ids_and_texts(modules: Mapping[int, ModuleRow]) -> tuple[np.ndarray, list[str]]:
    ids = np.fromiter(modules, dtype=np.int64, count=len(modules))
    return ids, [row.text for row in modules.values()]


def _vector(numbers: Sequence[float]) -> np.ndarray:
    return np.asarray(numbers, dtype=np.float32)


def _serves(indexed: _Indexed, stamp: Stamp, dimension: int | None) -> bool:
    if not indexed.stamp.covers(stamp):
        return False
    return dimension in (None, indexed.index.dimension) or not indexed.modules


def _rank(
    query: str, vector: np.ndarray | None, indexed: _Indexed, params: SearchParams
) -> tuple[Ranking, dict[int, float], dict[int, float]]:
    """The candidates, and what they score by words and by vectors. Filters apply before the cut to
    `depth`, so they cost no hits."""
    index, depth = indexed.index, params.depth
    allowed = _allowed(indexed, params)
    dense = [] if vector is None else index.search_dense(vector, depth, allowed)
    sparse = [] if params.search == "dense" else index.search_sparse(query, depth, allowed)
    scores = dict(sparse), dict(dense)
    if params.search == "hybrid":
        return fuse([[number for number, _ in ranking] for ranking in (sparse, dense)]), *scores
    return sparse or dense, *scores


def _within(ranking: Ranking, share: float, *scored: dict[int, float]) -> Ranking:
    """The hits of which one score is at least a share of the best one of its kind, and the first
    hit. Fused scores count ranks and say nothing of that."""
    if not share or not ranking:
        return ranking
    kept = {ranking[0][0]}
    for scores in scored:
        best = max(scores.values(), default=0.0)
        kept |= {number for number, score in scores.items() if best > 0 and score >= share * best}
    return [(number, score) for number, score in ranking if number in kept]


def _allowed(indexed: _Indexed, params: SearchParams) -> np.ndarray | None:
    """[N] bool, in the order of the index; None where all may be found."""
    wanted, left_out, rows = params.wanted, params.left_out, indexed.modules.values()
    if wanted is None and not left_out:
        return None
    passes = (
        row.document not in left_out and (wanted is None or wanted(row.metadata)) for row in rows
    )
    return np.fromiter(passes, dtype=bool, count=len(rows))


def _diverse(ranking: Ranking, indexed: _Indexed, params: SearchParams) -> list[int]:
    """The places that MMR selects, in order. Relevance is the cosine, or else the score as a
    share of the best one; similarity is the cosine of vectors or, without vectors, the overlap of
    words."""
    if not ranking or params.mmr is None:
        return []
    relevance = np.array([score for _, score in ranking])
    if params.search != "dense":
        relevance = relevance / relevance.max()
    vectors = indexed.index.vectors([number for number, _ in ranking])
    if vectors is not None:
        similarity = vectors @ vectors.T  # cosines, since these are unit vectors
    else:
        similarity = overlaps([terms(indexed.modules[number].text) for number, _ in ranking])
    return select_by_mmr(relevance, similarity, params.k, params.mmr)


class Retrievers:
    """The retrievers of a namespace, one for each embedder. Thread-safe; embedders of one name
    share vectors and index."""

    def __init__(
        self, catalog: Catalog, database: Database, embedder: Embeddings | None,
        reranker: Reranker | None = None,
    ) -> None:  # fmt: skip
        self._catalog, self._database, self._reranker = catalog, database, reranker
        self._known: dict[str, Retriever] = {}
        self._finding = threading.Lock()
        self._first = (
            Retriever(catalog, reranker=reranker) if embedder is None
            else self.retriever_for(embedder)
        )  # fmt: skip

    def retriever_for(self, embedder: Embeddings | None = None) -> Retriever:
        """The retriever of an embedder; without one, that of the namespace's own embedder, or a
        sparse one."""
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
    """The name of an embedder's vectors in the database: its class and, if known, its model."""
    model = getattr(embedder, "model_name", None) or getattr(embedder, "model", None)
    kind = f"{type(embedder).__module__}.{type(embedder).__qualname__}"
    return f"{kind}:{model}" if isinstance(model, str) else kind
