"""Reciprocal-rank fusion of several rankings."""

from __future__ import annotations

from collections.abc import Sequence

RANK_CONSTANT = 60
"""Cormack, Clarke and Buettcher, SIGIR 2009."""


def fuse(rankings: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """(id, score) by descending sum of 1 / (60 + rank); ties by id, so the order is stable."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, number in enumerate(ranking, start=1):
            scores[number] = scores.get(number, 0.0) + 1.0 / (RANK_CONSTANT + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
