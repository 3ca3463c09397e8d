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
_loaded: list[Embeddings] = []  # minilm, once it is loaded


class RagCacheEmbeddings(Embeddings):
    """The embedder of a `RagCache`, or by default all-MiniLM-L6-v2 with 384 dimensions.

    Loaded at first use. The process has one all-MiniLM-L6-v2 (`minilm`).

    Args:
        rag: An open `RagCache`.
        state: The state folder to open instead of `rag`.

    Raises:
        MissingExtra: minilm is not installed. Raised at first use.
        ConfigurationError: The `RagCache` has no embedder. Raised at first use.
    """

    def __init__(self, rag: RagCache | None = None, *, state: str | Path | None = None) -> None:
        self._rag, self._state = rag, state

    @property
    def embedder(self) -> Embeddings:
        """The embedder itself. Loads it, or opens the state folder, at first use."""
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
    """Return the process's all-MiniLM-L6-v2. Raises `MissingExtra` if it is not installed."""
    from ragcache.retrieval.embeddings import MiniLM

    with _loading:
        if not _loaded:
            _loaded.append(MiniLM())
        return _loaded[0]


def unwrap_embedder(embedding: Embeddings | None) -> Embeddings | None:
    """Return the embedder of a `RagCacheEmbeddings`, so that its vectors are stored once."""
    return embedding.embedder if isinstance(embedding, RagCacheEmbeddings) else embedding
