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
    """Modules of a collection as documents, each with `metadata["ragcache"]`: module, document,
    tier, tokens, score, bm25, cosine and rerank; the last three are None where nothing measured
    them.

    Args:
        collection: the collection to search.
        rag: an open `RagCache`.
        state: its folder, in place of `rag`; opened at first use.
        embedding: another embedder than that of the folder.
        Other fields: as in `SearchParams`; each may be given to `invoke` too.

    Raises:
        UnknownCollection: by a search, for a collection that does not exist.
        InvalidRequest: by a search, for wrong arguments.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=False)

    collection: str
    rag: Any = Field(default=None, exclude=True, repr=False)
    state: str | Path | None = None
    embedding: Embeddings | None = Field(default=None, exclude=True)

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
        return SearchParams.part_of(self).replace(**arguments)

    def _open_retriever(self) -> tuple[RagCache, Retriever]:
        rag = shared_rag(self.rag, self.state)
        return rag, rag.retriever(unwrap_embedder(self.embedding))
