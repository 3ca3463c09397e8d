"""Routes of OpenAI's interface: chat completions, text completions, and models.

They are served below `/v1` and below each collection, for clients without a field that names one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from time import time
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Depends
from starlette.responses import Response

from ragcache import (
    Answer,
    AnswerSpan,
    AsyncAnswerStream,
)
from ragcache.engine import Choice, LogprobFormat, SampledToken, TokenDelta
from ragcache_api.http.bodies import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    named_collection,
    unsupported,
)
from ragcache_api.http.model_ids import collection_in
from ragcache_api.http.openings import (
    addressed,
    open_conversation,
    open_question,
    output_format,
)
from ragcache_api.http.protocol import (
    ResponseModel,
    compact,
    event_stream,
    openai_problems,
)
from ragcache_api.http.requests import ActiveRequest
from ragcache_api.http.service import (
    ContextDep,
    RequestContext,
    Service,
    declare_base_collection,
)
from ragcache_api.http.sources import CompletionSource, annotations_of, source_of
from ragcache_api.http.streaming import AnswerFormat, Opening, deltas_of, format_event, respond
from ragcache_api.http.tools import OutputFormat, join_deltas

DONE = b"data: [DONE]\n\n"
router = APIRouter()
_routes = APIRouter(responses=openai_problems())
_STREAMED = event_stream("The completion")


class PromptDetails(ResponseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Number of prompt tokens that were not computed for this request."""


class Usage(ResponseModel):
    """Numbers of tokens, for all prompts and all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    sources: dict[str, int] | None = None
    """Number of modules that were read of each document, with `collection` only. LangChain keeps
    this field and drops the other ones that OpenAI does not have."""


class OpenAICompletion(ResponseModel):
    """A chat completion or a text completion."""

    id: str
    object: Literal["chat.completion", "text_completion"]
    created: int
    """Unix seconds."""
    model: str
    system_fingerprint: str
    """Digest of the model's weights and configuration."""
    choices: list[dict[str, Any]]
    usage: Usage
    sources: list[CompletionSource] | None = None
    """Modules that the answer was read from, with `collection` only."""
    ragcache: dict[str, Any]
    """Mode, reuse, timings, spans, confidence and finish reason, as in `/v1/answers`."""


class ModelCard(ResponseModel):
    """A served model, with the fields of OpenAI and of Anthropic."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int
    """Start of the service, in Unix seconds."""
    created_at: datetime
    """The same time in RFC 3339."""
    owned_by: str = "ragcache"
    display_name: str


class ModelList(ResponseModel):
    """The served models, as one page."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


@_routes.post("/chat/completions", response_model=OpenAICompletion, responses=_STREAMED)
async def complete_chat(body: ChatRequest, context: ContextDep) -> Response:
    """Answer a conversation.

    With `collection`, documents of that collection stand before the user's last message, and
    `sources` lists the modules that were read.
    """
    body = addressed(body, context)
    generation = body.generation(context.deadline, context.service.settings.chat_max_tokens)
    output = await output_format(body, context)
    generation = output.apply(generation)
    messages = [each.plain() for each in body.messages]
    opening = open_conversation(context, body, generation, messages, tools=output.tools)
    writer = partial(_ChatWriter, context, body, output=output)
    return await _respond(context, "chat", body, [opening], writer)


@_routes.post("/completions", response_model=OpenAICompletion, responses=_STREAMED)
async def complete_text(body: CompletionRequest, context: ContextDep) -> Response:
    """Continue texts, or the tokens of texts, as they are.

    With `echo` and `logprobs`, log-probabilities begin with the prompt's tokens.

    With `collection`, the prompt is a question to the documents of that collection.
    """
    body = addressed(body, context)
    generation, prompts = body.generation(context.deadline), body.prompts
    if body.stream and len(prompts) > 1:
        raise unsupported("prompt", "a stream takes one prompt")
    openings = [
        open_question(context, body, generation, str(each))
        if body.collection
        else open_conversation(context, body, generation, each, recognize=not body.scores_prompt)
        for each in prompts
    ]
    return await _respond(
        context, "completion", body, openings, partial(_TextWriter, context, body)
    )


