"""Search in memory: an index of a collection's modules by words and by vectors, the fusion of
rankings, and maximal marginal relevance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from ragcache.retrieval.words import UpdatedWords, WordIndex

if TYPE_CHECKING:  # slow to import, and sparse search does without
    import faiss

Ranking = list[tuple[int, float]]
"""Ids of modules with their scores, best first."""


class CollectionIndex:
    """BM25 over the words of modules and, given vectors, FAISS over their embeddings. Thread-safe.

    ids: [N] int64, the modules; vectors: [N, D] float32 or None.
    """

    def __init__(
        self, ids: np.ndarray, texts: Sequence[str], vectors: np.ndarray | None = None
    ) -> None:
        self.ids = ids
        self._words: WordIndex | UpdatedWords = WordIndex(ids, texts)
        self._dense = None if vectors is None else _flat_index(ids, vectors)  # of some, or all
        self._before: faiss.IndexIDMap2 | None = None  # vectors of the last index that had some

    def with_vectors(self, vectors: Mapping[int, np.ndarray], dimension: int) -> CollectionIndex:
        """The same BM25 with other vectors, [dimension] float32, of modules by their ids; those of
        some may be missing."""
        other = copy(self)
        ids = [number for number in self.ids.tolist() if number in vectors]
        rows = np.array([vectors[number] for number in ids], dtype=np.float32)
        numbers = np.array(ids, dtype=np.int64)
        other._dense = _flat_index(numbers, rows.reshape(len(ids), dimension))
        other._before = None
        return other

    @property
    def lacks_vectors(self) -> bool:
        """Whether it searches by vectors, but some modules' are still missing."""
        return self._dense is not None and self._dense.ntotal < len(self.ids)

    def take_vectors(self, other: CollectionIndex) -> None:
        """Makes the vectors of another index known here."""
        self._before = other._last_dense

    @property
    def _last_dense(self) -> faiss.IndexIDMap2 | None:
        return self._before if self._dense is None else self._dense

    @property
    def last_dimension(self) -> int | None:
        """D of the vectors of this index, or of the last one before it that had some."""
        return None if self._last_dense is None else int(self._last_dense.d)

    def known_vectors(self, dimension: int) -> dict[int, np.ndarray]:
        """Unit vectors [D] of those modules that this index has some of, or the last one before it
        that had some, by their ids."""
        dense = self._last_dense
        if dense is None or dense.d != dimension or not dense.ntotal:
            return {}
        import faiss

        held = self.ids[np.isin(self.ids, faiss.vector_to_array(dense.id_map))]
        return dict(zip(held.tolist(), dense.reconstruct_batch(held), strict=True))

    def with_words(self, words: WordIndex | UpdatedWords) -> CollectionIndex:
        """The same vectors with other words of the same modules."""
        other = copy(self)
        other._words = words
        return other

    def update(self, ids: np.ndarray, texts: Sequence[str]) -> CollectionIndex:
        """An index over other modules, most of them the same; without vectors, unless all are."""
        if np.array_equal(ids, self.ids):
            return self
        other = copy(self)
        other.take_vectors(self)
        other.ids, other._words, other._dense = ids, self._words.update(ids, texts), None
        return other

    @property
    def has_old_words(self) -> bool:
        """Whether the words should be built anew."""
        return self._words.is_outdated

    def build(self) -> None:
        """Builds the words now; else the first sparse search does."""
        self._words.build()

    @property
    def dimension(self) -> int | None:
        """D of the vectors; None without vectors."""
        return None if self._dense is None else int(self._dense.d)

    def search_sparse(self, query: str, limit: int, allowed: np.ndarray | None = None) -> Ranking:
        """Modules that share a word with the query, with their BM25 scores. allowed: [N] bool, the
        modules that may be found; None for all."""
        scores = self._words.scores(query)
        if allowed is not None:
            scores[~allowed] = 0.0
        best = np.argsort(-scores, kind="stable")[:limit]
        return [(int(self.ids[i]), float(scores[i])) for i in best if scores[i] > 0]

    def word_weights(self, query: str) -> dict[str, float]:
        """Of each word of a query what it adds to the BM25 score of a module at most."""
        return self._words.weights(query)

    def search_dense(
        self, vector: np.ndarray, limit: int, allowed: np.ndarray | None = None
    ) -> Ranking:
        """Modules by cosine similarity to a query vector [D]; empty without vectors."""
        if self._dense is None or not self._dense.ntotal:
            return []
        parameters = None
        if allowed is not None:
            import faiss

            selector = faiss.IDSelectorBatch(np.ascontiguousarray(self.ids[allowed]))
            parameters = faiss.SearchParameters()
            parameters.sel = selector  # holds no reference: the local name keeps it alive
        limit = min(limit, self._dense.ntotal)
        scores, found = self._dense.search(_unit(vector[None]), limit, params=parameters)
        cosines = np.clip(scores[0], -1.0, 1.0)  # rounding may exceed the range
        pairs = zip(found[0].tolist(), cosines.tolist(), strict=True)
        return [(number, score) for number, score in pairs if number >= 0]

    def vectors(self, ids: Sequence[int]) -> np.ndarray | None:
        """Unit vectors [N, D] of modules; None where some vectors of the index are missing."""
        if self._dense is None or self.lacks_vectors:
            return None
        rows: np.ndarray = self._dense.reconstruct_batch(np.asarray(ids, dtype=np.int64))
        return rows


def _flat_index(ids: np.ndarray, vectors: np.ndarray) -> faiss.IndexIDMap2:
    import faiss

    index = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
    index.add_with_ids(_unit(vectors), ids)
    return index


def _unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: np.ndarray = (vectors / np.maximum(norms, 1e-12)).astype(np.float32)
    return unit


RANK_CONSTANT = 60
"""k of reciprocal-rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009)."""

MOST_FUSED = 2 / (RANK_CONSTANT + 1)
"""The score of a module that is first in both rankings."""


def fuse(rankings: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """Fuses rankings: (id, sum of 1 / (RANK_CONSTANT + rank)), best first; ties by id."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, start=1):
            scores[number] = scores.get(number, 0.0) + 1.0 / (RANK_CONSTANT + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))


def select_by_mmr(relevance: np.ndarray, similarity: np.ndarray, k: int, mmr: float) -> list[int]:
    """Selects `k` of N candidates by maximal marginal relevance (Carbonell and Goldstein, SIGIR
    1998): the most relevant one, then repeatedly the one with the largest

        (1 - mmr) * relevance - mmr * (largest similarity to a selected one)

    relevance: [N]; similarity: [N, N], both on the scale of a cosine. Ties go to the first.
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
    """Similarity [N, N] of texts: the Jaccard index of their sets of words."""
    words = [set(text) for text in texts]
    rows = [[len(a & b) / max(1, len(a | b)) for b in words] for a in words]
    return np.array(rows).reshape(len(words), len(words))
