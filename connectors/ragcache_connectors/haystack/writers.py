"""A component of Haystack that stores documents in a collection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict

from ragcache import SourceDocument
from ragcache.documents.source import DocumentPart
from ragcache.errors import UnreadableDocument
from ragcache_connectors.langchain.shared import shared_rag

_SOURCE = "source_id"
"""Metadata of Haystack's splitters: the id of the document that a part is from."""
_ADDRESSES = ("url", "file_path")
"""Metadata of Haystack's converters that is a document's address, the best one first."""
_OF_PARTS = (_SOURCE, "split_id", "split_idx_start", "_split_overlap", "page_number")


@component
class RagCacheDocumentWriter:
    """The step of an indexing pipeline that stores documents and encodes their states, once.

    ragcache splits documents itself. Documents that a splitter has made of one become its parts.

    Example:
        >>> writer = RagCacheDocumentWriter("handbook", state="state/")  # doctest: +SKIP
        >>> writer.run([Document(content="The boat is blue.")])  # doctest: +SKIP
    """

    def __init__(self, collection: str, state: str | None = None, *, rag: Any = None) -> None:
        """Store documents in a collection.

        Args:
            collection: The collection, which is created if there is none.
            state: The state folder, which all components of this process share.
            rag: An open `RagCache`, instead of `state`. It is left out of `to_dict`.
        """
        self.collection, self.state, self.rag = collection, state, rag

    def to_dict(self) -> dict[str, Any]:
        """Return the component for a pipeline's file."""
        found: dict[str, Any] = default_to_dict(self, collection=self.collection, state=self.state)
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RagCacheDocumentWriter:
        """Return the component of `to_dict`."""
        found: RagCacheDocumentWriter = default_from_dict(cls, data)
        return found

    @component.output_types(documents_written=int)
    def run(self, documents: list[Document]) -> dict[str, int]:
        """Store documents, and return how many were new or changed.

        Raises:
            UnreadableDocument: A document has no text.
            DocumentError: As in `RagCache.ingest`.
        """
        sources = _source_documents(documents)
        if not sources:
            return {"documents_written": 0}
        rag = shared_rag(self.rag, self.state and Path(self.state))
        done = rag.ingest(self.collection, sources)
        return {"documents_written": done.added + done.updated}


def _source_documents(documents: Sequence[Document]) -> list[SourceDocument]:
    """Return the documents of parts, in the order of their first parts."""
    grouped: dict[str, list[Document]] = {}
    for document in documents:
        if document.content is None:
            raise UnreadableDocument(f"the document {document.id!r} has no text")
        grouped.setdefault(str(document.meta.get(_SOURCE) or document.id), []).append(document)
    return [_source_document(name, parts) for name, parts in grouped.items()]


def _source_document(name: str, parts: Sequence[Document]) -> SourceDocument:
    metadata = {key: value for key, value in parts[0].meta.items() if key not in _OF_PARTS}
    address = next((str(metadata[key]) for key in _ADDRESSES if metadata.get(key)), "")
    texts = [str(part.content) for part in parts]
    if len(parts) == 1:
        return SourceDocument(name, texts[0], address, metadata)
    pages = [part.meta.get("page_number") for part in parts]
    divided = tuple(
        DocumentPart(text, {} if page is None else {"page": page})
        for text, page in zip(texts, pages, strict=True)
    )
    return SourceDocument(name, "\n\n".join(texts), address, metadata, divided)
