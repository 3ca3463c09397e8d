"""Retrieval without an answer, and filters of questions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from ragcache import RagCache, SourceDocument
from ragcache.errors import ConfigurationError, InvalidRequest, UnknownCollection
from ragcache.models import LoadedModel
from ragcache.pipeline import Answer
from ragcache.retrieval import SearchParams

KEYS = "The spare key of the boathouse hangs in the red cupboard."
LOCKS = "The lock of the boathouse takes the spare key. " * 40


@pytest.fixture
def rag(tmp_path: Path, reader: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", reader, max_new_tokens=2, module_tokens=96) as opened:
        opened.ingest(
            "notes",
            [
                SourceDocument("keys", KEYS, "file:///keys", {"year": 2020, "team": "quay"}),
                SourceDocument("locks", LOCKS, metadata={"year": 2024}),
            ],
        )
        yield opened


def documents(answer: Answer) -> set[str]:
    return {source.document for source in answer.sources}


def test_modules_come_with_the_metadata_of_their_document(rag: RagCache) -> None:
    [hit] = rag.retrieve("red cupboard", collection="notes", k=1).hits
    assert (hit.module.document, hit.module.uri) == ("keys", "file:///keys")
    assert hit.module.attributes == {"year": 2020, "team": "quay"}
    assert rag.retrieve("spare key", collection="notes", filters={"year": {"$lt": 2000}}).hits == ()


def test_every_way_to_ask_takes_filters_and_a_threshold(rag: RagCache) -> None:
    async def ways() -> list[Answer]:
        asked = await rag.aask_batch(["spare key?"], collection="notes", filters=old)
        stream = await rag.astream("spare key?", collection="notes", filters=old)
        return [*asked, await stream, await rag.aask("spare key?", collection="notes", filters=old)]

    old = {"year": 2020}
    answers = [
        rag.ask("spare key?", collection="notes", filters=old),
        *rag.ask_batch(["spare key?"], collection="notes", filters=old),
        rag.stream("spare key?", collection="notes", filters=old).result(),
        *asyncio.run(ways()),
    ]
    assert [documents(answer) for answer in answers] == [{"keys"}] * 6
    refused = rag.ask("spare key?", collection="notes", threshold=1.0)
    assert (refused.finish_reason, refused.sources) == ("no_documents", ())
    with pytest.raises(InvalidRequest, match="unknown operator"):
        rag.ask("spare key?", collection="notes", filters={"year": {"$near": 1}})


def test_modules_are_got_by_name_in_the_order_of_the_names(rag: RagCache) -> None:
    rows = rag.get_modules(["locks#2", "nowhere#1", "keys#1", "locks#2"], collection="notes")
    assert [row.name for row in rows] == ["locks#2", "keys#1", "locks#2"]
    assert rows[1].text.strip() == KEYS
    with pytest.raises(UnknownCollection):
        rag.get_modules(["keys#1"], collection="recipes")


def test_documents_are_listed_with_metadata_and_modules(rag: RagCache) -> None:
    keys, locks = rag.documents("notes")
    assert (keys.source_id, keys.modules, keys.attributes["team"]) == ("keys", 1, "quay")
    assert (locks.source_id, locks.attributes) == ("locks", {"year": 2024})
    assert rag.documents("notes", ["locks", "nowhere"]) == [locks]
    assert locks.modules == len(rag.list_modules("notes")) - 1 > 1
    with pytest.raises(UnknownCollection):
        rag.documents("recipes")


def test_another_embedder_has_vectors_of_its_own(rag: RagCache) -> None:
    with pytest.raises(InvalidRequest, match="needs an embedder"):
        rag.retrieve("key", collection="notes", search="meaning")
    other = rag.retriever(DeterministicFakeEmbedding(size=6))
    text = rag.get_modules(["keys#1"], collection="notes")[0].text.strip()
    [hit] = other.retrieve(text, "notes", SearchParams(1, "meaning")).hits
    assert (hit.module.name, hit.score) == ("keys#1", pytest.approx(1.0))
    assert rag.retriever() is rag.retriever(rag.retriever().embedder)


def test_no_modules_cannot_be_asked_for(rag: RagCache) -> None:
    with pytest.raises(ConfigurationError, match="k is 0"):
        rag.retrieve("key", collection="notes", k=0)


def test_retrieval_for_asyncio_finds_the_same(rag: RagCache) -> None:
    found = asyncio.run(rag.aretrieve("red cupboard", collection="notes", k=2))
    assert found == rag.retrieve("red cupboard", collection="notes", k=2)
    with pytest.raises(UnknownCollection):
        asyncio.run(rag.aretrieve("key", collection="recipes"))


def test_a_question_of_one_character_finds_it(rag: RagCache) -> None:
    rag.ingest("ships", [SourceDocument("a", "船停在北京的码头。"), SourceDocument("b", "钥匙。")])
    [hit] = rag.retrieve("京", collection="ships").hits
    assert hit.module.document == "a"
    assert documents(rag.ask("京", collection="ships")) == {"a"}