@_routes.get("/models")
def list_models(context: ContextDep) -> ModelList:
    """List the served model and, unless the base URL names one, each `MODEL/COLLECTION`."""
    served, base = context.service.served_name, context.base_collection
    ids = [served]
    if base is None:
        ids += [f"{served}/{name}" for name in context.rag.collections.names()]
    else:
        _check_collection(context, base)
    cards = [_model_card(context.service, each) for each in ids]
    return ModelList(data=cards, first_id=ids[0], last_id=ids[-1])


@_routes.get("/models/{name:id}")
def get_model(name: str, context: ContextDep) -> ModelCard:
    """Return a model by its id."""
    served = context.service.served_name
    collection = collection_in(name, served)
    if named := named_collection(context.base_collection, collection):
        _check_collection(context, named)
    return _model_card(context.service, "/".join(filter(None, (served, collection))))


router.include_router(_routes, prefix="/v1", tags=["openai"])
router.include_router(
    _routes,
    prefix="/v1/collections/{collection}",
    tags=["openai_collection"],
    dependencies=[Depends(declare_base_collection)],
)


def _check_collection(context: RequestContext, collection: str) -> None:
    """Raise `UnknownCollection` unless a collection exists."""
    context.rag.collections.instruction(collection)


def _model_card(service: Service, name: str) -> ModelCard:
    created = int(service.started)
    return ModelCard(
        id=name,
        created=created,
        created_at=datetime.fromtimestamp(created, UTC),
        display_name=name,
    )


async def _respond(
    context: RequestContext,
    kind: str,
    body: GenerationRequest,
    openings: list[Opening],
    writer_of: Callable[[ActiveRequest], _CompletionWriter],
) -> Response:
    written = AnswerFormat(
        whole=lambda active, answers: writer_of(active).completion(answers),
        events=lambda active, stream: writer_of(active).chunks(active, stream),
        error=lambda info: format_event(info.openai()),
    )
    return await respond(
        context, written, kind, body.collection or "", *openings, stream=body.stream, n=body.n
    )


def finish_reason_of(choice: Choice) -> str:
    """Return OpenAI's finish reason of a choice: `length`, also for `repetition`, or `stop`.

    OpenAI has no reasons for `repetition`, `no_documents` and `no_answer`; `ragcache.finish_reason`
    has them.
    """
    return "length" if choice.finish_reason in ("length", "repetition") else "stop"


