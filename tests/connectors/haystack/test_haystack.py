"""Haystack's own pipelines over ragcache's components."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache import RagCache
from ragcache.errors import InvalidRequest, UnreadableDocument
from ragcache.models import LoadedModel

pytest.importorskip(
    "haystack", reason="the extra `haystack` is not installed; `make test-clients` installs it"
)

from haystack import Document, Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.preprocessors import DocumentSplitter
from haystack.dataclasses import ChatMessage, ImageContent, StreamingChunk
from haystack.utils.filters import document_matches_filter

from ragcache_connectors.haystack import (
    RagCacheChatGenerator,
    RagCacheDocumentWriter,
    RagCacheTextRetriever,
)
from ragcache_connectors.haystack.retrievers import convert_filters
from tests.connectors.guide_blocks import check_block

NOTES = [
    Document(id="boats", content="The survey boat Pipit is moored at the north quay.",
             meta={"year": 2024, "url": "https://x.example/boats"}),
    Document(id="keys", content="The spare key hangs in the red cupboard of the boathouse.",
             meta={"year": 2019, "team": "ops"}),
]  # fmt: skip
QUESTION = "Where is the survey boat Pipit moored?"
MESSAGES = [ChatMessage.from_system("Be brief."), ChatMessage.from_user(QUESTION)]
TEMPLATE = [
    ChatMessage.from_user(
        "{% for each in documents %}{{ each.content }}\n\n{% endfor %}{{ question }}"
    )
]


@pytest.fixture(scope="module")
def rag(tmp_path_factory: pytest.TempPathFactory, quick_reader: LoadedModel) -> Iterator[RagCache]:
    """The notes in a collection, as Haystack's pipeline stores them."""
    path = tmp_path_factory.mktemp("haystack") / "state"
    with RagCache.open(path, quick_reader, max_tokens=6, embedding="none") as opened:
        indexing = Pipeline()
        indexing.add_component("writer", RagCacheDocumentWriter("notes", rag=opened))
        done = indexing.run({"writer": {"documents": NOTES}})
        assert done == {"writer": {"documents_written": 2}}
        yield opened


def query_pipeline(rag: RagCache) -> Pipeline:
    pipeline = Pipeline()
    pipeline.add_component("retriever", RagCacheTextRetriever("notes", top_k=2, rag=rag))
    pipeline.add_component("prompt", ChatPromptBuilder(TEMPLATE, required_variables="*"))
    pipeline.add_component("generator", RagCacheChatGenerator(rag=rag))
    pipeline.connect("retriever.documents", "prompt.documents")
    pipeline.connect("prompt.prompt", "generator.messages")
    return pipeline


def test_a_pipeline_reads_states(rag: RagCache) -> None:
    asked = {"retriever": {"query": QUESTION}, "prompt": {"question": QUESTION}}
    [reply] = query_pipeline(rag).run(asked)["generator"]["replies"]
    assert reply.meta["usage"]["cached_tokens"] > 0
    assert reply.meta["sources"][0] == "boats#1"
    assert reply.meta["model"] == rag.internals.shared.model.name


async def test_a_pipeline_runs_without_waiting_threads(rag: RagCache) -> None:
    asked = {"retriever": {"query": QUESTION}, "prompt": {"question": QUESTION}}
    found = await query_pipeline(rag).run_async(asked)
    expected = query_pipeline(rag).run(asked)
    texts = [each["generator"]["replies"][0].text for each in (found, expected)]
    assert texts[0] == texts[1]


async def test_replies_are_streamed(rag: RagCache) -> None:
    chunks: list[StreamingChunk] = []
    generator = RagCacheChatGenerator(rag=rag, streaming_callback=chunks.append)
    [reply] = generator.run(MESSAGES)["replies"]
    assert "".join(chunk.content for chunk in chunks).strip() == reply.text
    waited: list[str] = []

    async def keep(chunk: StreamingChunk) -> None:
        waited.append(chunk.content)

    [again] = (await generator.run_async(MESSAGES, streaming_callback=keep))["replies"]
    assert "".join(waited).strip() == again.text == reply.text
    assert generator.run([])["replies"] == (await generator.run_async([]))["replies"] == []


