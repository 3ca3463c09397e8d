"""Server-sent events of an answer under way."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import anyio
from anyio.abc import TaskGroup
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from pydantic_core import to_json
from starlette.types import Message, Receive, Scope, Send

PING_SECONDS, STALL_SECONDS, WATCH_SECONDS = 15.0, 30.0, 5.0
_BODY = "http.response.body"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Events(EventSourceResponse):
    """Sends events as they come, and a comment in every pause, so that no proxy gives up.

    Stops as soon as the client goes away, also while nothing is sent; where it takes nothing for
    `STALL_SECONDS`; and after `seconds`. Its connection is closed then. close: called when it is
    over, however it ended, even if nothing was ever sent.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], None] = lambda: None,
        seconds: float = math.inf,
    ) -> None:  # fmt: skip
        super().__init__(events, headers=_HEADERS)
        self._events, self._close, self._seconds = events, close, seconds
        self._sending, self._since = False, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            async with anyio.create_task_group() as group:
                stop = group.cancel_scope
                stop.deadline = anyio.current_time() + self._seconds
                group.start_soon(self._until_gone, receive, stop)
                group.start_soon(self._watch, send, group)
                await self._send_all(send)
                stop.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._events.aclose()
            self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await self._send(send, {"type": "http.response.start", **start})
        async for event in self._events:
            await self._send(send, {"type": _BODY, "body": event, "more_body": True})
        self._sending, self._since = True, time.monotonic()  # for good: nothing may follow
        await send({"type": _BODY, "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        self._sending, self._since = True, time.monotonic()
        await send(message)
        self._sending, self._since = False, time.monotonic()

    async def _until_gone(self, receive: Receive, stop: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        stop.cancel()

    async def _watch(self, send: Send, group: TaskGroup) -> None:
        """A timer for each send would cost as much as the send."""
        while True:
            await anyio.sleep(WATCH_SECONDS)
            quiet = time.monotonic() - self._since
            if self._sending and quiet >= STALL_SECONDS:
                group.cancel_scope.cancel()
            elif quiet >= PING_SECONDS:
                group.start_soon(self._ping, send)

    async def _ping(self, send: Send) -> None:
        if not self._sending:
            await self._send(send, {"type": _BODY, "body": KEEPALIVE_COMMENT, "more_body": True})


def event(value: Any, name: str | None = None) -> bytes:
    """An event with a value as JSON."""
    return format_sse_event(data_str=compact(value).decode(), event=name)


def compact(value: Any) -> bytes:
    """JSON without spaces. Numbers that are not finite have no place in it: null stands there."""
    return to_json(value, inf_nan_mode="null")
