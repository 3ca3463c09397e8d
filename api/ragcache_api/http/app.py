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
from ragcache_api.http.auth import AccessMiddleware
from ragcache_api.http.browser import install_pages
from ragcache_api.http.errors import install_error_handlers, is_openai
from ragcache_api.http.protocol import error_schemas
from ragcache_api.http.request_ids import RequestIds
from ragcache_api.http.routes import admin, answers, documents, keys, openai
from ragcache_api.http.service import Service
from ragcache_api.http.stats_recorder import POINT_SECONDS
from ragcache_api.http.telemetry import telemetry_config, trace_answers
from ragcache_api.settings import ServiceSettings

_THREADS = 64  # of routes, and as many for retrieval and leases
ROUTERS = (
    admin.health_router,
    openai.router,
    answers.router,
    answers.schemas_router,
    documents.router,
    documents.jobs_router,
    admin.router,
    keys.router,
)


def create_app(rag: RagCache, settings: ServiceSettings | None = None) -> FastAPI:
    """Make the ASGI application of the HTTP service over an open state folder.

    `app.state.service` is the `Service` that the routes use.

    Args:
        rag: The open folder. The application does not close it.
        settings: By default read from the environment and `ragcache.toml`.

    Raises:
        MissingExtra: The settings ask for telemetry, and OpenTelemetry is not installed.
    """
    settings = settings or ServiceSettings.read()
    service = Service(rag, settings)
    app = ServiceApp(
        title="ragcache",
        version=__version__,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        telemetry=telemetry_config(settings.telemetry),
        generate_unique_id_function=_operation_id,
    )
    app.state.service = service
    if settings.telemetry:
        service.requests.on_end.append(trace_answers)
    app.add_middleware(AccessMiddleware, keys=rag.keys, settings=settings)
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
    """Count the running requests once for each point of the time series."""
    while True:
        service.recorder.count_active(service.requests.active.values())
        await asyncio.sleep(POINT_SECONDS)


def _operation_id(route: APIRoute) -> str:
    """Join the router's tag and the function's name, such as `admin.list_modules`."""
    return f"{route.tags[0]}.{route.name}"


class ServiceApp(FastAPI):
    """FastAPI with an OpenAPI document that declares the API key.

    Routes of OpenAI's interface declare no status 422: they answer 400 to an invalid body.
    """

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, made at the first call."""
        if self.openapi_schema is None:
            document = super().openapi()
            key = {"type": "http", "scheme": "bearer", "description": "An API key."}
            document["components"]["schemas"] |= error_schemas()
            document["components"]["securitySchemes"] = {"key": key}
            document["security"] = [{"key": []}, {}]  # no key is needed before the first one exists
            for path, operations in document["paths"].items():
                if is_openai(path):
                    for operation in operations.values():
                        operation["responses"].pop("422", None)
        return super().openapi()
