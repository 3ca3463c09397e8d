"""Maximal marginal relevance (Carbonell and Goldstein, SIGIR 1998)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np


def most_diverse(
    relevance: np.ndarray, likeness: np.ndarray, k: int, diversity: float
) -> list[int]:
    """Picks `k` of N candidates: the most relevant, then one after the other that with the largest

        (1 - diversity) * relevance - diversity * (largest likeness to what was picked)

    relevance: [N]; likeness: [N, N], both on the scale of a cosine. Of equals the first.
    """
    if not len(relevance) or k < 1:
        return []
    picked = [int(np.argmax(relevance))]
    nearest = likeness[picked[0]]
    while len(picked) < min(k, len(relevance)):
        marginal = (1 - diversity) * relevance - diversity * nearest
        marginal[picked] = -np.inf
        picked.append(int(np.argmax(marginal)))
        nearest = np.maximum(nearest, likeness[picked[-1]])
    return picked


def cosines(vectors: np.ndarray) -> np.ndarray:
    """Likeness [N, N] of unit vectors [N, D]."""
    products: np.ndarray = vectors @ vectors.T
    return products


def overlaps(texts: Sequence[Collection[str]]) -> np.ndarray:
    """Likeness [N, N] of texts by their words: those that two share, of those that either has
    (Jaccard)."""
    words = [set(text) for text in texts]
    rows = [[len(a & b) / max(1, len(a | b)) for b in words] for a in words]
    return np.array(rows).reshape(len(words), len(words))
