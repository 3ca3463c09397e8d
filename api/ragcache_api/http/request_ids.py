"""Ids of requests, which responses and the log contain."""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass
from secrets import token_urlsafe

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID_HEADER = "X-Request-ID"
_USABLE = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def request_id() -> str | None:
    """Return the id of the request that this code runs for, if it runs for one."""
    return _request_id.get()


@dataclass(frozen=True, slots=True)
class RequestIds:
    """ASGI middleware that gives each request an id and writes it to the response.

    The id is the client's `X-Request-ID`, or else random.
    """

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        name = wanted if _USABLE.fullmatch(wanted) else token_urlsafe(12)
        _request_id.set(name)  # to the end of the task, in which the server logs, too

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = name
            await send(message)

        await self.app(scope, receive, send_named)
