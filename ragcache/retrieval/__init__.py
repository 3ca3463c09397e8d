"""Retrieval: sparse and dense search over the modules of a collection, and their fusion."""

from ragcache.retrieval.filters import Filters, compile_filters
from ragcache.retrieval.retriever import (
    CANDIDATES,
    Hit,
    Retriever,
    Retrievers,
    SearchKind,
    SearchParams,
    Selection,
)
from ragcache.retrieval.search import CollectionIndex, fuse

__all__ = [
    "CANDIDATES",
    "CollectionIndex",
    "Filters",
    "Hit",
    "Retriever",
    "Retrievers",
    "SearchKind",
    "SearchParams",
    "Selection",
    "compile_filters",
    "fuse",
]
