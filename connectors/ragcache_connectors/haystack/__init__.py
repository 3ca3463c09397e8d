"""Haystack (extra `haystack`): chat generator, retriever and document writer over a `RagCache`."""

from ragcache_connectors.haystack.generators import RagCacheChatGenerator
from ragcache_connectors.haystack.retrievers import RagCacheTextRetriever
from ragcache_connectors.haystack.writers import RagCacheDocumentWriter

__all__ = ["RagCacheChatGenerator", "RagCacheDocumentWriter", "RagCacheTextRetriever"]
