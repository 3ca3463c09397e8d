"""A step of LlamaIndex's ingestion pipelines that stores documents in a collection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, TextNode, TransformComponent
from pydantic import Field

from ragcache import RagCache, SourceDocument
from ragcache.documents.source import DocumentPart
from ragcache_connectors.langchain.shared import shared_rag
from ragcache_connectors.llama_index.retrievers import module_node

_ADDRESSES = ("url", "source", "file_path")
"""Metadata of LlamaIndex's readers that is a document's address, the best one first."""


class RagCacheIngestion(TransformComponent):
    """The step of an `IngestionPipeline` that stores documents and encodes their states, once.

    Documents are split by ragcache. Nodes that an earlier step has split become the parts of their
    document. The step returns the nodes of the stored modules, with the ids that
    `RagCacheNodeRetriever` gives them.

    Example:
        >>> pipeline = IngestionPipeline(  # doctest: +SKIP
        ...     transformations=[RagCacheIngestion(collection="handbook", state="state/")]
        ... )
        >>> nodes = pipeline.run(documents=documents)  # doctest: +SKIP
    """

    collection: str
    """The collection, which is created if there is none."""
    rag: Any = Field(default=None, exclude=True, repr=False)
    """An open `RagCache`."""
    state: str | None = None
    """The state folder to open instead of `rag`, at first use."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex serializes the class."""
        return "RagCacheIngestion"

    def __call__(self, nodes: Sequence[BaseNode], **_: Any) -> list[TextNode]:
        """Store the documents of nodes. Raises the errors of `RagCache.ingest`."""
        rag = shared_rag(self.rag, None if self.state is None else Path(self.state))
        documents = _source_documents(nodes)
        rag.ingest(self.collection, documents)
        return _stored_nodes(rag, self.collection, [document.id for document in documents])


def _source_documents(nodes: Sequence[BaseNode]) -> list[SourceDocument]:
    """Return the documents of nodes, in the order of their first nodes."""
    grouped: dict[str, list[BaseNode]] = {}
    for node in nodes:
        grouped.setdefault(node.ref_doc_id or node.node_id, []).append(node)
    return [_source_document(name, parts) for name, parts in grouped.items()]


def _source_document(name: str, nodes: Sequence[BaseNode]) -> SourceDocument:
    texts = [node.get_content(MetadataMode.NONE) for node in nodes]
    shared = dict(set.intersection(*(_items(node) for node in nodes)))
    metadata = {key: value for key, value in nodes[0].metadata.items() if key in shared}
    address = next((str(metadata[key]) for key in _ADDRESSES if metadata.get(key)), "")
    if len(nodes) == 1:
        return SourceDocument(name, texts[0], address, metadata)
    parts = tuple(
        DocumentPart(text, {k: v for k, v in node.metadata.items() if k not in shared})
        for text, node in zip(texts, nodes, strict=True)
    )
    return SourceDocument(name, "\n\n".join(texts), address, metadata, parts)


def _items(node: BaseNode) -> set[tuple[str, str]]:
    return {(key, repr(value)) for key, value in node.metadata.items()}


def _stored_nodes(rag: RagCache, collection: str, documents: Sequence[str]) -> list[TextNode]:
    rows = rag.documents.get(collection, documents)
    names = [f"{row.source_id}#{n + 1}" for row in rows for n in range(row.modules)]
    return [
        module_node(collection, module)
        for module in rag.internals.catalog.modules(collection, names)
    ]
