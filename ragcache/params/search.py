"""`SearchParams`: how modules are found for a question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ragcache.config import DEFAULT_K, DEFAULT_RELATIVE_THRESHOLD
from ragcache.params.base import Params

SearchKind = Literal["hybrid", "sparse", "dense"]

MOST_FUSED = 2 / 61
"""Highest score of reciprocal rank fusion over two rankings."""


class SearchParams(Params):
    """Options of the search for the modules that a question is answered from.

    Raises:
        InvalidRequest: An option is unknown or out of its range.

    Example:
        >>> SearchParams(k=2, search="sparse")
        SearchParams(k=2, search='sparse')
    """

    k: Annotated[int, Field(ge=1, le=10_000)] = DEFAULT_K
    """Most modules to retrieve."""
    search: SearchKind = "hybrid"
    """`sparse` searches by words (BM25), `dense` by meaning (cosine), `hybrid` by both, fused by
    rank."""
    filters: Mapping[str, Any] | None = None
    """Conditions on the documents' metadata, such as `{"year": {"$gte": 2020}}`."""
    threshold: Annotated[float | None, Field(allow_inf_nan=False)] = None
    """Lowest score of a module, on the scale of `search`. Scores of a hybrid search are at most
    2/61."""
    relative_threshold: Annotated[float, Field(ge=0, le=1)] = DEFAULT_RELATIVE_THRESHOLD
    """Share of the best BM25 score or cosine that a module must have. 0 keeps all modules."""
    rerank: Annotated[int, Field(ge=0, le=1000)] = 20
    """Number of candidates that the reranker orders, if the folder has one. 0 skips it."""
    mmr: Annotated[float | None, Field(ge=0, le=1)] = None
    """Weight of diversity in the selection (maximal marginal relevance). Off by default."""
    candidates: Annotated[int, Field(ge=1, le=100_000)] = 50
    """Number of modules that each ranking contributes to a hybrid search."""

    @property
    def depth(self) -> int:
        """Length of each ranking: `k` or `candidates`, whichever is larger."""
        return max(self.k, self.candidates)

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if self.search == "hybrid" and (self.threshold or 0) > MOST_FUSED:
            raise ValueError(
                f"threshold is {self.threshold}; a hybrid search fuses ranks, and its scores are "
                f"at most {MOST_FUSED:.4f}. Give relative_threshold, a share of the best BM25 "
                "score or cosine, or retrieve with search 'sparse' or 'dense'"
            )
        return self
