"""Retrieval: sparse and dense search over the modules of a collection, and their fusion."""

from ragcache.retrieval.filters import Filters, compile_filters
from ragcache.retrieval.retriever import (
    CollectionIndex,
    Hit,
    Retriever,
    Retrievers,
    SearchKind,
    SearchParams,
    Selection,
    embedder_name,
    fuse,
)

__all__ = [
    "CollectionIndex", "Filters", "Hit", "Retriever", "Retrievers", "SearchKind", "SearchParams",
    "Selection", "compile_filters", "embedder_name", "fuse",
]  # fmt: skip
