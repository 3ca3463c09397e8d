"""Ids of requests: clients or the service choose them, and the log names errors by them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.contents import Collections
from ragcache.errors import LedgerUnavailable
from tests.api.http.conftest import client_of


@pytest.fixture
def fresh(rag: RagCache) -> Iterator[TestClient]:
    with client_of(rag) as client:
        yield client


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def page(*_: object) -> None:
        raise error

    monkeypatch.setattr(Collections, "page", page)


def test_the_log_names_errors_by_the_ids_of_their_requests(
    fresh: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail(monkeypatch, RuntimeError("the lamp is out"))
    failed = fresh.get("/v1/collections")
    fail(monkeypatch, LedgerUnavailable("the ledger is away"))
    away = fresh.get("/v1/collections", headers={"X-Request-ID": "mine-1"})
    assert (failed.status_code, away.status_code) == (500, 503)
    assert away.headers["x-request-id"] == "mine-1"
    first, second = [each for each in caplog.records if each.name == "ragcache_api.http.envelope"]
    name = failed.headers["x-request-id"]
    assert first.getMessage() == f"request {name}: GET /v1/collections failed"
    assert "RuntimeError: the lamp is out" in caplog.text
    assert second.getMessage() == "request mine-1: GET /v1/collections: the ledger is away"


def test_a_client_names_its_request_only_in_plain_letters(client: TestClient) -> None:
    names = [client.get("/health/live").headers["x-request-id"] for _ in range(2)]
    assert names[0] != names[1]
    for odd in ("x" * 65, "a b", "\u00fc"):
        told = client.get("/health/live", headers={"X-Request-ID": odd.encode()})
        assert told.headers["x-request-id"] != odd
