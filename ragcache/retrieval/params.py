"""What a search is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from ragcache.errors import ConfigurationError, InvalidRequest
from ragcache.retrieval.filters import Filters, Test, compile_filters

SearchKind = Literal["hybrid", "sparse", "dense"]

CANDIDATES = 50
"""Modules that each ranking hands to fusion and diversity."""


@dataclass(frozen=True, slots=True)
class SearchParams:
    """At most `k` modules.

    search: `sparse` (BM25), `dense` (cosine of embeddings) or `hybrid`, which fuses both by
    reciprocal rank, and is words alone where there is no embedder. filters: of the documents'
    metadata, applied before anything is counted (see `filters`). threshold: the least score of a
    hit: the cosine in [-1, 1] for `dense`, the BM25 score for `sparse`, the fused score for
    `hybrid`, whose best is 1/61 for each ranking. mmr: how much unlikeness to the hits
    before it counts against relevance, 0 to 1 (see `mmr`). candidates: modules that each
    ranking hands to fusion and diversity, at least `k`. Raises `ConfigurationError` for `k`, else
    `InvalidRequest`.
    """

    k: int
    search: SearchKind = "hybrid"
    filters: Filters | None = None
    threshold: float | None = None
    mmr: float | None = None
    candidates: int = CANDIDATES
    wanted: Test | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigurationError(f"k is {self.k}; at least one module is needed")
        if self.search not in get_args(SearchKind):
            kinds = ", ".join(get_args(SearchKind))
            raise InvalidRequest(f"unknown search {self.search!r}; searches: {kinds}")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise InvalidRequest(f"threshold is {self.threshold}; give a finite score")
        if self.mmr is not None and not 0 <= self.mmr <= 1:
            raise InvalidRequest(f"mmr is {self.mmr}; it lies between 0 and 1")
        if self.candidates < 1:
            raise InvalidRequest(f"candidates is {self.candidates}; at least one is needed")
        object.__setattr__(self, "wanted", compile_filters(self.filters))

    @property
    def depth(self) -> int:
        """How many modules a ranking names."""
        return max(self.k, self.candidates)
