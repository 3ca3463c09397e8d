"""What a collection holds, and finding it: retrieval without an answer."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.embeddings import Embeddings

from ragcache.config import DEFAULT_K
from ragcache.pipeline import Parts, Placed
from ragcache.retrieval import Filters, Retriever, SearchKind, SearchParams, Selection
from ragcache.retrieval.params import CANDIDATES
from ragcache.store import (
    CollectionRow,
    DocumentRow,
    ModuleRow,
    Page,
    collection_page,
    document_page,
)


class Retrieval:
    """The methods of `RagCache` that find and list documents and modules."""

    _parts: Parts

    def retrieve(
        self, query: str, *, collection: str, k: int = DEFAULT_K, search: SearchKind = "hybrid",
        filters: Filters | None = None, threshold: float | None = None,
        diversity: float | None = None, candidates: int = CANDIDATES,
    ) -> Selection:  # fmt: skip
        """The `k` best modules for a query, with their scores; no model runs but the embedder.

        search: `words` (BM25), `meaning` (cosine), or `hybrid`, both fused by reciprocal rank.
        filters: of the documents' metadata, such as `{"year": {"$gte": 2020}}`; see
        `ragcache.retrieval.filters`. threshold: the least score: of `meaning` the cosine in
        [-1, 1], of `words` the BM25 score, of `hybrid` the fused score, whose best is 1/61 for
        each ranking. diversity: 0 to 1, maximal marginal relevance (Carbonell and Goldstein 1998)
        over the `candidates` best; likeness is the cosine of vectors, or without an embedder the
        overlap of words. Raises `UnknownCollection`, `InvalidRequest` or `ConfigurationError`.
        """
        criteria = SearchParams(k, search, filters, threshold, diversity, candidates)
        return self.retriever().retrieve(query, collection, criteria)

    async def aretrieve(
        self, query: str, *, collection: str, k: int = DEFAULT_K, search: SearchKind = "hybrid",
        filters: Filters | None = None, threshold: float | None = None,
        diversity: float | None = None, candidates: int = CANDIDATES,
    ) -> Selection:  # fmt: skip
        """`retrieve` for asyncio."""
        criteria = SearchParams(k, search, filters, threshold, diversity, candidates)
        return await self.retriever().aretrieve(query, collection, criteria)

    def retriever(self, embedding: Embeddings | None = None) -> Retriever:
        """The retriever of this folder, or one by the meaning of another embedder, whose vectors
        are made at the first search and kept beside the others."""
        return self._parts.retrievers.of(embedding)

    def get_modules(self, names: Sequence[str], *, collection: str) -> list[ModuleRow]:
        """Those of the modules that there are, in the order of the names. Raises
        `UnknownCollection`."""
        return self._parts.catalogue.modules(collection, names)

    def texts(self, collection: str, document_ids: Sequence[str]) -> dict[str, str]:
        """The whole texts of those of the documents that there are, by id. Raises
        `UnknownCollection`."""
        return self._parts.catalogue.texts(collection, document_ids)

    def placed(self, modules: Sequence[ModuleRow]) -> list[Placed]:
        """How long modules are, and where their states stand now."""
        return self._parts.modules.placed(modules)

    def documents(self, collection: str, ids: Sequence[str] | None = None) -> list[DocumentRow]:
        """The documents of a collection with metadata and numbers of modules, in the order in
        which they were stored; or those of the ids that there are. Raises `UnknownCollection`."""
        self._parts.catalogue.stamp(collection)
        return list(self._parts.catalogue.documents(collection, ids).values())

    def document_page(
        self, collection: str, cursor: str | None = None, limit: int = 100
    ) -> Page[DocumentRow]:
        """The documents of a collection by id, a page at a time; `total` comes with the first.
        Raises `InvalidRequest` or `UnknownCollection`."""
        catalogue = self._parts.catalogue
        return document_page(
            self._parts.database, catalogue.namespace, collection, cursor, limit
        )  # fmt: skip

    def collection_page(self, cursor: str | None = None, limit: int = 100) -> Page[CollectionRow]:
        """The collections by name, with what they hold. Raises `InvalidRequest`."""
        return collection_page(self._parts.database, self._parts.catalogue.namespace, cursor, limit)
