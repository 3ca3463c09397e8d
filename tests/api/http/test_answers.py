"""`POST /v1/answers` and `POST /v1/prompts`, and the time that a request has to its last byte."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import fields

import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from ragcache import AsyncRagCache, RagCache, Timings
from ragcache.errors import QueueFull
from ragcache_api.http import ServiceSettings, create_app, streaming
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.service import Service
from ragcache_api.http.telemetry import count_leased
from tests.api.http.asgi import Caller, events
from tests.api.http.conftest import LEAVE, client_of

ASK = {"question": LEAVE, "collection": "notes"}


def test_an_answer_is_that_of_the_library(client: TestClient, rag: RagCache) -> None:
    told = client.post("/v1/answers", json=ASK).json()
    answer = rag.ask(LEAVE, collection="notes")
    assert told["text"] == answer.text
    assert told["finish_reason"] == answer.finish_reason
    assert [s["module"] for s in told["sources"]] == [s.module for s in answer.sources]
    assert told["reuse"]["prompt_tokens"] == answer.reuse.prompt_tokens
    assert told["reuse"]["cached_tokens"] > 0
    assert set(told["timings"]) == {each.name for each in fields(Timings)}


def test_a_stream_tells_sources_tokens_and_the_answer(client: TestClient) -> None:
    body = {**ASK, "stream": True, "max_tokens": 8}
    response = client.post("/v1/answers", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    told = events(response.text)
    assert told[0][0] == "sources"
    assert {name for name, _ in told[1:-1]} == {"token"}
    name, answer = told[-1]
    assert name == "answer"
    assert "".join(value["text"] for _, value in told[1:-1]).strip() == answer["text"]
    times = [value["at"] for _, value in told[1:-1]]
    assert times == sorted(times)
    assert told[0][1] == answer["sources"]


def test_options_reach_the_engine(client: TestClient) -> None:
    body = {**ASK, "k": 1, "max_tokens": 2, "mode": "exact"}
    told = client.post("/v1/answers", json=body).json()
    assert len(told["sources"]) == 1
    assert told["mode"] == "exact"
    assert told["reuse"]["cached_tokens"] == 0
    seeded = {**body, "temperature": 1.5, "seed": 3, "max_tokens": 6, "mode": "rooted"}
    first, second = (client.post("/v1/answers", json=seeded).json()["text"] for _ in range(2))
    assert first == second


def test_an_extractive_answer_tells_where_it_stands(client: TestClient, rag: RagCache) -> None:
    body = {**ASK, "extractive": True, "max_tokens": 6, "min_confidence": 0}
    told = client.post("/v1/answers", json=body).json()
    assert told["spans"]
    for span in told["spans"]:
        text = rag.documents.texts("notes", [span["document"]])[span["document"]]
        assert text[span["start"] : span["end"]] == told["text"]
    streamed = events(client.post("/v1/answers", json={**body, "stream": True}).text)
    assert streamed[-1][1]["spans"] == told["spans"]
    assert "".join(value["text"] for name, value in streamed if name == "token") == told["text"]
    free = client.post("/v1/answers", json={**body, "extractive": False}).json()
    assert free["spans"] == []


def test_an_answer_of_little_confidence_is_refused(client: TestClient) -> None:
    body = {**ASK, "max_tokens": 6}
    told = client.post("/v1/answers", json={**body, "min_confidence": 0}).json()
    assert 0 < told["confidence"] < 1
    assert told["finish_reason"] != "no_answer"
    strict = {**body, "min_confidence": 1, "refusal": "Nobody wrote that down."}
    refused = client.post("/v1/answers", json=strict).json()
    assert (refused["text"], refused["finish_reason"]) == (strict["refusal"], "no_answer")
    assert (refused["spans"], refused["confidence"]) == ([], told["confidence"])
    assert refused["sources"]
    streamed = events(client.post("/v1/answers", json={**strict, "stream": True}).text)
    pieces = [value["text"] for name, value in streamed if name == "token"]
    assert pieces == [strict["refusal"]], "nothing of the answer is shown before it is refused"
    assert streamed[-1][1]["finish_reason"] == "no_answer"
    off = client.post("/v1/answers", json={**body, "confidence": False}).json()
    assert off["confidence"] is None


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"question": "  "}, 400, "empty-question"),
        ({"collection": "none"}, 404, "unknown-collection"),
        ({"mode": "odd"}, 422, "invalid-request"),
        ({"surprise": 1}, 422, "invalid-request"),
        ({"k": 0}, 422, "invalid-request"),
        ({"min_confidence": 2}, 422, "invalid-request"),
        ({"refusal": " "}, 422, "invalid-request"),
        ({"rerank": -1}, 422, "invalid-request"),
        ({"relative_threshold": 2}, 422, "invalid-request"),
        ({"stop": [""]}, 400, "invalid-request"),
        ({"question": "x " * 9000}, 400, "prompt-too-long"),
        ({"question": None}, 422, "invalid-request"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_asked_is_refused_before_a_stream_begins(
    client: TestClient, change: dict[str, object], status: int, code: str, stream: bool
) -> None:
    response = client.post("/v1/answers", json={**ASK, **change, "stream": stream})
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["type"] == f"urn:ragcache:problem:{code}"
    assert problem["instance"] == "/v1/answers"
    assert problem["detail"]


def test_a_full_queue_says_when_to_come_again(
    client: TestClient, rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object, **__: object) -> None:
        raise QueueFull("1 requests wait already")

    monkeypatch.setattr(AsyncRagCache, "stream", full)
    response = client.post("/v1/answers", json=ASK)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1


def test_a_deadline_ends_a_request(rag: RagCache) -> None:
    with client_of(rag) as client:
        late = client.post("/v1/answers", json=ASK, headers={"X-Request-Timeout": "0.0001"})
        assert late.status_code == 504
        for wrong in ("soon", "-1", "nan", "0"):
            refused = client.post("/v1/answers", json=ASK, headers={"X-Request-Timeout": wrong})
            assert refused.status_code == 400, wrong
    with client_of(rag, deadline=0.0001) as client:
        patient = {"X-Request-Timeout": "60"}
        assert client.post("/v1/answers", json=ASK, headers=patient).status_code == 504


SCHEMA = """<schema name="trip"><module name="boat">The survey boat is moored at the north quay.
</module></schema>"""


def test_a_prompt_reads_the_modules_of_a_schema(client: TestClient) -> None:
    assert client.post("/v1/schemas", json={"text": SCHEMA}).status_code == 201
    text = '<prompt schema="trip"><boat/>Where is it?</prompt>'
    told = client.post("/v1/prompts", json={"prompt": text, "max_tokens": 3}).json()
    quoting = client.post("/v1/prompts", json={"prompt": text, "extractive": True})
    assert quoting.status_code == 400
    assert told["reuse"]["cached_tokens"] > 0
    streamed = client.post("/v1/prompts", json={"prompt": text, "max_tokens": 3, "stream": True})
    assert events(streamed.text)[-1][1]["text"] == told["text"]
    wrong = client.post("/v1/prompts", json={"prompt": "<prompt schema='trip'>"})
    assert wrong.status_code == 422
    unknown = client.post("/v1/prompts", json={"prompt": '<prompt schema="no">Hi</prompt>'})
    assert unknown.status_code == 404


LONG = {**ASK, "stream": True, "max_tokens": 2500, "ignore_eos": True, "extractive": False}


@pytest.mark.parametrize("path", ["/v1/answers", "/v1/collections/notes/documents"])
def test_a_body_that_does_not_come_is_refused(
    rag: RagCache, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache_api.http.envelope.DRAIN_PAUSE_SECONDS", 0.05)
    app = create_app(rag, ServiceSettings.read(deadline=0.2))
    caller = Caller(b'{"question"', whole=False)
    asyncio.run(asyncio.wait_for(caller.call(app, "POST", path), 10))
    assert caller.status == 408
    assert (b"connection", b"close") in caller.told[0]["headers"]
    assert json.loads(caller.told[1]["body"])["type"].endswith("body-too-slow")


@pytest.mark.parametrize("stream", [False, True])
def test_retrieval_counts(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async def slow(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(AsyncRagCache, "stream", slow)
    begun = time.monotonic()
    late = client.post(
        "/v1/answers", json={**ASK, "stream": stream}, headers={"X-Request-Timeout": "0.3"}
    )
    assert late.status_code == 504
    assert time.monotonic() - begun < 30
    assert client.get("/admin/requests").json()["running"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("slow_steps")
def test_a_stream_is_told_that_its_time_is_over(client: TestClient) -> None:
    told = client.post("/v1/answers", json=LONG, headers={"X-Request-Timeout": "2"})
    assert told.status_code == 200
    assert told.text.rstrip().rpartition("\n\n")[2].startswith("event: error")
    assert "deadline-exceeded" in told.text


@pytest.mark.slow
@pytest.mark.usefixtures("slow_steps")
def test_a_stalled_client_holds_nothing_after_the_deadline(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "LAST_EVENTS_SECONDS", 1.0)
    app = create_app(rag, ServiceSettings.read(deadline=2))
    service: Service = app.state.service
    caller = Caller(json.dumps(LONG).encode(), takes=2)

    async def stalled() -> tuple[int, int]:
        """States that are leased while it is stalled, and once its time is over."""
        call = asyncio.create_task(caller.call(app, "POST", "/v1/answers"))
        while len(caller.told) < 2:
            await asyncio.sleep(0.01)
        leased = count_leased(rag)
        while not next(iter(service.requests.active.values())).expired:
            await asyncio.sleep(0.01)
        after = count_leased(rag)
        await asyncio.wait_for(call, 20)
        return leased, after

    leased, after = asyncio.run(asyncio.wait_for(stalled(), 60))
    assert leased > 0
    assert after == 0
    assert not service.requests.active
    assert len(caller.told) == 2


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("STALL", 0.1), ("PING", 0.05), ("WATCH", 0.02)):
        monkeypatch.setattr(streaming, f"{name}_SECONDS", seconds)


@pytest.mark.usefixtures("impatient")
def test_a_client_that_takes_nothing_is_left() -> None:
    ended = []

    async def many() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: 1\n\n"
        finally:
            ended.append("events")

    caller = Caller(takes=5)
    events = streaming.EventStream(many(), lambda: ended.append("response"))
    asyncio.run(asyncio.wait_for(caller.call(events, "GET", "/"), 10))
    assert ended == ["events", "response"]
    assert len(caller.told) == 5


def test_a_stream_whose_request_cannot_be_read_ends() -> None:
    ended = []

    async def forever() -> AsyncGenerator[bytes, None]:
        while True:
            yield b"data: 1\n\n"
            await asyncio.sleep(0.01)

    async def broken() -> Message:
        await asyncio.sleep(0.05)
        raise HTTPProblem(408, "body-too-slow", "it did not come")

    caller = Caller()
    events = streaming.EventStream(forever(), lambda: ended.append("response"))
    asyncio.run(asyncio.wait_for(events({}, broken, caller.send), 10))
    assert ended == ["response"]
    assert caller.told


@pytest.mark.usefixtures("impatient")
def test_a_ping_that_cannot_be_sent_ends_the_stream() -> None:
    ended = []

    async def silent() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()

    async def send(message: Message) -> None:
        if message.get("body", b"").startswith(b":"):
            raise OSError("the client is gone")

    events = streaming.EventStream(silent(), lambda: ended.append("response"))
    asyncio.run(asyncio.wait_for(events({}, Caller().receive, send), 10))
    assert ended == ["response"]


@pytest.mark.usefixtures("impatient")
def test_a_pause_is_filled_and_is_no_stall() -> None:

    async def few() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await asyncio.sleep(0.25)
        yield b"data: 2\n\n"

    caller = Caller()
    asyncio.run(caller.call(streaming.EventStream(few()), "GET", "/"))
    bodies = [message["body"] for message in caller.told[1:]]
    assert [body for body in bodies if body.startswith(b"data")] == [b"data: 1\n\n", b"data: 2\n\n"]
    assert len(bodies) > 3
    assert bodies[-1] == b""
