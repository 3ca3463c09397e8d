"""The service as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from fastapi.routing import APIRoute

from ragcache import RagCache, __version__
from ragcache_api.http import faults
from ragcache_api.http.auth import Doorkeeper
from ragcache_api.http.cursors import CursorCipher
from ragcache_api.http.documenting import Documented
from ragcache_api.http.files import PageFiles
from ragcache_api.http.gate import Gate
from ragcache_api.http.limits import RateLimit
from ragcache_api.http.recording import POINT_SECONDS
from ragcache_api.http.routes import (
    admin_modules,
    admin_state,
    admin_work,
    answers,
    chat,
    completions,
    documents,
    health,
    jobs,
    models,
    schemas,
)
from ragcache_api.http.service import Service
from ragcache_api.http.tracing import telemetry, trace_answers
from ragcache_api.settings import ServiceSettings

PAGE = Path(__file__).parent / "page"
_THREADS = 64  # of routes, and as many that wait for retrieval and leases
ROUTERS = (
    health.router, models.router, chat.router, completions.router, answers.router,
    schemas.router, documents.router, jobs.router, admin_modules.router, admin_state.router,
    admin_work.router,
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
        doorkeeper=Doorkeeper(rag.keys),
        rate=RateLimit(settings.rate),
        body_bytes=settings.body_bytes,
        upload_bytes=settings.upload_bytes,
        deadline=settings.deadline,
        allowed_hosts=frozenset((*settings.allowed_hosts, settings.host)),
        open_paths=_open_paths(page),
    )
    faults.install(app)
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
