"""Search by vectors, rank fusion and MMR."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from ragcache.retrieval import VectorIndex, fuse
from ragcache.retrieval.retriever import overlaps, select_by_mmr

IDS = np.array([40, 7, 19, 3], dtype=np.int64)
VECTORS = np.array([[3, 0, 0], [0, 5, 0], [0, 0, 0.1], [1, 1, 0]], dtype=np.float32)


def vector(*numbers: float) -> np.ndarray:
    return np.array(numbers, dtype=np.float32)


def ids(ranking: list[tuple[int, float]]) -> list[int]:
    scores = [score for _, score in ranking]
    assert scores == sorted(scores, reverse=True)
    return [number for number, _ in ranking]


@pytest.fixture
def index() -> VectorIndex:
    return VectorIndex(IDS, VECTORS)


def test_a_search_ignores_lengths_of_vectors(index: VectorIndex) -> None:
    assert ids(index.search(vector(1, 0.2, 0), 10))[:3] == [40, 3, 7]
    assert ids(index.search(vector(0, 0, 9), 1)) == [19]
    assert sorted(ids(index.search(vector(1, 1, 1), 50))) == sorted(IDS.tolist()), "all there are"
    assert len(index.search(vector(0, 0, 0), 2)) == 2, "zeros find something"
    assert VectorIndex.of({}, 3).search(vector(1, 0, 0), 5) == []


def test_disallowed_modules_do_not_count_to_the_limit(index: VectorIndex) -> None:
    assert ids(index.search(vector(1, 0.2, 0), 2, {7, 19, 3})) == [3, 7]
    assert index.search(vector(1, 0.2, 0), 2, set()) == []


def test_scores_are_cosines(index: VectorIndex) -> None:
    scores = dict(index.search(vector(2, 0, 0), 4))
    assert scores == pytest.approx({40: 1.0, 3: 0.5**0.5, 7: 0.0, 19: 0.0})


def test_an_update_leaves_the_first_index_unchanged(index: VectorIndex) -> None:
    other = index.update({7: "", 40: "", 5: ""}, {5: vector(0, 0, 2)})
    assert (other.ids, index.ids, other.dimension) == ({7, 40, 5}, set(IDS.tolist()), 3)
    assert other.vectors([7, 40, 5]).tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert ids(index.search(vector(0, 0, 1), 1)) == [19]
    assert other.update({7: "", 40: "", 5: "", 8: ""}, {}) is other


rankings = st.lists(st.lists(st.integers(0, 30), unique=True, max_size=12), max_size=4)


def test_scores_are_sums_of_reciprocal_ranks() -> None:
    fused = fuse([[5, 7], [7, 9]])
    assert [number for number, _ in fused] == [7, 5, 9]
    assert [score for _, score in fused] == pytest.approx([1 / 62 + 1 / 61, 1 / 61, 1 / 62])
    assert [n for n, _ in fuse([[4], [2]])] == [n for n, _ in fuse([[2], [4]])] == [2, 4], "ties"


@given(rankings)
def test_ranked_modules_are_fused_once_and_scores_descend(ranked: list[list[int]]) -> None:
    fused = fuse(ranked)
    numbers = [number for number, _ in fused]
    assert sorted(numbers) == sorted({n for ranking in ranked for n in ranking})
    scores = [score for _, score in fused]
    assert scores == sorted(scores, reverse=True)


@given(st.lists(st.integers(), unique=True, max_size=20))
def test_one_ranking_alone_keeps_its_order(ranking: list[int]) -> None:
    assert [number for number, _ in fuse([ranking])] == ranking


@given(st.integers(0, 1000), st.integers(1, 8), st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]))
def test_mmr_equals_langchain(seed: int, k: int, mmr: float) -> None:
    vectors = np.random.default_rng(seed).standard_normal((7, 4))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    relevance = vectors[1:] @ vectors[0]
    picked = select_by_mmr(relevance, vectors[1:] @ vectors[1:].T, k, mmr)
    expected = maximal_marginal_relevance(vectors[0], list(vectors[1:]), 1 - mmr, k)
    assert picked == expected


def test_mmr_skips_a_copy() -> None:
    relevance = np.array([0.9, 0.9, 0.3])
    similarity = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    assert select_by_mmr(relevance, similarity, 2, 0.5) == [0, 2]
    assert select_by_mmr(relevance, similarity, 2, 0.0) == [0, 1]
    assert select_by_mmr(np.zeros(0), np.zeros((0, 0)), 3, 0.5) == []


def test_overlaps_are_jaccard_indices() -> None:
    similarity = overlaps([["boat", "quay"], ["quay", "key", "key"], []])
    assert similarity == pytest.approx(np.array([[1, 1 / 3, 0], [1 / 3, 1, 0], [0, 0, 0]]))
