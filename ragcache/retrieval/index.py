"""The indexes over one collection, built in memory from the ledger, which stays the truth."""

from __future__ import annotations

from collections.abc import Sequence

import bm25s
import faiss
import numpy as np

from ragcache.retrieval.terms import terms


class CollectionIndex:
    """BM25 over the modules' words and, given vectors, FAISS over their meaning.

    ids: [N] int64, the modules; vectors: [N, D] float32 or None.
    """

    def __init__(
        self, ids: np.ndarray, texts: Sequence[str], vectors: np.ndarray | None = None
    ) -> None:
        self.ids = ids
        self._bm25 = _bm25(texts) if texts else None
        self._dense = None if vectors is None else _flat_index(ids, vectors)

    def by_words(self, query: str, limit: int) -> list[int]:
        """Ids of modules that share a word with the query, best first."""
        words = terms(query)
        if self._bm25 is None or not words:
            return []
        scores = self._bm25.get_scores(words)
        best = np.argsort(-scores, kind="stable")[:limit]
        return [int(self.ids[i]) for i in best if scores[i] > 0]

    def by_meaning(self, vector: np.ndarray, limit: int) -> list[int]:
        """Ids by cosine similarity to a query vector [D]; none where there are no vectors."""
        if self._dense is None:
            return []
        _, found = self._dense.search(_unit(vector[None]), min(limit, len(self.ids)))
        return [int(number) for number in found[0] if number >= 0]


def _bm25(texts: Sequence[str]) -> bm25s.BM25:
    index = bm25s.BM25()
    corpus = [terms(text) or ["\0"] for text in texts]  # bm25s needs a word in every text
    index.index(corpus, show_progress=False)
    return index


def _flat_index(ids: np.ndarray, vectors: np.ndarray) -> faiss.IndexIDMap2:
    index = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
    index.add_with_ids(_unit(vectors), ids)
    return index


def _unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: np.ndarray = (vectors / np.maximum(norms, 1e-12)).astype(np.float32)
    return unit
