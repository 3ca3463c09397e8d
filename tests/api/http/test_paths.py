"""Paths that no route has: the shape of their errors, and the sentence that says what to call."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from ragcache_api.http.bodies import ChatRequest, CompletionRequest
from ragcache_api.http.dispatch import parse_body
from ragcache_api.http.paths import explain_unserved, is_openai

CHAT = "POST /v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "openai"),
    [
        ("/v1/chat/completions", True),
        ("/v1/models/a/b", True),
        ("/v1/anything", True),
        ("/v1", True),
        ("/chat/completions", True),
        ("/v1/v1/models", True),
        ("//v1/chat/completions", True),
        ("/openai/deployments/x/chat/completions", True),
        ("/v1/collections/notes/chat/completions", True),
        ("/v1/collections/chat/documents", False),
        ("/v1/collections/notes", False),
        ("/v1/answers", False),
        ("/v1/answers/", False),
        ("/v1/messages", False),
        ("/v1/collections/notes/v1/messages/count_tokens", False),
        ("/admin/stats", False),
        ("/", False),
    ],
)
def test_shapes_go_by_the_path(path: str, openai: bool) -> None:
    assert is_openai(path) is openai


def paths_of_openais_client() -> set[str]:
    import openai

    found: set[str] = set()
    for file in (Path(openai.__file__).parent / "resources").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        found.update(re.findall(r'(?:path_template\(|\._\w+\(\s*)f?"(/[^"]*)"', text))
    return {re.sub(r"{[^}]*}", "x", path.partition("?")[0]) for path in found}


def test_every_path_of_openais_client_has_its_shape() -> None:
    paths = paths_of_openais_client()
    assert len(paths) > 50
    assert [path for path in paths if not is_openai(f"/v1{path}")] == []
    assert [path for path in paths if not is_openai(path)] == []


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("POST /v1/edits", f"is not served; answer with {CHAT}"),
        ("POST /v1/collections/notes/edits", f"is not served; answer with {CHAT}"),
        ("PUT /v1/embeddings", "is not served; embed texts with POST /v1/embeddings"),
        ("GET /v1/anything", "is not served; GET /openapi.json lists all routes"),
        ("PUT /v1/chat/completions", "is not served: this path takes POST"),
        ("POST /chat/completions", f"{CHAT} is. The client's base URL has no /v1 at its end"),
        ("POST /v1/v1/chat/completions", f"{CHAT} is. The client's base URL should end in a"),
        ("POST //v1/chat/completions", f"{CHAT} is. The client's base URL should have no slash"),
        ("GET /nothing/here", "is not served; GET /openapi.json lists all routes"),
    ],
)
def test_a_sentence_says_what_to_call(call: str, sentence: str) -> None:
    method, path = call.split()
    routes = {"/v1/chat/completions": ["POST"]}
    said = explain_unserved(method, path, lambda path: routes.get(path, []))
    assert said.startswith(f"{call} is not served")
    assert re.search(sentence, said), said


@pytest.mark.parametrize(
    "call",
    [
        "POST /v1/edits", "POST /v1/images/edits", "GET /v1/batches", "POST /chat/completions",
        "POST /v1/v1/chat/completions", "POST //v1/chat/completions", "PUT /v1/models",
    ],
)  # fmt: skip
def test_openais_clients_can_show_the_sentence(client: TestClient, call: str) -> None:
    method, path = call.split()
    refused = client.request(method, f"http://localhost{path}", json={"model": "x"})
    assert refused.status_code == (405 if method == "PUT" else 404)
    error = refused.json()["error"]
    assert error["message"].startswith(f"{call} is not served")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/answers", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/admin/keys", "GET, HEAD, POST"),
        ("PATCH", "/v1/collections/notes/documents", "GET, HEAD, POST, PUT, DELETE"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
def test_a_wrong_method_says_which_are_right(
    client: TestClient, method: str, path: str, allowed: str
) -> None:
    refused = client.request(method, path, json={})
    assert refused.status_code == 405
    assert refused.headers["allow"] == allowed
    assert f"{method} {path} is not served: this path takes" in refused.text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models/", 200),
        ("/v1/collections/", 200),
        ("/v1/collections/notes/documents/", 200),
        ("/admin/modules/", 200),
        ("/admin/stats/", 200),
        ("/metrics/", 200),
        ("/health/", 200),
        ("/admin/", 200),
        ("/v1/nothing/", 404),
    ],
)
def test_a_slash_at_the_end_is_served(client: TestClient, path: str, status: int) -> None:
    answer = client.get(path, follow_redirects=False)
    assert answer.status_code == status
    if status == 200:
        twin = client.get(path.rstrip("/"))
        assert answer.headers["content-type"] == twin.headers["content-type"]


def test_ids_of_documents_may_end_with_a_slash(client: TestClient) -> None:
    missing = client.get("/v1/collections/notes/documents/https://a.example/")
    assert "'https://a.example/'" in missing.json()["detail"]


@pytest.mark.parametrize(
    "path", ["/health", "/health/live", "/v1/models", "/metrics", "/admin/", "/admin/stats"]
)
def test_head_is_get_without_a_body(client: TestClient, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert client.head("/v1/answers").status_code == 405


@pytest.mark.parametrize(
    ("path", "model", "collection"),
    [
        ("/v1/chat/completions", "reader", None),
        ("/v1/chat/completions", "reader/notes", "notes"),
        ("/v1/collections/notes/chat/completions", "reader", "notes"),
        ("/v1/collections/notes/completions", "reader", "notes"),
    ],
)
def test_gateway_finds_the_collection(path: str, model: str, collection: str | None) -> None:
    body = {"model": model, "prompt": "Where?", "messages": [{"role": "user", "content": "Where?"}]}
    parsed = parse_body(path, json.dumps(body).encode(), "reader")
    assert isinstance(parsed, ChatRequest | CompletionRequest)
    assert parsed.collection == collection


def test_gateway_reads_nothing_for_two_collections() -> None:
    body = {"model": "reader@boats", "messages": [{"role": "user", "content": "Where?"}]}
    assert (
        parse_body("/v1/collections/notes/chat/completions", json.dumps(body).encode(), "reader")
        is None
    )