class _CompletionWriter(ABC):
    """Writer of one completion, whole or in chunks."""

    kind: ClassVar[str]
    """`object` of a whole completion."""
    chunk_kind: ClassVar[str]
    """`object` of a chunk."""

    def __init__(
        self, context: RequestContext, body: GenerationRequest, active: ActiveRequest
    ) -> None:
        service = context.service
        self._fields = {
            "id": active.id,
            "object": self.kind,
            "created": int(time()),
            "model": service.served_name,
            "system_fingerprint": f"fp_{service.shared.model.causal.fingerprint[:10]}",
        }
        self._logprobs = LogprobFormat(service.tokenizer)
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._with_sources = body.collection is not None
        self._prefix = b"data: " + compact(self._fields | {"object": self.chunk_kind})[:-1] + b","

    def completion(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Write the whole completion."""
        return {
            **self._fields,
            "choices": self.choices(answers),
            "usage": self._usage(answers),
            **self._reuse_fields(answers),
            **({"sources": self._sources(answers)} if self._with_sources else {}),
        }

    @staticmethod
    def _sources(answers: Sequence[Answer]) -> list[dict[str, Any]]:
        return [source_of(each) for answer in answers for each in answer.sources]

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Count the tokens of all prompts and all choices and, with `collection`, the modules."""
        prompt = sum(answer.reuse.prompt_tokens for answer in answers)
        kept = sum(answer.reuse.cached_tokens + answer.reuse.shared_tokens for answer in answers)
        generated = sum(len(choice.token_ids) for answer in answers for choice in answer.choices)
        counts = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": kept},
        }
        if self._with_sources:
            read = (source.document for answer in answers for source in answer.sources)
            counts["sources"] = Counter(read)
        return counts

    def _reuse_fields(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the fields that OpenAI does not have, apart from sources.

        Spans cover all prompts. All other fields describe the first prompt.
        """
        first, spans, choices = answers[0], list[AnswerSpan](), 0
        for answer in answers:
            spans += [replace(span, choice=choices + span.choice) for span in answer.spans]
            choices += len(answer.choices)
        return {
            "ragcache": {
                "mode": first.mode,
                "reuse": first.reuse,
                "timings": first.timings,
                "spans": spans,
                "confidence": first.confidence,
                "finish_reason": first.finish_reason,
            }
        }

    @abstractmethod
    def choices(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """Write the choices of all answers."""

    async def chunks(
        self, active: ActiveRequest, stream: AsyncAnswerStream
    ) -> AsyncGenerator[bytes, None]:
        """Yield all events of the answer. The last has the fields that OpenAI does not have.

        Sources come before the annotations of the last choices: Open WebUI shows each annotation as
        a source, too, and joins it with a source of the same document that it has already.
        """
        if first := self._first():
            yield self._chunk(*first)
        async with aclosing(deltas_of(active, stream)) as deltas:
            async for delta in deltas:
                if choice := self._choice_delta(delta):
                    yield self._chunk(choice)
        choices = active.answers[0].choices
        if held := self._held_back(len(choices)):
            yield self._chunk(*held)
        if self._with_sources:
            unchanged = [self._unchanged(index) for index in range(len(choices))]
            yield self._chunk(*unchanged, sources=self._sources(active.answers))
        endings = [self._ending(index, active.answers[0]) for index in range(len(choices))]
        yield self._chunk(*endings, **self._reuse_fields(active.answers))
        if self._with_usage:
            yield self._chunk(usage=self._usage(active.answers)) + DONE
        else:
            yield DONE

    def _chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        if self._with_usage:
            more.setdefault("usage", None)
        return self._prefix + compact({"choices": choices, **more})[1:] + b"\n\n"

    @abstractmethod
    def _first(self) -> list[dict[str, Any]]:
        """Write the choices of the first chunk, before any delta. Without any, it is not sent."""

    @abstractmethod
    def _choice_delta(self, delta: TokenDelta) -> dict[str, Any] | None:
        """Write the choice of one delta, or return None if it adds nothing."""

    def _held_back(self, choices: int) -> list[dict[str, Any]]:  # noqa: ARG002
        """Write choices with text that could not be sent before the answer was complete."""
        return []

    @abstractmethod
    def _unchanged(self, index: int) -> dict[str, Any]:
        """Write a choice of a chunk that adds nothing to it."""

    @abstractmethod
    def _ending(self, index: int, answer: Answer) -> dict[str, Any]:
        """Write a choice of the last chunk, with its finish reason."""


class _ChatWriter(_CompletionWriter):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        context: RequestContext,
        body: ChatRequest,
        active: ActiveRequest,
        output: OutputFormat,
    ) -> None:
        super().__init__(context, body, active)
        self._with_logprobs, self._marked = bool(body.logprobs), body.citations
        self._readers = [output.reader() for _ in range(body.n)]

    def choices(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        answer = answers[0]
        return [self._message(n, choice, answer) for n, choice in enumerate(answer.choices)]

    def _message(self, index: int, choice: Choice, answer: Answer) -> dict[str, Any]:
        reader = self._readers[index]
        deltas = [reader.feed(choice.text), reader.finish()]
        message = {"role": "assistant", **join_deltas(deltas)}
        if self._with_sources:
            message["annotations"] = self._annotations(answer, index, message["content"] or "")
        logprobs = self._logprobs.chat(choice.chosen) if self._with_logprobs else None
        return _choice(index, logprobs, self._finish_reason(index, choice), message=message)

    def _annotations(self, answer: Answer, index: int, text: str) -> list[dict[str, Any]]:
        return annotations_of(answer, index, text, self._marked)

    def _finish_reason(self, index: int, choice: Choice) -> str:
        return self._readers[index].finish_reason(finish_reason_of(choice))

    def _first(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [_choice(index, delta=delta) for index in range(len(self._readers))]

    def _choice_delta(self, delta: TokenDelta) -> dict[str, Any] | None:
        fields = self._readers[delta.choice].feed(delta.text)
        logprobs = None
        if self._with_logprobs and delta.chosen is not None:
            logprobs = self._logprobs.chat([delta.chosen])
        if not fields and logprobs is None:
            return None
        return _choice(delta.choice, logprobs, delta=fields)

    def _held_back(self, choices: int) -> list[dict[str, Any]]:
        held = [(index, self._readers[index].finish()) for index in range(choices)]
        return [_choice(index, delta=fields) for index, fields in held if fields]

    def _unchanged(self, index: int) -> dict[str, Any]:
        return _choice(index, delta={})

    def _ending(self, index: int, answer: Answer) -> dict[str, Any]:
        choice, delta = answer.choices[index], dict[str, Any]()
        if self._with_sources:
            text = self._readers[index].content
            delta["annotations"] = self._annotations(answer, index, text)
        return _choice(index, None, self._finish_reason(index, choice), delta=delta)


class _TextWriter(_CompletionWriter):
    kind = chunk_kind = "text_completion"

    def __init__(
        self, context: RequestContext, body: CompletionRequest, active: ActiveRequest
    ) -> None:
        super().__init__(context, body, active)
        self._with_logprobs = body.logprobs is not None
        self._echoed = [self._text_of(each) if body.echo else "" for each in body.prompts]
        self._only_prompt = body.max_tokens == 0
        self._scores_prompt = body.scores_prompt
        self._number = body.n
        self._lengths: Counter[int] = Counter()

    def _text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._logprobs.tokenizer.decode(prompt)

    def completion(self, answers: Sequence[Answer]) -> dict[str, Any]:
        if not self._only_prompt:
            return super().completion(answers)
        empty = Choice((), "", "length")
        return super().completion([replace(a, choices=(empty,) * self._number) for a in answers])

    def _reported(self, answer: Answer, choice: Choice) -> list[SampledToken]:
        """Return the tokens with log-probabilities: of the prompt, the answer, and its end.

        A scored prompt is followed by the stop token, as by vLLM: `lm-eval` leaves out the last
        token.
        """
        ending = [choice.ending] if self._scores_prompt and choice.ending is not None else []
        return [*answer.prompt_logprobs, *choice.chosen, *ending]

    def choices(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        choices: list[dict[str, Any]] = []
        for echoed, answer in zip(self._echoed, answers, strict=True):
            for each in answer.choices:
                logprobs = None
                if self._with_logprobs:
                    logprobs = self._logprobs.text(self._reported(answer, each))
                ending, text = finish_reason_of(each), echoed + each.text
                choices.append(_choice(len(choices), logprobs, ending, text=text))
        return choices

    def _first(self) -> list[dict[str, Any]]:
        if not self._echoed[0]:
            return []
        return [_choice(index, text=self._echoed[0]) for index in range(self._number)]

    def _choice_delta(self, delta: TokenDelta) -> dict[str, Any] | None:
        logprobs = None
        if self._with_logprobs and delta.chosen is not None:
            logprobs = self._logprobs.text([delta.chosen], self._lengths[delta.choice])
            self._lengths[delta.choice] += len(logprobs["tokens"][0])
        if logprobs is None and not delta.text:
            return None
        return _choice(delta.choice, logprobs, text=delta.text)

    def _unchanged(self, index: int) -> dict[str, Any]:
        return _choice(index, text="")

    def _ending(self, index: int, answer: Answer) -> dict[str, Any]:
        return _choice(index, None, finish_reason_of(answer.choices[index]), text="")


def _choice(
    index: int, logprobs: dict[str, Any] | None = None, ending: str | None = None, **content: Any
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": ending}
