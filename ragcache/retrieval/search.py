"""Search by vectors, fusion of rankings, and maximal marginal relevance."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ragcache.retrieval.bm25 import Ranking


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
