"""The ASGI application: routes behind the access check, error shapes, and the pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyio.to_thread import current_default_thread_limiter
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Match, Mount
from starlette.types import ASGIApp, Receive, Scope, Send

from ragcache import RagCache, __version__
from ragcache.calibration import calibrate_in_background
from ragcache_api.http.access_log import AccessLog
from ragcache_api.http.auth import KEY_HEADERS, AccessMiddleware
from ragcache_api.http.browser import install_pages
from ragcache_api.http.envelope import Envelope, install_error_handlers
from ragcache_api.http.paths import is_anthropic, is_openai
from ragcache_api.http.protocol import referenced_schemas
from ragcache_api.http.routes import (
    admin,
    answers,
    archives,
    conversations,
    documents,
    files,
    keys,
    mcp,
    messages,
    namespaces,
    openai,
    pins,
    responses,
    tokens,
    vector_stores,
    vectors,
)
from ragcache_api.http.service import Service
from ragcache_api.http.stats_recorder import POINT_SECONDS
from ragcache_api.http.telemetry import telemetry_config, trace_answers
from ragcache_api.settings import ServiceSettings

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_THREADS = 64  # of routes, and as many for retrieval and leases
ROUTERS = (
    admin.health_router,
    openai.router,
    responses.router,
    messages.router,
    tokens.router,
    vectors.router,
    files.router,
    vector_stores.router,
    answers.router,
    answers.schemas_router,
    documents.router,
    documents.jobs_router,
    pins.router,
    pins.admin_router,
    admin.router,
    archives.router,
    conversations.router,
    keys.router,
    namespaces.router,
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
        service,
        title="ragcache",
        version=__version__,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=telemetry_config(settings.telemetry),
        generate_unique_id_function=_operation_id,
    )
    if settings.telemetry:
        service.requests.on_end.append(trace_answers)
    install_error_handlers(app, app.methods_of)
    for router in ROUTERS:
        app.include_router(router)
    app.router.routes.append(mcp.route)
    if settings.page:
        install_pages(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: Service = app.state.service
    pool = ThreadPoolExecutor(_THREADS, "ragcache-http")
    asyncio.get_running_loop().set_default_executor(pool)
    current_default_thread_limiter().total_tokens = _THREADS
    modes = [service.shared.default_mode]
    await asyncio.to_thread(service.rag.gate.measure_in_background, modes)
    calibrate_in_background(service.rag)
    ticking = asyncio.create_task(_tick(service))
    end = partial(service.end_namespace, asyncio.get_running_loop())
    service.shared.on_deletion.append(end)
    try:
        yield
    finally:
        service.shared.on_deletion.remove(end)
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


@dataclass(frozen=True, slots=True)
class _WithoutSlash:
    """ASGI middleware that removes a slash from the end of a path that is served without it."""

    app: ASGIApp
    has_route: Callable[[str, str], bool]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/"):
            path: str = scope["path"].rstrip("/")
            method = scope["method"]  # ids of documents may end with a slash
            if self.has_route(method, path) and not self.has_route(method, scope["path"]):
                scope = {**scope, "path": path, "raw_path": scope["raw_path"].rstrip(b"/")}
        await self.app(scope, receive, send)


class ServiceApp(FastAPI):
    """FastAPI inside the access check and the envelope of responses.

    A path with a slash at its end is served as the path without it. The OpenAPI document declares
    the API key. Routes of OpenAI's and Anthropic's interfaces declare no status 422: they answer
    400 to an invalid body.
    """

    def __init__(self, service: Service, **options: Any) -> None:
        super().__init__(**options)
        self.state.service = service

    def build_middleware_stack(self) -> ASGIApp:
        """Put the access check and the envelope around FastAPI's own error handling."""
        service: Service = self.state.service
        stack = super().build_middleware_stack()
        access = AccessMiddleware(stack, service.rag.keys, service.settings)
        logged = AccessLog.around(
            _WithoutSlash(access, self._has_route), service.settings.access_log
        )
        return Envelope(logged, service.settings.cors_origins)

    def methods_of(self, path: str) -> list[str]:
        """List the methods that the routes have for a path. Files of the pages have none."""
        found = [method for method in _METHODS if self._has_route(method, path)]
        return [*found[:1], "HEAD", *found[1:]] if found[:1] == ["GET"] else found

    def _has_route(self, method: str, path: str) -> bool:
        """Tell whether a route of the OpenAPI document serves a call, not one of the pages."""
        scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        listed = (each for each in self.routes if getattr(each, "include_in_schema", True))
        routes = (route for route in listed if not isinstance(route, Mount))
        return any(route.matches(scope)[0] == Match.FULL for route in routes)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, made at the first call."""
        if self.openapi_schema is None:
            document = super().openapi()
            key = {"type": "http", "scheme": "bearer", "description": "An API key."}
            document["components"]["schemas"] |= referenced_schemas()
            schemes = {"key": key} | {
                name: {"type": "apiKey", "in": "header", "name": name} for name in KEY_HEADERS
            }
            document["components"]["securitySchemes"] = schemes
            # no key is needed before the first one exists
            document["security"] = [*({name: []} for name in schemes), {}]
            for path, operations in document["paths"].items():
                if is_openai(path) or is_anthropic(path):
                    for operation in operations.values():
                        operation["responses"].pop("422", None)
        return super().openapi()
