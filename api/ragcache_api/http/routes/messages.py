"""Routes of Anthropic's Messages API.

Anthropic's clients add `/v1/messages` to their base URL, which is the service's own address or
`/v1/collections/COLLECTION`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ragcache import Answer, AsyncAnswerStream, SourceDocument
from ragcache.documents import ReadOptions, read_file
from ragcache.engine import Choice
from ragcache.modes import EXACT
from ragcache.params import SearchParams
from ragcache.pipeline.chat import ChatCall, DocumentSearch, select_given
from ragcache_api.http.anthropic import (
    CitedDocument,
    CountTokensRequest,
    FileSource,
    MessagesChat,
    MessagesRequest,
    chat_of,
    documents_of,
)
from ragcache_api.http.bodies import invalid
from ragcache_api.http.openings import addressed, open_conversation, output_format
from ragcache_api.http.protocol import ResponseModel, anthropic_problems, event_stream
from ragcache_api.http.requests import ActiveRequest
from ragcache_api.http.service import ContextDep, RequestContext, declare_base_collection
from ragcache_api.http.sources import CompletionSource, search_citations, source_of
from ragcache_api.http.streaming import AnswerFormat, deltas_of, format_event, respond
from ragcache_api.http.tools import OutputFormat, join_deltas

router = APIRouter()
_routes = APIRouter(responses=anthropic_problems())


class MessageUsage(ResponseModel):
    """Numbers of tokens. The prompt has the sum of the three numbers of input tokens."""

    input_tokens: int
    """Tokens of the prompt that were computed and not kept."""
    cache_creation_input_tokens: int
    """Tokens of the prompt that were computed and whose states were kept."""
    cache_read_input_tokens: int
    """Tokens of the prompt whose states were kept before."""
    output_tokens: int


class AnthropicMessage(ResponseModel):
    """An answer as a message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    """Blocks of the types `text` and `tool_use`. A text has its citations."""
    stop_reason: str
    """`end_turn`, `max_tokens`, `stop_sequence`, `tool_use` or `model_context_window_exceeded`."""
    stop_sequence: str | None
    usage: MessageUsage
    sources: list[CompletionSource] | None = None
    """Modules that the answer was read from, with `collection` only."""
    ragcache: dict[str, Any]
    """Mode, reuse, timings, spans, confidence and finish reason, as in `/v1/answers`."""


class TokensCountResponse(ResponseModel):
    """The length of a prompt."""

    input_tokens: int


@_routes.post("/messages", response_model=AnthropicMessage, responses=event_stream("The message"))
async def create_message(body: MessagesRequest, context: ContextDep) -> Response:
    """Answer a conversation.

    With `collection`, documents of that collection stand before the user's last message. So do
    documents of the request that have citations.
    """
    asked = await _translated(body, context)
    generation = asked.chat.generation(context.deadline)
    output = await output_format(asked.chat, context)
    opening = open_conversation(
        context,
        asked.chat,
        output.apply(generation),
        [each.plain() for each in asked.chat.messages],
        tools=output.tools,
        documents=asked.sources,
        keep=asked.keep,
    )

    def writer(active: ActiveRequest) -> _MessageWriter:
        return _MessageWriter(context, asked, active, output)

    written = AnswerFormat(
        whole=lambda active, answers: writer(active).message(answers[0]),
        events=lambda active, stream: writer(active).events(stream),
        error=lambda info: format_event(info.anthropic(), "error"),
    )
    collection = asked.chat.collection or ""
    return await respond(context, written, "chat", collection, opening, stream=body.stream)


