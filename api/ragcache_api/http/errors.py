"""Errors on the wire: one table of statuses, and two shapes.

Under `/v1/chat`, `/v1/completions` and `/v1/models` errors are OpenAI's, elsewhere RFC 9457's
`application/problem+json`.
"""

# MERGED ragcache_api.http.faults: How errors become responses.

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ragcache.errors import RagCacheError
from ragcache_schemas import PMLError

STATUS = {
    "ConfigurationError": 400,
    "DocumentError": 422,
    "UnsupportedModel": 400,  # what a request asks of the model
    "MissingExtra": 501,
    "ModelError": 500,
    "DeadlineExceeded": 504,
    "EngineClosed": 503,
    "EngineFailed": 500,
    "IdempotencyConflict": 409,
    "QueueFull": 429,
    "RequestCancelled": 503,
    "UnknownCollection": 404,
    "UnknownJob": 404,
    "UnknownKey": 404,
    "UnknownModule": 404,
    "UnknownSchema": 404,
    "UnusableLogits": 500,
    "RequestError": 400,
    "LedgerUnavailable": 503,
    "RemoteUnavailable": 503,
    "StoreBudgetExceeded": 503,
    "StoreFull": 507,
    "StateMissing": 404,
    "StoreError": 500,
    "PMLError": 422,
}
"""The status of every named error: that of its class, or of the nearest one above it."""

RETRY_SECONDS = 1
_OPENAI = re.compile(r"/v1/(chat|completions|models)(/|$)")
_TITLES = {
    400: "Bad request", 401: "Unauthorized", 403: "Forbidden", 404: "Not found",
    405: "Method not allowed", 408: "Too slow", 409: "Conflict", 413: "Body too large",
    422: "Unprocessable", 429: "Too many requests", 500: "Internal error", 501: "Not installed",
    503: "Unavailable", 504: "Deadline exceeded", 507: "Store full",
}  # fmt: skip
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class HTTPProblem(HTTPException):
    """A request that the service refuses itself. code: as `queue-full`, in the problem's type."""

    def __init__(
        self, status: int, code: str, detail: str, headers: dict[str, str] | None = None,
        param: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(status, detail, headers)
        self.code, self.param = code, param


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as it is told: what both shapes are made of."""

    status: int
    code: str
    detail: str
    headers: dict[str, str] = field(default_factory=dict)
    param: str | None = None
    problems: tuple[dict[str, Any], ...] = ()

    def problem(self, path: str) -> dict[str, Any]:
        """RFC 9457."""
        told: dict[str, Any] = {
            "type": f"urn:ragcache:problem:{self.code}",
            "title": _TITLES.get(self.status, "Error"),
            "status": self.status,
            "detail": self.detail,
            "instance": path,
        }
        return told | {"errors": list(self.problems)} if self.problems else told

    def openai(self) -> dict[str, Any]:
        """OpenAI's shape."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.detail,
                "type": _OPENAI_TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code.replace("-", "_"),
            }
        }

    def body(self, path: str) -> dict[str, Any]:
        """The shape of the path."""
        return self.openai() if is_openai(path) else self.problem(path)


def is_openai(path: str) -> bool:
    """Whether a path belongs to OpenAI's interface."""
    return _OPENAI.match(path) is not None


def fault_of(error: BaseException) -> ErrorInfo | None:
    """None for an error that nobody named: a fault of ours, of which nothing is told."""
    if isinstance(error, HTTPProblem):
        headers = dict(error.headers or {})
        return ErrorInfo(error.status_code, error.code, error.detail, headers, error.param)
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        code = _TITLES.get(error.status_code, "error").lower().replace(" ", "-")
        return ErrorInfo(error.status_code, code, str(error.detail), dict(error.headers or {}))
    kinds = (kind.__name__ for kind in type(error).__mro__)
    status = next((STATUS[kind] for kind in kinds if kind in STATUS), None)
    if status is None:
        return None
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else {}
    return ErrorInfo(status, _code(type(error).__name__), str(error), headers)


UNNAMED = ErrorInfo(500, "internal-error", "the service failed; its log says how")


def _code(name: str) -> str:
    """`QueueFull` as `queue-full`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower().replace("pmlsyntax", "pml-syntax")


def _invalid(error: RequestValidationError) -> ErrorInfo:
    """Says where and what, and repeats nothing that was sent."""
    if any(each["type"] == "json_invalid" for each in error.errors()):
        return ErrorInfo(422, "invalid-json", "the body is no JSON")
    problems = tuple(
        {"loc": [str(part) for part in each["loc"]], "msg": str(each["msg"])}
        for each in error.errors()[:20]
    )
    first = problems[0] if problems else {"loc": [], "msg": "the request cannot be read"}
    place = ".".join(first["loc"][1:]) or "body"
    return ErrorInfo(
        422, "invalid-request", f"{place}: {first['msg']}", param=place, problems=problems
    )


logger = logging.getLogger(__name__)


def fault_response(fault: ErrorInfo, path: str) -> Response:
    """OpenAI answers what cannot be read with 400, everybody else with 422."""
    if is_openai(path):
        status = 400 if fault.status == 422 else fault.status
        return JSONResponse(fault.openai(), status, fault.headers)
    media_type = "application/problem+json"
    return JSONResponse(fault.problem(path), fault.status, fault.headers, media_type)


def fault_in_stream(error: Exception) -> ErrorInfo:
    """What is told of an error for which no status can be sent any longer."""
    fault = fault_of(error)
    if fault is None:
        logger.error("a stream failed", exc_info=error)
    return fault or UNNAMED


def install(app: FastAPI) -> None:
    """Every error that leaves a route is told in the shape of its path."""
    for kind in (HTTPProblem, RequestValidationError, HTTPException, RagCacheError, PMLError):
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
