"""Anthropic's messages: blocks, tools, marks, citations, usage, events and errors."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragcache import AnswerSpan, GenerationParams, RagCache, SourceDocument
from ragcache.engine import Choice
from ragcache.models import LoadedModel
from ragcache_api.cluster.streams import is_resumable
from ragcache_api.http.anthropic import MessagesRequest, chat_of
from ragcache_api.http.dispatch import parse_body
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.routes.messages import _BlockEvents, citations_of
from tests.api.http.asgi import events
from tests.api.http.conftest import LEAVE, client_of
from tests.conftest import REPOSITORY, write_notes
from tests.ragcache.documents.sample_files import pdf

MODEL = "ragcache-reader"
HANDBOOK = REPOSITORY / "examples" / "handbook"
QUESTION = "On what date does our leave year start?"


@pytest.fixture(scope="module")
def rag(quick_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagCache]:
    folder = tmp_path_factory.mktemp("messages")
    with RagCache.open(folder / "state", quick_reader, force_modes=True) as opened:
        opened.ingest("notes", write_notes(folder / "notes"))
        yield opened


def send(client: TestClient, path: str = "/v1/messages", **body: Any) -> Any:
    given = {"model": MODEL, "max_tokens": 6, "messages": [{"role": "user", "content": LEAVE}]}
    return client.post(path, json=given | body)


def document(text: str, **more: Any) -> dict[str, Any]:
    source = {"type": "text", "media_type": "text/plain", "data": text}
    cited = {"title": "leave", "citations": {"enabled": True}}
    return {"type": "document", "source": source, **cited, **more}


def request(*messages: Any, **body: Any) -> MessagesRequest:
    return MessagesRequest(model=MODEL, max_tokens=6, messages=list(messages), **body)


def test_a_message_is_a_chat_of_the_library(client: TestClient, rag: RagCache) -> None:
    told = send(client, system=[{"type": "text", "text": "Be brief."}]).json()
    answer = rag.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": LEAVE}],
        generation=GenerationParams(max_tokens=6),
    )
    assert (told["type"], told["role"], told["model"]) == ("message", "assistant", MODEL)
    assert told["content"] == [{"type": "text", "text": answer.choices[0].text.lstrip(),
                                "citations": None}]  # fmt: skip
    usage = told["usage"]
    read = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[name] for name in read) == answer.reuse.prompt_tokens
    assert usage["output_tokens"] == len(answer.choices[0].token_ids)
    assert told["stop_reason"] in ("max_tokens", "end_turn")


def test_events_add_up_to_the_message(client: TestClient) -> None:
    whole = send(client).json()
    told = events(send(client, stream=True).text)
    assert all(value["type"] == name for name, value in told)
    names = [name for name, _ in told]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [value["delta"] for name, value in told if name == "content_block_delta"]
    assert "".join(each["text"] for each in deltas) == whole["content"][0]["text"]
    ended = told[-2][1]
    assert ended["delta"]["stop_reason"] == whole["stop_reason"]
    assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_stop_sequence_is_named(client: TestClient) -> None:
    word = send(client).json()["content"][0]["text"].split()[-1]
    told = send(client, stop_sequences=["never", word]).json()
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", word)
    assert word not in "".join(each["text"] for each in told["content"])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/collections/notes/v1/messages"])
def test_a_collection_is_cited_as_search_results(client: TestClient, path: str) -> None:
    model = MODEL if "collections" in path else f"{MODEL}/notes"
    told = send(client, path, model=model, max_tokens=20, min_confidence=0).json()
    [block] = told["content"]
    cited = block["citations"][0]
    assert cited["type"] == "search_result_location"
    assert "26 days" in cited["cited_text"]
    assert told["sources"][cited["search_result_index"]]["source"]["name"] == cited["source"]
    assert told["usage"]["cache_read_input_tokens"] > 0


def test_documents_are_cited_by_characters(client: TestClient) -> None:
    text = (HANDBOOK / "annual-leave.md").read_text("utf-8")
    content = [document("# Boats\n\nThe Pipit is red.", title=None), document(text),
               {"type": "text", "text": QUESTION}]  # fmt: skip
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 20,
             "min_confidence": 0}  # fmt: skip
    [block] = send(client, **asked).json()["content"]
    [cited, *_] = block["citations"]
    assert cited["type"] == "char_location"
    assert (cited["document_index"], cited["document_title"]) == (1, "leave")
    begin, end = cited["start_char_index"], cited["end_char_index"]
    assert text[begin:end] == cited["cited_text"] == block["text"]
    told = events(send(client, **asked, stream=True).text)
    deltas = [value["delta"] for name, value in told if name == "content_block_delta"]
    assert [each["citation"] for each in deltas if each["type"] == "citations_delta"] == [
        *block["citations"]
    ]


def test_citations_count_blocks_and_pages(rag: RagCache) -> None:
    parts = ["The Pipit is red.", "The Wren is blue."]
    content = {"type": "content", "content": [{"type": "text", "text": each} for each in parts]}
    asked = request({"role": "user", "content": [document("", source=content)]})
    cited = chat_of(asked).cited
    answer = rag.chat([{"role": "user", "content": "Hi"}])
    [blue] = citations_of(with_span(answer, AnswerSpan("leave", "leave#1", 31, 35)), cited)
    assert (blue["start_block_index"], blue["end_block_index"]) == (1, 2)
    assert blue["cited_text"] == parts[1]
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}
    asked = request({"role": "user", "content": [document("", source=source)]})
    cited = chat_of(asked, {0: SourceDocument("leave.pdf", "The Wren is blue.")}).cited
    [page] = citations_of(with_span(answer, AnswerSpan("leave", "leave#1", 4, 8, page=3)), cited)
    assert page["type"] == "page_location"
    assert (page["start_page_number"], page["end_page_number"]) == (3, 4)


def with_span(answer: Any, span: AnswerSpan) -> Any:
    return replace(answer, choices=(Choice((), "blue", "stop"),), spans=(span,))


@pytest.mark.slow
def test_a_pdf_file_is_read(client: TestClient) -> None:
    source = {"type": "base64", "media_type": "application/pdf"}
    data = base64.b64encode(pdf()).decode()
    asked = {"type": "text", "text": "Where does the lighthouse keeper sleep?"}
    content = [document("", source={**source, "data": data}), asked]
    told = send(client, messages=[{"role": "user", "content": content}], max_tokens=20,
                min_confidence=0).json()  # fmt: skip
    assert told["content"][0]["citations"][0]["start_page_number"] == 2
    broken = [document("", source={**source, "data": "?"})]
    refused = send(client, messages=[{"role": "user", "content": broken}])
    assert refused.status_code == 400
    assert "no base64" in refused.json()["error"]["message"]


def test_a_marked_text_is_created_once_and_read_then(client: TestClient, rag: RagCache) -> None:
    text = (HANDBOOK / "travel.md").read_text("utf-8")
    plain = {"type": "text", "text": text}
    unmarked = send(client, system=[plain]).json()["usage"]
    assert unmarked["cache_creation_input_tokens"] == 0
    marked = [plain | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    first = send(client, system=marked).json()["usage"]
    created = first["cache_creation_input_tokens"]
    assert created > 96
    kept = [each for each in rag.modules.observed.all() if each.kept_until > 0]
    assert sum(len(each.token_ids) for each in kept) == created
    other = [{"role": "user", "content": "Who has the key?"}]
    again = send(client, messages=other, system=[plain]).json()["usage"]
    assert again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] >= created


def test_a_short_marked_text_is_left_as_it_is(client: TestClient, rag: RagCache) -> None:
    known = len(rag.modules.observed.all())
    marked = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert send(client, system=marked).json()["usage"]["cache_creation_input_tokens"] == 0
    assert len(rag.modules.observed.all()) == known


def test_tokens_are_counted_as_they_are_read(client: TestClient) -> None:
    counted = client.post(
        "/v1/messages/count_tokens",
        json={"model": MODEL, "messages": [{"role": "user", "content": LEAVE}]},
    )
    usage = send(client).json()["usage"]
    del usage["output_tokens"]
    assert counted.json() == {"input_tokens": sum(usage.values())}


def test_blocks_of_tools_become_messages() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2", "is_error": True}
    told = chat_of(request(
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        tools=[{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )).chat  # fmt: skip
    plain = [each.plain() for each in told.messages]
    assert [each["role"] for each in plain] == ["user", "assistant", "tool", "user"]
    assert plain[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert plain[2] == {"role": "tool", "content": "Error: 2", "tool_call_id": "toolu_1"}
    assert told.tools is not None
    assert told.tools[0].function["parameters"] == {"type": "object"}
    assert (told.tool_choice, told.parallel_tool_calls) == ("required", False)


def test_calls_become_blocks() -> None:
    writer = _BlockEvents()
    call = {"index": 0, "id": "call_7", "function": {"name": "add", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    fed = [{"content": "Yes."}, {"tool_calls": [call]}, {"tool_calls": [more]}]
    told = b"".join([*(event for each in fed for event in writer.feed(each)), *writer.end(())])
    found = [(value["type"], value["index"]) for _, value in events(told.decode())]
    assert found == [
        ("content_block_start", 0), ("content_block_delta", 0), ("content_block_stop", 0),
        ("content_block_start", 1), ("content_block_delta", 1), ("content_block_stop", 1),
    ]  # fmt: skip
    started = events(told.decode())[3][1]["content_block"]
    assert started == {"type": "tool_use", "id": "toolu_7", "name": "add", "input": {}}


@pytest.mark.parametrize(
    ("body", "status", "kind", "said"),
    [
        ({"model": "other"}, 404, "not_found_error", "not served"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"flavor": 1}, 400, "invalid_request_error", "flavor: Extra inputs are not permitted"),
        ({"container": "c"}, 400, "invalid_request_error", "container is not served"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "invalid_request_error",
         "thinking is not served"),
        ({"messages": [{"role": "assistant", "content": "So"}]}, 400, "invalid_request_error",
         "the last message is the model's"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
         "invalid_request_error", "image"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400,
         "invalid_request_error", "custom"),
        ({"messages": [{"role": "user", "content": [document("", source={
            "type": "base64", "media_type": "application/pdf", "data": "h\u00f6fn"})]}]},
         400, "invalid_request_error", "no base64"),
        ({"stop": "x"}, 400, "invalid_request_error", "give stop_sequences"),
        ({"model": f"{MODEL}/none"}, 404, "not_found_error", "none"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_shape(
    client: TestClient, body: dict[str, Any], status: int, kind: str, said: str
) -> None:
    refused = send(client, **body)
    assert refused.status_code == status, refused.text
    told = refused.json()
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert said in told["error"]["message"]


def test_ignored_fields_change_nothing(client: TestClient) -> None:
    plain = send(client).json()["content"]
    more = {"metadata": {"user_id": "x"}, "service_tier": "auto", "thinking": {"type": "adaptive"}}
    assert send(client, **more, output_config={"effort": "low"}).json()["content"] == plain


def test_models_have_the_fields_of_anthropic(client: TestClient) -> None:
    told = client.get("/v1/models").json()
    first, last = told["data"][0], told["data"][-1]
    assert (told["first_id"], told["last_id"], told["has_more"]) == (first["id"], last["id"], False)
    assert (first["type"], first["display_name"]) == ("model", MODEL)
    assert first["created_at"].endswith("Z")


def test_keys_come_in_anthropics_header(rag: RagCache) -> None:
    row, secret = rag.keys.create("tenant", role="admin")
    try:
        with client_of(rag) as client:
            refused = send(client)
            assert (refused.status_code, refused.json()["error"]["type"]) == (
                401, "authentication_error",
            )  # fmt: skip
            client.headers["x-api-key"] = secret
            assert send(client, max_tokens=1).status_code == 200
    finally:
        rag.keys.revoke(row.id)


def test_the_gateway_reads_messages_as_chats() -> None:
    body = request({"role": "user", "content": "Hi"}).model_dump_json(exclude_unset=True).encode()
    asked = parse_body("/v1/collections/notes/v1/messages", body, MODEL)
    assert asked is not None
    assert asked.collection == "notes"
    with pytest.raises(HTTPProblem, match="cites either"):
        chat_of(request(
            {"role": "user", "content": [document("The Pipit is red.")]}, collection="notes"
        ))  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
def test_streams_of_messages_stay_with_their_replica(stream: bool) -> None:
    body = request({"role": "user", "content": "Hi"}, stream=stream)
    asked = parse_body("/v1/messages", body.model_dump_json(exclude_unset=True).encode(), MODEL)
    assert asked is not None
    assert asked.stream is stream
    assert not is_resumable(asked)
