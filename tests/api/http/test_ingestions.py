"""Ingestions that wait, end early, and are sent again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.errors import EngineClosed
from ragcache.pipeline.module_states import ModuleEncoder

HEADERS = {"Idempotency-Key": "herons"}
BODY = {"documents": [{"id": "q", "text": "An interrupted document about herons."}]}
PATH = "/v1/collections/birds/documents"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds encoding up until it is set."""
    opened, lease = threading.Event(), ModuleEncoder.lease

    def held(*arguments: Any, **named: Any) -> Any:
        assert opened.wait(20)
        return lease(*arguments, **named)

    monkeypatch.setattr(ModuleEncoder, "lease", held)
    yield opened
    opened.set()


def test_what_was_interrupted_goes_on_when_it_is_sent_again(
    client: TestClient, rag: RagCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as closing:
        closing.setattr(rag.jobs.worker.__class__, "put_job", lambda *_: None)
        job = client.post(PATH, json=BODY, headers=HEADERS).json()["id"]
    rag.jobs.rows.fail(rag.jobs.get(job).id, EngineClosed("the folder was closed"))
    assert client.get(f"/v1/jobs/{job}").json()["status"] == "interrupted"
    again = client.post(PATH, json=BODY, headers=HEADERS)
    assert (again.status_code, again.json()["id"]) == (202, job)
    assert rag.jobs.wait(job, 20).status == "done"
    assert client.get(PATH).json()["total"] == 1


def test_more_than_may_wait_gets_429_and_what_waits_is_known(
    client: TestClient, rag: RagCache, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rag.jobs.worker, "_budget", 1000)
    bodies = [
        {"documents": [{"id": "a", "text": f"{number} herons. " * 60}]} for number in range(2)
    ]
    first = client.post(PATH, json=bodies[0], headers={"Idempotency-Key": "0"})
    assert first.status_code == 202
    refused = client.post(PATH, json=bodies[1])
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 0
    known = client.post(PATH, json=bodies[0], headers={"Idempotency-Key": "0"})
    assert (known.status_code, known.json()["id"]) == (202, first.json()["id"])
    gate.set()
    rag.jobs.wait(first.json()["id"], 20)
    last = client.post(PATH, json=bodies[1])
    assert rag.jobs.wait(last.json()["id"], 20).status == "done"


def test_a_large_body_is_parsed_off_the_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragcache_api.http import uploads

    seen: list[str] = []

    def noting(sent: type[Any]) -> Any:
        validate = sent.model_validate_json

        def noted(body: bytes) -> Any:
            seen.append(threading.current_thread().name)
            return validate(body)

        return noted

    monkeypatch.setattr(
        uploads.DocumentsSent, "model_validate_json", staticmethod(noting(uploads.DocumentsSent))
    )
    client.post("/v1/collections/loop/documents", json=BODY)
    assert seen
    assert all("AnyIO worker" in name for name in seen), seen
