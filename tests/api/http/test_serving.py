"""How the server listens: whose word counts, and how many it takes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ragcache import RagCache
from ragcache_api.http import ServiceSettings, create_app
from ragcache_api.http.serving import server_config


async def statuses(app: Callable[..., Awaitable[None]], client: str, number: int) -> list[int]:
    """Of calls over connections from one address, each of which names another in a header."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    for each in range(number):
        headers = [(b"host", b"localhost"), (b"x-forwarded-for", b"10.0.0.%d" % each)]
        scope = {
            "type": "http", "method": "GET", "path": "/v1/models", "raw_path": b"/v1/models",
            "query_string": b"", "headers": headers, "client": (client, 1), "scheme": "http",
            "http_version": "1.1", "root_path": "", "server": ("localhost", 80), "asgi": {},
        }  # fmt: skip
        await app(scope, receive, send)
    return [each["status"] for each in sent if each["type"] == "http.response.start"]


@pytest.mark.parametrize(
    ("trusted", "client", "refused"),
    [("", "127.0.0.1", True), ("127.0.0.1", "127.0.0.1", False), ("127.0.0.1", "127.0.0.2", True)],
)
def test_only_proxies_that_are_named_tell_who_calls(
    rag: RagCache, monkeypatch: pytest.MonkeyPatch, trusted: str, client: str, refused: bool
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn reads it by itself
    settings = ServiceSettings.read(rate="2/minute", trusted_proxies=trusted)
    config = server_config(create_app(rag, settings), settings)
    config.load()
    assert (429 in asyncio.run(statuses(config.loaded_app, client, 3))) is refused


def test_connections_are_counted(rag: RagCache) -> None:
    settings = ServiceSettings.read(connections=7)
    assert server_config(create_app(rag, settings), settings).limit_concurrency == 7
