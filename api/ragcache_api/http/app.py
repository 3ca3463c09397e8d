"""The service as an ASGI application."""

# MERGED ragcache_api.http.files: The operator's page as files, with a strict policy for the
#   browser that shows them.
# MERGED ragcache_api.http.documenting: The OpenAPI document, as far as FastAPI does not write
#   it as the service answers.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from ragcache import RagCache, __version__
from ragcache_api.http import errors
from ragcache_api.http.auth import APIKeyAuth, Gate, RateLimit
from ragcache_api.http.cursors import CursorCipher
from ragcache_api.http.errors import is_openai
from ragcache_api.http.openai import routes as openai
from ragcache_api.http.routes import admin, answers, documents, health, jobs, schemas
from ragcache_api.http.service import Service
from ragcache_api.http.stats_recorder import POINT_SECONDS
from ragcache_api.http.tracing import telemetry, trace_answers
from ragcache_api.settings import ServiceSettings

PAGE = Path(__file__).parent / "page"
_THREADS = 64  # of routes, and as many that wait for retrieval and leases
ROUTERS = (
    health.router, openai.router, answers.router, schemas.router, documents.router, jobs.router,
    admin.router,
)  # fmt: skip


def create_app(rag: RagCache, settings: ServiceSettings | None = None) -> FastAPI:
    """The service over an open state folder, which stays the caller's to close.

    `app.state.service` is what the routes work with. Raises `MissingExtra` where traces are asked
    for and OpenTelemetry is not installed.
    """
    settings = settings or ServiceSettings.read()
    service = Service(rag, settings)
    app = Documented(
        title="ragcache", version=__version__, lifespan=_lifespan, docs_url=None, redoc_url=None,
        telemetry=telemetry(settings.telemetry), generate_unique_id_function=_operation_id,
    )  # fmt: skip
    app.state.service = service
    app.state.cursors = CursorCipher.of(rag)
    if settings.telemetry:
        service.running.ended.append(trace_answers)
    page = PAGE if settings.page and PAGE.is_dir() else None
    app.add_middleware(
        Gate,
        doorkeeper=APIKeyAuth(rag.keys),
        rate=RateLimit(settings.rate),
        body_bytes=settings.body_bytes,
        upload_bytes=settings.upload_bytes,
        deadline=settings.deadline,
        allowed_hosts=frozenset((*settings.allowed_hosts, settings.host)),
        open_paths=_open_paths(page),
    )
    errors.install(app)
    for router in ROUTERS:
        app.include_router(router)
    if page is not None:
        app.mount("/admin", PageFiles(directory=page, html=True), name="page")
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    pool = ThreadPoolExecutor(_THREADS, "ragcache-http")
    asyncio.get_running_loop().set_default_executor(pool)
    current_default_thread_limiter().total_tokens = _THREADS
    ticking = asyncio.create_task(_tick(service))
    try:
        yield
    finally:
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking


async def _tick(service: Service) -> None:
    """Notes how many requests run, once for every point of the series."""
    while True:
        service.recorder.tick(service.running.entries.values())
        await asyncio.sleep(POINT_SECONDS)


def _operation_id(route: APIRoute) -> str:
    """Names of routes are those of functions, which two files may have in common."""
    return f"{route.endpoint.__module__.rpartition('.')[2]}.{route.name}"


def _open_paths(page: Path | None) -> frozenset[str]:
    """The page's files, which hold nothing that is secret."""
    if page is None:
        return frozenset()
    files = (file.relative_to(page).as_posix() for file in page.rglob("*") if file.is_file())
    return frozenset(("/admin/", "/admin", *(f"/admin/{name}" for name in files)))


HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # scripts of two versions must not meet after an upgrade
}


class PageFiles(StaticFiles):
    """Nothing from other hosts, nothing inline, and no other site may frame it."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Raises `HTTPException` (404, 405)."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


class Documented(FastAPI):
    """FastAPI adds an answer 422 to every operation that takes something; under OpenAI's interface
    what cannot be read gets 400."""

    def openapi(self) -> dict[str, Any]:
        """The document, made at the first call."""
        if self.openapi_schema is None:
            for path, operations in super().openapi()["paths"].items():
                if is_openai(path):
                    for operation in operations.values():
                        operation["responses"].pop("422", None)
        return super().openapi()
