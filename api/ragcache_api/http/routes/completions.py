"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from ragcache import Answer, AsyncAnswerStream, Generation
from ragcache.engine import Choice, Piece
from ragcache_api.http.asking import answered, streamed
from ragcache_api.http.errors import Refusal
from ragcache_api.http.routes.models import check_model
from ragcache_api.http.routes.openai import Chunks, pieces_of, told_fault
from ragcache_api.http.running import Entry, unless_gone
from ragcache_api.http.service import Call, CallDep
from ragcache_api.http.wire.common import event_stream, openai_problems
from ragcache_api.http.wire.openai import CompletionRequest
from ragcache_api.http.wire.openai_told import Head, OpenAICompletion, reason

router = APIRouter(
    prefix="/v1", tags=["openai"], responses={**openai_problems(), **event_stream("The completion")}
)


@router.post("/completions", response_model=OpenAICompletion)
async def complete(body: CompletionRequest, call: CallDep) -> Response:
    """OpenAI's text completion: texts are continued as they stand. With `collection`, the prompt is
    a question to its documents."""
    check_model(call.service, body.model)
    generation, prompts = body.generation(call.deadline), body.prompts
    running, namespace = call.service.running, call.caller.namespace
    if body.stream:
        if len(prompts) > 1:
            raise Refusal(400, "unsupported", "a stream takes one prompt", None, "prompt")
        entry = running.begin("completion", namespace, body.collection or "")
        told = _Completion(call, body, entry)
        opening = _opening(call, body, generation, prompts[0])
        return await streamed(call, entry, opening, told.chunks, told_fault)
    with running.entry("completion", namespace, body.collection or "") as entry:
        openings = [_opening(call, body, generation, prompt) for prompt in prompts]
        answers = await unless_gone(call.request, _all(entry, openings))
        entry.answers += answers
        told = _Completion(call, body, entry)
        whole = told.head.completion(
            told.choices(prompts), answers, sources=body.collection is not None
        )
    return JSONResponse(whole)
