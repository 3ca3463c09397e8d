"""The access log: one line for each request on standard output, without texts of users."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache_api.http.envelope import request_id

AccessLogFormat = Literal["off", "text", "json"]


class AccessLog:
    """ASGI middleware that writes a line when a response has ended.

    A line has the time, the client's address, method, path, status, seconds, sent bytes and the id
    of the request. It has neither query strings nor bodies, which hold texts. Probes of `/health`
    are left out.
    """

    def __init__(
        self, app: ASGIApp, format: AccessLogFormat, write: Callable[[str], Any] | None = None
    ) -> None:
        """Wrap a service.

        Args:
            app: The service, inside of `Envelope`.
            format: `text` or `json`.
            write: Writes a line with its end. Defaults to standard output.
        """
        self._app, self._format = app, format
        self._write = _print if write is None else write

    @classmethod
    def around(cls, app: ASGIApp, format: AccessLogFormat) -> ASGIApp:
        """Return a service with an access log, or as it is if the format is `off`."""
        return app if format == "off" else cls(app, format)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/health"):
            await self._app(scope, receive, send)
            return
        began, status, sent = time.perf_counter(), 0, 0

        async def send_on(message: Message) -> None:
            nonlocal status, sent
            status = message.get("status", status)
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            self._write(self._line(scope, status, time.perf_counter() - began, sent))

    def _line(self, scope: Scope, status: int, seconds: float, sent: int) -> str:
        client = scope.get("client") or ("-", 0)
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "client": client[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            "bytes": sent,
            "request_id": request_id(),
        }
        if self._format == "json":
            return json.dumps(line) + "\n"
        line["path"] = json.dumps(line["path"])[1:-1]  # without line ends
        return " ".join(map(str, line.values())) + "\n"


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()
