"""LangChain: chat model, retriever, vector store, embeddings, record manager and loader over a
`RagCache`, and schemas from prompt templates. Names are loaded on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragcache_connectors.langchain.chat_model import ChatRagCache
    from ragcache_connectors.langchain.embeddings import RagCacheEmbeddings
    from ragcache_connectors.langchain.loader import RagCacheLoader
    from ragcache_connectors.langchain.opening import close_shared, shared_rag
    from ragcache_connectors.langchain.record_manager import RagCacheRecordManager
    from ragcache_connectors.langchain.retriever import RagCacheRetriever
    from ragcache_connectors.langchain.templates import TemplateSchema, template_schema
    from ragcache_connectors.langchain.vector_store import RagCacheVectorStore

__all__ = [
    "ChatRagCache",
    "RagCacheEmbeddings",
    "RagCacheLoader",
    "RagCacheRecordManager",
    "RagCacheRetriever",
    "RagCacheVectorStore",
    "TemplateSchema",
    "close_shared",
    "shared_rag",
    "template_schema",
]

_HOMES = {
    "ChatRagCache": "chat_model",
    "RagCacheEmbeddings": "embeddings",
    "RagCacheLoader": "loader",
    "RagCacheRecordManager": "record_manager",
    "RagCacheRetriever": "retriever",
    "RagCacheVectorStore": "vector_store",
    "TemplateSchema": "templates",
    "close_shared": "opening",
    "shared_rag": "opening",
    "template_schema": "templates",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
