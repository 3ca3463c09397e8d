"""LangChain's documents as ragcache keeps them, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.documents import Document

from ragcache.documents.source import check_metadata

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache.retrieval import Hit

MARK = "ragcache"
"""The key of the metadata under which documents tell module, tier and tokens."""


def storable(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Metadata as it is stored: without ragcache's own mark. name: of the document, for errors.

    Raises `UnstorableMetadata` for what JSON cannot hold, so that what comes back is what was
    given: dates and paths are to be written as text.
    """
    kept = {key: value for key, value in metadata.items() if key != MARK}
    check_metadata(kept, name, exact=True)
    return kept


def marks(rag: RagCache, hits: Sequence[Hit]) -> list[dict[str, Any]]:
    """What documents tell of the modules that were found: names, the tier that holds their states
    (None where they are to be encoded yet), their tokens, and their scores."""
    placed = rag.placed([hit.module for hit in hits])
    return [
        {
            "module": hit.module.name,
            "document": hit.module.document,
            "tier": place.tier,
            "tokens": place.tokens,
            "score": hit.score,
        }
        for hit, place in zip(hits, placed, strict=True)
    ]


def found_documents(rag: RagCache, hits: Sequence[Hit]) -> list[Document]:
    """Modules as documents: the text that ragcache recognizes in a prompt, the document's metadata
    with a `source`, and `metadata["ragcache"]`."""
    return [
        Document(
            id=hit.module.name,
            page_content=hit.module.text.strip(),
            metadata={
                "source": hit.module.uri or hit.module.document,
                **hit.module.attributes,
                MARK: mark,
            },
        )
        for hit, mark in zip(hits, marks(rag, hits), strict=True)
    ]
