"""`POST /v1/answers` and `POST /v1/prompts`."""

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
from ragcache_api.http.service import Call, CallDep
from ragcache_api.http.streaming import Opening, answered, event, streamed

router = APIRouter(
    prefix="/v1", tags=["answers"], responses={**problems(500), **event_stream("The answer")}
)


@router.post("/answers", response_model=AnswerResponse)
async def ask(body: AnswerRequest, call: CallDep) -> Response:
    """Answers a question from the documents of a collection.

    With `stream`, events: `sources`, a `token` for each piece of text, and `answer`, or `error`.
    """
    generation, rag = body.generation(call.deadline), call.rag
    opening = lambda: rag.astream(  # noqa: E731
        body.question, collection=body.collection, generation=generation, **body.retrieval()
    )
    return await _respond(call, "answer", body.collection, opening, stream=body.stream)


@router.post("/prompts", response_model=AnswerResponse)
async def prompt(body: PromptRequest, call: CallDep) -> Response:
    """Answers a PML prompt over a stored schema. Events as for answers."""
    generation, rag = body.generation(call.deadline), call.rag
    opening = lambda: rag.astream_prompt(  # noqa: E731
        body.prompt, mode=body.mode, source="prompt", generation=generation
    )
    return await _respond(call, "prompt", "", opening, stream=body.stream)


async def _respond(
    call: Call, kind: str, collection: str, opening: Opening, *, stream: bool
) -> Response:
    running = call.service.running
    if stream:
        entry = running.begin(kind, call.caller.namespace, collection)
        return await streamed(call, entry, opening, _told, _told_fault)
    with running.entry(kind, call.caller.namespace, collection) as entry:
        [answer] = await answered(call, entry, opening)
    return CompactResponse(answer_response(entry.id, answer))


async def _told(entry: ActiveRequest, stream: AsyncAnswerStream) -> AsyncGenerator[bytes, None]:
    yield event(stream.sources, "sources")
    async with aclosing(stream.pieces()) as pieces:
        async for piece in pieces:
            if piece.text:
                yield event({"text": piece.text, "at": monotonic() - entry.started}, "token")
    entry.answers.append(stream.answer)
    yield event(answer_response(entry.id, stream.answer), "answer")


def _told_fault(fault: ErrorInfo) -> bytes:
    return event(fault.problem("/v1/answers"), "error")
