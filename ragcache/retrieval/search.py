"""The index over one collection: BM25 for sparse search, FAISS for dense search, and rank fusion.

It lives in memory and is built from the catalog, which stays the truth.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence

import bm25s
import faiss
import numpy as np
import Stemmer

Ranking = list[tuple[int, float]]
"""Ids of modules with their scores, best first."""


class CollectionIndex:
    """BM25 over the words of modules and, given vectors, FAISS over their embeddings. Thread-safe.

    ids: [N] int64, the modules; vectors: [N, D] float32 or None. Single Chinese, Japanese and
    Korean characters have a separate BM25, so that text lengths in the first one count words.
    """

    def __init__(
        self, ids: np.ndarray, texts: Sequence[str], vectors: np.ndarray | None = None
    ) -> None:
        self.ids = ids
        self._words = _Words(texts)
        self._dense = None if vectors is None else _flat_index(ids, vectors)

    def with_vectors(self, vectors: np.ndarray) -> CollectionIndex:
        """The same BM25 with other vectors, [N, D] float32."""
        other = CollectionIndex.__new__(CollectionIndex)
        other.ids, other._words = self.ids, self._words
        other._dense = _flat_index(self.ids, vectors)
        return other

    @property
    def dimension(self) -> int | None:
        """D of the vectors; None without vectors."""
        return None if self._dense is None else int(self._dense.d)

    def search_sparse(self, query: str, limit: int, allowed: np.ndarray | None = None) -> Ranking:
        """Modules that share a word with the query, with their BM25 scores.

        allowed: [N] bool, the modules that may be found; None for all.
        """
        scores = self._words.scores(query)
        if allowed is not None:
            scores[~allowed] = 0.0
        best = np.argsort(-scores, kind="stable")[:limit]
        return [(int(self.ids[i]), float(scores[i])) for i in best if scores[i] > 0]

    def search_dense(
        self, vector: np.ndarray, limit: int, allowed: np.ndarray | None = None
    ) -> Ranking:
        """Modules by cosine similarity to a query vector [D]; empty without vectors.

        allowed: as in `search_sparse`.
        """
        if self._dense is None:
            return []
        parameters = None
        if allowed is not None:
            selector = faiss.IDSelectorBatch(np.ascontiguousarray(self.ids[allowed]))
            parameters = faiss.SearchParameters()
            parameters.sel = selector  # holds no reference: the local name keeps it alive
        scores, found = self._dense.search(
            _unit(vector[None]), min(limit, len(self.ids)), params=parameters
        )
        cosines = np.clip(scores[0], -1.0, 1.0)  # rounding may exceed the range
        pairs = zip(found[0].tolist(), cosines.tolist(), strict=True)
        return [(number, score) for number, score in pairs if number >= 0]

    def vectors(self, ids: Sequence[int]) -> np.ndarray | None:
        """Unit vectors [N, D] of modules; None without vectors."""
        if self._dense is None:
            return None
        rows: np.ndarray = self._dense.reconstruct_batch(np.asarray(ids, dtype=np.int64))
        return rows


class _Words:
    """BM25 over texts, built at the first query; concurrent queries wait for it."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._made: tuple[bm25s.BM25 | None, bm25s.BM25 | None] | None = None
        self._making = threading.Lock()

    def scores(self, query: str) -> np.ndarray:
        """Scores [N] float32 of all texts; 0 where no word is shared with the query."""
        with self._making:
            if self._made is None:
                self._made = _bm25(self._texts, terms), _bm25(self._texts, characters)
        scores = np.zeros(len(self._texts), dtype=np.float32)
        for index, words in zip(self._made, (terms(query), lone_characters(query)), strict=True):
            if index is not None and words:
                scores += index.get_scores(words)
        return scores


def _bm25(texts: Sequence[str], spell: Callable[[str], list[str]]) -> bm25s.BM25 | None:
    """An index over the terms of texts; None if there are none."""
    corpus = [spell(text) for text in texts]
    if not any(corpus):
        return None
    index = bm25s.BM25()
    spelled = [words or ["\0"] for words in corpus]  # bm25s requires a term in every text
    index.index(spelled, show_progress=False)
    return index


def _flat_index(ids: np.ndarray, vectors: np.ndarray) -> faiss.IndexIDMap2:
    index = faiss.IndexIDMap2(faiss.IndexFlatIP(vectors.shape[1]))
    index.add_with_ids(_unit(vectors), ids)
    return index


def _unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: np.ndarray = (vectors / np.maximum(norms, 1e-12)).astype(np.float32)
    return unit


_WORD = re.compile(r"[^\W_]+", re.UNICODE)
_IDEOGRAPHS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
STOP_WORDS = frozenset(
    "a an and are as at be been by can could did do does for from had has have he her him his how "
    "i if in into is it its long many may me much must my no not of on one or our shall she should "
    "so than that the their them there they this those to up us was we were what when where which "
    "who whom whose why will with would you your".split()
)


class _Local(threading.local):
    """A stemmer for each thread: PyStemmer's are not thread-safe."""

    def __init__(self) -> None:
        self.stemmer = Stemmer.Stemmer("english")


_local = _Local()


def terms(text: str) -> list[str]:
    """Stemmed words without stop words; Chinese, Japanese and Korean as pairs of characters."""
    found: list[str] = []
    for word in _WORD.findall(text.lower()):
        if _IDEOGRAPHS.search(word):
            found.extend(_pairs(word))
        elif word not in STOP_WORDS:
            found.append(word)
    stemmed: list[str] = _local.stemmer.stemWords(found)
    return stemmed


def characters(text: str) -> list[str]:
    """The Chinese, Japanese and Korean characters of a text, one by one."""
    return [character for run in _IDEOGRAPHS.findall(text) for character in run]


def lone_characters(text: str) -> list[str]:
    """Such characters that form a word of their own, which no pair of characters can match."""
    return [w for w in _WORD.findall(text) if len(w) == 1 and _IDEOGRAPHS.match(w)]


def _pairs(word: str) -> list[str]:
    return [word[i : i + 2] for i in range(max(1, len(word) - 1))]


RANK_CONSTANT = 60
"""k of reciprocal-rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009)."""


def fuse(rankings: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """Fuses rankings: (id, sum of 1 / (RANK_CONSTANT + rank)), best first; ties by id."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, start=1):
            scores[number] = scores.get(number, 0.0) + 1.0 / (RANK_CONSTANT + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