@_routes.post("/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, context: ContextDep) -> TokensCountResponse:
    """Count the tokens of the prompt that a conversation becomes, with its documents."""
    asked = await _translated(body, context)
    output = await output_format(asked.chat, context)
    return TokensCountResponse(
        input_tokens=await run_in_threadpool(_prompt_tokens, context, asked, output)
    )


router.include_router(_routes, prefix="/v1", tags=["anthropic"])
router.include_router(
    _routes,
    prefix="/v1/collections/{collection}/v1",
    tags=["anthropic_collection"],
    dependencies=[Depends(declare_base_collection)],
)


async def _translated(body: CountTokensRequest, context: RequestContext) -> MessagesChat:
    """Read the PDF files of a request, and return it as a chat with the served model."""
    files = {}
    for index, block in enumerate(documents_of(body)):
        if isinstance(block.source, FileSource):
            name = f"{block.title or index + 1}.pdf"
            files[index] = await to_thread.run_sync(
                _read, name, block.source, context, limiter=context.service.readers
            )
    try:
        asked = chat_of(body, files)
    except ValidationError as error:
        problems = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(problems) from None
    return MessagesChat(addressed(asked.chat, context), asked.sources, asked.cited, asked.keep)


def _read(name: str, file: FileSource, context: RequestContext) -> SourceDocument:
    try:
        raw = base64.b64decode(file.data, validate=True)
    except ValueError as error:
        raise invalid("messages", f"the data of {name} is no base64: {error}") from None
    return read_file(name, raw, ReadOptions.of(context.service.shared.config))


def _prompt_tokens(context: RequestContext, asked: MessagesChat, output: OutputFormat) -> int:
    chat, shared, search = asked.chat, context.service.shared, None
    if asked.sources:
        given = select_given(asked.sources, shared.model, shared.config.module_tokens)
        search = DocumentSearch("", selection=given)
    elif chat.collection is not None:
        search = DocumentSearch(chat.collection, SearchParams.part_of(chat))
    call = ChatCall(
        EXACT,
        recognize=False,
        tools=output.tools,
        template_kwargs=chat.chat_template_kwargs,
        search=search,
    )
    messages = [each.plain() for each in chat.messages]
    [prompt] = context.rag.internals.chat.prepare_prompts([messages], call)
    return len(prompt.computed_tokens)


class _MessageWriter:
    """Writer of one message, whole or as events."""

    def __init__(
        self,
        context: RequestContext,
        asked: MessagesChat,
        active: ActiveRequest,
        output: OutputFormat,
    ) -> None:
        self._asked, self._active, self._reader = asked, active, output.reader()
        self._fields = {
            "id": f"msg_{active.id.partition('-')[2]}",
            "type": "message",
            "role": "assistant",
            "model": context.service.served_name,
        }

    def message(self, answer: Answer) -> dict[str, Any]:
        """Write the whole message."""
        choice = answer.choices[0]
        joined = join_deltas([self._reader.feed(choice.text), self._reader.finish()])
        blocks: list[dict[str, Any]] = []
        if joined["content"]:
            cited = self._citations(answer)
            blocks.append({"type": "text", "text": joined["content"], "citations": cited or None})
        blocks += [_call_block(call) for call in joined.get("tool_calls", ())]
        return {
            **self._fields,
            "content": blocks,
            **self._stop(choice),
            "usage": _usage(answer),
            **self._reuse_fields(answer),
        }

    async def events(self, stream: AsyncAnswerStream) -> AsyncGenerator[bytes, None]:
        """Yield all events of the message."""
        blocks = _BlockEvents()
        kept = sum(stream.read_tokens.values())
        created = stream.read_tokens.get("encoded", 0)
        begun = {
            "input_tokens": stream.prompt_tokens - kept,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": kept - created,
            "output_tokens": 0,
        }
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=self._fields | nothing | {"usage": begun})
        async with aclosing(deltas_of(self._active, stream)) as deltas:
            async for delta in deltas:
                if events := b"".join(blocks.feed(self._reader.feed(delta.text))):
                    yield events
        answer = self._active.answers[0]
        last = [*blocks.feed(self._reader.finish()), *blocks.end(self._citations(answer))]
        ended = {"delta": self._stop(answer.choices[0]), "usage": _usage(answer)}
        last.append(_event("message_delta", **ended, **self._reuse_fields(answer)))
        last.append(_event("message_stop"))
        yield b"".join(last)

    def _stop(self, choice: Choice) -> dict[str, Any]:
        """Return the reason why the answer ended."""
        string = choice.stopped_by if isinstance(choice.stopped_by, str) else None
        reason = "end_turn" if string is None else "stop_sequence"
        if choice.finish_reason == "repetition":
            reason = "max_tokens"
        elif choice.finish_reason == "length":
            whole = len(choice.token_ids) >= (self._asked.chat.max_tokens or 0)
            reason = "max_tokens" if whole else "model_context_window_exceeded"
        if self._reader.called and reason == "end_turn":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": string}

    def _citations(self, answer: Answer) -> list[dict[str, Any]]:
        if self._asked.cited:
            return [*citations_of(answer, self._asked.cited)]
        return [] if self._asked.chat.collection is None else search_citations(answer)

    def _reuse_fields(self, answer: Answer) -> dict[str, Any]:
        """Return the fields that Anthropic does not have."""
        names = ("mode", "reuse", "timings", "spans", "confidence", "finish_reason")
        fields: dict[str, Any] = {"ragcache": {name: getattr(answer, name) for name in names}}
        if self._asked.chat.collection is not None:
            fields["sources"] = [source_of(each) for each in answer.sources]
        return fields


