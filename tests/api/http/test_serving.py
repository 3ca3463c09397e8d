"""How the server listens: whose word counts, and how many it takes at once."""

from __future__ import annotations

import asyncio
import gc

import pytest

from ragcache import RagCache
from ragcache_api.http import ServiceSettings, create_app
from ragcache_api.http.serving import long_lived, server_config
from tests.api.http.asgi import App, Caller


async def statuses(app: App, client: str, number: int) -> list[int]:
    """Of calls over connections from one address, each of which names another in a header."""
    callers = [Caller() for _ in range(number)]
    for each, caller in enumerate(callers):
        await caller.call(app, "GET", "/v1/models", client=client, x_forwarded_for=f"10.0.0.{each}")
    return [caller.status for caller in callers]


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


def test_full_collections_pass_by_what_stood_when_serving_began() -> None:
    with long_lived():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
