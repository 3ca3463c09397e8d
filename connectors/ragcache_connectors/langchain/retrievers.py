"""A LangChain retriever over a collection."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun as AsyncRun
from langchain_core.callbacks import CallbackManagerForRetrieverRun as Run
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field

from ragcache.params import SearchParams, Surface
from ragcache_connectors.langchain.document_loaders import hits_to_documents
from ragcache_connectors.langchain.embeddings import unwrap_embedder
from ragcache_connectors.langchain.shared import shared_rag

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.retrieval import Retriever


class RagCacheRetriever(BaseRetriever, Surface, SearchParams):
    """A retriever of a collection's modules as documents.

    The fields of `SearchParams` can be set here or in a call of `invoke`. Each document has
    `metadata["ragcache"]` with module, document, tier, tokens, score, bm25, cosine and rerank.
    Scores that the search does not compute are None.

    Raises:
        UnknownCollection: The collection does not exist. Raised by a search.
        InvalidRequest: Arguments are invalid. Raised by a search.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=False)

    collection: str
    """The collection to search."""
    rag: Any = Field(default=None, exclude=True, repr=False)
    """An open `RagCache`."""
    state: str | Path | None = None
    """The state folder to open instead of `rag`, at first use."""
    embedding: Embeddings | None = Field(default=None, exclude=True)
    """The embedder of queries. Defaults to the folder's embedder."""

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: Run,  # noqa: ARG002
        **arguments: Any,
    ) -> list[Document]:
        params = self._search_params(arguments)
        rag, retriever = self._open_retriever()
        return hits_to_documents(
            rag, retriever.retrieve(query, self.collection, params).hits, self.collection
        )

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncRun,  # noqa: ARG002
        **arguments: Any,
    ) -> list[Document]:
        params = await asyncio.to_thread(self._search_params, arguments)
        rag, retriever = await asyncio.to_thread(self._open_retriever)
        selection = await retriever.aretrieve(query, self.collection, params)
        return await asyncio.to_thread(hits_to_documents, rag, selection.hits, self.collection)

    def _search_params(self, arguments: Mapping[str, Any]) -> SearchParams:
        return SearchParams.part_of(self).replace(**arguments)

    def _open_retriever(self) -> tuple[RagCache, Retriever]:
        rag = shared_rag(self.rag, self.state)
        return rag, rag.retriever(unwrap_embedder(self.embedding))
