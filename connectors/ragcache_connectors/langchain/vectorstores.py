"""A LangChain vector store: documents in the catalog, their vectors in FAISS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from ragcache.errors import InvalidRequest, MissingExtra, UnknownCollection
from ragcache_connectors.langchain.document_loaders import (
    METADATA_KEY,
    module_metadata,
    storable_metadata,
)
from ragcache_connectors.langchain.embeddings import minilm, unwrap_embedder
from ragcache_connectors.langchain.shared import shared_rag

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.params import SearchParams
    from ragcache.retrieval import Retriever, Selection


Scored = list[tuple[Document, float]]


class RagCacheVectorStore(VectorStore):
    """A vector store over a collection, which is created with the first document.

    Each document is one ragcache document, named by its id. Its states are encoded when it is
    added. A longer document becomes several modules: a search returns the part that is most similar
    to the query, under the document's id. `get_by_ids` returns the whole document.

    `filter` of every search is a metadata filter (`ragcache.retrieval.filters`). It applies before
    the `k` nearest are chosen.

    Args:
        embedding: The embedder. Defaults to the folder's embedder, or else to `minilm`. If there is
            none, searches are by words.
        collection: The name of the collection.
        rag: An open `RagCache`.
        state: The state folder to open instead of `rag`.
        annotated: Whether documents of a search have `metadata["ragcache"]` in addition to their
            own metadata.
        instruction: The instruction of the collection (`RagCache.collections.set_instruction`).
            Unchanged by default.
    """

    def __init__(
        self,
        embedding: Embeddings | None = None,
        *,
        collection: str,
        rag: RagCache | None = None,
        state: str | Path | None = None,
        annotated: bool = False,
        instruction: str | None = None,
    ) -> None:
        self.collection, self.annotated = collection, annotated
        self._instruction = instruction
        self._rag, self._state, self._embedding = rag, state, embedding
        self._last_embedder: Embeddings | None = None

    @property
    def rag(self) -> RagCache:
        """The `RagCache` that holds the documents, opened at first use."""
        return shared_rag(self._rag, self._state)

    @property
    def embeddings(self) -> Embeddings | None:
        """The store's embedder, or else the one of the last search. Loads nothing."""
        return self._embedding or self._last_embedder

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Store documents. Each replaces the document with the same id.

        Returns:
            The documents' ids: `ids`, or else `Document.id`, or else new ones.

        Raises:
            UnstorableMetadata: JSON cannot hold a document's metadata. Raised before anything is
                stored.
            DocumentError: A document cannot be ingested. Raised before anything is stored.
        """
        from ragcache import SourceDocument

        given: Sequence[str | None] = kwargs.get("ids") or [document.id for document in documents]
        if len(given) != len(documents):
            raise ValueError(f"{len(documents)} documents have {len(given)} ids")
        ids = [each or str(uuid4()) for each in given]
        sources: dict[str, SourceDocument] = {}  # the last document of an id counts
        for name, document in zip(ids, documents, strict=True):
            metadata = storable_metadata(document.metadata, name)
            uri = str(metadata.get("source", ""))
            sources[name] = SourceDocument(name, document.page_content, uri, metadata)
        if sources and self._instruction is not None:
            self.rag.collections.create(self.collection)
            self.rag.collections.set_instruction(self.collection, self._instruction)
        if sources:
            self.rag.ingest(self.collection, list(sources.values()))
        return ids

    def delete(self, ids: list[str] | None = None, **_: Any) -> bool | None:
        """Delete the documents with these ids, by default all. Unknown ids are ignored."""
        with suppress(UnknownCollection):
            if ids is None:
                ids = [row.source_id for row in self.rag.documents.get(self.collection)]
            self.rag.delete(self.collection, ids)
        return True

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the whole documents with these ids, in their order, without unknown ids."""
        try:
            texts = self.rag.documents.texts(self.collection, ids)
            rows = {row.source_id: row for row in self.rag.documents.get(self.collection, ids)}
        except UnknownCollection:
            return []
        return [
            Document(id=name, page_content=texts[name], metadata=dict(rows[name].attributes))
            for name in ids
            if name in texts and name in rows
        ]

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        return _without_scores(self.similarity_search_with_score(query, k, **kwargs))

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> Scored:
        """Return documents, best first, with cosines in [-1, 1], or BM25 scores by words."""
        return self._search(query, self._search_params(k, **kwargs))

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, **kwargs: Any
    ) -> list[Document]:
        return _without_scores(self._search(embedding, self._search_params(k, **kwargs)))

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Return relevant and diverse documents. `lambda_mult`: 0 (diversity) to 1 (relevance)."""
        params = self._search_params(k, fetch_k, lambda_mult, **kwargs)
        return _without_scores(self._search(query, params))

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        **kwargs: Any,
    ) -> list[Document]:
        params = self._search_params(k, fetch_k, lambda_mult, **kwargs)
        return _without_scores(self._search(embedding, params))

    async def _asimilarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> Scored:
        """Run the whole search in a thread, as it may load the embedder."""
        search = self._similarity_search_with_relevance_scores
        return await asyncio.to_thread(search, query, k, **kwargs)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """Return a function that raises negative cosines to 0."""
        if self._retriever().embedder is None:
            raise InvalidRequest("relevance scores are of meaning, and there is no embedder")
        return lambda cosine: max(0.0, cosine)

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> RagCacheVectorStore:
        """Create a store with these texts. `kwargs` are arguments of the constructor."""
        store = cls(embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def _search_params(
        self, k: int, fetch_k: int | None = None, lambda_mult: float | None = None, **kwargs: Any
    ) -> SearchParams:
        from ragcache.params import SearchParams

        filters = kwargs.pop("filter", None)
        if kwargs:
            raise InvalidRequest(f"unknown argument {next(iter(kwargs))!r}; there is `filter`")
        return SearchParams(
            k=k,
            search="sparse" if self._retriever().embedder is None else "dense",
            filters=filters,
            mmr=None if lambda_mult is None else 1 - lambda_mult,
            candidates=k if fetch_k is None else fetch_k,
            relative_threshold=0.0,
            rerank=0,  # the `k` nearest, as vector stores do
        )

    def _search(self, query: str | Sequence[float], params: SearchParams) -> Scored:
        retriever = self._retriever()
        search: Any = retriever.retrieve if isinstance(query, str) else retriever.retrieve_by_vector
        try:
            return self._documents(search(query, self.collection, params))
        except UnknownCollection:
            return []

    def _documents(self, selection: Selection) -> Scored:
        """Return whole documents of one module, and the parts found of longer documents."""
        hits = selection.hits
        whole = self.rag.documents.texts(self.collection, [hit.module.document for hit in hits])
        details = module_metadata(self.rag, hits) if self.annotated else []
        found: Scored = []
        for number, hit in enumerate(hits):
            name, part = hit.module.document, hit.module.text.strip()
            text = whole.get(name, "")
            annotation = {METADATA_KEY: details[number]} if self.annotated else {}
            metadata = {**hit.module.attributes, **annotation}
            text = text if text.strip() == part else part
            found.append((Document(id=name, page_content=text, metadata=metadata), hit.score))
        return found

    def _retriever(self) -> Retriever:
        rag = self.rag
        chosen = unwrap_embedder(self._embedding) or rag.retriever().embedder
        if chosen is None:
            with suppress(MissingExtra):
                chosen = minilm()
        self._last_embedder = chosen
        return rag.retriever(chosen)


def _without_scores(scored: Scored) -> list[Document]:
    return [document for document, _ in scored]
