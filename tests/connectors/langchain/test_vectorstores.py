"""The vector store: LangChain's own suite, and and what it leaves out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from ragcache import RagCache
from ragcache.errors import DocumentError, InvalidRequest, MissingExtra, UnstorableMetadata
from ragcache.retrieval import Retriever
from ragcache_connectors.langchain import RagCacheVectorStore

LONG = "# Boats\n\n" + " ".join(f"Boat number {n} is moored at quay {n}." for n in range(60)) + "  "


class TestStandard(VectorStoreIntegrationTests):
    """No flag is off."""

    @pytest.fixture
    def vectorstore(self, rag: RagCache) -> VectorStore:
        return RagCacheVectorStore(self.get_embeddings(), collection="standard", rag=rag)


def fill(store: RagCacheVectorStore) -> None:
    years = {"foo": 2020, "bar": 2022, "baz": 2024}
    documents = [Document(text, metadata={"year": year}) for text, year in years.items()]
    store.add_documents(documents, ids=list(years))


def contents(documents: list[Document]) -> list[str]:
    return [document.page_content for document in documents]


async def test_scores_are_cosines_and_relevance_is_never_negative(
    store: RagCacheVectorStore,
) -> None:
    fill(store)
    scored = store.similarity_search_with_score("bar", k=3)
    scores = [score for _, score in scored]
    assert scores == sorted(scores, reverse=True)
    assert (scored[0][0].id, scores[0]) == ("bar", pytest.approx(1.0))
    relevant = store.similarity_search_with_relevance_scores("bar", k=3)
    assert [score for _, score in relevant] == [max(0.0, score) for score in scores]
    assert await store.asimilarity_search_with_relevance_scores("bar", k=3) == relevant
    near = store.similarity_search_with_relevance_scores("bar", k=3, score_threshold=0.99)
    assert [document.id for document, _ in near] == ["bar"]


async def test_a_search_opens_nothing_in_the_event_loop(
    store: RagCacheVectorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    open_retriever, threads = RagCache.retriever, []

    def record_thread(rag: RagCache, *embedding: Any) -> Retriever:
        threads.append(threading.current_thread())
        return open_retriever(rag, *embedding)

    monkeypatch.setattr(RagCache, "retriever", record_thread)
    await store.asimilarity_search("bar")
    await store.asimilarity_search_with_relevance_scores("bar")
    await store.amax_marginal_relevance_search("bar")
    assert threads
    assert threading.main_thread() not in threads


def test_a_vector_finds_what_its_text_does(store: RagCacheVectorStore) -> None:
    fill(store)
    vector = DeterministicFakeEmbedding(size=6).embed_query("baz")
    assert store.similarity_search_by_vector(vector, k=2) == store.similarity_search("baz", k=2)


async def test_every_search_takes_a_filter(store: RagCacheVectorStore) -> None:
    fill(store)
    late: dict[str, Any] = {"filter": {"year": {"$gt": 2020}}}
    vector = DeterministicFakeEmbedding(size=6).embed_query("foo")
    every = [
        store.similarity_search("foo", **late),
        store.similarity_search_by_vector(vector, **late),
        store.max_marginal_relevance_search("foo", **late),
        store.max_marginal_relevance_search_by_vector(vector, **late),
        await store.asimilarity_search("foo", **late),
        await store.asimilarity_search_by_vector(vector, **late),
        await store.amax_marginal_relevance_search("foo", **late),
        await store.amax_marginal_relevance_search_by_vector(vector, **late),
        store.as_retriever(search_kwargs=late).invoke("foo"),
        await store.as_retriever(search_type="mmr", search_kwargs=late).ainvoke("foo"),
    ]
    assert [sorted(contents(found)) for found in every] == [["bar", "baz"]] * len(every)
    assert store.similarity_search("foo", k=1, **late) != [], "the filter comes before the cut"
    with pytest.raises(InvalidRequest, match="unknown operator"):
        store.similarity_search("foo", filter={"year": {"$near": 1}})
    with pytest.raises(InvalidRequest, match="unknown argument 'filters'"):
        store.similarity_search("foo", filters={})


def test_diversity_passes_over_copies(store: RagCacheVectorStore) -> None:
    store.add_texts(["foo", "foo ", "bar"], ids=["1", "2", "3"])
    assert {d.id for d in store.similarity_search("foo", k=2)} == {"1", "2"}
    diverse = store.max_marginal_relevance_search("foo", k=2, lambda_mult=0.1)
    assert "3" in {document.id for document in diverse}
    plain = store.max_marginal_relevance_search("foo", k=2, lambda_mult=1.0)
    assert {document.id for document in plain} == {"1", "2"}


def test_a_long_document_is_several_modules_and_one_document(store: RagCacheVectorStore) -> None:
    document = Document(LONG, id="boats", metadata={"kind": "list"})
    assert store.add_documents([document]) == ["boats"]
    [row] = store.rag.documents.get("notes")
    assert row.modules > 3
    assert store.get_by_ids(["boats"]) == [document], "whole, to the last space"
    parts = store.similarity_search("boat", k=3)
    assert {part.id for part in parts} == {"boats"}
    assert all(part.page_content in LONG or "# Boats" in part.page_content for part in parts)
    assert all(len(part.page_content) < len(LONG) / 2 for part in parts)
    store.delete(["boats"])
    assert store.get_by_ids(["boats"]) == store.similarity_search("boat") == []


def test_text_comes_back_as_it_was_given(store: RagCacheVectorStore) -> None:
    text = "\n  foo\tbar \n\n"
    store.add_texts([text], ids=["1"])
    assert contents(store.similarity_search("foo", k=1)) == [text]
    assert contents(store.get_by_ids(["1", "2"])) == [text]


def test_the_last_document_of_an_id_is_kept(store: RagCacheVectorStore) -> None:
    assert store.add_texts(["foo", "bar"], ids=["1", "1"]) == ["1", "1"]
    assert contents(store.get_by_ids(["1"])) == ["bar"]


def test_documents_without_ids_get_new_ones(store: RagCacheVectorStore) -> None:
    first, second = store.add_documents([Document("foo"), Document("foo", id="")])
    assert len({first, second, ""}) == 3
    assert contents(store.get_by_ids([second, first])) == ["foo", "foo"]


@pytest.mark.slow
def test_a_prompt_that_pastes_what_was_found_reads_its_states(store: RagCacheVectorStore) -> None:
    store.add_texts([LONG, "\nThe spare key of the boathouse hangs in the red cupboard.\n"])
    found = [*store.similarity_search("boat", k=2), *store.similarity_search("key", k=20)[-2:]]
    pasted = "\n\n".join(dict.fromkeys(contents(found)))
    answer = store.rag.chat([{"role": "user", "content": f"Read:\n\n{pasted}\n\nWhere?"}])
    assert answer.mode == "recognized:rooted"
    assert len(answer.sources) == len(set(contents(found)))


def test_deleting_without_ids_deletes_everything(store: RagCacheVectorStore) -> None:
    assert store.delete() is True, "of no collection"
    fill(store)
    assert store.delete() is True
    assert store.similarity_search("foo") == store.get_by_ids(["foo"]) == []


def test_annotated_documents_hold_module_tier_and_tokens(rag: RagCache) -> None:
    embedding = DeterministicFakeEmbedding(size=6)
    store = RagCacheVectorStore(embedding, collection="notes", rag=rag, annotated=True)
    fill(store)
    [found] = store.similarity_search("foo", k=1)
    mark = found.metadata["ragcache"]
    assert (mark["module"], mark["document"], mark["tier"]) == ("foo#1", "foo", "host")
    [placed] = rag.modules.locate(rag.modules.named("notes", ["foo#1"]))
    assert mark["tokens"] == placed.tokens > 0
    store.add_documents([found])
    assert store.get_by_ids(["foo"])[0].metadata == {"year": 2020}, "the mark is not stored"


def test_unstorable_metadata_is_named_and_nothing_is_stored(store: RagCacheVectorStore) -> None:
    cases: list[tuple[Any, str]] = [
        ({1}, r"metadata\['x'\] is a set"),
        (Path("a"), "is a PosixPath"),
        (float("nan"), "is nan"),
        ({"deep": [b"1"]}, r"metadata\['x'\]\['deep'\]\[0\] is a bytes"),
        ({1: 2}, "the key 1"),
    ]
    for value, said in cases:
        good, bad = Document("foo"), Document("bar", metadata={"x": value})
        with pytest.raises(UnstorableMetadata, match=said):
            store.add_documents([good, bad])
    assert store.similarity_search("foo") == []


def test_empty_documents_and_wrong_counts_are_refused(store: RagCacheVectorStore) -> None:
    with pytest.raises(DocumentError, match="an empty document"):
        store.add_texts(["foo", " "])
    with pytest.raises(ValueError, match="2 documents have 1 ids"):
        store.add_documents([Document("foo"), Document("bar")], ids=["1"])
    with pytest.raises(ValueError, match="metadatas must match"):
        store.add_texts(["foo", "bar"], metadatas=[{}])
    with pytest.raises(DocumentError, match="not UTF-8 text"):
        store.add_texts(["foo"], ids=["\ud800"])
    assert store.add_documents([]) == []


async def test_from_texts_makes_a_store_of_a_folder(tmp_path: Path) -> None:
    from ragcache_connectors.langchain import close_shared

    embedding = DeterministicFakeEmbedding(size=6)
    where: dict[str, Any] = {"collection": "notes", "state": tmp_path / "state"}
    try:
        store = RagCacheVectorStore.from_texts(["foo"], embedding, [{"n": 1}], ids=["1"], **where)
        assert store.get_by_ids(["1"]) == [Document("foo", id="1", metadata={"n": 1})]
        documents = [Document("bar", id="2")]
        other = await RagCacheVectorStore.afrom_documents(documents, embedding, **where)
        assert other.rag is store.rag
        assert len(await other.asimilarity_search("bar")) == 2
    finally:
        close_shared()


def test_without_an_embedder_a_search_is_sparse(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise MissingExtra("no minilm")

    monkeypatch.setattr("ragcache_connectors.langchain.vectorstores.minilm", missing)
    store = RagCacheVectorStore(collection="notes", rag=rag)
    store.add_texts(["The boat is moored.", "The key hangs there."], ids=["boat", "key"])
    assert [document.id for document in store.similarity_search("keys")] == ["key"]
    assert store.embeddings is None
    with pytest.raises(InvalidRequest, match="there is no embedder"):
        store.similarity_search_with_relevance_scores("keys")
    with pytest.raises(InvalidRequest, match="needs an embedder"):
        store.similarity_search_by_vector([1.0])


def test_tenants_do_not_see_each_others_documents(rag: RagCache) -> None:
    embedding = DeterministicFakeEmbedding(size=6)
    mine, theirs = (
        RagCacheVectorStore(embedding, collection="notes", rag=rag.within(name))
        for name in ("mine", "theirs")
    )
    mine.add_texts(["foo"], ids=["1"])
    theirs.add_texts(["bar"], ids=["1"])
    assert contents(mine.similarity_search("bar")) == ["foo"]
    assert contents(theirs.get_by_ids(["1"])) == ["bar"]
    theirs.delete()
    assert contents(mine.get_by_ids(["1"])) == ["foo"]


def test_a_store_gives_its_collection_an_instruction(rag: RagCache) -> None:
    store = RagCacheVectorStore(collection="guide", rag=rag, instruction="Answer in French.")
    store.add_texts(["The quay is north."])
    assert rag.collections.instruction("guide") == "Answer in French."
