"""`POST /v1/answers` and `POST /v1/prompts`: one answer, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import monotonic

from fastapi import APIRouter
from starlette.responses import Response

from ragcache import AsyncAnswerStream
from ragcache_api.http.errors import ErrorInfo
from ragcache_api.http.protocol import (
    AnswerRequest,
    AnswerResponse,
    CompactResponse,
    PromptRequest,
    answer_response,
    event_stream,
    problems,
)
from ragcache_api.http.requests import ActiveRequest
from ragcache_api.http.service import ContextDep, RequestContext
from ragcache_api.http.streaming import (
    Opening,
    complete_answers,
    deltas_of,
    format_event,
    stream_answer,
)

router = APIRouter(
    prefix="/v1", tags=["answers"], responses={**problems(500), **event_stream("The answer")}
)


@router.post("/answers", response_model=AnswerResponse)
async def answer_question(body: AnswerRequest, context: ContextDep) -> Response:
    """Answers a question from the documents of a collection.

    With `stream`, events: `sources`, a `token` for each delta of text, and `answer` or `error`.
    """
    generation, rag = body.generation(context.deadline), context.rag
    opening = lambda: rag.astream(  # noqa: E731
        body.question, collection=body.collection, generation=generation, **body.retrieval()
    )
    return await _respond(context, "answer", body.collection, opening, stream=body.stream)


@router.post("/prompts", response_model=AnswerResponse)
async def answer_prompt(body: PromptRequest, context: ContextDep) -> Response:
    """Answers a PML prompt over a stored schema. Events as for questions."""
    generation, rag = body.generation(context.deadline), context.rag
    opening = lambda: rag.astream_prompt(  # noqa: E731
        body.prompt, mode=body.mode, source="prompt", generation=generation
    )
    return await _respond(context, "prompt", "", opening, stream=body.stream)


async def _respond(
    context: RequestContext, kind: str, collection: str, opening: Opening, *, stream: bool
) -> Response:
    requests, namespace = context.service.requests, context.caller.namespace
    if stream:
        active = requests.begin_request(kind, namespace, collection)
        return await stream_answer(context, active, opening, _events, _error_event)
    with requests.track_request(kind, namespace, collection) as active:
        [answer] = await complete_answers(context, active, opening)
    return CompactResponse(answer_response(active.id, answer))


async def _events(active: ActiveRequest, stream: AsyncAnswerStream) -> AsyncGenerator[bytes, None]:
    yield format_event(stream.sources, "sources")
    async with aclosing(deltas_of(active, stream)) as deltas:
        async for delta in deltas:
            if delta.text:
                token = {"text": delta.text, "at": monotonic() - active.started}
                yield format_event(token, "token")
    yield format_event(answer_response(active.id, stream.answer), "answer")


def _error_event(info: ErrorInfo) -> bytes:
    return format_event(info.problem("/v1/answers"), "error")
