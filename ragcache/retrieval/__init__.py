"""Finding modules for a question: words, meaning, and the fusion of both."""

from ragcache.retrieval.filters import Filters, compile_filters
from ragcache.retrieval.params import SearchKind, SearchParams
from ragcache.retrieval.retriever import Hit, Retriever, Retrievers, Selection
from ragcache.retrieval.search import CollectionIndex, fuse

__all__ = [
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
