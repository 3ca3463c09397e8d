"""Search indexes of collections, in memory, which follow the catalog.

Before a search, the index of its collection applies all changes in the catalog, from any process.
Texts without a vector are embedded by a background thread.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ragcache.db import Catalog, CollectionVersion, ModuleRow, Vectors
from ragcache.db.documents import Contents
from ragcache.errors import (
    ConfigurationError,
    EngineClosed,
    LedgerUnavailable,
    UnknownCollection,
)
from ragcache.retrieval.bm25 import BM25Index, Ranking

if TYPE_CHECKING:  # slow to import, and sparse search does without
    from langchain_core.embeddings import Embeddings

_log = logging.getLogger(__name__)

EMBEDDED_AT_ONCE = 8
"""Most modules without a vector that a question embeds. If there are more, they are embedded in the
background, and found by their words until then."""

_EMBED_BATCH = 64
_EMBEDDED_IN_TURN = 32  # texts of a collection, before other collections have their turn
_EXIT_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds after a failure, doubled each time


class VectorIndex:
    """FAISS index for cosine similarity of modules. Immutable and thread-safe.

    Args:
        ids: Ids of the modules, [N] int64.
        vectors: Their vectors, [N, D] float32, which need not be unit vectors.
    """

    def __init__(self, ids: np.ndarray, vectors: np.ndarray) -> None:
        import faiss  # slow to import, and sparse search does without

        self.ids = frozenset(ids.tolist())
        self.dimension = int(vectors.shape[1])
        self._index = faiss.IndexIDMap2(faiss.IndexFlatIP(self.dimension))
        self._index.add_with_ids(_unit(vectors), ids)

    @classmethod
    def of(cls, vectors: Mapping[int, np.ndarray], dimension: int) -> VectorIndex:
        """Index vectors [dimension] by the ids of their modules."""
        return cls(*_matrix(vectors, dimension))

    def update(self, modules: Collection[int], came: Mapping[int, np.ndarray]) -> VectorIndex:
        """Return an index without vectors of deleted modules, and with vectors that came."""
        there = self.ids & set(modules)
        if not came and len(there) == len(self.ids):
            return self
        kept = np.array(sorted(there), dtype=np.int64)
        ids, vectors = _matrix(came, self.dimension)
        return VectorIndex(
            np.concatenate([kept, ids]), np.concatenate([self.vectors(kept), vectors])
        )

    def search(
        self, vector: np.ndarray, limit: int, allowed: Collection[int] | None = None
    ) -> Ranking:
        """Find modules by the cosine similarity to a query, best first.

        Args:
            vector: The query [D], which need not be a unit vector.
            limit: The most modules to return.
            allowed: Ids of the modules that may be found. Defaults to all.
        """
        import faiss

        if not self.ids:
            return []
        parameters = None
        if allowed is not None:
            selector = faiss.IDSelectorBatch(np.array(list(allowed), dtype=np.int64))
            parameters = faiss.SearchParameters()
            parameters.sel = selector  # holds no reference: the local name keeps it alive
        limit = min(limit, len(self.ids))
        scores, found = self._index.search(_unit(vector[None]), limit, params=parameters)
        cosines = np.clip(scores[0], -1.0, 1.0)  # rounding may exceed the range
        pairs = zip(found[0].tolist(), cosines.tolist(), strict=True)
        return [(number, score) for number, score in pairs if number >= 0]

    def vectors(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the unit vectors [N, D] of modules that have one."""
        rows: np.ndarray = self._index.reconstruct_batch(np.asarray(ids, dtype=np.int64))
        return rows


