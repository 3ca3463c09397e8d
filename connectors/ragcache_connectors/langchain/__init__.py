"""LangChain: chat model, retriever, vector store, embeddings, record manager and loader.

All work on a `RagCache`. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragcache_connectors.langchain.chat_models import ChatRagCache
    from ragcache_connectors.langchain.document_loaders import RagCacheLoader
    from ragcache_connectors.langchain.embeddings import RagCacheEmbeddings
    from ragcache_connectors.langchain.record_manager import RagCacheRecordManager
    from ragcache_connectors.langchain.retrievers import RagCacheRetriever
    from ragcache_connectors.langchain.shared import close_shared, shared_rag
    from ragcache_connectors.langchain.vectorstores import RagCacheVectorStore

__all__ = [
    "ChatRagCache",
    "RagCacheEmbeddings",
    "RagCacheLoader",
    "RagCacheRecordManager",
    "RagCacheRetriever",
    "RagCacheVectorStore",
    "close_shared",
    "shared_rag",
]

_HOMES = {
    "ChatRagCache": "chat_models",
    "RagCacheEmbeddings": "embeddings",
    "RagCacheLoader": "document_loaders",
    "RagCacheRecordManager": "record_manager",
    "RagCacheRetriever": "retrievers",
    "RagCacheVectorStore": "vectorstores",
    "close_shared": "shared",
    "shared_rag": "shared",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
