"""Whether the service lives, and whether it takes requests; and its metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.metrics import CONTENT_TYPE
from ragcache_api.http.protocol import ResponseModel, problems
from ragcache_api.http.requests import stopping
from ragcache_api.http.service import CallDep, ServiceDep, off_loop

router = APIRouter(tags=["health"])


class Health(ResponseModel):
    status: Literal["live", "ready"]


@router.get("/health/live")
async def live() -> Health:
    """Whether the process answers."""
    return Health(status="live")


@router.get("/health/ready", responses=problems())
async def ready(service: ServiceDep) -> Health:
    """Whether requests are taken: 503 while the service is being stopped."""
    if service.running.draining:
        raise stopping()
    if not service.looking.is_open:
        raise HTTPProblem(503, "engine-closed", "the engine takes no requests any longer")
    return Health(status="ready")


@router.get("/metrics", response_class=PlainTextResponse, responses=problems())
async def metrics(call: CallDep) -> Response:
    """For Prometheus."""
    call.operator()
    return Response(await off_loop(call.service.metrics.text), media_type=CONTENT_TYPE)
