"""Maximal marginal relevance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.vectorstores.utils import maximal_marginal_relevance

from ragcache.retrieval.diversity import cosines, most_diverse, overlaps


@given(st.integers(0, 1000), st.integers(1, 8), st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]))
def test_it_picks_what_langchain_picks(seed: int, k: int, diversity: float) -> None:
    vectors = np.random.default_rng(seed).standard_normal((7, 4))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    relevance = vectors[1:] @ vectors[0]
    picked = most_diverse(relevance, cosines(vectors[1:]), k, diversity)
    expected = maximal_marginal_relevance(vectors[0], list(vectors[1:]), 1 - diversity, k)
    assert picked == expected


def test_without_diversity_relevance_alone_decides() -> None:
    relevance = np.array([0.1, 0.9, 0.5])
    assert most_diverse(relevance, np.ones((3, 3)), 2, 0.0) == [1, 2]


def test_a_copy_of_a_hit_gives_way() -> None:
    relevance = np.array([0.9, 0.9, 0.3])
    likeness = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 1]])
    assert most_diverse(relevance, likeness, 2, 0.5) == [0, 2]


def test_no_candidates_pick_none() -> None:
    assert most_diverse(np.zeros(0), np.zeros((0, 0)), 3, 0.5) == []


def test_overlap_is_the_share_of_common_words() -> None:
    likeness = overlaps([["boat", "quay"], ["quay", "key", "key"], []])
    assert likeness == pytest.approx(np.array([[1, 1 / 3, 0], [1 / 3, 1, 0], [0, 0, 0]]))
