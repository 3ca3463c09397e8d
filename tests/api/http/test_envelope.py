"""Every response: its id, the shape of errors, and calls of pages of other origins."""

from __future__ import annotations

import asyncio
import gzip
import io
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from ragcache import RagCache
from ragcache.errors import ConfigurationError
from ragcache_api.http import ServiceSettings, envelope
from ragcache_api.http.envelope import Envelope
from ragcache_api.http.errors import HTTPProblem
from tests.api.http.asgi import Caller
from tests.api.http.conftest import LEAVE, client_of

ASKED = {"question": LEAVE, "collection": "notes", "max_tokens": 1}
ORIGIN = "https://app.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_pages_of_allowed_origins_may_call(rag: RagCache) -> None:
    with client_of(rag, cors_origins=ORIGIN) as client:
        asked = client.options("/v1/answers", headers=PREFLIGHT)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == ORIGIN
        assert asked.headers["x-request-id"]
        answered = client.post("/v1/answers", json=ASKED, headers={"Origin": ORIGIN})
        assert answered.status_code == 200
        refused = client.post("/v1/nothing", json={}, headers={"Origin": ORIGIN})
        for response in (answered, refused):
            assert response.headers["access-control-allow-origin"] == ORIGIN
            exposed = response.headers["access-control-expose-headers"].lower()
            assert {"x-request-id", "retry-after"} <= set(exposed.split(", "))
        other = client.get("/v1/models", headers={"Origin": "https://evil.example"})
        assert other.status_code == 403


def test_without_keys_a_star_opens_the_service_to_nobody(rag: RagCache) -> None:
    with client_of(rag, cors_origins="*") as client:
        assert client.get("/v1/models", headers={"Origin": ORIGIN}).status_code == 403


def test_no_origin_is_allowed_by_default(client: TestClient) -> None:
    assert client.options("/v1/answers", headers=PREFLIGHT).status_code != 200
    assert "access-control-allow-origin" not in client.get("/v1/models").headers


def test_an_origin_is_no_address_of_a_page() -> None:
    with pytest.raises(ConfigurationError, match=r"cors_origins.*https://app.example:8443"):
        ServiceSettings.read(cors_origins="https://app.example/chat")


@pytest.mark.parametrize(
    ("kind", "came"),
    [
        ("application/x-www-form-urlencoded", "as application/x-www-form-urlencoded, which `curl"),
        ("text/plain; charset=utf-8", "as text/plain;"),
        ("", "without a Content-Type;"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/answers", "/v1/chat/completions"])
def test_json_without_its_type_is_told_so(
    client: TestClient, path: str, kind: str, came: str
) -> None:
    refused = client.post(path, content=b'{"a": 1}', headers={"Content-Type": kind})
    assert refused.status_code == 415
    told = refused.json()
    detail = told["detail"] if path == "/v1/answers" else told["error"]["message"]
    assert f"the body came {came}" in detail
    assert "Content-Type: application/json" in detail


def zipped(body: bytes) -> bytes:
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as file:
        file.write(body)
    return buffer.getvalue()


def post_packed(client: TestClient, content: bytes, encoding: str = "gzip") -> Any:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    return client.post("/v1/answers", content=content, headers=headers)


def test_bodies_of_gzip_are_read(client: TestClient) -> None:
    body = b'{"question": "%s", "collection": "notes", "max_tokens": 1' % LEAVE.encode()
    for content in (zipped(body + b"}"), zipped(body) + zipped(b"}")):
        assert post_packed(client, content).status_code == 200
    large = zipped(body + b', "stop": null' + b" " * 3_000_000 + b"}")
    assert post_packed(client, large).status_code == 200


@pytest.mark.parametrize(
    ("content", "encoding", "status", "detail"),
    [
        (zipped(b" " * 5_000_000), "gzip", 413, "more than the 4,194,304 bytes"),
        (zipped(b"{}")[:-3], "gzip", 400, "it ends too early"),
        (b"{}", "gzip", 400, "cannot be unpacked as gzip"),
        (b"{}", "br", 415, "Content-Encoding br are not read; send gzip, or none"),
    ],
)
def test_other_packed_bodies_are_refused_by_name(
    client: TestClient, content: bytes, encoding: str, status: int, detail: str
) -> None:
    refused = post_packed(client, content, encoding)
    assert refused.status_code == status
    assert detail in refused.json()["detail"]


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPProblem(413, "body-too-large", "too many", {"Connection": "close"})


def test_a_refused_body_is_drained_before_its_connection_closes() -> None:
    waiting: list[Message] = [
        {"type": "http.request", "body": b"x", "more_body": more} for more in (True, True, False)
    ]

    async def call() -> Caller:
        caller = Caller()

        async def receive() -> Message:
            assert caller.told[-1].get("more_body") is True  # the client has the whole error
            return waiting.pop(0)

        scope = {"type": "http", "method": "POST", "path": "/v1/answers", "headers": []}
        await Envelope(refuse)(scope, receive, caller.send)
        return caller

    told = asyncio.run(call()).told
    assert waiting == []
    assert [message.get("more_body") for message in told] == [None, True, False]


@pytest.mark.parametrize("headers", [{}, {"expect": "100-continue"}])
def test_a_drain_ends_without_bytes(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    monkeypatch.setattr(envelope, "DRAIN_PAUSE_SECONDS", 0.01)
    caller = Caller(whole=False)
    asyncio.run(caller.call(Envelope(refuse), "POST", "/v1/answers", **headers))
    assert caller.status == 413
    assert not caller.told[-1].get("more_body")
    assert caller._given is not bool(headers)  # who waits for `100 Continue` sends no body
