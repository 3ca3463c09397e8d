"""Retrieval: sparse and dense search over the modules of a collection, and their fusion."""

from ragcache.retrieval.filters import Filters, compile_filters
from ragcache.retrieval.reranking import CrossEncoderReranker, Reranker
from ragcache.retrieval.retriever import (
    Hit,
    Retriever,
    Retrievers,
    SearchKind,
    SearchParams,
    Selection,
    embedder_name,
)
from ragcache.retrieval.search import CollectionIndex, fuse

__all__ = [
    "CollectionIndex", "CrossEncoderReranker", "Filters", "Hit", "Reranker", "Retriever",
    "Retrievers", "SearchKind", "SearchParams", "Selection", "compile_filters", "embedder_name",
    "fuse",
]  # fmt: skip
