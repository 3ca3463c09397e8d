"""LlamaIndex's own pipelines, engines and filters over ragcache's components."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragcache import RagCache
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel

pytest.importorskip(
    "llama_index.core",
    reason="the extra `llama-index` is not installed; `make test-clients` installs it",
)

from llama_index.core import Document
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, LLMMetadata
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import LLM
from llama_index.core.node_parser import MarkdownNodeParser
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeRelationship, TransformComponent
from llama_index.core.vector_stores import MetadataFilter, MetadataFilters

from ragcache_connectors.llama_index import (
    RagCacheIngestion,
    RagCacheLLM,
    RagCacheNodeRetriever,
)
from ragcache_connectors.llama_index.retrievers import convert_filters
from tests.connectors.guide_blocks import check_block

NOTES = [
    Document(id_="boats", text="The survey boat Pipit is moored at the north quay.",
             metadata={"year": 2024, "file_path": "/notes/boats.md"}),
    Document(id_="keys", text="The spare key hangs in the red cupboard of the boathouse.",
             metadata={"year": 2019, "tags": ["key", "red"]}),
]  # fmt: skip
QUESTION = "Where is the survey boat Pipit moored?"
MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(content=QUESTION)]


@pytest.fixture(scope="module")
def rag(tmp_path_factory: pytest.TempPathFactory, quick_reader: LoadedModel) -> Iterator[RagCache]:
    """The notes in a collection, as LlamaIndex's pipeline stores them."""
    path = tmp_path_factory.mktemp("llama-index") / "state"
    with RagCache.open(path, quick_reader, max_tokens=6, embedding="none") as opened:
        step = RagCacheIngestion(collection="notes", rag=opened)
        nodes = IngestionPipeline(transformations=[step]).run(documents=NOTES)
        assert [node.metadata["module"] for node in nodes] == ["boats#1", "keys#1"]
        yield opened


@pytest.fixture
def llm(rag: RagCache) -> RagCacheLLM:
    return RagCacheLLM(rag=rag)


def test_the_classes_are_of_llama_index(llm: RagCacheLLM) -> None:
    assert isinstance(llm, LLM)
    assert issubclass(RagCacheNodeRetriever, BaseRetriever)
    assert issubclass(RagCacheIngestion, TransformComponent)
    assert isinstance(llm.metadata, LLMMetadata)
    assert llm.metadata.is_chat_model
    assert llm.metadata.num_output == 6
    assert llm.metadata.context_window == llm.rag.internals.shared.model.causal.window
    assert "rag" not in llm.to_dict()


async def test_all_ways_of_asking_agree(llm: RagCacheLLM) -> None:
    whole = llm.chat(MESSAGES)
    text = whole.message.content
    assert text
    assert whole.additional_kwargs["total_tokens"] > whole.additional_kwargs["prompt_tokens"]
    *pieces, last = llm.stream_chat(MESSAGES)
    assert "".join(piece.delta for piece in pieces).strip() == text
    assert last.message.content == text
    assert last.raw["finish_reason"] == whole.raw["finish_reason"]
    assert (await llm.achat(MESSAGES)).message.content == text
    *pieces, last = [piece async for piece in await llm.astream_chat(MESSAGES)]
    assert pieces[-1].message.content.strip() == last.message.content == text
    completed = llm.complete(QUESTION)
    assert completed.text == llm.chat(MESSAGES[1:]).message.content
    assert list(llm.stream_complete(QUESTION))[-1].text == completed.text
    assert (await llm.acomplete(QUESTION)).text == completed.text
    streamed = [piece async for piece in await llm.astream_complete(QUESTION)]
    assert streamed[-1].text == completed.text


def test_options_of_calls_come_first(rag: RagCache) -> None:
    llm = RagCacheLLM(rag=rag, generation={"max_tokens": 2, "ignore_eos": True})
    assert llm.complete(QUESTION).additional_kwargs["completion_tokens"] == 2
    more = llm.complete(QUESTION, max_tokens=3)
    assert more.additional_kwargs["completion_tokens"] == 3
    with pytest.raises(InvalidRequest, match="max_tokenz"):
        llm.complete(QUESTION, max_tokenz=3)


