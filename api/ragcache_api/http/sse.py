"""Server-sent events of an answer under way."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

PING_SECONDS = 15.0
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Events(EventSourceResponse):
    """Sends events as they come, and a comment in every pause, so that no proxy gives up.

    Stops as soon as the client goes away, also while nothing is sent. close: called when it is
    over, however it ended, even if nothing was ever sent.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(events, headers=_HEADERS)
        self._events, self._close = events, close
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            async with anyio.create_task_group() as group:
                group.start_soon(self._until_gone, receive, group.cancel_scope)
                group.start_soon(self._ping, send)
                await self._send_all(send)
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._events.aclose()
            self._close()

    async def _send_all(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            self._sent_at = time.monotonic()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_gone(self, receive: Receive, cancel: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel.cancel()

    async def _ping(self, send: Send) -> None:
        while True:
            await anyio.sleep(PING_SECONDS)
            if time.monotonic() - self._sent_at >= PING_SECONDS:
                body = {"body": KEEPALIVE_COMMENT, "more_body": True}
                await send({"type": "http.response.body", **body})


def event(value: Any, name: str | None = None) -> bytes:
    """An event with a value as JSON."""
    return format_sse_event(data_str=compact(value), event=name)


def compact(value: Any) -> str:
    """JSON without spaces. Numbers that are not finite have no place in it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
