"""Kept conversations over HTTP: their tokens in `usage`, their bytes, and their deletion."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from ragcache import RagCache
from ragcache.models import LoadedModel
from tests.api.http.conftest import client_of
from tests.ragcache.test_recurrence import passage


@pytest.fixture
def rag(tmp_path: Path, quick_reader: LoadedModel) -> Iterator[RagCache]:
    with RagCache.open(tmp_path / "state", quick_reader, recognize_recurring=False) as opened:
        yield opened


@pytest.fixture
def client(rag: RagCache) -> Iterator[TestClient]:
    with client_of(rag) as made:
        yield made


def chat(client: TestClient, *seeds: int, **body: Any) -> int:
    """Return the cached tokens of a chat, of which the last message asks."""
    roles = ["user", "assistant"] * len(seeds)
    messages = [
        {"role": role, "content": passage(seed, 9)}
        for role, seed in zip(roles, seeds, strict=False)
    ]
    given = {"model": "ragcache-reader", "messages": messages, "max_tokens": 4, **body}
    told = client.post("/v1/chat/completions", json=given)
    assert told.status_code == 200, told.text
    return int(told.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_conversation_is_resumed_and_deleted_by_its_name(client: TestClient) -> None:
    assert chat(client, 1, prompt_cache_key="mine") == 0
    resumed = chat(client, 1, 2, 3, prompt_cache_key="mine")
    assert resumed > 128
    held = client.get("/v1/conversations").json()
    assert held["resumed_tokens"] == {"host": resumed}
    assert held["bytes"]["host"] > 0
    path = "/v1/conversations/mine"
    foreseen = client.delete(path, params={"dry_run": True}).json()
    assert foreseen == {"bytes": held["bytes"], "dry_run": True, "conversations": 1}
    assert client.delete(path).json() == {**foreseen, "dry_run": False}
    assert client.get("/v1/conversations").json() == {**held, "bytes": {}}
    assert client.delete(path).json()["conversations"] == 0


def test_a_request_with_store_false_leaves_nothing(client: TestClient) -> None:
    chat(client, 1, store=False)
    assert client.get("/v1/conversations").json() == {"bytes": {}, "resumed_tokens": {}}


def retained(client: TestClient, rag: RagCache, seed: int, **sent: Any) -> list[float]:
    """Return the seconds for which the states of a new chat are retained."""
    rag.internals.shared.store.memory.retained.clear()
    given = {"model": "ragcache-reader", "messages": [], "max_tokens": 4, **sent}
    given["messages"] = [{"role": "user", "content": passage(seed, 9)}]
    headers = given.pop("headers", {})
    told = client.post(given.pop("path", "/v1/chat/completions"), json=given, headers=headers)
    assert told.status_code == 200, told.text
    rag.internals.shared.keeping.submit(lambda: None).result()
    return [until - time.time() for until in rag.internals.shared.store.memory.retained.values()]


def test_callers_wish_to_find_their_states_again(client: TestClient, rag: RagCache) -> None:
    """By OpenAI's field, by Anthropic's mark, and by a header, which the field replaces."""
    header = {"headers": {"X-Prompt-Cache-Retention": "600"}}
    mark = {"path": "/v1/messages", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert not retained(client, rag, 1)
    assert not retained(client, rag, 2, prompt_cache_retention="in_memory")
    assert min(retained(client, rag, 3, prompt_cache_retention="24h")) > 86_000
    assert 500 < min(retained(client, rag, 4, **header)) <= 600
    assert 200 < min(retained(client, rag, 5, **header, prompt_cache_retention="5m")) <= 300
    assert 3000 < min(retained(client, rag, 6, **mark)) <= 3600


@pytest.mark.parametrize("wish", ["soon", "-1"])
def test_a_wish_that_is_no_time_is_refused(client: TestClient, wish: str) -> None:
    body = {"model": "ragcache-reader", "messages": [{"role": "user", "content": "Hi"}]}
    by_field = client.post("/v1/chat/completions", json=body | {"prompt_cache_retention": wish})
    headers = {"X-Prompt-Cache-Retention": wish}
    by_header = client.post("/v1/chat/completions", json=body, headers=headers)
    assert by_field.status_code == by_header.status_code == 400


def test_operators_see_the_bytes_of_each_tier(client: TestClient) -> None:
    chat(client, 1)
    client.get("/v1/conversations")
    tiers = {each["name"]: each for each in client.get("/admin/tiers").json()["items"]}
    assert 0 < tiers["host"]["conversation_bytes"] <= tiers["host"]["used_bytes"]
    assert tiers["disk"]["conversation_bytes"] == 0
    assert client.delete("/v1/conversations").json()["conversations"] == 1
