"""Requests and responses as written: JSON, malformed requests, errors, the OpenAPI document."""

from __future__ import annotations

import inspect
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from ragcache import RagCache, errors
from ragcache.errors import RagCacheError
from ragcache_api.http.errors import STATUS, HTTPProblem, error_info, error_response
from ragcache_api.http.protocol import CompactResponse, compact
from ragcache_schemas import PMLError
from tests.api.http.conftest import LEAVE
from tests.conftest import scaled


@dataclass(frozen=True, slots=True)
class Told:
    text: str
    score: float
    tags: tuple[str, ...] = ()


def test_dataclasses_are_objects_and_characters_stay() -> None:
    told = compact({"a": Told("höfn\u2028", 0.5, ("x",))})
    assert told == '{"a":{"text":"höfn\u2028","score":0.5,"tags":["x"]}}'.encode()


def test_numbers_that_json_has_not_are_null() -> None:
    response = CompactResponse([math.nan, -math.inf, 1.0, Told("", math.nan)])
    assert response.media_type == "application/json"
    told = {"text": "", "score": None, "tags": []}
    assert json.loads(response.body) == [None, None, 1.0, told]


ROUTES = {
    "/v1/answers": {"question": LEAVE, "collection": "notes", "k": 2, "max_tokens": 1},
    "/v1/prompts": {"prompt": '<prompt schema="none">Hi</prompt>', "max_tokens": 1},
    "/v1/chat/completions": {
        "model": "ragcache-reader", "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1, "temperature": 0.5,
    },
    "/v1/completions": {"model": "ragcache-reader", "prompt": "Hi", "max_tokens": 1, "n": 1},
    "/v1/schemas": {"text": "<schema name='x'><module name='a'>b</module></schema>"},
    "/v1/collections/notes/documents": {"documents": [{"id": "a", "text": "b"}]},
    "/admin/evict": {"collection": "notes", "tier": "disk"},
    "/admin/plan": {"collection": "notes", "sample": 1},
}  # fmt: skip
WRONG: list[Any] = [
    None, True, -1, 0, 1e300, 10**30, "", "\x00", "\ud800", "x" * 300, [], [None], {}, {"a": []},
    [[1]], "-", ["", ""], {"$where": "1"}, "../../etc/passwd", "٣",
]  # fmt: skip
REQUIRED = {
    "/v1/answers": "question", "/v1/prompts": "prompt", "/v1/chat/completions": "messages",
    "/v1/completions": "model", "/v1/schemas": "text",
    "/v1/collections/notes/documents": "documents", "/admin/evict": "collection",
    "/admin/plan": "collection",
}  # fmt: skip