def test_a_collection_is_retrieved_from(rag: RagCache) -> None:
    answer = RagCacheLLM(rag=rag, collection="notes").chat(MESSAGES)
    assert answer.raw["sources"] == ["boats#1"]
    assert answer.additional_kwargs["cached_tokens"] > 0


def test_other_content_than_text_is_refused(llm: RagCacheLLM) -> None:
    picture = ChatMessage(blocks=[ImageBlock(image=b"GIF89a")])
    with pytest.raises(InvalidRequest, match="holds a ImageBlock, and ragcache reads text only"):
        llm.chat([picture])


async def test_a_query_engine_reads_states(rag: RagCache) -> None:
    retriever = RagCacheNodeRetriever("notes", rag=rag, k=2)
    seen: list[Any] = []

    class Watched(RagCacheLLM):
        def chat(self, messages: Any, **kwargs: Any) -> Any:
            seen.append(super().chat(messages, **kwargs))
            return seen[-1]

    engine = RetrieverQueryEngine.from_args(retriever, llm=Watched(rag=rag))
    response = engine.query(QUESTION)
    assert response.source_nodes[0].node.text == NOTES[0].text
    [answer] = seen
    assert answer.additional_kwargs["cached_tokens"] > 0
    assert "boats#1" in answer.raw["sources"]
    assert [each.node_id for each in await retriever.aretrieve(QUESTION)] == [
        each.node_id for each in response.source_nodes
    ]


def test_nodes_have_metadata_score_and_source(rag: RagCache) -> None:
    [found] = RagCacheNodeRetriever("notes", rag=rag, k=1).retrieve(QUESTION)
    assert found.score
    node = found.node
    assert node.node_id == "notes/boats#1"
    assert node.metadata["year"] == 2024
    assert node.metadata["uri"] == "/notes/boats.md"
    assert node.relationships[NodeRelationship.SOURCE].node_id == "boats"
    assert "uri" not in node.get_metadata_str("llm")


def test_filters_choose_by_metadata(rag: RagCache) -> None:
    def found(*filters: MetadataFilter, condition: str = "and") -> list[str]:
        chosen = MetadataFilters(filters=list(filters), condition=condition)
        search = RagCacheNodeRetriever("notes", rag=rag, filters=chosen, relative_threshold=0)
        return [each.node.metadata["document"] for each in search.retrieve("boat or key?")]

    new = MetadataFilter(key="year", value=2020, operator=">=")
    red = MetadataFilter(key="tags", value="red", operator="contains")
    assert found(new) == ["boats"]
    assert found(red) == ["keys"]
    assert found(new, red) == []
    assert sorted(found(new, red, condition="or")) == ["boats", "keys"]
    assert found(new, condition="not") == ["keys"]
    nested = MetadataFilters(filters=[MetadataFilters(filters=[new]), red], condition="or")
    assert convert_filters(nested) == {
        "$or": [{"$and": [{"year": {"$gte": 2020}}]}, {"tags": {"$eq": "red"}}]
    }
    with pytest.raises(InvalidRequest, match="'text_match' of LlamaIndex has no counterpart"):
        found(MetadataFilter(key="a", value="b", operator="text_match"))


def test_split_nodes_become_parts_of_their_document(rag: RagCache) -> None:
    text = "\n\n".join(f"# Quay {number}\n\nThe quay is of stone." for number in range(3))
    steps = [MarkdownNodeParser(), RagCacheIngestion(collection="parts", rag=rag)]
    nodes = IngestionPipeline(transformations=steps).run(
        documents=[Document(id_="quay", text=text, metadata={"year": 2020})]
    )
    [row] = rag.documents.get("parts")
    assert row.source_id == "quay"
    assert row.attributes["year"] == 2020
    assert len(nodes) == row.modules == 3


def test_a_state_folder_is_opened_once(tmp_path: Path, notes: Path) -> None:
    from ragcache_connectors.langchain import close_shared

    state = str(tmp_path / "state")
    try:
        step = RagCacheIngestion(collection="notes", state=state)
        step([Document(id_="a", text="The tide is out.")])
        llm = RagCacheLLM(state=state)
        assert llm.open_rag() is RagCacheLLM(state=state, collection="notes").open_rag()
        assert RagCacheNodeRetriever("notes", state=state).retrieve("tide")
    finally:
        close_shared()


@pytest.mark.slow
def test_the_block_of_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_block("llama_index", tmp_path, monkeypatch, capsys)
