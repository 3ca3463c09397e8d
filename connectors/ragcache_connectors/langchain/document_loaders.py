"""Documents of LangChain's loaders and splitters as modules, and modules as documents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import BaseDocumentTransformer, Document

from ragcache.documents.loading import join_documents
from ragcache.documents.source import check_metadata
from ragcache.errors import DocumentError
from ragcache_connectors.langchain.shared import shared_rag

if TYPE_CHECKING:
    from ragcache import Ingestion, RagCache, SourceDocument
    from ragcache.retrieval import Hit

METADATA_KEY = "ragcache"
"""Key of the details of a module in a document's metadata: module, tier, tokens and scores."""


class RagCacheLoader:
    """Ingests the documents of a loader into a collection.

    Documents with one `metadata["source"]` become one ragcache document of that name, and each of
    them a module of it, in their order. A longer text becomes several modules. The ragcache
    document keeps the metadata on which all of them agree. A document without a source is named by
    its id.

    Args:
        documents: A loader, or documents.
        collection: The collection to ingest into.
        splitter: Splits the documents first.
        rag: An open `RagCache`.
        state: The state folder to open instead of `rag`.

    Example:
        >>> RagCacheLoader(loader, collection="handbook").load()  # doctest: +SKIP
    """

    def __init__(
        self,
        documents: BaseLoader | Iterable[Document],
        *,
        collection: str,
        splitter: BaseDocumentTransformer | None = None,
        rag: RagCache | None = None,
        state: str | Path | None = None,
    ) -> None:
        self._documents, self._splitter, self._collection = documents, splitter, collection
        self._rag, self._state = rag, state

    def load(self) -> Ingestion:
        """Read all documents, then ingest them.

        Raises:
            DocumentError: A document has no name. Raised before anything is stored.
            UnstorableMetadata: JSON cannot hold a document's metadata. Raised before anything is
                stored.
        """
        return self._store(self.sources())

    async def aload(self) -> Ingestion:
        """Do the same as `load`, for asyncio, with the loader's own `alazy_load`."""
        documents = self._documents
        if isinstance(documents, BaseLoader):
            documents = [document async for document in documents.alazy_load()]
        return await asyncio.to_thread(lambda: self._store(self._grouped(documents)))

    def sources(self) -> list[SourceDocument]:
        """Return the documents that `load` ingests."""
        given = self._documents
        return self._grouped(given.lazy_load() if isinstance(given, BaseLoader) else given)

    def _store(self, sources: Sequence[SourceDocument]) -> Ingestion:
        return shared_rag(self._rag, self._state).ingest(self._collection, sources)

    def _grouped(self, documents: Iterable[Document]) -> list[SourceDocument]:
        if self._splitter is not None:
            documents = self._splitter.transform_documents(list(documents))
        groups: dict[str, list[Document]] = {}
        for document in documents:
            if document.page_content.strip():  # loaders give empty pages, splitters empty ends
                groups.setdefault(_name(document), []).append(document)
        return [_source(name, parts) for name, parts in groups.items()]


def _name(document: Document) -> str:
    source = document.metadata.get("source")
    name = document.id if source is None else source
    if name is None or not str(name).strip():
        raise DocumentError(
            "a document has neither metadata['source'] nor an id to name it by; give it one. It "
            f"begins {document.page_content[:40]!r}"
        )
    return str(name)


def _source(name: str, documents: Sequence[Document]) -> SourceDocument:
    kept = [
        Document(each.page_content, metadata=storable_metadata(each.metadata, name))
        for each in documents
    ]
    return join_documents(kept, name)


def storable_metadata(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return metadata without `METADATA_KEY`.

    Args:
        metadata: The metadata of a document.
        name: The document's name, for errors.

    Raises:
        UnstorableMetadata: JSON cannot hold a value, such as a date or a path. Searches return
            metadata unchanged, so give such values as text.
    """
    kept = {key: value for key, value in metadata.items() if key != METADATA_KEY}
    check_metadata(kept, name, exact=True)
    return kept


def module_metadata(
    rag: RagCache, hits: Sequence[Hit], collection: str | None = None
) -> list[dict[str, Any]]:
    """Return the details of each hit: module, document, tier, tokens and the scores of `Hit`.

    A module whose states must still be encoded has no tier (None).
    """
    placed = rag.modules.locate([hit.module for hit in hits], collection)
    return [
        {
            "module": hit.module.name,
            "document": hit.module.document,
            "tier": place.tier,
            "tokens": place.tokens,
            "score": hit.score,
            "bm25": hit.bm25,
            "cosine": hit.cosine,
            "rerank": hit.rerank,
        }
        for hit, place in zip(hits, placed, strict=True)
    ]


def hits_to_documents(
    rag: RagCache, hits: Sequence[Hit], collection: str | None = None
) -> list[Document]:
    """Convert hits to documents that ragcache recognizes in a prompt.

    Each has the document's metadata, a `source`, and details of the module under `METADATA_KEY`.
    """
    documents = []
    for hit, details in zip(hits, module_metadata(rag, hits, collection), strict=True):
        module = hit.module
        source = {"source": module.uri or module.document}
        metadata = {**source, **module.metadata, METADATA_KEY: details}
        text = module.text.strip()
        documents.append(Document(id=module.name, page_content=text, metadata=metadata))
    return documents
