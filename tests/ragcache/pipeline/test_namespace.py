"""Namespaces: one folder, model and engine, and nothing of one seen or reused in another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.embeddings import Embeddings

from ragcache import RagCache, SourceDocument
from ragcache.errors import ConfigurationError, RagCacheError, UnknownCollection, UnknownSchema
from ragcache.models import LoadedModel
from ragcache.pipeline import namespace

DOCUMENTS = [SourceDocument(name, f"The {name} is in the yard.") for name in ("kiln", "lamp")]
SCHEMA = '<schema name="trip"><module name="sea">The tide is out.</module></schema>'
PROMPT = '<prompt schema="trip"><sea/>When is it in?</prompt>'
QUESTION = "Where is the kiln?"


class Letters(Embeddings):
    """Counts letters."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[float(text.count(letter)) for letter in "aeiknlmp"] for text in texts]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


@pytest.fixture
def rag(tmp_path: Path, model: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(
        tmp_path / "state", model, max_tokens=4, embedding=Letters(), module_tokens=32
    ) as opened:
        opened.ingest("notes", DOCUMENTS)
        yield opened


@pytest.fixture
def other(rag: RagCache) -> RagCache:
    return rag.within("tenant-2")


def test_a_foreign_document_is_encoded_again(rag: RagCache, other: RagCache) -> None:
    encoded = rag.stats().encoded
    done = other.ingest("notes", DOCUMENTS)
    assert (done.added, done.encoded) == (2, 3), "two modules and a preamble of its own"
    assert rag.stats().encoded == 2 * encoded
    asked = other.ask(QUESTION, collection="notes")
    assert {source.tier for source in asked.sources} == {"host"}


def test_a_foreign_schema_is_encoded_again(rag: RagCache, other: RagCache) -> None:
    rag.schemas.add(SCHEMA)
    with pytest.raises(UnknownSchema, match="known: none yet"):
        other.prompt(PROMPT)
    encoded = rag.stats().encoded
    other.schemas.add(SCHEMA)
    assert rag.stats().encoded > encoded
    other.schemas.delete("trip")
    assert (rag.schemas.names(), other.schemas.names()) == (["trip"], [])
    assert rag.prompt(PROMPT).reuse.cached_tokens
    with pytest.raises(UnknownSchema, match="'trip'"):
        other.prompt(PROMPT)


def test_private_states_are_shared_within_a_namespace_alone(rag: RagCache, other: RagCache) -> None:
    long = QUESTION + " I have looked in the yard, in the shed and behind the gate." * 9
    other.ingest("notes", DOCUMENTS)
    rag.ask(long, collection="notes")
    assert rag.ask(long, collection="notes").reuse.shared_tokens
    assert other.ask(long, collection="notes").reuse.shared_tokens == 0
    assert other.ask(long, collection="notes").reuse.shared_tokens


def test_foreign_texts_are_not_recognized(rag: RagCache, other: RagCache) -> None:
    rag.ingest("notes", [SourceDocument("gate", "The gate is behind the shed, under the lime.")])
    message = [{"role": "user", "content": "The gate is behind the shed, under the lime. Where?"}]
    assert [source.document for source in rag.chat(message).sources] == ["gate"]
    answer = other.chat(message)
    assert (answer.sources, answer.mode, answer.reuse.cached_tokens) == ((), "exact", 0)


def test_nothing_foreign_is_listed_counted_or_named(rag: RagCache, other: RagCache) -> None:
    assert other.modules.all() == []
    assert other.stats().collections == {}
    for call in (
        lambda: other.ask(QUESTION, collection="notes"),
        lambda: other.modules.all("notes"),
        lambda: other.modules.pin("notes"),
        lambda: other.modules.evict("notes"),
        lambda: other.delete("notes", ["kiln"]),
        lambda: other.collections.delete("notes"),
        lambda: other.documents.rename("notes", "kiln", "oven"),
        lambda: other.schemas.generate("notes", expanded=True),
        lambda: other.collections.add_scaffold("notes", ["kiln", "lamp"]),
    ):
        with pytest.raises(UnknownCollection, match=r"'notes'; known: none yet"):
            call()
    assert len(rag.modules.all()) == 2


def test_collections_of_one_name_have_their_own_documents(rag: RagCache, other: RagCache) -> None:
    other.ingest("notes", [SourceDocument("kiln", "The kiln is at sea.")])
    assert [row.document for row in other.modules.all("notes")] == ["kiln"]
    assert other.stats().collections == {"notes": 1}
    assert rag.stats().collections == {"notes": 2}
    assert [s.document for s in other.ask(QUESTION, collection="notes").sources] == ["kiln"]
    assert len(rag.ask(QUESTION, collection="notes").sources) == 2


def test_evicting_and_deleting_leave_the_others_alone(rag: RagCache, other: RagCache) -> None:
    other.ingest("notes", DOCUMENTS)
    other.modules.pin("notes")
    assert not any(row.pinned for row in rag.modules.all())
    other.modules.evict("notes")
    assert {row.tiers for row in rag.modules.all()} == {("disk", "host")}
    assert {row.tiers for row in other.modules.all()} == {()}
    other.modules.warm("notes")
    assert other.delete("notes", ["kiln"]) == 1
    assert other.collections.delete("notes") == 1
    asked = rag.ask(QUESTION, collection="notes")
    assert {source.tier for source in asked.sources} == {"host"}


def test_a_deleted_collection_takes_its_states(rag: RagCache) -> None:
    assert rag.ask(QUESTION, collection="notes").sources
    assert rag.collections.delete("notes") == 2
    assert rag.stats().tiers["disk"]["states"] == 1, "the preamble"
    with pytest.raises(UnknownCollection, match="known: none yet"):
        rag.ask(QUESTION, collection="notes")
    rag.ingest("notes", [SourceDocument("oven", "The kiln is an oven.")])
    assert [s.document for s in rag.ask(QUESTION, collection="notes").sources] == ["oven"]


@pytest.mark.parametrize("part", ["IngestionWorkers", "ModeGate", "parse_optional_bytes"])
def test_a_folder_that_cannot_be_opened_leaves_no_thread(
    part: str, tmp_path: Path, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*values: object) -> None:
        if engines() - before:
            raise RuntimeError("no memory")

    def engines() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "ragcache-engine"}

    before = engines()
    monkeypatch.setattr(namespace, part, fail)
    with pytest.raises(RuntimeError, match="no memory"):
        RagCache.open(tmp_path / "state", model)
    assert engines() == before


def test_closing_a_view_closes_nothing(rag: RagCache, other: RagCache) -> None:
    with other:
        other.ingest("notes", DOCUMENTS)
    assert other.ask(QUESTION, collection="notes").sources
    assert other.within("default").modules.all() == rag.modules.all()
    assert (rag.namespace, other.namespace) == ("default", "tenant-2")
    rag.close()
    with pytest.raises(RagCacheError):
        other.ingest("notes", [SourceDocument("oven", "The oven is hot.")])


def test_a_name_that_cannot_be_used_is_refused(rag: RagCache) -> None:
    for name in ("", "a b", "a/b", "é", "x" * 65, "a\n"):
        with pytest.raises(ConfigurationError, match="cannot name a namespace"):
            rag.within(name)
