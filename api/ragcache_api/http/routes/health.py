"""Health checks and metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.metrics import CONTENT_TYPE
from ragcache_api.http.protocol import ResponseModel, problems
from ragcache_api.http.requests import stopping
from ragcache_api.http.service import ContextDep, ServiceDep, off_loop

router = APIRouter(tags=["health"])


class HealthResponse(ResponseModel):
    status: Literal["live", "ready"]


@router.get("/health/live")
async def check_live() -> HealthResponse:
    """Whether the process answers."""
    return HealthResponse(status="live")


@router.get("/health/ready", responses=problems())
async def check_ready(service: ServiceDep) -> HealthResponse:
    """Whether the service takes requests: 503 while it is being stopped."""
    if service.requests.draining:
        raise stopping()
    if not service.queries.is_open:
        raise HTTPProblem(503, "engine-closed", "the engine takes no requests any longer")
    return HealthResponse(status="ready")


@router.get("/metrics", response_class=PlainTextResponse, responses=problems())
async def read_metrics(context: ContextDep) -> Response:
    """Metrics in Prometheus's text format."""
    context.require_operator()
    return Response(await off_loop(context.service.metrics.text), media_type=CONTENT_TYPE)
