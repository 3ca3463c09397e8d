"""Prompts of a retrieval workload: a few documents are asked for often, most hardly ever."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ZipfWorkload:
    """prompts of `documents_a_prompt` different documents each, drawn with odds 1 / rank^skew.

    budget: the share of all documents that the cache holds.
    """

    documents: int = 2_000
    prompts: int = 10_000
    documents_a_prompt: int = 4
    skew: float = 1.0
    budget: float = 0.1
    seed: int = 1

    @property
    def places(self) -> int:
        """How many documents of equal size the cache holds."""
        return int(self.documents * self.budget)

    def draw(self) -> np.ndarray:
        """[prompts, documents_a_prompt] int64, document numbers in the order of each prompt.

        The largest of log(odds) + Gumbel noise are a sample without replacement.
        """
        rng = np.random.default_rng(self.seed)
        log_odds = -self.skew * np.log(np.arange(1, self.documents + 1))
        drawn = np.empty((self.prompts, self.documents_a_prompt), np.int64)
        for row in drawn:
            noisy = log_odds + rng.gumbel(size=self.documents)
            best = np.argpartition(noisy, -self.documents_a_prompt)[-self.documents_a_prompt :]
            row[:] = best[np.argsort(-noisy[best])]
        return drawn

    def tokens(self) -> np.ndarray:
        """[documents] int64: lengths between 128 and 2,048 tokens, for caches that weigh them."""
        rng = np.random.default_rng(self.seed + 1)
        return np.exp(rng.uniform(np.log(128), np.log(2048), self.documents)).astype(np.int64)