class _BlockEvents:
    """The events of a message's blocks, in the order of its deltas."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None
        """Type of the block that is open."""
        self._call = -1

    def feed(self, fields: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the events of a delta in OpenAI's fields."""
        if text := fields.get("content"):
            if self._open != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in fields.get("tool_calls", ()):
            function = call["function"]
            if call["index"] != self._call:
                self._call = call["index"]
                yield from self._begin(_call_block(call, {}))
            if function["arguments"]:
                part = {"type": "input_json_delta", "partial_json": function["arguments"]}
                yield self._delta(part)

    def end(self, citations: Sequence[dict[str, Any]]) -> Iterator[bytes]:
        """Yield the citations of the text, and the end of the last block."""
        if self._open == "text":
            for each in citations:
                yield self._delta({"type": "citations_delta", "citation": each})
        yield from self._stop()

    def _begin(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._stop()
        self._index, self._open = self._index + 1, block["type"]
        yield _event("content_block_start", index=self._index, content_block=block)

    def _stop(self) -> Iterator[bytes]:
        if self._open is not None:
            self._open = None
            yield _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def citations_of(
    answer: Answer, documents: Mapping[str, CitedDocument]
) -> Iterator[dict[str, Any]]:
    """Yield the places of an answer in documents of its request, as Anthropic's citations.

    A plain text is cited by characters, a text in blocks by blocks, and a PDF file by pages. An
    answer that is no quotation has no places.

    Args:
        answer: The answer.
        documents: The documents by id.
    """
    said = answer.choices[0].text.strip()
    for span in answer.spans:
        document = documents.get(span.document)
        if document is None or span.choice or span.start is None or span.end is None:
            continue
        about = {"document_index": document.index, "document_title": document.title}
        if document.has_pages:
            if span.page is not None:
                pages = {"start_page_number": span.page, "end_page_number": span.page + 1}
                yield {"type": "page_location", "cited_text": said, **about, **pages}
        elif document.in_blocks:
            first, last = _blocks_at(document.parts, span.start, span.end)
            text = "".join(document.parts[first:last])
            blocks = {"start_block_index": first, "end_block_index": last}
            yield {"type": "content_block_location", "cited_text": text, **about, **blocks}
        else:
            place = {"start_char_index": span.start, "end_char_index": span.end}
            text = document.parts[0][span.start : span.end]
            yield {"type": "char_location", "cited_text": text, **about, **place}


def _blocks_at(parts: Sequence[str], start: int, end: int) -> tuple[int, int]:
    """Return the first block of a range of characters, and the one after its last.

    The characters count in the text of the blocks with blank lines between them.
    """
    touched, begin = [], 0
    for index, part in enumerate(parts):
        if begin < end and start < begin + len(part):
            touched.append(index)
        begin += len(part) + 2
    return (touched[0], touched[-1] + 1) if touched else (0, len(parts))


def _usage(answer: Answer) -> dict[str, int]:
    reuse = answer.reuse
    return {
        "input_tokens": reuse.computed_tokens - reuse.created_tokens,
        "cache_creation_input_tokens": reuse.created_tokens,
        "cache_read_input_tokens": reuse.cached_tokens + reuse.shared_tokens,
        "output_tokens": len(answer.choices[0].token_ids),
    }


def _call_block(call: Mapping[str, Any], given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write a call of OpenAI's as a block. `given` is its input in place of the arguments."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    number = call["id"].removeprefix("call_")
    values = _parsed(arguments) if given is None else given
    return {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": values}


def _parsed(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call, or nothing if they were cut off."""
    try:
        values = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _event(name: str, /, **fields: Any) -> bytes:
    return format_event({"type": name, **fields}, name)
