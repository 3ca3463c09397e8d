"""What chats and completions have in common."""

# MERGED ragcache_api.http.routes.chat: `POST /v1/chat/completions`.
# MERGED ragcache_api.http.routes.completions: `POST /v1/completions`.
# MERGED ragcache_api.http.routes.models: `GET /v1/models`.

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ragcache import Answer, AsyncAnswerStream, Generation
from ragcache.engine import Choice, TokenDelta
from ragcache_api.http.errors import ErrorInfo, HTTPProblem
from ragcache_api.http.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    Head,
    Model,
    Models,
    OpenAICompletion,
    extras,
    reason,
    sources_response,
    usage,
)
from ragcache_api.http.openai.tools import Shape, joined
from ragcache_api.http.protocol import CompactResponse, compact, event_stream, openai_problems
from ragcache_api.http.requests import ActiveRequest
from ragcache_api.http.service import Call, CallDep, Service
from ragcache_api.http.streaming import Opening, answered, event, streamed

DONE = b"data: [DONE]\n\n"
ChunkOf = Callable[[TokenDelta], dict[str, Any] | None]
"""The choice that a piece makes in a chunk; None where it tells nothing."""


@dataclass(slots=True)
class Chunks:
    """Writes the chunks of one streamed answer."""

    head: Head
    with_usage: bool
    with_sources: bool
    _prefix: bytes = field(init=False)

    def __post_init__(self) -> None:
        self._prefix = b"data: " + self.head.prefix()

    def chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        """An event with some choices."""
        if self.with_usage:
            more.setdefault("usage", None)
        return self._prefix + compact({"choices": choices, **more})[1:] + b"\n\n"

    def ending(self, answers: list[Answer]) -> bytes:
        """Usage, if it was asked for, and the end."""
        if not self.with_usage:
            return DONE
        return self.chunk(usage=usage(answers)) + DONE

    def extras(self, answers: list[Answer]) -> dict[str, Any]:
        """The fields of the last chunk that has choices, which OpenAI does not know."""
        told: dict[str, Any] = {"ragcache": extras(answers)}
        return told | ({"sources": sources_response(answers)} if self.with_sources else {})


async def pieces_of(
    entry: ActiveRequest, stream: AsyncAnswerStream
) -> AsyncGenerator[TokenDelta, None]:
    """The stream's pieces; the entry has the answer afterwards."""
    async with aclosing(stream.pieces()) as pieces:
        async for piece in pieces:
            yield piece
    entry.answers.append(stream.answer)


def told_fault(fault: ErrorInfo) -> bytes:
    """An error in the middle of a stream, as OpenAI tells it."""
    return event(fault.openai())


router = APIRouter(prefix="/v1", tags=["openai"], responses=openai_problems())
_STREAMED = event_stream("The completion")


@router.post("/chat/completions", response_model=OpenAICompletion, responses=_STREAMED)
async def complete_chat(body: ChatRequest, call: CallDep) -> Response:
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

    def __init__(self, call: Call, body: ChatRequest, shape: Shape, entry: ActiveRequest) -> None:
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
        self, entry: ActiveRequest, stream: AsyncAnswerStream
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


@router.post("/completions", response_model=OpenAICompletion, responses=_STREAMED)
async def complete_text(body: CompletionRequest, call: CallDep) -> Response:
    """OpenAI's text completion: texts are continued as they stand. With `collection`, the prompt is
    a question to its documents."""
    check_model(call.service, body.model)
    generation, prompts = body.generation(call.deadline), body.prompts
    running, namespace = call.service.running, call.caller.namespace
    if body.stream:
        if len(prompts) > 1:
            raise HTTPProblem(400, "unsupported", "a stream takes one prompt", None, "prompt")
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

    def __init__(self, call: Call, body: CompletionRequest, entry: ActiveRequest) -> None:
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
        self, entry: ActiveRequest, stream: AsyncAnswerStream
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


@router.get("/models")
async def list_models(call: CallDep) -> Models:
    """The model that is served."""
    return Models(data=[_served(call.service)])


@router.get("/models/{name:path}")
async def get_model(name: str, call: CallDep) -> Model:
    """The model of a name."""
    check_model(call.service, name)
    return _served(call.service)


def check_model(service: Service, name: str) -> None:
    """Raises `HTTPProblem` (404) for another model than the one that is served."""
    if name != service.model:
        raise HTTPProblem(
            404, "model-not-found", f"the model {name!r:.200} is not served; {service.model!r} is",
            None, "model",
        )  # fmt: skip


def _served(service: Service) -> Model:
    return Model(id=service.model, created=int(service.started))
