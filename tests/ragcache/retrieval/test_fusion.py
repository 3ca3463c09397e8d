"""Reciprocal-rank fusion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.retrieval import fuse

rankings = st.lists(st.lists(st.integers(0, 30), unique=True, max_size=12), max_size=4)


def test_scores_are_sums_of_reciprocal_ranks() -> None:
    fused = dict(fuse([[5, 7], [7, 9]]))
    assert fused[7] == pytest.approx(1 / 62 + 1 / 61)
    assert fused[5] == pytest.approx(1 / 61)
    assert fused[9] == pytest.approx(1 / 62)


def test_what_both_rankings_know_comes_before_what_one_ranks_first() -> None:
    assert fuse([[1, 2, 3], [9, 2, 8]])[0][0] == 2


def test_ties_are_broken_by_number_whatever_the_order_of_the_rankings() -> None:
    assert [n for n, _ in fuse([[4], [2]])] == [n for n, _ in fuse([[2], [4]])] == [2, 4]


@given(rankings)
def test_everything_that_was_ranked_is_fused_once_and_scores_descend(
    ranked: list[list[int]],
) -> None:
    fused = fuse(ranked)
    numbers = [number for number, _ in fused]
    assert sorted(numbers) == sorted({n for ranking in ranked for n in ranking})
    scores = [score for _, score in fused]
    assert scores == sorted(scores, reverse=True)


@given(st.lists(st.integers(), unique=True, max_size=20))
def test_one_ranking_alone_keeps_its_order(ranking: list[int]) -> None:
    assert [number for number, _ in fuse([ranking])] == ranking
