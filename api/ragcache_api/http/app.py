"""The ASGI application: routes behind the access check, error shapes, and the pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from fastapi.routing import APIRoute

from ragcache import RagCache, __version__
from ragcache_api.http.auth import AccessMiddleware, APIKeyAuth, RateLimit
from ragcache_api.http.browser import install_pages, open_paths
from ragcache_api.http.errors import install_error_handlers, is_openai
from ragcache_api.http.protocol import error_schemas
from ragcache_api.http.request_ids import RequestIds
from ragcache_api.http.routes import admin, answers, documents, keys, openai
from ragcache_api.http.service import Service
from ragcache_api.http.stats_recorder import POINT_SECONDS
from ragcache_api.http.telemetry import telemetry_config, trace_answers
from ragcache_api.settings import ServiceSettings

_THREADS = 64  # of routes, and as many that wait for retrieval and leases
ROUTERS = (
    admin.health_router, openai.router, answers.router, answers.schemas_router, documents.router,
    documents.jobs_router, admin.router, keys.router,
)  # fmt: skip


def create_app(rag: RagCache, settings: ServiceSettings | None = None) -> FastAPI:
    """The HTTP service over an open state folder, as an ASGI application.

    `app.state.service` is the `Service` of the routes.

    Args:
        rag: Stays the caller's to close.
        settings: Read from the environment and `ragcache.toml` by default.

    Raises:
        MissingExtra: traces are on, and OpenTelemetry is not installed.
    """
    settings = settings or ServiceSettings.read()
    service = Service(rag, settings)
    app = ServiceApp(
        title="ragcache", version=__version__, lifespan=_lifespan, docs_url=None, redoc_url=None,
        telemetry=telemetry_config(settings.telemetry), generate_unique_id_function=_operation_id,
    )  # fmt: skip
    app.state.service = service
    if settings.telemetry:
        service.requests.on_end.append(trace_answers)
    app.add_middleware(
        AccessMiddleware, auth=APIKeyAuth(rag.keys),
        rate=RateLimit(settings.rate, settings.rate_storage),
        body_bytes=settings.body_bytes, upload_bytes=settings.upload_bytes,
        deadline=settings.deadline, open_paths=open_paths() if settings.page else frozenset(),
        allowed_hosts=frozenset((*settings.allowed_hosts, settings.host)),
    )  # fmt: skip
    app.add_middleware(RequestIds)
    install_error_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    if settings.page:
        install_pages(app)
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
    """Records how many requests run, once for each point of the series."""
    while True:
        service.recorder.count_active(service.requests.active.values())
        await asyncio.sleep(POINT_SECONDS)


def _operation_id(route: APIRoute) -> str:
    """As `admin.list_modules`: the tag of the router, and the name of the function."""
    return f"{route.tags[0]}.{route.name}"


class ServiceApp(FastAPI):
    """FastAPI, whose OpenAPI document names the API key, and gives no status 422 under OpenAI's
    interface: a request that cannot be read gets 400 there."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, made at the first call."""
        if self.openapi_schema is None:
            document = super().openapi()
            key = {"type": "http", "scheme": "bearer", "description": "An API key."}
            document["components"]["schemas"] |= error_schemas()
            document["components"]["securitySchemes"] = {"key": key}
            document["security"] = [{"key": []}, {}]  # none is needed until the first is made
            for path, operations in document["paths"].items():
                if is_openai(path):
                    for operation in operations.values():
                        operation["responses"].pop("422", None)
        return super().openapi()
