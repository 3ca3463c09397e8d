"""The time of a request: from its first byte to the last that its client takes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator

import pytest
from starlette.testclient import TestClient
from starlette.types import Message

from ragcache import RagCache
from ragcache_api.http import ServiceSettings, create_app, streaming
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.service import Service
from tests.api.http.asgi import Caller
from tests.api.http.conftest import LEAVE

ASK = {"question": LEAVE, "collection": "notes"}
LONG = {**ASK, "stream": True, "max_tokens": 2500, "temperature": 100}


@pytest.mark.parametrize("path", ["/v1/answers", "/v1/collections/notes/documents"])
def test_a_body_that_does_not_come_is_refused(rag: RagCache, path: str) -> None:
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

    monkeypatch.setattr(RagCache, "astream", slow)
    begun = time.monotonic()
    late = client.post(
        "/v1/answers", json={**ASK, "stream": stream}, headers={"X-Request-Timeout": "0.3"}
    )
    assert late.status_code == 504
    assert time.monotonic() - begun < 30
    assert client.get("/admin/requests").json()["running"] == []


@pytest.mark.usefixtures("slow_steps")
def test_a_stream_is_told_that_its_time_is_over(client: TestClient) -> None:
    told = client.post("/v1/answers", json=LONG, headers={"X-Request-Timeout": "2"})
    assert told.status_code == 200
    assert told.text.rstrip().rpartition("\n\n")[2].startswith("event: error")
    assert "deadline-exceeded" in told.text


@pytest.mark.usefixtures("slow_steps")
def test_a_client_that_takes_nothing_holds_nothing_after_the_deadline(
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
        leased = service.queries.count_leased()
        while not next(iter(service.requests.active.values())).expired:
            await asyncio.sleep(0.01)
        after = service.queries.count_leased()
        await asyncio.wait_for(call, 20)
        return leased, after

    leased, after = asyncio.run(asyncio.wait_for(stalled(), 60))
    assert leased > 0
    assert after == 0
    assert not service.requests.active
    assert len(caller.told) == 2


def test_a_client_that_takes_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(streaming, "WATCH_SECONDS", 0.02)
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


def test_a_ping_that_cannot_be_sent_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PING_SECONDS", 0.05)
    monkeypatch.setattr(streaming, "WATCH_SECONDS", 0.02)
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


def test_a_pause_is_filled_and_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(streaming, "PING_SECONDS", 0.05)
    monkeypatch.setattr(streaming, "WATCH_SECONDS", 0.02)

    async def few() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await asyncio.sleep(0.5)
        yield b"data: 2\n\n"

    caller = Caller()
    asyncio.run(caller.call(streaming.EventStream(few()), "GET", "/"))
    bodies = [message["body"] for message in caller.told[1:]]
    assert [body for body in bodies if body.startswith(b"data")] == [b"data: 1\n\n", b"data: 2\n\n"]
    assert len(bodies) > 4
    assert bodies[-1] == b""
