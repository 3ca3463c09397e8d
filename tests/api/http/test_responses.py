"""OpenAI's responses, files and vector stores: by OpenAI's own client, and their shapes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from ragcache import GenerationParams, RagCache
from ragcache.answers import citations
from ragcache.db import StoredObjects
from ragcache.models import LoadedModel
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.responses import ResponsesRequest, plain_filters, responses_chat
from ragcache_api.http.routes.responses import _ItemEvents
from tests.api.http.asgi import events
from tests.api.http.conftest import LEAVE, client_of, serving
from tests.conftest import write_notes

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "ragcache-reader"
BOATS = b"# Boats\n\nThe survey boat Pipit is moored at the north quay.\n"
KEYS = b"# Keys\n\nThe spare key of the boathouse hangs in the red cupboard.\n"


@pytest.fixture(scope="module")
def rag(quick_reader: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RagCache]:
    folder = tmp_path_factory.mktemp("responses")
    with RagCache.open(folder / "state", quick_reader, embedding="none") as opened:
        opened.ingest("notes", write_notes(folder / "notes"))
        yield opened


def send(client: TestClient, path: str = "/v1/responses", **body: Any) -> Any:
    return client.post(path, json={"model": MODEL, "input": LEAVE, "max_output_tokens": 6} | body)


def text_of(response: dict[str, Any]) -> str:
    [message] = [each for each in response["output"] if each["type"] == "message"]
    return str(message["content"][0]["text"])


def test_a_response_is_a_chat_of_the_library(client: TestClient, rag: RagCache) -> None:
    told = send(client, instructions="Be brief.").json()
    answer = rag.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": LEAVE}],
        generation=GenerationParams(max_tokens=6),
    )
    assert text_of(told) == answer.choices[0].text.lstrip()
    assert told["usage"]["input_tokens"] == answer.reuse.prompt_tokens
    assert told["usage"]["output_tokens"] == len(answer.choices[0].token_ids)
    assert told["status"] in ("completed", "incomplete")
    assert (told["status"] == "incomplete") == (told["incomplete_details"] is not None)


def test_events_add_up_to_the_response(client: TestClient) -> None:
    whole = send(client).json()
    told = events(send(client, stream=True).text)
    assert all(value["type"] == name for name, value in told)
    assert [value["sequence_number"] for _, value in told] == [*range(len(told))]
    deltas = [value["delta"] for name, value in told if name == "response.output_text.delta"]
    assert "".join(deltas) == text_of(whole)
    last = told[-1][1]["response"]
    assert told[-1][0] == f"response.{whole['status']}"
    assert (text_of(last), last["usage"]) == (text_of(whole), whole["usage"])


def test_a_conversation_goes_on_from_a_stored_response(client: TestClient, rag: RagCache) -> None:
    first = send(client).json()
    again = send(client, input="Why?", previous_response_id=first["id"]).json()
    answer = rag.chat(
        [{"role": "user", "content": LEAVE}, {"role": "assistant", "content": text_of(first)},
         {"role": "user", "content": "Why?"}],
        generation=GenerationParams(max_tokens=6),
    )  # fmt: skip
    assert text_of(again) == answer.choices[0].text.lstrip()
    assert again["previous_response_id"] == first["id"]
    path = f"/v1/responses/{first['id']}"
    assert client.get(path).json() == first
    [item] = client.get(f"{path}/input_items").json()["data"]
    assert (item["type"], item["content"][0]["text"]) == ("message", LEAVE)
    assert client.delete(path).json()["deleted"] is True
    assert client.get(path).status_code == 404
    refused = send(client, previous_response_id=first["id"])
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    unstored = send(client, store=False).json()
    assert client.get(f"/v1/responses/{unstored['id']}").status_code == 404


def test_responses_stay_in_their_namespace(rag: RagCache) -> None:
    database = rag.internals.shared.database
    made = StoredObjects(database, "default").add("response", {"a": 1}, seconds=60)
    assert StoredObjects(database, "other").get("response", made.id) is None


def test_expired_objects_are_gone(rag: RagCache) -> None:
    objects = StoredObjects(rag.internals.shared.database, "default")
    made = objects.add("response", {"a": 1}, content=b"x", seconds=-1)
    assert objects.get("response", made.id) is None
    assert objects.content("response", made.id) is None
    kept = objects.add("response", {"a": 2}, owner="x")
    assert [each.id for each in objects.list("response", "x")] == [kept.id]
    objects.delete_owned("x")
    assert objects.list("response", "x") == []


def test_a_collection_is_searched_and_cited(client: TestClient) -> None:
    tool = {"type": "file_search", "vector_store_ids": ["notes"], "max_num_results": 2}
    asked = {"tools": [tool], "include": ["file_search_call.results"], "min_confidence": 0}
    told = send(client, max_output_tokens=20, **asked).json()
    search, message = told["output"]
    assert (search["type"], search["queries"]) == ("file_search_call", [LEAVE])
    assert 0 < len(search["results"]) <= 2
    assert search["results"][0]["score"] == pytest.approx(1)
    [part] = message["content"]
    cited = {each["file_id"] for each in part["annotations"]}
    assert cited <= {each["file_id"] for each in search["results"]}
    assert all(each["index"] == len(part["text"]) for each in part["annotations"])
    streamed = events(send(client, stream=True, max_output_tokens=20, **asked).text)
    names = [name for name, _ in streamed]
    assert "response.file_search_call.completed" in names
    assert "response.output_text.annotation.added" in names
    last = streamed[-1][1]["response"]["output"]
    assert [each["content"] for each in last[1:]] == [message["content"]]


def test_citations_have_the_places_of_marks(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(citations, "sources_of", lambda _, passages: passages[:: len(passages) - 1])
    tool = {"type": "file_search", "vector_store_ids": ["notes"]}
    asked = {"tools": [tool], "extractive": False, "citations": True, "min_confidence": 0}
    asked |= {"max_output_tokens": 12, "relative_threshold": 0}
    told = send(client, **asked).json()
    [part] = told["output"][1]["content"]
    marks = list(re.finditer(r"\[\d+\]", part["text"]))
    assert len(marks) > 1
    assert [each["index"] for each in part["annotations"]] == [each.start() for each in marks]
    places = {f"[{each['mark']}]": each["document"] for each in told["ragcache"]["spans"]}
    assert [each["file_id"] for each in part["annotations"]] == [places[each[0]] for each in marks]
    streamed = events(send(client, stream=True, **asked).text)
    added = [value["annotation"] for name, value in streamed if "annotation.added" in name]
    assert added == part["annotations"]


def test_a_form_is_kept(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"days": {"type": "integer", "maximum": 99}},
              "required": ["days"], "additionalProperties": False}  # fmt: skip
    form = {"format": {"type": "json_schema", "name": "days", "schema": schema, "strict": True}}
    told = send(client, text=form, max_output_tokens=40).json()
    assert set(json.loads(text_of(told))) == {"days"}


def test_items_become_messages() -> None:
    body = ResponsesRequest.model_validate({
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
            {"type": "message", "role": "assistant",
             "content": [{"type": "output_text", "text": "Yes."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "reasoning", "summary": []},
            {"role": "developer", "content": "Go on."},
        ],
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "add"},
    })  # fmt: skip
    chat = responses_chat(body)
    plain = [each.plain() for each in chat.messages]
    assert [each["role"] for each in plain] == ["user", "assistant", "tool", "system"]
    assert plain[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert plain[2] == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert chat.model_dump()["tool_choice"] == {"type": "function", "function": {"name": "add"}}


def test_calls_become_items() -> None:
    told: list[str] = []

    def message(text: str, _: Any, status: str = "completed") -> dict[str, Any]:
        return {"id": "m", "type": "message", "status": status, "content": [{"text": text}]}

    def event(name: str, /, **_: Any) -> bytes:
        told.append(name)
        return b""

    def made_call(call: Any, status: str) -> dict[str, Any]:
        return {"id": "f", "call_id": call["id"], "status": status, **call["function"]}

    writer = _ItemEvents(event, message, made_call)
    call = {"index": 0, "id": "call_7", "function": {"name": "add", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    for fields in ({"content": "Yes."}, {"tool_calls": [call]}, {"tool_calls": [more]}):
        for _ in writer.feed(fields):
            pass
    for _ in writer.end(()):
        pass
    text, made = writer.done
    assert text["content"][0]["text"] == "Yes."
    assert (made["call_id"], made["arguments"], made["status"]) == (
        "call_7", '{"a": 1}', "completed",
    )  # fmt: skip
    assert told[-2:] == ["response.function_call_arguments.done", "response.output_item.done"]


def test_functions_of_namespaces_are_offered() -> None:
    add = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    tools = [{"type": "namespace", "name": "math", "description": "Numbers.", "tools": [add]}]
    body = ResponsesRequest.model_validate({"input": "Add.", "tools": tools})
    offered = responses_chat(body).tools
    assert offered is not None
    assert [each.function["name"] for each in offered] == ["add"]
    assert body.namespaces == {"add": "math"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"background": True}, "background is not served"),
        ({"conversation": "c"}, "conversation is not served"),
        ({"top_logprobs": 2}, "top_logprobs is not served"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"max_tokens": 4}, "give max_output_tokens"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["a", "b"]}]}, "at most 1"),
    ],
)  # fmt: skip
def test_unserved_parts_are_refused_by_name(
    client: TestClient, body: dict[str, Any], said: str
) -> None:
    refused = send(client, **body)
    assert refused.status_code == 400, refused.text
    assert said in refused.json()["error"]["message"]


def test_filters_of_openai_become_ragcaches() -> None:
    one = {"type": "gte", "key": "year", "value": 2020}
    both = {"type": "and", "filters": [one, {"type": "in", "key": "team", "value": ["a"]}]}
    assert plain_filters(both) == {"$and": [{"year": {"$gte": 2020}}, {"team": {"$in": ["a"]}}]}
    with pytest.raises(HTTPProblem, match="none of OpenAI's"):
        plain_filters({"type": "near", "key": "year", "value": 1})
    with pytest.raises(ValidationError):
        ResponsesRequest.model_validate({"input": []})


@pytest.fixture(scope="module")
def openai(rag: RagCache) -> Iterator[OpenAI]:
    from openai import OpenAI

    with serving(rag) as (_, url):
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


real = [pytest.mark.enable_socket, pytest.mark.allow_hosts(["127.0.0.1"]), pytest.mark.slow]


class TestOpenAIsClient:
    """OpenAI's documented flow, unchanged."""

    pytestmark = real

    def test_a_store_is_made_filled_and_asked(self, openai: OpenAI) -> None:
        store = openai.vector_stores.create(
            name="Boats", description="Boats of the harbour.", metadata={"team": "harbour"}
        )
        file = openai.vector_stores.files.upload_and_poll(
            vector_store_id=store.id, file=("boats.md", BOATS), poll_interval_ms=100
        )
        assert (file.status, file.last_error) == ("completed", None)
        response = openai.responses.create(
            model=MODEL,
            input="Where is the survey boat moored?",
            tools=[{"type": "file_search", "vector_store_ids": [store.id]}],
            include=["file_search_call.results"],
            extra_body={"min_confidence": 0},
        )
        search, message = response.output
        assert search.type == "file_search_call"
        assert [each.filename for each in search.results or ()] == ["boats.md"]
        assert response.output_text
        assert response.output_text in BOATS.decode()
        assert message.type == "message"
        [cited] = message.content[0].annotations
        assert (cited.type, cited.file_id, cited.filename) == (
            "file_citation", file.id, "boats.md",
        )  # fmt: skip
        with openai.responses.stream(
            model=MODEL,
            input="Where is the survey boat moored?",
            tools=[{"type": "file_search", "vector_store_ids": [store.id]}],
            extra_body={"min_confidence": 0},
        ) as stream:
            text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
            assert stream.get_final_response().output_text == text == response.output_text
        assert openai.vector_stores.delete(store.id).deleted
        assert openai.files.content(file.id).read() == BOATS

    def test_batches_attributes_and_search(self, openai: OpenAI) -> None:
        from openai import NotFoundError

        store = openai.vector_stores.create(
            name="Harbour", expires_after={"anchor": "last_active_at", "days": 7}
        )
        files = [
            openai.files.create(file=(name, text), purpose="assistants")
            for name, text in (("boats.md", BOATS), ("keys.md", KEYS), ("odd.bin", b"\x00\x01"))
        ]
        batch = openai.vector_stores.file_batches.create_and_poll(
            vector_store_id=store.id, file_ids=[each.id for each in files], poll_interval_ms=100
        )
        assert (batch.file_counts.completed, batch.file_counts.failed) == (2, 1)
        listed = list(openai.vector_stores.files.list(store.id, limit=1, order="asc"))
        assert [each.id for each in listed] == [each.id for each in files]
        assert listed[2].last_error is not None
        assert listed[2].last_error.code == "unsupported_file"
        openai.vector_stores.files.update(
            files[1].id, vector_store_id=store.id, attributes={"kind": "key"}
        )
        openai.vector_stores.files.poll(files[1].id, vector_store_id=store.id)
        found = openai.vector_stores.search(
            store.id,
            query=["the survey boat", "the spare key"],
            filters={"type": "eq", "key": "kind", "value": "key"},
        )
        [result] = found.data
        assert (result.filename, result.attributes) == ("keys.md", {"kind": "key"})
        assert "red cupboard" in result.content[0].text
        [text] = openai.vector_stores.files.content(files[0].id, vector_store_id=store.id).data
        assert text.text == BOATS.decode()
        told = openai.vector_stores.retrieve(store.id)
        assert told.file_counts.total == 3
        assert told.expires_at is not None
        assert store.id in [each.id for each in openai.vector_stores.list()]
        assert "notes" in [each.id for each in openai.vector_stores.list()]
        assert openai.files.delete(files[0].id).deleted
        with pytest.raises(NotFoundError):
            openai.vector_stores.files.retrieve(files[0].id, vector_store_id=store.id)


