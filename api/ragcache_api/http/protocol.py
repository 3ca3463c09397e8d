"""Requests and responses of the service's own routes, as pydantic models, and what routes declare
for the OpenAPI document. Bodies that ask for an answer are in `bodies`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from fastapi import Depends, Path, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.responses import JSONResponse

from ragcache import (
    Answer,
    AnswerSpan,
    Citation,
    Reuse,
    SourceDocument,
    Timings,
)
from ragcache.db import Deletion
from ragcache.db.sql import page_of
from ragcache.store.admin import StateChange, TierStatus
from ragcache.store.verify import Disagreement
from ragcache_api.http.bodies import CollectionName

T = TypeVar("T")

PublicId = Annotated[str, Path(pattern="^[A-Za-z0-9_-]{1,64}$")]
Limit = Annotated[int, Query(ge=1, le=1000, description="The most items of a page.")]
Cursor = Annotated[str | None, Query(max_length=10_000, description="`next` of the page before.")]

Flag = Annotated[bool, BeforeValidator(lambda value: value == "" or value)]
"""In a query: `?name` alone is true."""


class RequestModel(BaseModel):
    """The body of a request. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ResponseModel(BaseModel):
    """The body of a response."""

    model_config = ConfigDict(frozen=True, protected_namespaces=(), from_attributes=True)


class RowResponse(ResponseModel):
    """A row of the ledger, under its public id."""

    id: str = Field(validation_alias="public_id")


class PageOf(ResponseModel, Generic[T]):
    """A page of a list. next: the cursor of the following page; None at the end."""

    items: list[T]
    next: str | None = None
    total: int | None = None


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The part of a list that a caller wants. cursor: None for its beginning."""

    cursor: str | None
    limit: int

    def cut(self, items: Sequence[T], name: Callable[[T], str]) -> PageOf[T]:
        """The page of a list that is small enough to be read whole, in the order of its names."""
        left = [each for each in items if self.cursor is None or name(each) > self.cursor]
        page = page_of(sorted(left, key=name), self.limit, name, len(items))
        return PageOf(items=list(page.items), next=page.next, total=page.total)


async def _page(cursor: Cursor = None, limit: Limit = 100) -> PageRequest:
    return PageRequest(cursor, limit)


PageDep = Annotated[PageRequest, Depends(_page)]


class ProblemLocation(ResponseModel):
    loc: list[str]
    msg: str


class Problem(ResponseModel):
    """RFC 9457. type: `urn:ragcache:problem:CODE`."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[ProblemLocation] | None = None