def test_options_of_a_run_come_first(rag: RagCache) -> None:
    generator = RagCacheChatGenerator(
        rag=rag, collection="notes", generation_kwargs={"max_tokens": 2, "ignore_eos": True}
    )
    [reply] = generator.run(QUESTION)["replies"]
    assert reply.meta["usage"]["completion_tokens"] == 2
    assert reply.meta["sources"] == ["boats#1"]
    both = generator.run(QUESTION, generation_kwargs={"max_tokens": 3, "n": 2, "temperature": 1.0})
    assert [each.meta["usage"]["completion_tokens"] for each in both["replies"]] == [3, 3]
    with pytest.raises(InvalidRequest, match="max_tokenz"):
        generator.run(QUESTION, generation_kwargs={"max_tokenz": 3})
    picture = ImageContent("R0lGODlh", "image/gif", validation=False)
    with pytest.raises(InvalidRequest, match="holds a ImageContent"):
        generator.run([ChatMessage.from_user(content_parts=["Look:", picture])])


def test_documents_have_meta_and_score(rag: RagCache) -> None:
    [found] = RagCacheTextRetriever("notes", rag=rag).run(QUESTION, top_k=1)["documents"]
    assert (found.id, found.content) == ("boats#1", NOTES[0].content)
    assert found.score
    assert found.meta == {
        "year": 2024,
        "url": "https://x.example/boats",
        "document": "boats",
        "module": "boats#1",
        "uri": "https://x.example/boats",
    }


OLD = {"field": "meta.year", "operator": "<", "value": 2020}
OPS = {"field": "meta.team", "operator": "==", "value": "ops"}
FILTERS = [
    OLD,
    OPS,
    {"operator": "AND", "conditions": [OLD, OPS]},
    {
        "operator": "OR",
        "conditions": [{"field": "meta.year", "operator": "==", "value": 2024}, OPS],
    },
    {"operator": "NOT", "conditions": [OPS]},
    {"field": "meta.year", "operator": "in", "value": [2019, 2020]},
    {"field": "meta.year", "operator": "not in", "value": [2019, 2020]},
    {"field": "meta.team", "operator": "!=", "value": "ops"},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_choose_what_haystack_chooses(filters: dict[str, object], rag: RagCache) -> None:
    retriever = RagCacheTextRetriever(
        "notes", rag=rag, filters=filters, search={"relative_threshold": 0.0}
    )
    found = {each.meta["document"] for each in retriever.run("boat or key?")["documents"]}
    assert found == {each.id for each in NOTES if document_matches_filter(filters, each)}


def test_wrong_filters_are_refused() -> None:
    for wrong in ({"field": "a", "operator": "~", "value": 1}, {"operator": "XOR"}, {"a": 1}):
        with pytest.raises(InvalidRequest):
            convert_filters(wrong)
    with pytest.raises(InvalidRequest, match="k"):
        RagCacheTextRetriever("notes", top_k=-1)


def test_split_documents_become_parts(rag: RagCache) -> None:
    splitter = DocumentSplitter(split_by="word", split_length=30)
    indexing = Pipeline()
    indexing.add_component("splitter", splitter)
    indexing.add_component("writer", RagCacheDocumentWriter("parts", rag=rag))
    indexing.connect("splitter", "writer")
    whole = Document(id="quay", content="The quay is of stone. " * 40, meta={"year": 2020})
    assert indexing.run({"splitter": {"documents": [whole]}})["writer"] == {"documents_written": 1}
    [row] = rag.documents.get("parts")
    assert dict(row.attributes) == {"year": 2020}
    assert row.modules > 2
    writer = RagCacheDocumentWriter("parts", rag=rag)
    assert writer.run([]) == {"documents_written": 0}
    with pytest.raises(UnreadableDocument, match="'empty' has no text"):
        writer.run([Document(id="empty")])


def print_chunk(chunk: StreamingChunk) -> None:
    """A callback that a pipeline's file can name."""


def test_pipelines_are_saved_and_loaded(tmp_path: Path) -> None:
    pipeline = Pipeline()
    state = str(tmp_path / "state")
    parts = {
        "writer": RagCacheDocumentWriter("notes", state),
        "retriever": RagCacheTextRetriever("notes", state, OLD, 3, {"search": "sparse"}),
        "generator": RagCacheChatGenerator(
            state,
            "a/b",
            "notes",
            "primed:4",
            {"max_tokens": 9},
            print_chunk,
            {"host_bytes": "1GiB"},
        ),
    }
    for name, part in parts.items():
        pipeline.add_component(name, part)
    trusted = ["ragcache_connectors.haystack", __name__]
    loaded = Pipeline.loads(pipeline.dumps(), allowed_modules=trusted)
    for name, part in parts.items():
        assert loaded.get_component(name).to_dict() == part.to_dict()
    assert loaded.get_component("generator").streaming_callback is print_chunk


@pytest.mark.slow
def test_the_block_of_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_block("haystack", tmp_path, monkeypatch, capsys)