def test_an_unused_store_expires_with_its_documents(
    client: TestClient, rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"name": "Short", "expires_after": {"anchor": "last_active_at", "days": 1}}
    store = client.post("/v1/vector_stores", json=asked).json()["id"]
    assert client.get(f"/v1/vector_stores/{store}").json()["file_counts"]["total"] == 0
    from ragcache_api.http import vector_stores

    monkeypatch.setattr(vector_stores, "_DAY", -1.0)
    assert client.get(f"/v1/vector_stores/{store}").status_code == 404
    assert store not in rag.stats().collections


def test_files_of_a_tenant_are_its_own(rag: RagCache) -> None:
    rows = [rag.keys.create("operator", role="admin"), rag.keys.create("b", namespace="tenant")]
    try:
        with client_of(rag) as client:
            first, second = ({"Authorization": f"Bearer {secret}"} for _, secret in rows)
            form = {"files": {"file": ("boats.md", BOATS)}, "data": {"purpose": "assistants"}}
            made = client.post("/v1/files", headers=first, **form).json()
            assert client.get(f"/v1/files/{made['id']}", headers=first).json() == made
            assert client.get(f"/v1/files/{made['id']}", headers=second).status_code == 404
            assert client.get("/v1/files", headers=second).json()["data"] == []
            asked = {"file_id": made["id"]}
            missing = client.post("/v1/vector_stores/notes/files", headers=second, json=asked)
            assert missing.status_code == 404
    finally:
        for row, _ in rows:
            rag.keys.revoke(row.id)
