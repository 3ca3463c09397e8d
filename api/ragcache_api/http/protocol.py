"""Bodies of the service's own routes, and helpers for the OpenAPI document.

Texts under fields become descriptions in that document. Bodies that ask for an answer are in
`bodies`, and bodies of `/admin` in `admin_bodies`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Path, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_serializer
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.responses import JSONResponse

from ragcache import Answer, AnswerSpan, Citation, Reuse, SourceDocument, Timings
from ragcache.config import MAX_DESCRIPTION, MAX_PRIMING
from ragcache.db.sql import page_of
from ragcache_api.http.bodies import CollectionName
from ragcache_api.http.sources import public_uri, without_path

T = TypeVar("T")

PublicId = Annotated[str, Path(pattern="^[A-Za-z0-9_-]{1,64}$")]
Flag = Annotated[bool, BeforeValidator(lambda value: value == "" or value)]
"""A flag in a query. `?name` without a value is true."""


class RequestModel(BaseModel):
    """The body of a request. Unknown fields are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )


class ResponseModel(BaseModel):
    """The body of a response."""

    model_config = ConfigDict(
        frozen=True, protected_namespaces=(), from_attributes=True, use_attribute_docstrings=True
    )


class RowResponse(ResponseModel):
    """A row of the ledger with its public id."""

    id: str = Field(validation_alias="public_id")


class PageOf(ResponseModel, Generic[T]):
    """A page of a list."""

    # Pydantic searches the source of every `PageOf[...]` for docstrings: a second of each start.
    model_config = ConfigDict(use_attribute_docstrings=False)
    items: list[T]
    next: Annotated[
        str | None, Field(description="Cursor of the following page. Null after the last page.")
    ] = None
    total: Annotated[
        int | None,
        Field(description="Number of items in the whole list. Null if they are not counted."),
    ] = None


class PageRequest(BaseModel):
    """The query of a page."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    cursor: Annotated[str | None, Field(max_length=10_000)] = None
    """`next` of the page before. The first page by default."""
    limit: Annotated[int, Field(ge=1, le=1000)] = 100
    """Most items of the page, 1 to 1,000."""

    def cut(self, items: Sequence[T], name: Callable[[T], str]) -> PageOf[T]:
        """Cut the page out of a whole list, which is sorted by name."""
        left = [each for each in items if self.cursor is None or name(each) > self.cursor]
        page = page_of(sorted(left, key=name), self.limit, name, len(items))
        return PageOf(items=list(page.items), next=page.next, total=page.total)


PageQuery = Annotated[PageRequest, Query()]


class ProblemLocation(ResponseModel):
    """A wrong part of a request."""

    loc: list[str]
    """Path to the part, such as `["body", "limit"]`."""
    msg: str


class Problem(ResponseModel):
    """An error in the shape of RFC 9457."""

    type: str
    """`urn:ragcache:problem:CODE`, with a code such as `queue-full`."""
    title: str
    status: int
    detail: str
    """The error in a sentence."""
    instance: str
    """Path of the request."""
    errors: list[ProblemLocation] | None = None
    """Wrong parts of the request."""


class OpenAIErrorDetail(ResponseModel):
    """The content of an OpenAI error."""

    message: str
    type: str
    param: str | None = None
    """Field of the request that is wrong."""
    code: str | None = None


class OpenAIError(ResponseModel):
    """An error in OpenAI's shape."""

    error: OpenAIErrorDetail


class AnthropicErrorDetail(ResponseModel):
    """The content of an Anthropic error."""

    type: str
    """Such as `invalid_request_error`."""
    message: str


class AnthropicError(ResponseModel):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorDetail


def compact(value: Any) -> bytes:
    """Write JSON without spaces. Accepts dataclasses; numbers that are not finite become null."""
    return to_json(value, inf_nan_mode="null")


class CompactResponse(JSONResponse):
    """A JSON response with any value that `compact` accepts."""

    def render(self, content: Any) -> bytes:
        return compact(content)


