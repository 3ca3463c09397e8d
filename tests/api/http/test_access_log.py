"""The access log: a line for each request, without texts."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from tests.api.http.conftest import LEAVE, client_of


def ask(client: TestClient) -> str:
    """Ask a question, and return the id of the request."""
    body = {"question": LEAVE, "collection": "notes", "max_tokens": 1}
    answer = client.post("/v1/answers?secret=1", json=body, headers={"X-Request-ID": "a-1"})
    assert answer.status_code == 200
    client.get("/health/live")
    return str(answer.headers["X-Request-ID"])


def test_a_request_is_a_line_of_json(rag: RagCache, capsys: pytest.CaptureFixture[str]) -> None:
    with client_of(rag, access_log="json") as client:
        name = ask(client)
    [text] = [each for each in capsys.readouterr().out.splitlines() if each.startswith("{")]
    line = json.loads(text)
    assert (line["method"], line["path"], line["request_id"]) == ("POST", "/v1/answers", name)
    assert line["status"] == 200
    assert line["seconds"] >= 0
    assert line["bytes"] > 0
    assert LEAVE not in text
    assert "secret" not in text


def test_a_request_is_a_line_of_text(rag: RagCache, capsys: pytest.CaptureFixture[str]) -> None:
    with client_of(rag, access_log="text") as client:
        client.get("/v1/mod%0Aels")
    [line] = [each for each in capsys.readouterr().out.splitlines() if " GET " in each]
    assert " GET /v1/mod\\nels 4" in line


def test_without_the_setting_nothing_is_written(
    rag: RagCache, capsys: pytest.CaptureFixture[str]
) -> None:
    with client_of(rag) as client:
        ask(client)
    assert "/v1/answers" not in capsys.readouterr().out
