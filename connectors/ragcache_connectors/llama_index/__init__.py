"""LlamaIndex (extra `llama-index`): language model, retriever and ingestion over a `RagCache`."""

from ragcache_connectors.llama_index.ingestion import RagCacheIngestion
from ragcache_connectors.llama_index.llms import RagCacheLLM
from ragcache_connectors.llama_index.retrievers import RagCacheNodeRetriever

__all__ = ["RagCacheIngestion", "RagCacheLLM", "RagCacheNodeRetriever"]
