"""A LangChain retriever over a collection."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun as AsyncRun
from langchain_core.callbacks import CallbackManagerForRetrieverRun as Run
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field

from ragcache.config import DEFAULT_RELATIVE_THRESHOLD, DEFAULT_RERANK
from ragcache.errors import InvalidRequest
from ragcache_connectors.langchain.document_loaders import hits_to_documents
from ragcache_connectors.langchain.embeddings import unwrap_embedder
from ragcache_connectors.langchain.shared import shared_rag

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.retrieval import Retriever, SearchParams


_ARGUMENTS = (
    "k", "search", "filters", "threshold", "relative_threshold", "rerank", "mmr", "candidates",
)  # fmt: skip


class RagCacheRetriever(BaseRetriever):
    """Modules of a collection as documents, each with `metadata["ragcache"]`: module, document,
    tier, tokens, score, bm25, cosine and rerank; the last three are None where nothing measured
    them.

    Args:
        collection: the collection to search.
        rag: an open `RagCache`.
        state: its folder, in place of `rag`; opened at first use.
        embedding: another embedder than that of the folder.
        k, search, filters, threshold, relative_threshold, rerank, mmr, candidates: as in
            `RagCache.retrieve`; each may be given to `invoke` too. The reranker is that of
            `RagCache.open`.

    Raises:
        UnknownCollection: by a search, for a collection that does not exist.
        InvalidRequest: by a search, for wrong arguments.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    collection: str
    rag: Any = Field(default=None, exclude=True, repr=False)
    state: str | Path | None = None
    embedding: Embeddings | None = Field(default=None, exclude=True)
    k: int = 4
    search: Literal["hybrid", "sparse", "dense"] = "hybrid"
    filters: Mapping[str, Any] | None = None
    threshold: float | None = None
    relative_threshold: float = DEFAULT_RELATIVE_THRESHOLD
    rerank: int = DEFAULT_RERANK
    mmr: float | None = None
    candidates: int = 50

    def _get_relevant_documents(
        self, query: str, *, run_manager: Run,  # noqa: ARG002
        **arguments: Any,
    ) -> list[Document]:  # fmt: skip
        params = self._search_params(arguments)
        rag, retriever = self._open_retriever()
        return hits_to_documents(
            rag, retriever.retrieve(query, self.collection, params).hits, self.collection
        )

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncRun,  # noqa: ARG002
        **arguments: Any,
    ) -> list[Document]:  # fmt: skip
        params = await asyncio.to_thread(self._search_params, arguments)
        rag, retriever = await asyncio.to_thread(self._open_retriever)
        selection = await retriever.aretrieve(query, self.collection, params)
        return await asyncio.to_thread(hits_to_documents, rag, selection.hits, self.collection)

    def _search_params(self, arguments: Mapping[str, Any]) -> SearchParams:
        from ragcache.retrieval import SearchParams

        unknown = sorted(arguments.keys() - set(_ARGUMENTS))
        if unknown:
            known = ", ".join(_ARGUMENTS)
            raise InvalidRequest(f"unknown argument {unknown[0]!r}; arguments: {known}")
        return SearchParams(**{name: getattr(self, name) for name in _ARGUMENTS} | dict(arguments))

    def _open_retriever(self) -> tuple[RagCache, Retriever]:
        rag = shared_rag(self.rag, self.state)
        return rag, rag.retriever(unwrap_embedder(self.embedding))
