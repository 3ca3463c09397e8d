"""Routes that answer a question or a PML prompt, and routes of schemas."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from time import monotonic
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response

from ragcache import AsyncAnswerStream, AsyncRagCache
from ragcache.errors import UnknownSchema
from ragcache_api.http.bodies import AnswerRequest, PathName, PromptRequest, own_generation
from ragcache_api.http.errors import HTTPProblem
from ragcache_api.http.protocol import (
    AnswerResponse,
    DeletedResponse,
    PageOf,
    PageQuery,
    SchemaRequest,
    SchemaResponse,
    answer_response,
    event_stream,
    problems,
)
from ragcache_api.http.requests import ActiveRequest
from ragcache_api.http.service import ContextDep, RequestContext
from ragcache_api.http.sources import without_path
from ragcache_api.http.streaming import AnswerFormat, deltas_of, format_event, respond
from ragcache_schemas import parse_schema

router = APIRouter(
    prefix="/v1", tags=["answers"], responses={**problems(500), **event_stream("The answer")}
)
schemas_router = APIRouter(prefix="/v1/schemas", tags=["schemas"], responses=problems(507))
Name = Annotated[PathName, Path()]
_NAME = TypeAdapter(PathName)


@router.post("/answers", response_model=AnswerResponse)
async def answer_question(body: AnswerRequest, context: ContextDep) -> Response:
    """Answer a question from the documents of a collection.

    With `stream`, the events are `sources`, a `token` for each delta of text, and at the end
    `answer` or `error`.
    """
    generation = own_generation(body, context.deadline)
    options = body.retrieval() | context.selection
    opening = partial(
        AsyncRagCache(context.rag).stream,
        body.question,
        collection=body.collection,
        generation=generation,
        **options,
    )
    return await respond(context, _FORMAT, "answer", body.collection, opening, stream=body.stream)


@router.post("/prompts", response_model=AnswerResponse)
async def answer_prompt(body: PromptRequest, context: ContextDep) -> Response:
    """Answer a PML prompt over a stored schema, with the same events as `/v1/answers`."""
    generation = own_generation(body, context.deadline)
    opening = partial(
        AsyncRagCache(context.rag).stream_prompt,
        body.prompt,
        mode=body.mode,
        source="prompt",
        generation=generation,
    )
    return await respond(context, _FORMAT, "prompt", "", opening, stream=body.stream)


async def _events(active: ActiveRequest, stream: AsyncAnswerStream) -> AsyncGenerator[bytes, None]:
    yield format_event([without_path(each) for each in stream.sources], "sources")
    async with aclosing(deltas_of(active, stream)) as deltas:
        async for delta in deltas:
            if delta.text:
                token = {"text": delta.text, "at": monotonic() - active.started}
                yield format_event(token, "token")
    yield format_event(answer_response(active.id, active.answers[0]), "answer")


_FORMAT = AnswerFormat(
    whole=lambda active, answers: answer_response(active.id, answers[0]),
    events=_events,
    error=lambda info: format_event(info.problem("/v1/answers"), "error"),
)


@schemas_router.get("")
def list_schemas(context: ContextDep, page: PageQuery) -> PageOf[SchemaResponse]:
    """List the hand-written schemas by name, without their texts."""
    texts = context.rag.internals.pml.texts
    found = [(name, texts.get_schema(name)) for name in texts.names()]
    listed = [SchemaResponse(name=name, placement=s.placement) for name, s in found if s]
    return page.cut(listed, lambda schema: schema.name)


@schemas_router.post("", status_code=201)
def add_schema(body: SchemaRequest, context: ContextDep) -> SchemaResponse:
    """Store a schema and encode its modules."""
    name = parse_schema(body.text, source="schema").name
    try:
        _NAME.validate_python(name)
    except ValidationError:
        raise HTTPProblem(
            422,
            "unusable-name",
            f"the schema is called {name!r:.80}, which no path can hold: a name has 1 to 200 "
            "characters and no `/`, and is neither `.` nor `..`",
        ) from None
    context.rag.schemas.add(body.text, placement=body.placement, source="schema")
    return SchemaResponse(name=name, placement=body.placement)


@schemas_router.get("/{name}")
def get_schema(name: Name, context: ContextDep) -> SchemaResponse:
    """Return a schema with its text."""
    return find_schema(context, name)


def find_schema(context: RequestContext, name: str) -> SchemaResponse:
    """Return a hand-written schema of the caller's namespace. Raises `UnknownSchema`."""
    found = context.rag.internals.pml.texts.get_schema(name)
    if found is None:
        raise UnknownSchema(f"there is no schema {name!r}")
    return SchemaResponse(name=name, placement=found.placement, text=found.text)


@schemas_router.delete("/{name}")
def delete_schema(name: Name, context: ContextDep) -> DeletedResponse:
    """Delete a schema, and the states that nothing else needs."""
    context.rag.schemas.delete(name)
    return DeletedResponse(deleted=1)
