"""Finding modules for a question: words, meaning, and the fusion of both."""

from ragcache.retrieval.criteria import Criteria, SearchKind
from ragcache.retrieval.filters import Filters, compile_filters
from ragcache.retrieval.fusion import fuse
from ragcache.retrieval.index import CollectionIndex
from ragcache.retrieval.retriever import Hit, Retriever, Selection
from ragcache.retrieval.retrievers import Retrievers

__all__ = [
    "CollectionIndex",
    "Criteria",
    "Filters",
    "Hit",
    "Retriever",
    "Retrievers",
    "SearchKind",
    "Selection",
    "compile_filters",
    "fuse",
]
