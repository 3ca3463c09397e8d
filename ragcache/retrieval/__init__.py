"""Retrieval: sparse and dense search over the modules of a collection, and their fusion."""

from ragcache.retrieval.bm25 import BM25Index
from ragcache.retrieval.filters import Filters, compile_filters
from ragcache.retrieval.indexes import VectorIndex
from ragcache.retrieval.resolve import CrossEncoderReranker, Reranker
from ragcache.retrieval.retriever import (
    HeldOutSearch,
    Hit,
    Retriever,
    Retrievers,
    Selection,
    embedder_name,
    fuse,
)

__all__ = [
    "BM25Index",
    "CrossEncoderReranker",
    "Filters",
    "HeldOutSearch",
    "Hit",
    "Reranker",
    "Retriever",
    "Retrievers",
    "Selection",
    "VectorIndex",
    "compile_filters",
    "embedder_name",
    "fuse",
]
