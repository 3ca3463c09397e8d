"""The route `/mcp`: the Model Context Protocol by streamable HTTP.

Each call is complete in itself and gets one JSON response, so that any replica can answer it. An
API key opens it as every other route: a caller finds the collections of its namespace.
"""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ragcache import Answer, AsyncRagCache, GenerationParams
from ragcache.errors import MissingExtra, RequestError
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.requests import deadline_exceeded
from ragcache_api.http.service import RequestContext, Service
from ragcache_api.mcp.tools import AskArguments, McpSession

PATH = "/mcp"


class McpEndpoint:
    """ASGI application of the path. Raises `MissingExtra` without the SDK."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = _server()
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        limit: int = scope["app"].state.service.settings.body_bytes
        manager = StreamableHTTPSessionManager(
            server, stateless=True, json_response=True, max_request_body_size=limit
        )
        async with manager.run():
            await manager.handle_request(scope, receive, send)


route = Route(PATH, McpEndpoint(), methods=["POST"])


@cache
def _server() -> Any:
    """Return the server of this process. Raises `MissingExtra`."""
    try:
        from ragcache_api.mcp.server import create_mcp_server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "mcp_types"):
            raise
        text = "the Model Context Protocol needs another package: pip install 'ragcache[mcp]'"
        raise MissingExtra(text) from error
    return create_mcp_server(_session)


def _session(context: Any) -> McpSession:
    """Return the session of a request, whose key `AccessMiddleware` has checked."""
    request: Request = context.request
    service: Service = request.app.state.service
    caller = request.state.caller
    found = RequestContext.of(request, service, caller)

    async def ask(wanted: AskArguments) -> Answer:
        return await _answer(found, wanted)

    return McpSession(found.rag, ask, service.settings.mcp_ingest)


async def _answer(context: RequestContext, wanted: AskArguments) -> Answer:
    """Answer a question as a request of the service, with its queue, deadline and statistics.

    Raises:
        RequestError: The service is ending, too many requests wait, or the time is over.
    """
    left, requests = context.deadline, context.service.requests
    try:
        with requests.track_request("answer", context.caller, wanted.collection) as active:
            async with asyncio.timeout(left):
                await active.wait_for_turn()
                opening = AsyncRagCache(context.rag).stream(
                    wanted.question,
                    collection=wanted.collection,
                    k=wanted.k,
                    filters=wanted.filters,
                    generation=GenerationParams(timeout=left),
                )
                active.add_answer(await active.attach(await opening))
            return active.answers[0]
    except HTTPProblem as error:
        raise RequestError(error.info.detail) from error
    except TimeoutError:
        raise deadline_exceeded() from None
