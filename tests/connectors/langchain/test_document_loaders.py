"""Loaders' and splitters' documents as modules."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from langchain_core.document_loaders import BaseLoader
from langchain_core.documents import Document
from langchain_text_splitters import CharacterTextSplitter

from ragcache import RagCache
from ragcache.errors import DocumentError, UnstorableMetadata
from ragcache_connectors.langchain import RagCacheLoader

PAGES = [
    Document("The boat is moored.", metadata={"source": "boats.pdf", "page": 1, "team": "quay"}),
    Document("The key hangs there.", metadata={"source": "keys.pdf", "page": 1}),
    Document("The boat is painted.", metadata={"source": "boats.pdf", "page": 2, "team": "quay"}),
    Document("  \n", metadata={"source": "boats.pdf", "page": 3}),
]


class Pages(BaseLoader):
    def lazy_load(self) -> Iterator[Document]:
        yield from PAGES


class AsyncPages(BaseLoader):
    async def alazy_load(self) -> AsyncIterator[Document]:
        for page in PAGES:
            yield page


def texts(rag: RagCache, collection: str = "notes") -> dict[str, str]:
    names = [row.name for row in rag.modules.all(collection)]
    return {row.name: row.text.strip() for row in rag.modules.named(collection, names)}


EXPECTED = {
    "boats.pdf#1": "The boat is moored.",
    "boats.pdf#2": "The boat is painted.",
    "keys.pdf#1": "The key hangs there.",
}


async def test_documents_of_one_source_are_modules_of_one_document(rag: RagCache) -> None:
    done = RagCacheLoader(Pages(), collection="notes", rag=rag).load()
    assert (done.added, done.modules) == (2, 3)
    assert texts(rag) == EXPECTED
    boats, keys = rag.documents.get("notes")
    assert boats.attributes == {"source": "boats.pdf", "team": "quay"}
    assert (boats.uri, keys.attributes) == ("boats.pdf", {"source": "keys.pdf", "page": 1})
    again = await RagCacheLoader(AsyncPages(), collection="notes", rag=rag).aload()
    assert (again.unchanged, again.encoded) == (2, 0)


async def test_a_list_of_documents_for_asyncio(rag: RagCache) -> None:
    await RagCacheLoader(PAGES, collection="notes", rag=rag).aload()
    assert texts(rag) == EXPECTED


def test_a_splitter_cuts_first(rag: RagCache) -> None:
    document = Document("one two|three four|five", metadata={"source": "a"})
    splitter = CharacterTextSplitter("|", chunk_size=10, chunk_overlap=0)
    RagCacheLoader([document], collection="notes", splitter=splitter, rag=rag).load()
    assert list(texts(rag).values()) == ["one two", "three four", "five"]


def test_a_chunk_that_is_too_long_for_a_module_becomes_several(rag: RagCache) -> None:
    long = " ".join(f"Boat number {n}." for n in range(60))
    chunks = [Document(text, metadata={"source": "a"}) for text in ("First.", long, "Last.")]
    RagCacheLoader(chunks, collection="notes", rag=rag).load()
    found = list(texts(rag).values())
    assert (found[0], found[-1]) == ("First.", "Last.")
    assert len(found) > 4


def test_a_document_without_a_source_needs_an_id(rag: RagCache) -> None:
    RagCacheLoader([Document("one", id="a")], collection="notes", rag=rag).load()
    assert texts(rag) == {"a#1": "one"}
    bad = Document("one", metadata={"source": "a", "path": Path("x")})
    with pytest.raises(UnstorableMetadata, match=r"document 'a': .*'path'\] is a PosixPath"):
        RagCacheLoader([bad], collection="notes", rag=rag).load()
    with pytest.raises(DocumentError, match=r"neither metadata\['source'\] nor an id.*'two'"):
        RagCacheLoader([Document("two")], collection="notes", rag=rag).load()
