"""The envelope of every response: its id, the shape of errors, and how its connection ends.

The whole service runs inside `Envelope`, which answers errors wherever they are raised. A response
that leaves the server without passing an application has the same shape from `raw_response`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from secrets import token_urlsafe

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragcache.errors import RagCacheError
from ragcache_api.http.errors import (
    INTERNAL_ERROR,
    ErrorInfo,
    HTTPProblem,
    error_info,
    error_response,
    wrong_content_type,
)
from ragcache_api.http.paths import explain_unserved
from ragcache_schemas import PMLError

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-ID"
DRAIN_BYTES, DRAIN_SECONDS, DRAIN_PAUSE_SECONDS = 2**28, 10.0, 1.0
"""How much more of a refused body is taken, and for how long, in all and without any bytes. A
connection that closes earlier loses the response: the client's system discards it with a reset."""
_BODY = "http.response.body"
_EXPOSED = (REQUEST_ID_HEADER, "Retry-After", "Location")
_USABLE = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

MethodsOf = Callable[[str], Sequence[str]]
"""Returns the methods that the service has for a path."""


def request_id() -> str | None:
    """Return the id of the request that this code runs for, if it runs for one."""
    return _request_id.get()


def new_request_id() -> str:
    """Return a random id."""
    return token_urlsafe(12)


class Envelope:
    """ASGI middleware around a whole service.

    It gives each request an id, the client's `X-Request-ID` or else a random one, and writes it to
    the response. It answers errors in the shape of their path, `HEAD` as `GET` without a body, and
    the calls of pages whose origins are allowed. A connection that a response closes stays open
    until the client has sent its body, within limits.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str] = ()) -> None:
        """Wrap a service.

        Args:
            app: The service. It may raise any error before its response begins.
            origins: Origins whose pages may call the service, or `*`.
        """
        self._app = app
        self._outer: ASGIApp = self._answer
        if origins:
            self._outer = CORSMiddleware(
                self._answer,
                allow_origins=origins,
                allow_methods=("*",),
                allow_headers=("*",),
                expose_headers=_EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        name = wanted if _USABLE.fullmatch(wanted) else new_request_id()
        _request_id.set(name)  # to the end of the task, in which the server logs, too
        exchange = _Exchange(scope, receive, send, name)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._outer(scope, exchange.receive, exchange.send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_on(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as error:  # any error of the application becomes a 500 in the usual shape
            if started:  # the server closes the connection, and logs the error
                raise
            info = logged_error(error, _call(scope["method"], scope["path"]))
            await error_response(info, scope["path"])(scope, receive, send)


class _Exchange:
    """One request and its response, as the server passes them."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, name: str) -> None:
        self._receive, self._send, self._name = receive, send, name
        self._is_head = scope["method"] == "HEAD"
        self._waits = Headers(scope=scope).get("expect", "").lower() == "100-continue"
        self._more = True  # of the request's body
        self._closes = self._sent = False

    async def receive(self) -> Message:
        """Receive a message, and note when the body is complete."""
        message = await self._receive()
        self._waits = False
        self._more = message["type"] == "http.request" and message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the response."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID_HEADER] = self._name
            self._closes = headers.get("connection", "").lower() == "close"
        elif self._is_head and message["type"] == _BODY:
            if self._sent:
                return
            message, self._sent = {"type": _BODY, "body": b"", "more_body": False}, True
        if self._closes and self._more and not self._waits and _is_last(message):
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": _BODY, "body": b"", "more_body": False}
        await self._send(message)

    async def _drain(self) -> None:
        """Discard the rest of the body, within the limits of this module."""
        left = DRAIN_BYTES
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._more and left > 0:
                    message = await asyncio.wait_for(self.receive(), DRAIN_PAUSE_SECONDS)
                    left -= len(message.get("body", b""))
        except TimeoutError:
            return


def _is_last(message: Message) -> bool:
    return message["type"] == _BODY and not message.get("more_body", False)


def raw_response(info: ErrorInfo, path: str) -> bytes:
    """Write the response of an error as HTTP/1.1, with a random id, for a connection that ends."""
    response, name = error_response(info, path), new_request_id()
    logger.info("%s: %s", _call("", path, name), info.detail)
    response.headers.update({REQUEST_ID_HEADER: name, "Connection": "close"})
    head = [f"HTTP/1.1 {info.status} {HTTPStatus(info.status).phrase}".encode()]
    head += [key + b": " + value for key, value in response.raw_headers]
    return b"\r\n".join((*head, b"", bytes(response.body)))


def logged_error(error: BaseException, call: str) -> ErrorInfo:
    """Return the content of an error for its client.

    Errors of the service are logged with the call. An unknown error is logged with its traceback,
    and returned as `INTERNAL_ERROR`.
    """
    info = error_info(error)
    if info is None:
        logger.error("%s failed", call, exc_info=error)
    elif info.status >= 500:
        logger.error("%s: %s", call, error)
    return info or INTERNAL_ERROR


def stream_error(error: Exception) -> ErrorInfo:
    """Log an error of a response that has begun, and return its content for the last event."""
    return logged_error(error, f"request {request_id()}: a stream")


def install_error_handlers(app: FastAPI, methods_of: MethodsOf) -> None:
    """Write each error that leaves a route in the shape of its path.

    FastAPI would answer them in its own shape before `Envelope` sees them.
    """

    async def respond(request: Request, error: Exception) -> Response:
        path = request.url.path
        if isinstance(error, RequestValidationError):
            error = wrong_content_type(error, request.headers.get("content-type")) or error
        elif isinstance(error, HTTPException) and not isinstance(error, HTTPProblem):
            error = _unserved(request, error, methods_of)
        return error_response(logged_error(error, _call(request.method, path)), path)

    for kind in (RequestValidationError, HTTPException, RagCacheError, PMLError, Exception):
        app.add_exception_handler(kind, respond)


def _unserved(request: Request, error: HTTPException, methods_of: MethodsOf) -> HTTPException:
    """Return the error of a call without a route. The router's own says no more than its status."""
    if error.status_code not in (404, 405):
        return error
    path = request.url.path
    allowed = {"Allow": ", ".join(methods)} if (methods := methods_of(path)) else {}
    detail = explain_unserved(request.method, path, methods_of)
    status, code = (405, "method-not-allowed") if methods else (404, "not-found")
    return HTTPProblem(status, code, detail, allowed)


def _call(method: str, path: str, name: str | None = None) -> str:
    return f"request {name or request_id()}: {method} {path}"