def _matrix(vectors: Mapping[int, np.ndarray], dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids [N] and vectors [N, D] as arrays."""
    ids = np.fromiter(vectors, dtype=np.int64, count=len(vectors))
    rows = np.array(list(vectors.values()), dtype=np.float32)
    return ids, rows.reshape(len(vectors), dimension)


def _unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: np.ndarray = (vectors / np.maximum(norms, 1e-12)).astype(np.float32)
    return unit


@dataclass(frozen=True, slots=True, eq=False)
class CollectionIndex:
    """The index of a collection at one version."""

    version: CollectionVersion
    modules: Mapping[int, ModuleRow]
    """Modules by id."""
    words: BM25Index
    vectors: VectorIndex | None = None
    """Vectors of the modules that have one. Built by the first search by vectors."""

    @property
    def missing(self) -> int:
        """Number of modules without a vector, which a search by vectors cannot find."""
        return len(self.modules) - (0 if self.vectors is None else len(self.vectors.ids))

    def without_vectors(self) -> list[ModuleRow]:
        """List the modules without a vector."""
        known = frozenset[int]() if self.vectors is None else self.vectors.ids
        return [row for number, row in self.modules.items() if number not in known]


class CollectionIndexes:
    """The indexes of all collections for one embedder. Thread-safe.

    The next question (`observe`) applies changes of any process, in milliseconds. If several
    threads need the first index of a collection, one builds it and the others wait. More than
    `EMBEDDED_AT_ONCE` modules without a vector are embedded in the background. After a failure, a
    question starts that again after a pause of a second at first and a minute at most.

    The index of a collection that any process has deleted goes with the next call that names it, or
    with the first index of another collection.
    """

    def __init__(
        self, catalog: Catalog, embedder: Embeddings | None, vectors: Vectors | None
    ) -> None:
        """Index the collections of a catalog.

        Args:
            catalog: The catalog.
            embedder: Embeds modules. Without one, only words are indexed.
            vectors: Stores the vectors of the embedder.
        """
        self.embedder = embedder
        self._catalog, self._stored = catalog, vectors
        self._indexes: dict[str, CollectionIndex] = {}
        self._changing: dict[str, threading.Lock] = {}  # held to change an entry of `_indexes`
        self._embedding: dict[str, threading.Lock] = {}  # held to embed; taken first
        self._background = _Background(self._build)

    def observe(self, collection: str) -> CollectionVersion:
        """Return the version of a collection, and apply the changes since its index was made.

        Version and changes come from the same snapshot.

        Raises:
            UnknownCollection: There is no such collection.
        """
        before = self._indexes.get(collection)
        if before is None:
            return self._catalog.version(collection)
        try:
            version, changes = self._catalog.version_and_changes(
                collection, before.version, before.modules
            )
        except UnknownCollection:
            self._forget(collection)
            raise
        if changes is not None and changes.version.collection == before.version.collection:
            with self._lock(collection):
                if self._indexes.get(collection) is before:  # nobody else has applied them
                    self._indexes[collection] = self._updated(collection, before, changes)
        return version

    def index_at(
        self, collection: str, version: CollectionVersion, dimension: int | None = None
    ) -> CollectionIndex:
        """Return the index of a collection at the version or later.

        Args:
            collection: Its name.
            version: The result of `observe`.
            dimension: D of the query's vector. The index then has all stored vectors of that
                length, and embeds a few missing ones. By default vectors stay as they are.
        """
        index = self._indexes.get(collection)
        if index is None or not index.version.covers(version):
            index = self._read(collection, version)
        if dimension is None:
            return index
        known = index.vectors is not None and index.vectors.dimension == dimension
        if not known or 0 < index.missing <= EMBEDDED_AT_ONCE:
            index = self._with_vectors(collection, index, dimension)
        if index.missing:
            self._background.request(collection)
        return index

    def update(self, collection: str) -> None:
        """Apply a change to the index of a collection if it is built, so that no question has to.

        The index of a deleted collection goes.

        If the ledger does not answer, the next question applies the change.
        """
        if collection in self._indexes:
            with contextlib.suppress(LedgerUnavailable, UnknownCollection):  # deleted meanwhile
                self.observe(collection)

    def prepare(self, collection: str) -> None:
        """Start to build the first index of a collection in the background, with its vectors."""
        if collection not in self._indexes:
            self._background.request(collection)

    def embed_some(self, collection: str) -> None:
        """Embed some modules of a collection that have no vector, and index their vectors.

        One thread at a time embeds; the others wait and find it done.
        """
        with self._embedding.setdefault(collection, threading.Lock()):
            index = self.index_at(collection, self.observe(collection))
            if self.embedder is None or not index.modules:
                return
            dimension = self._dimension(collection, index)
            if dimension is not None and index.vectors is None:
                index = self._with_vectors(collection, index, dimension, {})
            missing = index.without_vectors()
            made = self._stored_vectors(collection, dimension, [row.id for row in missing])
            rest = [row for row in missing if row.id not in made][:_EMBEDDED_IN_TURN]
            made |= self._embed_modules(rest, dimension)
            if made:
                dimension = len(next(iter(made.values())))
                index = self._with_vectors(collection, index, dimension, made)
            if index.missing:
                self._background.request(collection)

    def embed_missing(self, collection: str) -> None:
        """Embed all modules of a collection that have no stored vector, and store the vectors.

        Modules have none if they were ingested with another embedder, or with none. Questions
        embed them in the background, which a command of one question ends too early.
        """
        if self.embedder is None or self._stored is None:
            return
        missing = self._stored.ids_without_vector(collection)
        if missing:
            rows = [row for row in self._catalog.modules(collection) if row.id in missing]
            self._embed_modules(rows, None)

    def embed_texts(self, texts: Sequence[str]) -> np.ndarray | None:
        """Embed stripped texts as vectors [N, D] float32, if there is an embedder."""
        if self.embedder is None:
            return None
        rows: list[list[float]] = []
        stripped = [text.strip() for text in texts]
        for start in range(0, len(texts), _EMBED_BATCH):
            rows += self.embedder.embed_documents(stripped[start : start + _EMBED_BATCH])
        return np.asarray(rows, dtype=np.float32)

    def _lock(self, collection: str) -> threading.Lock:
        return self._changing.setdefault(collection, threading.Lock())

    def _read(self, collection: str, version: CollectionVersion) -> CollectionIndex:
        """Read the modules that the index of a collection lacks at a version, and add them."""
        with self._lock(collection):
            before = self._indexes.get(collection)
            if before is not None and before.version.covers(version):
                return before
            if before is not None and before.version.collection != version.collection:
                before = None
            known = {} if before is None else before.modules
            contents = self._catalog.reread_modules(collection, known)
            index = self._updated(collection, before, contents)
            if before is None:
                for deleted in self._indexes.keys() - self._catalog.versions().keys():
                    self._forget(deleted)
            self._indexes[collection] = index
            return index

    def _forget(self, collection: str) -> None:
        """Remove what is kept of a collection. If it exists again, it is read again."""
        for kept in (self._indexes, self._changing, self._embedding):
            kept.pop(collection, None)

    def _updated(
        self, collection: str, before: CollectionIndex | None, contents: Contents
    ) -> CollectionIndex:
        """Return an index of new contents, made from the previous one if there is one."""
        modules = {row.id: row for row in contents.modules}
        texts = {number: row.text for number, row in modules.items()}
        if before is None:
            return CollectionIndex(contents.version, modules, BM25Index(texts))
        vectors = before.vectors
        if vectors is not None:
            came = [number for number in modules if number not in vectors.ids]
            stored = self._stored_vectors(collection, vectors.dimension, came)
            vectors = vectors.update(modules, stored)
        return CollectionIndex(contents.version, modules, before.words.update(texts), vectors)

    def _with_vectors(
        self,
        collection: str,
        index: CollectionIndex,
        dimension: int,
        made: Mapping[int, np.ndarray] | None = None,
    ) -> CollectionIndex:
        """Add vectors of one length to the index of a collection, or a later one of it.

        They are the vectors of the index, or else stored ones, and `made`. By default a few missing
        vectors are made now. An embedder that changed under its name leaves vectors of another
        length, which are not used.
        """
        with self._lock(collection):
            index = self._indexes.get(collection, index)
            vectors = index.vectors
            if vectors is None or vectors.dimension != dimension:
                stored = self._stored_vectors(collection, dimension)
                there = {n: each for n, each in stored.items() if n in index.modules}
                vectors = VectorIndex.of(there, dimension)
            index = replace(index, vectors=vectors)
            if made is None and index.missing <= EMBEDDED_AT_ONCE:
                made = self._embed_modules(index.without_vectors(), dimension)
            came = {
                number: each
                for number, each in (made or {}).items()
                if number in index.modules and number not in vectors.ids
            }
            index = replace(index, vectors=vectors.update(index.modules, came))
            self._indexes[collection] = index
            return index

    def _dimension(self, collection: str, index: CollectionIndex) -> int | None:
        """Return D of the vectors in the index or the ledger, if any module has a vector."""
        if index.vectors is not None:
            return index.vectors.dimension
        stored = {} if self._stored is None else self._stored.read_vectors(collection)
        return len(stored[max(stored)]) if stored else None

    def _stored_vectors(
        self, collection: str, dimension: int | None, modules: Sequence[int] | None = None
    ) -> dict[int, np.ndarray]:
        """Read the stored vectors [dimension] of modules by id. Defaults to all of a collection."""
        if self._stored is None or dimension is None or modules == []:
            return {}
        stored = self._stored.read_vectors(collection, modules)
        return {number: each for number, each in stored.items() if len(each) == dimension}

    def _embed_modules(
        self, modules: Sequence[ModuleRow], dimension: int | None
    ) -> dict[int, np.ndarray]:
        """Embed modules, and store their vectors [D].

        Raises:
            ConfigurationError: D is not the expected dimension.
        """
        found: dict[int, np.ndarray] = {}
        for start in range(0, len(modules), EMBEDDED_AT_ONCE):
            if self._background.ended:
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
            if self._stored is not None:
                self._stored.add_vectors(ids, made)
            found.update(zip(ids, made, strict=True))
        return found

    def _build(self, collection: str) -> bool:
        """Run `embed_some` and return whether it succeeded.

        Errors are logged, since searches by words still find the modules.
        """
        try:
            self.embed_some(collection)
        except (EngineClosed, UnknownCollection):
            return True  # closed or deleted meanwhile
        except LedgerUnavailable as error:
            _log.warning("the index of %r is built by a later question: %s", collection, error)
            return False
        except Exception:  # searches go on in what there is
            _log.exception("the index of %r was not completed; what there is serves", collection)
            return False
        return True


class _Background:
    """A thread that calls `build` for one requested collection after another. Thread-safe.

    The thread lives while there are requests. A collection that is requested again during its build
    is built again. If `build` returns False, requests for the collection are ignored during a
    pause, which doubles with each failure. At exit the thread is awaited: PyTorch aborts a process
    whose threads are killed in its code.
    """

    def __init__(self, build: Callable[[str], bool]) -> None:
        self._build = build
        self._pauses: dict[str, tuple[float, float]] = {}  # until when, and how long, in seconds
        self._requested: dict[str, None] = {}  # in the order of requests
        self._thread: threading.Thread | None = None
        self.ended = False
        """Whether the process ends."""
        self._guard = threading.Lock()

    def request(self, collection: str) -> None:
        """Request a build. Requests before the build begins count as one."""
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
            done = self._build(collection)
            with self._guard:
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