_STATUSES = {
    400: "A value that cannot be used",
    401: "No valid key",
    403: "Not with this key",
    404: "No such thing",
    408: "The body did not come in time",
    413: "The body is too large",
    415: "The body is not JSON, or packed in an unknown way",
    422: "A body that cannot be read",
    429: "Too many requests, or the queue is full",
    503: "Not now",
    504: "The time was over",
}


def problems(*more: int) -> dict[int | str, dict[str, Any]]:
    """Declare the errors of a route in the shape of RFC 9457. `more` are additional statuses."""
    return _error_responses(more, "application/problem+json", Problem)


def openai_problems() -> dict[int | str, dict[str, Any]]:
    """Declare the errors of a route of OpenAI's interface."""
    return _client_problems(OpenAIError)


def anthropic_problems() -> dict[int | str, dict[str, Any]]:
    """Declare the errors of a route of Anthropic's interface."""
    return _client_problems(AnthropicError)


def _client_problems(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    responses = _error_responses((500, 501, 507), "application/json", model)
    del responses[422]
    return responses


def event_stream(description: str) -> dict[int | str, dict[str, Any]]:
    """Declare that a route can send events, which OpenAPI cannot describe, instead of JSON."""
    return {200: {"description": description, "content": {"text/event-stream": {}}}}


def _error_responses(
    more: tuple[int, ...], media_type: str, model: type[BaseModel]
) -> dict[int | str, dict[str, Any]]:
    content = {media_type: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    statuses = {**_STATUSES, **dict.fromkeys(more, "The service failed")}
    return {status: {"description": text, "content": content} for status, text in statuses.items()}


class DeletedResponse(ResponseModel):
    """The result of a deletion."""

    deleted: int
    """Number of documents (or schemas) that were deleted."""


class DeletionResponse(DeletedResponse):
    """The amounts that a deletion would take, for `dry_run`."""

    deleted: int = Field(validation_alias="documents")
    """Number of documents."""
    dry_run: Literal[True] = True
    modules: int
    states: int
    """Number of states that nothing else needs."""
    bytes: int = Field(validation_alias="nbytes")
    """Bytes of these states in all tiers."""
    tiers: dict[str, int]
    """Bytes of these states by tier, on all machines."""


class AnswerResponse(ResponseModel):
    """An answer."""

    id: str
    question: str
    text: str
    finish_reason: str
    """`stop`, `length`, `repetition`, `no_documents` (retrieval found nothing) or `no_answer`
    (refused)."""
    confidence: float | None
    """Probability that the answer is right, 0 to 1. Null if it was not estimated."""
    mode: str
    """Mode of reuse, such as `rooted`."""
    sources: list[Citation]
    """Modules that the answer was read from."""
    spans: list[AnswerSpan]
    """Places of an extractive answer in the documents, best source first."""
    reuse: Reuse
    """Tokens that were read from the cache and computed."""
    timings: Timings
    """Seconds of each stage."""


def answer_response(id: str, answer: Answer) -> dict[str, Any]:
    """Return the fields of an `AnswerResponse`, ready to write as JSON without validation."""
    fields = {name: getattr(answer, name, None) for name in AnswerResponse.model_fields}
    return fields | {"id": id, "sources": [without_path(each) for each in answer.sources]}


Id = Annotated[str, Field(min_length=1, max_length=1000)]


Description = Annotated[str, Field(max_length=MAX_DESCRIPTION)]
"""Contents of a collection in words, for people and for models that choose among several."""


class CollectionRequest(RequestModel):
    """A collection to create."""

    name: CollectionName
    description: Description = ""


class DescriptionBody(RequestModel):
    """The description of a collection."""

    description: Description


class InstructionRequest(RequestModel):
    """An instruction for a collection."""

    instruction: Annotated[str, Field(min_length=1, max_length=20_000)] | None
    """Text before the documents in prompts, at most 20,000 characters. Null restores the service's
    default."""


class InstructionResponse(ResponseModel):
    """The instruction of a collection."""

    instruction: str
    """The collection's own instruction, or else the service's default."""


class PrimingRequest(RequestModel):
    """A priming text for a collection."""

    priming: Annotated[str, Field(min_length=1, max_length=MAX_PRIMING)] | None
    """Text that modules in later places are encoded behind, at most 20,000 characters. Null
    restores the built-in text."""
    similar: bool = False
    """Whether each is encoded behind the most similar other module instead. `priming` is null."""


class PrimingResponse(ResponseModel):
    """The priming text of a collection."""

    priming: str
    """The collection's own text, or else the built-in one."""
    similar: bool
    """Whether modules are encoded behind the most similar other module, where there is one."""


class CollectionCreatedResponse(ResponseModel):
    """A collection that exists now."""

    name: str
    created: bool
    """False if the collection existed already."""


class DocumentRequest(RequestModel):
    """A document to store."""

    id: Id
    text: Annotated[str, Field(max_length=50_000_000)]
    uri: Annotated[str, Field(max_length=4000)] = ""
    """Address of the document, for citations."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """Values for filters, kept as JSON."""

    def source(self) -> SourceDocument:
        return SourceDocument(self.id, self.text, self.uri, self.metadata)


class DocumentsRequest(RequestModel):
    """Documents to store. Each replaces a stored document of the same id."""

    documents: Annotated[list[DocumentRequest], Field(min_length=1, max_length=10_000)]


_FILES = {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
_FORM = {"type": "object", "properties": {"files": _FILES}, "required": ["files"]}
MULTIPART = {
    "required": True,
    "content": {
        "application/json": {"schema": {"$ref": "#/components/schemas/DocumentsRequest"}},
        "multipart/form-data": {"schema": _FORM},
    },
}
"""Body of an upload in the OpenAPI document."""


def referenced_schemas() -> dict[str, Any]:
    """Return the schemas to which declared errors and uploads refer by name."""
    models: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = [
        (Problem, "serialization"),
        (OpenAIError, "serialization"),
        (AnthropicError, "serialization"),
        (DocumentsRequest, "validation"),
    ]
    _, made = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = made["$defs"]
    return schemas


class DocumentResponse(ResponseModel):
    """A stored document."""

    id: str = Field(validation_alias="source_id")
    uri: str
    """Address of the document, or its id where the address is a path of the server."""
    digest: str
    """Digest of the text, the metadata and the settings of the splitter."""
    modules: int
    """Number of modules that the text is split into."""
    metadata: dict[str, Any] = Field(validation_alias="attributes")

    @field_serializer("uri")
    def _public_uri(self, uri: str) -> str:
        return public_uri(uri, self.id)


class DocumentTextResponse(DocumentResponse):
    """A stored document with its text, if it was asked for."""

    text: str | None = None
    pages: dict[int, int] | None = None
    """First character in the text by page or slide. Null without the text."""
    has_original: bool = False
    """Whether the file that the document was read from can be asked for."""


class JobResponse(RowResponse):
    """An ingestion job."""

    target: str
    """`collection NAME` or `schema NAME`."""
    status: str
    """`queued`, `running`, `done`, `failed`, `canceled` or `interrupted`."""
    done: int
    """Number of modules that are stored."""
    total: int
    """Number of modules. 0 until it is known."""
    error: str
    """Reason of a failure, or empty."""
    started_at: float | None
    """Unix seconds."""
    finished_at: float | None
    """Unix seconds."""
    report: dict[str, Any] = Field(default_factory=dict)
    """Files that were `skipped`, with reasons, content that documents have `omitted`, and ids that
    have `vanished`, or were `removed` or `renamed`."""


class SchemaRequest(RequestModel):
    """A schema to store. It replaces a stored schema of the same name."""

    text: Annotated[str, Field(min_length=1, max_length=10_000_000)]
    """The schema in PML."""
    placement: Literal["schema", "compact"] = "schema"
    """Positions of modules in prompts: as in the whole schema, or without gaps."""


class SchemaResponse(ResponseModel):
    """A hand-written schema."""

    name: str
    placement: str
    text: str | None = None
    """The schema in PML. Null in lists."""
