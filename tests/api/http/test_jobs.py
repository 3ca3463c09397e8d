"""The events of a job: until it ends, or an error says why they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.errors import LedgerUnavailable, UnknownJob
from ragcache_api.http.protocol import JobResponse
from ragcache_api.http.routes import jobs
from tests.api.http.conftest import client_of
from tests.api.http.events import events

EVENTS = {"Accept": "text/event-stream"}
JOB = JobResponse(
    public_id="a", target="notes", status="running", done=0, total=2, error="", started_at=1.0,
    finished_at=None,
)  # fmt: skip


@pytest.fixture
def client(rag: RagCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A service of its own, which may be drained."""
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.01)
    with client_of(rag) as made:
        yield made


@pytest.mark.parametrize(
    ("error", "code"),
    [(LedgerUnavailable("it does not answer"), "ledger-unavailable"),
     (UnknownJob("there is no job 1"), "unknown-job"), (ZeroDivisionError(), "internal-error")],
)  # fmt: skip
def test_what_cannot_be_read_is_told(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    answers = iter([JOB, JOB.model_copy(update={"done": 1})])

    async def job(*_: object) -> JobResponse:
        try:
            return next(answers)
        except StopIteration:
            raise error from None

    monkeypatch.setattr(jobs, "_job", job)
    told = events(client.get("/v1/jobs/1", headers=EVENTS).text)
    assert [name for name, _ in told] == ["progress", "progress", "error"]
    assert told[1][1]["done"] == 1
    assert told[-1][1]["type"] == f"urn:ragcache:problem:{code}"
    assert told[-1][1]["instance"] == "/v1/jobs/1"


def test_the_end_of_the_service_is_told(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, asked = client.app.state.service.requests, []  # type: ignore[attr-defined]

    async def job(*_: object) -> JobResponse:
        asked.append(1)
        if len(asked) == 3:
            running.drain()
        return JOB

    monkeypatch.setattr(jobs, "_job", job)
    told = events(client.get("/v1/jobs/1", headers=EVENTS).text)
    assert [name for name, _ in told] == ["progress", "error"]
    assert told[-1][1]["status"] == 503
    assert told[-1][1]["type"].endswith("stopping")
