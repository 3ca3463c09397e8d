"""LangChain embeddings: the embedder of a `RagCache`, or all-MiniLM-L6-v2."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_core.embeddings import Embeddings

from ragcache.errors import ConfigurationError
from ragcache_connectors.langchain.shared import shared_rag

if TYPE_CHECKING:
    from ragcache import RagCache

_loading = threading.Lock()
_loaded: list[Embeddings] = []  # minilm, once for the process


class RagCacheEmbeddings(Embeddings):
    """The embedder that a `RagCache` was opened with; without one all-MiniLM-L6-v2 (`minilm`, 384
    dimensions), which the process shares. Loaded at first use.

    Args:
        rag: an open `RagCache`.
        state: its folder, in place of `rag`; neither is minilm.

    Raises:
        MissingExtra: at first use, where minilm is not installed.
        ConfigurationError: at first use, for a `RagCache` without an embedder.
    """

    def __init__(self, rag: RagCache | None = None, *, state: str | Path | None = None) -> None:
        self._rag, self._state = rag, state

    @property
    def embedder(self) -> Embeddings:
        """The embedder itself. Loads it, or opens its folder."""
        if self._rag is None and self._state is None:
            return minilm()
        found = shared_rag(self._rag, self._state).retriever().embedder
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


def minilm() -> Embeddings:
    """The process's all-MiniLM-L6-v2. Raises `MissingExtra`."""
    from ragcache.retrieval.embeddings import MiniLM

    with _loading:
        if not _loaded:
            _loaded.append(MiniLM())
        return _loaded[0]


def unwrap_embedder(embedding: Embeddings | None) -> Embeddings | None:
    """The embedder behind a `RagCacheEmbeddings`, so that its vectors are stored once under one
    name."""
    return embedding.embedder if isinstance(embedding, RagCacheEmbeddings) else embedding
