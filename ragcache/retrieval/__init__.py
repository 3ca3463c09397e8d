"""Finding modules for a question: words, meaning, and the fusion of both."""

from ragcache.retrieval.fusion import fuse
from ragcache.retrieval.index import CollectionIndex
from ragcache.retrieval.retriever import Hit, Retriever, Selection

__all__ = ["CollectionIndex", "Hit", "Retriever", "Selection", "fuse"]
