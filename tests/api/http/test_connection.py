"""Bytes on the wire: limits of headers, refused bodies, HTTP/1.0, and errors before any route."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from ragcache import RagCache
from ragcache_api.http.connection import HEADER_BYTES
from tests.api.http.conftest import LEAVE, serving

pytestmark = [pytest.mark.enable_socket, pytest.mark.allow_hosts(["127.0.0.1"])]


def exchange(url: str, sent: bytes, *, ends: bool = False) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, and return the status, headers and body of the response when it has ended."""
    host, port = url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=60)) as connection:
        try:
            connection.sendall(sent)
        except (BrokenPipeError, ConnectionResetError):
            pytest.fail("the connection was closed before its bytes were taken")
        if ends:
            connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value for name, value in pairs}, body


def check_problem(answer: tuple[int, dict[str, str], bytes], status: int, code: str) -> None:
    got, headers, body = answer
    assert got == status
    assert headers["content-type"] == "application/problem+json"
    assert headers["connection"] == "close"
    assert len(headers["x-request-id"]) >= 16
    assert json.loads(body)["type"] == f"urn:ragcache:problem:{code}"


def get_with_header(length: int) -> bytes:
    """Return a request whose path and headers have so many bytes."""
    fixed = b"Host: localhost\r\nConnection: close\r\nLong: "
    value = b"x" * (length - len(b"/health" + fixed + b"\r\n"))
    return b"GET /health HTTP/1.1\r\n" + fixed + value + b"\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        get_with_header(HEADER_BYTES + 1),
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nLong: " + b"x" * 2_000_000,
        b"GET /" + b"x" * 2_000_000,
    ],
    ids=["one over", "many", "endless header", "endless path"],
)
def test_headers_are_limited_before_a_key_is_checked(served: str, sent: bytes) -> None:
    check_problem(exchange(served, sent, ends=True), 431, "headers-too-large")


def test_headers_up_to_the_limit_are_read(served: str) -> None:
    assert exchange(served, get_with_header(HEADER_BYTES))[0] == 200


def test_bytes_that_are_no_request_get_the_usual_shape(served: str) -> None:
    check_problem(exchange(served, b"NO HTTP\r\n\r\n", ends=True), 400, "bad-http")


def test_connections_over_the_limit_get_the_usual_shape(rag: RagCache) -> None:
    with serving(rag, connections=1) as (_, url):
        refused = httpx.get(f"{url}/v1/models", headers={"X-Request-ID": "mine"})
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-request-id"] == "mine"
    assert refused.json()["error"]["code"] == "too_many_connections"


@pytest.mark.parametrize("chunked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_413_of_a_large_body_reaches_its_client(served: str, chunked: bool) -> None:
    body = b" " * 10_000_000

    async def parts() -> Iterator[bytes]:  # type: ignore[misc]
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    async def post() -> int:
        headers = {"Content-Type": "application/json"}
        async with httpx.AsyncClient(timeout=60) as client:
            content = parts() if chunked else body
            answer = await client.post(f"{served}/v1/answers", content=content, headers=headers)
            assert answer.json()["type"].endswith("body-too-large")
            return answer.status_code

    async def all_of_them() -> list[int]:
        return [await post() for _ in range(20)]

    assert asyncio.run(all_of_them()) == [413] * 20


@pytest.mark.parametrize("stream", [False, True])
def test_no_answer_to_http_1_0_is_chunked(served: str, stream: bool) -> None:
    asked = {"question": LEAVE, "collection": "notes", "max_tokens": 2, "stream": stream}
    content = json.dumps(asked).encode()
    head = (
        "POST /v1/answers HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    status, headers, body = exchange(served, head.encode() + content)
    assert status == 200
    assert "transfer-encoding" not in headers
    if stream:
        assert body.startswith(b"event: sources\n")
        assert b"event: answer\n" in body
    else:
        assert int(headers["content-length"]) == len(body)