class OpenAIErrorDetail(ResponseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIError(ResponseModel):
    """OpenAI's shape of an error."""

    error: OpenAIErrorDetail


def compact(value: Any) -> bytes:
    """JSON without spaces, also of dataclasses. Numbers that are not finite become null."""
    return to_json(value, inf_nan_mode="null")


class CompactResponse(JSONResponse):
    """A response with any value that `compact` takes."""

    def render(self, content: Any) -> bytes:
        return compact(content)


_STATUSES = {
    400: "A value that cannot be used", 401: "No valid key", 403: "Not with this key",
    404: "No such thing", 408: "The body did not come in time", 413: "The body is too large",
    422: "A body that cannot be read",
    429: "Too many requests, or the queue is full", 503: "Not now", 504: "The time was over",
}  # fmt: skip


def problems(*more: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route of the service's own, for the OpenAPI document."""
    return _error_responses(more, "application/problem+json", Problem)


def openai_problems() -> dict[int | str, dict[str, Any]]:
    """The errors of a route of OpenAI's interface, for the OpenAPI document."""
    responses = _error_responses((500, 501, 507), "application/json", OpenAIError)
    del responses[422]
    return responses


def event_stream(description: str) -> dict[int | str, dict[str, Any]]:
    """A route's events, in place of JSON, for the OpenAPI document, which has no words for what
    several events are."""
    return {200: {"description": description, "content": {"text/event-stream": {}}}}


def _error_responses(
    more: tuple[int, ...], media_type: str, model: type[BaseModel]
) -> dict[int | str, dict[str, Any]]:
    content = {media_type: {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    statuses = {**_STATUSES, **dict.fromkeys(more, "The service failed")}
    return {status: {"description": text, "content": content} for status, text in statuses.items()}


def error_schemas() -> dict[str, Any]:
    """Schemas of both shapes of an error, which the responses of routes refer to by name."""
    models: list[tuple[type[BaseModel], Literal["serialization"]]] = [
        (Problem, "serialization"), (OpenAIError, "serialization"),
    ]  # fmt: skip
    _, made = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = made["$defs"]
    return schemas


class DeletedResponse(ResponseModel):
    """deleted: how many there were."""

    deleted: int


class DeletionResponse(DeletedResponse):
    """What a deletion would take, with `dry_run`. states: those that nothing else needs; tiers:
    their bytes by tier, on all machines."""

    dry_run: Literal[True] = True
    modules: int
    states: int
    bytes: int
    tiers: dict[str, int]

    @classmethod
    def of(cls, deletion: Deletion) -> DeletionResponse:
        return cls(
            deleted=deletion.documents, modules=deletion.modules, states=deletion.states,
            bytes=deletion.nbytes, tiers=dict(deletion.tiers),
        )  # fmt: skip


TierName = Annotated[str, Field(min_length=1, max_length=20)]


class ModuleResponse(RowResponse):
    """used_at: when a prompt last read its states; expires_at: both in Unix seconds."""

    name: str
    document: str
    collection: str
    tokens: int
    nbytes: int
    tiers: list[str]
    hits: int
    used_at: float | None
    pinned: bool
    expires_at: float | None


class ModuleTextResponse(ModuleResponse):
    """A module with its text, and its states in each tier."""

    text: str
    uri: str
    metadata: dict[str, Any]
    states: list[dict[str, Any]]


class ChangeResponse(ResponseModel):
    """A change of one state. tier: where it was; to: where it moves."""

    key: str
    action: str
    tier: str
    to: str
    nbytes: int


class ChangesResponse(ResponseModel):
    """Changes that were made or, with `dry_run`, would be."""

    dry_run: bool
    changes: list[ChangeResponse]
    bytes: int

    @classmethod
    def of(cls, changes: Sequence[StateChange], *, dry_run: bool = False) -> ChangesResponse:
        listed = [
            ChangeResponse(key=c.key, action=c.action, tier=c.tier, to=c.to, nbytes=c.nbytes)
            for c in changes
        ]
        return cls(dry_run=dry_run, changes=listed, bytes=sum(c.nbytes for c in changes))


class MoveRequest(RequestModel):
    tier: TierName


class ExpireRequest(RequestModel):
    """seconds: from now until the states go; null lifts the limit."""

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None


class EvictRequest(RequestModel):
    """States to evict: of a collection, or of all; from a tier, or from all."""

    collection: CollectionName | None = None
    documents: Annotated[list[str], Field(max_length=10_000)] | None = None
    tier: TierName | None = None


class PlanRequest(RequestModel):
    """A corpus to plan for: of a collection, or documents' texts. Sizes as `8GiB`."""

    collection: CollectionName | None = None
    texts: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = None
    host_bytes: int | str = "2GiB"
    device_bytes: int | str | None = None
    disk_bytes: int | str | None = None
    sample: Annotated[int, Field(ge=1, le=16)] = 4


class EvictionResponse(RowResponse):
    """reason: pressure, ttl, manual, superseded or corrupt. at: Unix seconds."""

    key: str
    module: str | None
    tier: str
    reason: str
    nbytes: int
    at: float


class StatsResponse(ResponseModel):
    """Statistics of the caller's namespace. engine, evictions: of all, and only the operator's."""

    model: str
    uptime: float
    collections: dict[str, int]
    requests: dict[str, int]
    tokens: dict[str, int]
    ttft: dict[str, dict[str, float | int | None]]
    engine: dict[str, float]
    series: list[dict[str, Any]]
    evictions: dict[str, dict[str, int]]


class ProcessMemory(ResponseModel):
    """rss_bytes: resident; mapped_bytes: those of it that are pages of files, such as blobs of the
    disk tier, which the system takes back at need."""

    rss_bytes: int
    mapped_bytes: int


class HostMemory(ResponseModel):
    """total_bytes: of the machine, or the limit of the process's control group."""

    total_bytes: int
    available_bytes: int


class DeviceMemory(ResponseModel):
    """A GPU. reserved_bytes: taken by this process's allocator."""

    name: str
    total_bytes: int
    free_bytes: int
    reserved_bytes: int


class MemoryResponse(ResponseModel):
    """device: None where the model runs on the processor."""

    process: ProcessMemory
    host: HostMemory
    device: DeviceMemory | None
    tiers: list[TierStatus]


class ModeResponse(ResponseModel):
    """How far a mode is from `exact` on the model (`ragcache.pipeline.gate.GateResult`).
    kl_divergence, limit, other_documents: nats; agreement: 0 to 1; passes: whether it serves
    without being forced."""

    mode: str
    prompts: int
    kl_divergence: float
    agreement: float
    limit: float
    other_documents: float
    passes: bool


class StateResponse(ResponseModel):
    """What the service has open. dtype: that the model computes in; states_dtype: of kept states;
    modes: those that were measured; force_modes: whether all serve whatever was measured."""

    model: str
    device: str
    dtype: str
    states_dtype: str
    window: int
    force_modes: bool
    modes: list[ModeResponse]


class VerifyResponse(ResponseModel):
    states: int
    modules: int
    found: tuple[Disagreement, ...]
    interrupted: dict[str, int]
    clean: bool


class FlushResponse(ResponseModel):
    flushed: bool


class AnswerResponse(ResponseModel):
    """finish_reason: `stop`, `length`, `no_documents` where retrieval found nothing, or `no_answer`
    where the answer was refused. confidence: the probability that the answer is right, or null.
    spans: where an extractive answer stands in the documents, the best source first."""

    id: str
    question: str
    text: str
    finish_reason: str
    confidence: float | None
    mode: str
    sources: list[Citation]
    spans: list[AnswerSpan]
    reuse: Reuse
    timings: Timings


def answer_response(id: str, answer: Answer) -> dict[str, Any]:
    """The fields of an `AnswerResponse`, which JSON is written from without validating them."""
    return {name: id if name == "id" else getattr(answer, name)
            for name in AnswerResponse.model_fields}  # fmt: skip


Id = Annotated[str, Field(min_length=1, max_length=1000)]


class CollectionRequest(RequestModel):
    """A collection to create."""

    name: CollectionName


class InstructionRequest(RequestModel):
    """What the model is to do with the documents of a collection; null: the service's own."""

    instruction: Annotated[str, Field(min_length=1, max_length=20_000)] | None


class InstructionResponse(ResponseModel):
    """instruction: the collection's own, or else the service's."""

    instruction: str


class CollectionCreatedResponse(ResponseModel):
    """created: false if it existed."""

    name: str
    created: bool


class CollectionResponse(ResponseModel):
    name: str
    documents: int
    modules: int


class DocumentRequest(RequestModel):
    id: Id
    text: Annotated[str, Field(max_length=50_000_000)]
    uri: Annotated[str, Field(max_length=4000)] = ""
    metadata: dict[str, Any] = Field(default_factory=dict)

    def source(self) -> SourceDocument:
        return SourceDocument(self.id, self.text, self.uri, self.metadata)


class DocumentsRequest(RequestModel):
    """Documents to store; each replaces an earlier one of the same id."""

    documents: Annotated[list[DocumentRequest], Field(min_length=1, max_length=10_000)]


_FILES = {"type": "array", "items": {"type": "string", "format": "binary"}}
_FORM = {"type": "object", "properties": {"files": _FILES}, "required": ["files"]}
MULTIPART = {
    "required": True,
    "content": {
        "application/json": {"schema": {"$ref": "#/components/schemas/DocumentsRequest"}},
        "multipart/form-data": {"schema": _FORM},
    },
}
"""The body of an upload, for the OpenAPI document."""


class DocumentResponse(ResponseModel):
    id: str
    uri: str
    digest: str
    modules: int
    metadata: dict[str, Any]


class JobResponse(RowResponse):
    """An ingestion job. done and total count modules; times are Unix seconds. report: files that
    were `skipped`, each with the reason, and ids that have `vanished`, were `removed` or
    `renamed`."""

    target: str
    status: str
    done: int
    total: int
    error: str
    started_at: float | None
    finished_at: float | None
    report: dict[str, Any] = Field(default_factory=dict)


class SchemaRequest(RequestModel):
    """A hand-written schema, in PML; it replaces one of the same name."""

    text: Annotated[str, Field(min_length=1, max_length=10_000_000)]
    placement: Literal["schema", "compact"] = "schema"


class SchemaResponse(ResponseModel):
    name: str
    placement: str
    text: str | None = None
