"""Calls of the application without a client between, and the events that it sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.testclient import TestClient
from starlette.types import Message

App = Callable[..., Awaitable[None]]


@dataclass
class Caller:
    """body: what comes of it; where it is not `whole`, the rest never comes. takes: how many
    messages are taken, the others block. told: what was taken."""

    body: bytes = b""
    whole: bool = True
    takes: float = float("inf")
    told: list[Message] = field(default_factory=list)
    _given: bool = False

    async def receive(self) -> Message:
        if self._given:
            await asyncio.Event().wait()
        self._given = True
        return {"type": "http.request", "body": self.body, "more_body": not self.whole}

    async def send(self, message: Message) -> None:
        if len(self.told) >= self.takes:
            await asyncio.Event().wait()
        self.told.append(message)

    @property
    def status(self) -> int:
        return int(self.told[0]["status"])

    async def call(
        self, app: App, method: str, path: str, *, client: str = "127.0.0.1", **headers: str
    ) -> None:  # fmt: skip
        """headers: with `_` for `-`."""
        named = {"host": "localhost", "content_type": "application/json", **headers}
        scope: dict[str, Any] = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(),
            "query_string": b"", "client": (client, 1), "scheme": "http", "http_version": "1.1",
            "root_path": "", "server": ("localhost", 80), "asgi": {"version": "3.0"}, "state": {},
            "headers": [
                (name.replace("_", "-").encode(), value.encode()) for name, value in named.items()
            ],
        }  # fmt: skip
        await app(scope, self.receive, self.send)


def listed(
    client: TestClient, path: str, headers: Mapping[str, str] | None = None, **query: Any
) -> list[Any]:
    """All items of a list, read in pages of two."""
    items: list[Any] = []
    query["limit"] = 2
    while True:
        page = client.get(path, params=query, headers=headers).json()
        assert len(page["items"]) <= 2
        items += page["items"]
        if page["next"] is None:
            return items
        query["cursor"] = page["next"]


def events(text: str) -> list[tuple[str, Any]]:
    """Names and values; the name of an event without one is `message`."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        names = [line[7:] for line in lines if line.startswith("event: ")]
        told = "\n".join(line[6:] for line in lines if line.startswith("data: "))
        found.append(
            (names[0] if names else "message", told if told == "[DONE]" else json.loads(told))
        )
    return found