def broken(rng: random.Random) -> tuple[str, bytes, str]:
    """A path, a body that no route can take, and its type."""
    path, body = rng.choice(list(ROUTES.items()))
    text = json.dumps(body)
    kind = "application/json"
    match rng.randrange(7):
        case 0:
            return path, text[: rng.randrange(1, len(text))].encode(), kind
        case 1:
            return path, json.dumps(rng.choice([v for v in WRONG if v != {}])).encode(), kind
        case 2:
            wrong = rng.choice([True, 7, [None], {"a": 1}, [[1]], ["\x00", 3]])
            return path, json.dumps({**body, REQUIRED[path]: wrong}).encode(), kind
        case 3:
            return path, bytes(rng.randrange(128, 256) for _ in range(rng.randrange(1, 60))), kind
        case 4:
            return path, text.encode(), rng.choice(["text/plain", "image/png", "x", ""])
        case 5:
            return path, b"[" * rng.randrange(1000, 5000), kind
        case _:
            left = {name: value for name, value in body.items() if name != REQUIRED[path]}
            return path, json.dumps({**left, "max_tokens": "many"}).encode(), kind


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_a_thousand_malformed_requests_are_told_what_is_wrong(client: TestClient) -> None:
    rng = random.Random(11)
    for number in range(1000):
        path, body, kind = broken(rng)
        response = client.post(path, content=body, headers={"Content-Type": kind})
        said = (number, path, body[:200], kind, response.text)
        assert 400 <= response.status_code < 500, said
        told = response.json()
        if path.startswith(("/v1/chat", "/v1/completions")):
            assert told["error"]["message"], said
        else:
            assert response.headers["content-type"] == "application/problem+json", said
            assert told["detail"], said
            assert told["status"] == response.status_code, said


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["k", "mode", "max_tokens", "temperature", "stop", "seed"])
def test_odd_values_are_refused_or_answered_and_never_fail(
    client: TestClient, name: str, wrong: Any
) -> None:
    body = {"question": LEAVE, "collection": "notes", "max_tokens": 1, name: wrong}
    content = json.dumps(body)
    headers = {"Content-Type": "application/json"}
    response = client.post("/v1/answers", content=content, headers=headers)
    assert response.status_code < 500, response.text


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs/0", "/v1/jobs/x", "/v1/jobs/99999999999999999999", "/v1/collections/%00",
        "/v1/collections/no/documents", "/v1/collections/notes/documents/none",
        "/v1/collections?limit=0", "/v1/jobs?limit=1001",
        "/v1/jobs?cursor=odd", "/v1/schemas/none", "/v1/models/x", "/admin/modules/0",
        "/admin/modules?sort=odd", "/admin/modules?cursor=odd", "/admin/modules?pinned=perhaps",
        "/admin/evictions?cursor=zz", "/admin/schemas/x",
        "/admin/schemas/schema:none", "/admin/schemas/collection:none", "/v2/answers",
    ],
)  # fmt: skip
def test_paths_and_queries_that_lead_nowhere(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert 400 <= response.status_code < 500, (path, response.text)
    told = response.json()
    assert told.get("detail") or told["error"]["message"]


def test_a_failure_of_ours_tells_nothing_of_it(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_stats(_: RagCache) -> None:
        raise RuntimeError("the secret is 7")

    monkeypatch.setattr(RagCache, "stats", broken_stats)
    response = client.get("/admin/stats")
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/problem+json"
    assert "secret" not in response.text


CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
schemathesis.serializer.alias("application/x-tar", "application/octet-stream")
# What takes seconds each time (the plan measures, and verify reads every blob), and keys: the first
# one would close the service to the calls after it.
LEFT_OUT = r"/admin/(plan|verify|keys)"


def operations(client: TestClient) -> list[Any]:
    """All of the service's own document."""
    loaded = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    loaded.app = client.app
    found = [result.ok() for result in loaded.exclude(path_regex=LEFT_OUT).get_all_operations()]
    assert len(found) > 35
    return found


def check(client: TestClient, operation: Any, examples: int) -> None:
    """Calls one operation with what its document allows, and with some that it does not."""

    @given(case=operation.as_strategy())
    @settings(
        max_examples=examples, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate], derandomize=True, database=None,
    )  # fmt: skip
    def run(case: Any) -> None:
        _shorten(case.body)
        case.call_and_validate(checks=CHECKS, headers={**(case.headers or {}), "Host": "localhost"})

    run()


def check_all(client: TestClient, examples: int, every: int = 1) -> None:
    """Checks each operation, or only one of so many."""
    failures = []
    for operation in operations(client)[::every]:
        try:
            check(client, operation, examples)
        except Exception as error:
            failures.append(f"{operation.label}: {error}")
    assert not failures, "\n\n".join(failures)


def test_every_answer_is_documented(client: TestClient) -> None:
    check_all(client, 1, every=8)


@pytest.mark.slow
@pytest.mark.nightly
def test_every_answer_is_documented_at_length(client: TestClient) -> None:
    check_all(client, scaled(60))


UPLOADS = "/v1/collections/{collection}/documents"


@pytest.mark.slow
@pytest.mark.parametrize("media_type", ["application/json", "multipart/form-data"])
@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_every_answer_to_an_upload_is_documented(
    client: TestClient, method: str, media_type: str
) -> None:
    [upload] = [each for each in operations(client) if each.label == f"{method} {UPLOADS}"]
    sent: list[int] = []

    @given(case=upload.as_strategy())
    @settings(
        max_examples=scaled(60), suppress_health_check=list(HealthCheck),
        phases=[Phase.generate], derandomize=True, database=None,
    )  # fmt: skip
    def run(case: Any) -> None:
        assume(case.media_type == media_type)
        headers = {**(case.headers or {}), "Host": "localhost"}
        response = case.call_and_validate(checks=CHECKS, headers=headers)
        sent.append(response.status_code)

    run()
    assert sent if media_type == "multipart/form-data" else 202 in sent


def references(value: Any) -> Iterator[str]:
    """Yield every `$ref` of a document."""
    if isinstance(value, dict):
        yield from ([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from references(each)


def test_every_reference_of_the_document_resolves(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    named = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    found = set(references(document))
    assert "#/components/schemas/DocumentsRequest" in found
    assert found <= named


def test_openais_interface_tells_400_of_what_cannot_be_read(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions"):
        told = set(paths[path]["post"]["responses"])
        assert {"400", "500", "501", "504", "507"} <= told
        assert "422" not in told
    assert "422" in paths["/v1/answers"]["post"]["responses"]


def _shorten(body: Any) -> None:
    """Long answers test the model, not the document."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
            if isinstance(body.get(name), int) and body[name] > 4:
                body[name] = 4
        if "messages" in body and not body.get("max_tokens"):
            body["max_tokens"] = 4
        if "input" in body and not body.get("max_output_tokens"):
            body["max_output_tokens"] = 4


def test_operations_are_named_by_tag_and_function(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    names = [each["operationId"] for operations in paths.values() for each in operations.values()]
    assert len(set(names)) == len(names)
    assert {"admin.list_modules", "openai.complete_chat", "documents.get_job"} <= set(names)


NAMED = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, RagCacheError) and kind is not RagCacheError
]


@pytest.mark.parametrize("kind", NAMED, ids=lambda kind: kind.__name__)
def test_every_named_error_is_told(kind: type[RagCacheError]) -> None:
    info = error_info(kind("what was wrong"))
    assert info is not None
    assert 400 <= info.status < 600
    assert info.detail == "what was wrong"
    response = error_response(info, "/v1/x")
    assert ("retry-after" in response.headers) is (info.status in (429, 503))
    problem = info.problem("/v1/x")
    assert problem["status"] == info.status
    assert problem["type"].startswith("urn:ragcache:problem:")
    assert info.openai()["error"]["message"] == "what was wrong"


def test_the_table_names_errors_that_there_are() -> None:
    assert set(STATUS) <= {kind.__name__ for kind in NAMED} | {PMLError.__name__}


def test_what_nobody_named_is_not_told() -> None:
    assert error_info(RuntimeError("a secret")) is None


def test_a_refusal_carries_its_headers() -> None:
    info = error_info(HTTPProblem(429, "rate-limited", "too many", {"Retry-After": "7"}))
    assert info is not None
    assert info.headers == {"Retry-After": "7"}
    assert info.openai()["error"]["type"] == "rate_limit_error"
