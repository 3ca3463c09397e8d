"""Calls of the application without a client between, for those that stall or lie."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

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
