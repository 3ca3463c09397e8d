"""A reverse proxy that adds a prefix to every path, as people put services behind one name."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_OWN = ("host", "connection", "transfer-encoding", "content-length", "content-encoding")


@contextmanager
def prefixed(service: str, prefix: str) -> Iterator[str]:
    """Serve a service below a prefix, and yield the address with the prefix."""
    client = httpx.AsyncClient(base_url=service, timeout=60)

    async def forward(request: Request) -> Response:
        path = request.url.path.removeprefix(prefix)
        headers = {k: v for k, v in request.headers.items() if k not in (*_OWN, "origin")}
        url = httpx.URL(path=path, query=request.url.query.encode())
        sent = client.build_request(
            request.method, url, headers=headers, content=await request.body()
        )
        answer = await client.send(sent, stream=True)

        async def body() -> AsyncIterator[bytes]:
            async for piece in answer.aiter_bytes():
                yield piece

        kept = {k: v for k, v in answer.headers.items() if k not in _OWN}
        return StreamingResponse(body(), answer.status_code, kept)

    methods = ["GET", "POST", "PUT", "DELETE"]
    app = Starlette(routes=[Route(f"{prefix}/{{path:path}}", forward, methods=methods)])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}{prefix}"
    finally:
        server.should_exit = True
        thread.join()
