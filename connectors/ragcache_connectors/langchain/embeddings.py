"""The embedder that needs no download, and that of an open `RagCache`, for LangChain."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from langchain_core.embeddings import Embeddings

from ragcache.errors import ConfigurationError

if TYPE_CHECKING:
    from ragcache import RagCache

_loading = threading.Lock()
_loaded: list[Embeddings] = []  # minilm, once for the process


class RagCacheEmbeddings(Embeddings):
    """all-MiniLM-L6-v2 (`minilm`, 384 dimensions), or the embedder that a `RagCache` was opened
    with. Loaded at first use; the model is shared by the process.

    Raises at first use `MissingExtra` where minilm is not installed, `ConfigurationError` for a
    `RagCache` without an embedder.
    """

    def __init__(self, rag: RagCache | None = None) -> None:
        self.rag = rag

    @property
    def embedder(self) -> Embeddings:
        """The embedder itself."""
        if self.rag is None:
            return minilm()
        found = self.rag.retriever().embedder
        if found is None:
            raise ConfigurationError(
                "this RagCache has no embedder; open it with embedding='minilm' or with an "
                "Embeddings object of LangChain"
            )
        return found

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.embedder.embed_documents(texts) if texts else []

    def embed_query(self, text: str) -> list[float]:
        return self.embedder.embed_query(text)

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        return await self.embedder.aembed_documents(texts) if texts else []

    async def aembed_query(self, text: str) -> list[float]:
        return await self.embedder.aembed_query(text)


def minilm() -> Embeddings:
    """The process's all-MiniLM-L6-v2. Raises `MissingExtra`."""
    from ragcache.retrieval.embedders import MiniLM

    with _loading:
        if not _loaded:
            _loaded.append(MiniLM())
        return _loaded[0]


def unwrapped(embedding: Embeddings | None) -> Embeddings | None:
    """The embedder behind a `RagCacheEmbeddings`, so that its vectors are stored once under one
    name."""
    return embedding.embedder if isinstance(embedding, RagCacheEmbeddings) else embedding
