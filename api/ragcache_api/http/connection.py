"""Client connections: what the server answers before a request reaches the application.

uvicorn's own protocol keeps any number of bytes of headers, answers in plain text, and sends
chunked bodies to clients of HTTP/1.0, which cannot read them.
"""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import service_unavailable
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ragcache_api.http.envelope import DRAIN_BYTES, DRAIN_SECONDS, Envelope, raw_response
from ragcache_api.http.errors import ErrorInfo, HTTPProblem

HEADER_BYTES = 64 * 1024
"""The most bytes of a request's path and headers."""
_LINE_BYTES = len(b": \r\n")
_UNREADABLE = ErrorInfo(400, "bad-http", "the request is not HTTP/1.1 as RFC 9112 defines it")
_TOO_LONG = ErrorInfo(
    431,
    "headers-too-large",
    f"the path and the headers have more than {HEADER_BYTES:,} bytes",
)


class ServiceProtocol(HttpToolsProtocol):
    """A connection to one client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head = 0  # bytes of an incomplete head so far
        self._in_head = False
        self._refusal: ErrorInfo | None = None
        self._left: int | None = None  # bytes to discard before a refused connection closes

    def data_received(self, data: bytes) -> None:
        """Parse bytes of the client, at most `HEADER_BYTES` at once."""
        for start in range(0, len(data), HEADER_BYTES):
            piece = data[start : start + HEADER_BYTES]
            if self._left is not None:
                self._discard(len(piece))
                continue
            begun = self._in_head
            super().data_received(piece)
            if begun and self._in_head:
                self._head += len(piece)
            if self._head > HEADER_BYTES and self._left is None:
                self._refuse(_TOO_LONG)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head = True, 0

    def on_headers_complete(self) -> None:
        self._in_head, self._head = False, 0
        lines = (len(name) + len(value) + _LINE_BYTES for name, value in self.headers)
        length = len(self.url) + sum(lines)
        if length > HEADER_BYTES:
            self._refusal = _TOO_LONG
            raise ValueError(_TOO_LONG.detail)  # the parser stops and has a 400 sent
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answer a request that cannot be parsed."""
        self._refuse(self._refusal or _UNREADABLE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._left = 0
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if app is service_unavailable:
            app = Envelope(_overloaded)
        if cycle.scope["http_version"] == "1.0":
            app = _unchunked(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _refuse(self, info: ErrorInfo) -> None:
        """Answer with an error, and close the connection when the client has read it."""
        path = getattr(self, "url", b"").decode("ascii", "replace").partition("?")[0]
        self.transport.write(raw_response(info, path))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._left, self._in_head = DRAIN_BYTES, False
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.loop.call_later(DRAIN_SECONDS, self.transport.close)

    def _discard(self, number: int) -> None:
        self._left = (self._left or 0) - number
        if self._left <= 0:
            self.transport.close()


async def _overloaded(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
    raise HTTPProblem(
        503,
        "too-many-connections",
        "the service has as many connections as it may (setting connections); try again",
    )


def _unchunked(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Wrap an app so that a body of unknown length ends with its connection, as in HTTP/1.0."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        measured = True

        async def send_plain(message: Message) -> None:
            nonlocal measured
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                measured = b"content-length" in names
                cycle.chunked_encoding = None if measured else False
            elif not measured:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return run
