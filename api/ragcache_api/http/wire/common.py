"""What all routes share: pages, problems, and the names of things."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

from fastapi import Path, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

T = TypeVar("T")

_NAME = r"^(\.{0,2}[^./\x00-\x1f\x7f]|\.{3})[^/\x00-\x1f\x7f]*$"  # clients resolve `.` and `..`
PathName = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=_NAME)]
"""A name that can be one part of a path."""
CollectionName = PathName
PublicId = Annotated[str, Path(pattern="^[A-Za-z0-9_-]{1,64}$")]
Limit = Annotated[int, Query(ge=1, le=1000, description="The most items of a page.")]
Cursor = Annotated[str | None, Query(max_length=10_000, description="`next` of the page before.")]

Flag = Annotated[bool, BeforeValidator(lambda value: value == "" or value)]
"""In a query: `?name` alone is true."""


class Wire(BaseModel):
    """A body of ours: nothing unknown is passed over in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Told(BaseModel):
    """A value that is answered."""

    model_config = ConfigDict(frozen=True, protected_namespaces=(), from_attributes=True)


class Identified(Told):
    """A row that callers name by its public id."""

    id: str = Field(validation_alias="public_id")


class PageOf(Told, Generic[T]):
    """A part of a list. next: the cursor of what follows; None at the end."""

    items: list[T]
    next: str | None = None
    total: int | None = None


class Place(Told):
    loc: list[str]
    msg: str


class Problem(Told):
    """RFC 9457. type: `urn:ragcache:problem:CODE`."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[Place] | None = None


class OpenAIFault(Told):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIError(Told):
    """OpenAI's shape of an error."""

    error: OpenAIFault


_STATUSES = {
    400: "A value that cannot be used", 401: "No valid key", 403: "Not with this key",
    404: "No such thing", 408: "The body did not come in time", 413: "The body is too large",
    422: "A body that cannot be read",
    429: "Too many requests, or the queue is full", 503: "Not now", 504: "The time was over",
}  # fmt: skip


def problems(*more: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route of ours, for the OpenAPI document."""
    schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schema = _inlined(schema)
    return _documented(more, "application/problem+json", schema)


def openai_problems() -> dict[int | str, dict[str, Any]]:
    """The errors of a route of OpenAI's interface, for the OpenAPI document."""
    schema = _inlined(OpenAIError.model_json_schema(ref_template="#/components/schemas/{model}"))
    documented = _documented((500, 501, 507), "application/json", schema)
    return {status: told for status, told in documented.items() if status != 422}


def event_stream(description: str) -> dict[int | str, dict[str, Any]]:
    """Says that a route may also answer with events."""
    content = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"description": description, "content": content}}


def _documented(
    more: tuple[int, ...], media_type: str, schema: dict[str, Any]
) -> dict[int | str, dict[str, Any]]:
    told = {**_STATUSES, **dict.fromkeys(more, "The service failed")}
    return {
        status: {"description": text, "content": {media_type: {"schema": schema}}}
        for status, text in told.items()
    }


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Without `$defs`, which OpenAPI keeps elsewhere."""
    definitions = schema.pop("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return walk(definitions[node["$ref"].rsplit("/", 1)[1]])
            return {key: walk(value) for key, value in node.items()}
        return [walk(each) for each in node] if isinstance(node, list) else node

    inlined: dict[str, Any] = walk(schema)
    return inlined


class Deleted(Told):
    """What a deletion did."""

    deleted: int = Field(description="How many there were.")
