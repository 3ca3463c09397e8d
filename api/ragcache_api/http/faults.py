"""How errors become responses."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ragcache.errors import RagCacheError
from ragcache_api.http.errors import UNNAMED, Fault, Refusal, fault_of, is_openai
from ragcache_schemas import PMLError

logger = logging.getLogger(__name__)


def fault_response(fault: Fault, path: str) -> Response:
    """OpenAI answers what cannot be read with 400, everybody else with 422."""
    if is_openai(path):
        status = 400 if fault.status == 422 else fault.status
        return JSONResponse(fault.openai(), status, fault.headers)
    media_type = "application/problem+json"
    return JSONResponse(fault.problem(path), fault.status, fault.headers, media_type)


def fault_in_stream(error: Exception) -> Fault:
    """What is told of an error for which no status can be sent any longer."""
    fault = fault_of(error)
    if fault is None:
        logger.error("a stream failed", exc_info=error)
    return fault or UNNAMED


def install(app: FastAPI) -> None:
    """Every error that leaves a route is told in the shape of its path."""
    for kind in (Refusal, RequestValidationError, HTTPException, RagCacheError, PMLError):
        app.add_exception_handler(kind, _named)
    app.add_exception_handler(Exception, _unnamed)


async def _named(request: Request, error: Exception) -> Response:
    fault = fault_of(error)
    if fault is None:
        return await _unnamed(request, error)
    if fault.status >= 500:
        logger.error("%s %s: %s", request.method, request.url.path, error)
    return fault_response(fault, request.url.path)


async def _unnamed(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return fault_response(UNNAMED, request.url.path)
