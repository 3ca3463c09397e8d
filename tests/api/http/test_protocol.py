"""JSON as the service writes it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragcache_api.http.protocol import CompactResponse, compact
from tests.api.http.conftest import LEAVE, client_of


@dataclass(frozen=True, slots=True)
class Told:
    text: str
    score: float
    tags: tuple[str, ...] = ()


def test_dataclasses_are_objects_and_characters_stay() -> None:
    told = compact({"a": Told("höfn\u2028", 0.5, ("x",))})
    assert told == '{"a":{"text":"höfn\u2028","score":0.5,"tags":["x"]}}'.encode()


def test_numbers_that_json_has_not_are_null() -> None:
    numbers = [math.nan, math.inf, -math.inf, 1.0, Told("", math.nan)]
    assert json.loads(compact(numbers)) == [
        None,
        None,
        None,
        1.0,
        {"text": "", "score": None, "tags": []},
    ]


def test_responses_are_written_so() -> None:
    response = CompactResponse({"score": math.inf})
    assert (response.body, response.media_type) == (b'{"score":null}', "application/json")


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
        "/v1/collections?cursor=%FF", "/v1/collections?limit=0", "/v1/jobs?limit=1001",
        "/v1/jobs?cursor=odd", "/v1/schemas/none", "/v1/models/x", "/admin/modules/0",
        "/admin/modules?sort=odd", "/admin/modules?cursor=odd", "/admin/modules?pinned=perhaps",
        "/admin/evictions?cursor=zz", "/admin/heat?minutes=0", "/admin/schemas/x/tree",
        "/admin/schemas/schema:none/tree", "/admin/schemas/collection:none/tree", "/v2/answers",
    ],
)  # fmt: skip
def test_paths_and_queries_that_lead_nowhere(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert 400 <= response.status_code < 500, (path, response.text)
    told = response.json()
    assert told.get("detail") or told["error"]["message"]


def test_a_wrong_method_says_which_are_right(client: TestClient) -> None:
    response = client.put("/v1/answers", json={})
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"


def test_a_failure_of_ours_tells_nothing_of_it(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragcache import RagCache

    def broken_stats(_: RagCache) -> None:
        raise RuntimeError("the secret is 7")

    monkeypatch.setattr(RagCache, "stats", broken_stats)
    response = client.get("/admin/stats")
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/problem+json"
    assert "secret" not in response.text


def test_a_body_larger_than_allowed_is_refused_whatever_it_holds(client: TestClient) -> None:
    with client_of(client.app.state.service.rag, body_bytes=100) as small:  # type: ignore[attr-defined]
        for path in ("/v1/answers", "/v1/chat/completions"):
            refused = small.post(path, content=b"x" * 101)
            assert refused.status_code == 413
