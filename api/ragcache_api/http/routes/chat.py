"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ragcache import AsyncAnswerStream
from ragcache.engine import TokenDelta
from ragcache_api.http.asking import answered, streamed
from ragcache_api.http.compact import CompactResponse
from ragcache_api.http.routes.models import check_model
from ragcache_api.http.routes.openai import Chunks, pieces_of, told_fault
from ragcache_api.http.running import Entry
from ragcache_api.http.service import Call, CallDep
from ragcache_api.http.shaping import Shape, joined
from ragcache_api.http.wire.common import event_stream, openai_problems
from ragcache_api.http.wire.openai import ChatRequest
from ragcache_api.http.wire.openai_told import Head, OpenAICompletion, reason

router = APIRouter(
    prefix="/v1/chat", tags=["openai"],
    responses={**openai_problems(), **event_stream("The completion")},
)  # fmt: skip


@router.post("/completions", response_model=OpenAICompletion)
async def complete(body: ChatRequest, call: CallDep) -> Response:
    """OpenAI's chat completion. With `collection`, the last message of the user is answered from
    the documents of that collection, and `sources` tells which modules were read."""
    check_model(call.service, body.model)
    shape = Shape.of(body, call.service.tokenizer)
    generation = shape.apply(body.generation(call.deadline))
    rag = call.rag
    running, namespace = call.service.running, call.caller.namespace

    async def opening() -> AsyncAnswerStream:
        if body.collection is not None:
            return await rag.astream(
                body.question, collection=body.collection, generation=generation, **body.retrieval()
            )
        messages = [message.plain() for message in body.messages]
        return await rag.astream_chat(
            messages, tools=shape.tools, generation=generation, **body.reading()
        )

    if body.stream:
        entry = running.begin("chat", namespace, body.collection or "")
        told = _Chat(call, body, shape, entry)
        return await streamed(call, entry, opening, told.chunks, told_fault)
    with running.entry("chat", namespace, body.collection or "") as entry:
        [answer] = await answered(call, entry, opening)
        told = _Chat(call, body, shape, entry)
        choices = [told.choice(index) for index in range(len(answer.choices))]
        whole = told.head.completion(choices, entry.answers, sources=body.collection is not None)
    return CompactResponse(whole)


class _Chat:
    """Tells one chat completion, whole or in chunks."""

    def __init__(self, call: Call, body: ChatRequest, shape: Shape, entry: Entry) -> None:
        service = call.service
        self.head = Head.of(entry.id, service.model, service.fingerprint, chat=True)
        self._body, self._shape, self._entry = body, shape, entry
        self._logprobs = service.logprobs
        self._readers = [shape.reader() for _ in range(body.n or 1)]

    def choice(self, index: int) -> dict[str, Any]:
        """A choice of the answer that has ended."""
        choice = self._entry.answers[0].choices[index]
        reader = self._readers[index]
        deltas = [reader.feed(choice.text), reader.finish()]
        message = {"role": "assistant", **joined(deltas)}
        logprobs = self._logprobs.chat(choice.chosen) if self._body.logprobs else None
        ending = reader.ending(reason(choice))
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": ending}

    async def chunks(
        self, entry: Entry, stream: AsyncAnswerStream
    ) -> AsyncGenerator[bytes, None]:  # fmt: skip
        """All events of the answer."""
        chunks = Chunks(self.head, self._body.with_usage, self._body.collection is not None)
        yield chunks.chunk(
            *(_delta(i, {"role": "assistant", "content": ""}) for i in range(self._body.n or 1))
        )
        async with aclosing(pieces_of(entry, stream)) as pieces:
            async for piece in pieces:
                delta = self._piece(piece)
                if delta is not None:
                    yield chunks.chunk(delta)
        choices = entry.answers[0].choices
        last = [_delta(index, self._readers[index].finish()) for index in range(len(choices))]
        if any(each["delta"] for each in last):
            yield chunks.chunk(*(each for each in last if each["delta"]))
        endings = [
            _delta(index, {}, self._readers[index].ending(reason(choice)))
            for index, choice in enumerate(choices)
        ]
        yield chunks.chunk(*endings, **chunks.extras(entry.answers))
        yield chunks.ending(entry.answers)

    def _piece(self, piece: TokenDelta) -> dict[str, Any] | None:
        said = self._readers[piece.choice].feed(piece.text)
        told = self._body.logprobs and piece.chosen is not None
        if not said and not told:
            return None
        delta = _delta(piece.choice, said)
        if told and piece.chosen is not None:
            delta["logprobs"] = self._logprobs.chat([piece.chosen])
        return delta


def _delta(index: int, delta: dict[str, Any], ending: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": ending}
