"""Errors as responses: one table of statuses, and three shapes.

Errors of OpenAI's interface have OpenAI's shape (`paths.is_openai`), errors of Anthropic's have
Anthropic's (`paths.is_anthropic`). All others have the shape of RFC 9457
(`application/problem+json`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ragcache_api.http.paths import is_anthropic, is_openai

STATUS = {
    "ArchiveError": 422,
    "ArchiveMismatch": 409,
    "ConfigurationError": 400,
    "RequestError": 400,
    "UnsupportedModel": 400,
    "OriginalMissing": 404,
    "StateMissing": 404,
    "UnknownCollection": 404,
    "UnknownJob": 404,
    "UnknownKey": 404,
    "UnknownModule": 404,
    "UnknownNamespace": 404,
    "UnknownSchema": 404,
    "CollectionExists": 409,
    "DocumentsChanged": 409,
    "IdempotencyConflict": 409,
    "NamespaceDeleted": 409,
    "OriginalChanged": 409,
    "PinBudgetExceeded": 409,
    "DocumentError": 422,
    "PMLError": 422,
    "QueueFull": 429,
    "EngineFailed": 500,
    "ModelError": 500,
    "ServiceFailed": 500,
    "StoreError": 500,
    "TextFailed": 500,
    "UnusableLogits": 500,
    "MissingExtra": 501,
    "EncodingOutOfMemory": 503,
    "EngineClosed": 503,
    "LedgerUnavailable": 503,
    "RemoteUnavailable": 503,
    "RequestCancelled": 503,
    "StoreBudgetExceeded": 503,
    "DeadlineExceeded": 504,
    "StoreFull": 507,
}
"""Status by the name of an error's class. Subclasses have the status of their base class."""

RETRY_SECONDS = 1
_TEMPORARY = (429, 503)
_TITLES = {
    400: "Bad request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Too slow",
    409: "Conflict",
    413: "Body too large",
    415: "Unsupported media type",
    422: "Unprocessable",
    429: "Too many requests",
    431: "Headers too large",
    500: "Internal error",
    501: "Not installed",
    503: "Unavailable",
    504: "Deadline exceeded",
    507: "Store full",
}
_OPENAI_CODES = {"prompt-too-long": "context_length_exceeded"}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    **_OPENAI_TYPES,
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """The content of an error, which all shapes write."""

    status: int
    code: str
    """Name of the kind of error, such as `queue-full`."""
    detail: str
    """The error in a sentence."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of the response, such as `Retry-After`."""
    param: str | None = None
    """Field of the request that is wrong, for OpenAI's shape."""
    problems: tuple[dict[str, Any], ...] = ()
    """All wrong parts of the request, each with `loc` and `msg`, for RFC 9457."""

    def problem(self, path: str) -> dict[str, Any]:
        """Return the body of RFC 9457."""
        problem: dict[str, Any] = {
            "type": f"urn:ragcache:problem:{self.code}",
            "instance": path,
            "title": _TITLES.get(self.status, "Error"),
            "status": self.status,
            "detail": self.detail,
        }
        return problem | {"errors": list(self.problems)} if self.problems else problem

    def openai(self) -> dict[str, Any]:
        """Return the body in OpenAI's shape."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.detail,
            "type": _OPENAI_TYPES.get(self.status, kind),
            "param": self.param,
            "code": _OPENAI_CODES.get(self.code, self.code.replace("-", "_")),
        }
        return {"error": error}

    def anthropic(self) -> dict[str, Any]:
        """Return the body in Anthropic's shape."""
        kind = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, kind)
        return {"type": "error", "error": {"type": kind, "message": self.detail}}


class HTTPProblem(HTTPException):
    """An error that the service itself raises, with the fields of an `ErrorInfo`."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        headers: dict[str, str] | None = None,
        param: str | None = None,
        problems: Sequence[dict[str, Any]] = (),
    ) -> None:
        super().__init__(status, detail, headers)
        self.info = ErrorInfo(status, code, detail, headers or {}, param, tuple(problems))


def error_info(error: BaseException) -> ErrorInfo | None:
    """Return the content of a known error.

    Other errors are internal: their details stay in the log.
    """
    if isinstance(error, HTTPProblem):
        return error.info
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        code = _TITLES.get(error.status_code, "error").lower().replace(" ", "-")
        return ErrorInfo(error.status_code, code, str(error.detail), dict(error.headers or {}))
    kinds = (kind.__name__ for kind in type(error).__mro__)
    status = next((STATUS[kind] for kind in kinds if kind in STATUS), None)
    if status is None:
        return None
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(error).__name__).lower()
    return ErrorInfo(status, name.replace("pmlsyntax", "pml-syntax"), str(error))


INTERNAL_ERROR = ErrorInfo(500, "internal-error", "the service failed; its log says how")


def _invalid(error: RequestValidationError) -> ErrorInfo:
    """Describe validation errors by place and reason, without repeating the request."""
    if any(each["type"] == "json_invalid" for each in error.errors()):
        return ErrorInfo(422, "invalid-json", "the body is no JSON")
    problems = tuple(
        {
            "loc": [str(part) for part in each["loc"]],
            "msg": str(each["msg"]).removeprefix("Value error, "),
        }
        for each in error.errors()[:20]
    )
    first = problems[0] if problems else {"loc": [], "msg": "the request cannot be read"}
    place = ".".join(first["loc"][1:]) or "body"
    detail = f"{place}: {first['msg']}"
    return ErrorInfo(422, "invalid-request", detail, param=place, problems=problems)


def wrong_content_type(error: RequestValidationError, kind: str | None) -> HTTPProblem | None:
    """Return the error of a body that was not read as JSON because its type is another one.

    Args:
        error: Error of the validation, in which such a body is a text.
        kind: Value of `Content-Type`.
    """
    media_type = (kind or "").partition(";")[0].strip().lower()
    if media_type == "application/json" or media_type.endswith("+json"):
        return None
    if not any(each["loc"] == ("body",) and each["type"] != "missing" for each in error.errors()):
        return None
    came = f"as {media_type:.80}" if media_type else "without a Content-Type"
    if media_type == "application/x-www-form-urlencoded":
        came += ", which `curl -d` sends by default"
    detail = f"the body came {came}; send JSON with the header Content-Type: application/json"
    return HTTPProblem(415, "unsupported-media-type", detail, {"Accept": "application/json"})


def error_response(info: ErrorInfo, path: str) -> Response:
    """Make the response of an error in the shape of its path.

    The interfaces of OpenAI and Anthropic have no status 422: an invalid request gets 400 there.
    Every 429 and 503 says when to come again.
    """
    if info.status in _TEMPORARY:
        later = {"Retry-After": str(RETRY_SECONDS)} | info.headers
        info = replace(info, headers=later)
    status = 400 if info.status == 422 else info.status
    if is_openai(path):
        return JSONResponse(info.openai(), status, info.headers)
    if is_anthropic(path):
        return JSONResponse(info.anthropic(), status, info.headers)
    media_type = "application/problem+json"
    return JSONResponse(info.problem(path), info.status, info.headers, media_type)
