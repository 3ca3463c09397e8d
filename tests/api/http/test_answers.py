"""`POST /v1/answers` and `POST /v1/prompts`."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.errors import QueueFull
from tests.api.http.asgi import events
from tests.api.http.conftest import LEAVE, client_of


def test_an_answer_is_that_of_the_library(client: TestClient, rag: RagCache) -> None:
    told = client.post("/v1/answers", json={"question": LEAVE, "collection": "notes"}).json()
    answer = rag.ask(LEAVE, collection="notes")
    assert told["text"] == answer.text
    assert told["finish_reason"] == answer.finish_reason
    assert [s["module"] for s in told["sources"]] == [s.module for s in answer.sources]
    assert told["reuse"]["prompt_tokens"] == answer.reuse.prompt_tokens
    assert told["reuse"]["cached_tokens"] > 0
    assert set(told["timings"]) == {"retrieve", "assemble", "first_token", "total", "queued"}


def test_a_stream_tells_sources_tokens_and_the_answer(client: TestClient) -> None:
    body = {"question": LEAVE, "collection": "notes", "stream": True, "max_tokens": 8}
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
    body = {"question": LEAVE, "collection": "notes", "k": 1, "max_tokens": 2, "mode": "exact"}
    told = client.post("/v1/answers", json=body).json()
    assert len(told["sources"]) == 1
    assert told["mode"] == "exact"
    assert told["reuse"]["cached_tokens"] == 0
    seeded = {**body, "temperature": 1.5, "seed": 3, "max_tokens": 6, "mode": "rooted"}
    first, second = (client.post("/v1/answers", json=seeded).json()["text"] for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"question": "  ", "collection": "notes"}, 400, "empty-question"),
        ({"question": LEAVE, "collection": "none"}, 404, "unknown-collection"),
        ({"question": LEAVE, "collection": "notes", "mode": "odd"}, 400, "configuration-error"),
        ({"question": LEAVE, "collection": "notes", "surprise": 1}, 422, "invalid-request"),
        ({"question": LEAVE, "collection": "notes", "k": 0}, 422, "invalid-request"),
        ({"question": LEAVE, "collection": "notes", "stop": [""]}, 400, "invalid-request"),
        ({"question": "x " * 9000, "collection": "notes"}, 400, "prompt-too-long"),
        ({"prompt": "<prompt"}, 422, "invalid-request"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_asked_is_refused_before_a_stream_begins(
    client: TestClient, body: dict[str, object], status: int, code: str, stream: bool
) -> None:
    response = client.post("/v1/answers", json={**body, "stream": stream})
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

    monkeypatch.setattr(RagCache, "astream", full)
    response = client.post("/v1/answers", json={"question": LEAVE, "collection": "notes"})
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1


def test_a_deadline_ends_a_request(rag: RagCache) -> None:
    with client_of(rag) as client:
        body = {"question": LEAVE, "collection": "notes"}
        late = client.post("/v1/answers", json=body, headers={"X-Request-Timeout": "0.0001"})
        assert late.status_code == 504
        for wrong in ("soon", "-1", "nan", "0"):
            refused = client.post("/v1/answers", json=body, headers={"X-Request-Timeout": wrong})
            assert refused.status_code == 400, wrong
    with client_of(rag, deadline=0.0001) as client:
        patient = {"X-Request-Timeout": "60"}
        assert client.post("/v1/answers", json=body, headers=patient).status_code == 504


SCHEMA = """<schema name="trip"><module name="boat">The survey boat is moored at the north quay.
</module></schema>"""


def test_a_prompt_reads_the_modules_of_a_schema(client: TestClient) -> None:
    assert client.post("/v1/schemas", json={"text": SCHEMA}).status_code == 201
    text = '<prompt schema="trip"><boat/>Where is it?</prompt>'
    told = client.post("/v1/prompts", json={"prompt": text, "max_tokens": 3}).json()
    assert told["reuse"]["cached_tokens"] > 0
    streamed = client.post("/v1/prompts", json={"prompt": text, "max_tokens": 3, "stream": True})
    assert events(streamed.text)[-1][1]["text"] == told["text"]
    wrong = client.post("/v1/prompts", json={"prompt": "<prompt schema='trip'>"})
    assert wrong.status_code == 422
    unknown = client.post("/v1/prompts", json={"prompt": '<prompt schema="no">Hi</prompt>'})
    assert unknown.status_code == 404
