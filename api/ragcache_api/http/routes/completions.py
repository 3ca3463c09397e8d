"""`POST /v1/completions`."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ragcache import AsyncAnswerStream, Generation
from ragcache.engine import Choice, TokenDelta
from ragcache_api.http.asking import Opening, answered, streamed
from ragcache_api.http.compact import CompactResponse
from ragcache_api.http.errors import Refusal
from ragcache_api.http.routes.models import check_model
from ragcache_api.http.routes.openai import Chunks, pieces_of, told_fault
from ragcache_api.http.running import Entry
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
        answers = await answered(call, entry, *openings)
        told = _Completion(call, body, entry)
        choices = told.choices(prompts)
        whole = told.head.completion(choices, answers, sources=body.collection is not None)
    return CompactResponse(whole)


def _opening(
    call: Call, body: CompletionRequest, generation: Generation, prompt: str
) -> Opening:  # fmt: skip
    rag = call.rag

    async def opening() -> AsyncAnswerStream:
        if body.collection is None:
            return await rag.astream_chat(prompt, generation=generation, **body.reading())
        return await rag.astream(
            prompt, collection=body.collection, generation=generation, **body.retrieval()
        )

    return opening


class _Completion:
    """Tells one text completion, whole or in chunks."""

    def __init__(self, call: Call, body: CompletionRequest, entry: Entry) -> None:
        service = call.service
        self.head = Head.of(entry.id, service.model, service.fingerprint, chat=False)
        self._body, self._entry = body, entry
        self._logprobs = service.logprobs

    def choices(self, prompts: list[str]) -> list[dict[str, Any]]:
        """Of all prompts, one after the other."""
        told: list[dict[str, Any]] = []
        for prompt, answer in zip(prompts, self._entry.answers, strict=True):
            lead = prompt if self._body.echo else ""
            told += [
                self._choice(len(told) + number, choice, lead)
                for number, choice in enumerate(answer.choices)
            ]
        return told

    def _choice(self, index: int, choice: Choice, lead: str) -> dict[str, Any]:
        told = self._body.logprobs is not None
        logprobs = self._logprobs.text(choice.chosen) if told else None
        return _choice(index, lead + choice.text, logprobs, reason(choice))

    async def chunks(
        self, entry: Entry, stream: AsyncAnswerStream
    ) -> AsyncGenerator[bytes, None]:  # fmt: skip
        """All events of the answer."""
        chunks = Chunks(self.head, self._body.with_usage, self._body.collection is not None)
        if self._body.echo:
            lead = self._body.prompts[0]
            yield chunks.chunk(*(_choice(i, lead) for i in range(self._body.n or 1)))
        lengths: Counter[int] = Counter()
        async with aclosing(pieces_of(entry, stream)) as pieces:
            async for piece in pieces:
                told = self._piece(piece, lengths)
                if told is not None:
                    yield chunks.chunk(told)
        endings = [
            _choice(index, "", None, reason(choice))
            for index, choice in enumerate(entry.answers[0].choices)
        ]
        yield chunks.chunk(*endings, **chunks.extras(entry.answers))
        yield chunks.ending(entry.answers)

    def _piece(self, piece: TokenDelta, lengths: Counter[int]) -> dict[str, Any] | None:
        told = self._body.logprobs is not None and piece.chosen is not None
        if not told and not piece.text:
            return None
        logprobs = None
        if told and piece.chosen is not None:
            logprobs = self._logprobs.text([piece.chosen], lengths[piece.choice])
            lengths[piece.choice] += len(logprobs["tokens"][0])
        return _choice(piece.choice, piece.text, logprobs)


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None = None, ending: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": ending}
