"""Routes of OpenAI's Responses API.

They are served below `/v1` and below each collection. Stored responses belong to the namespace of
the key, and expire.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from time import time
from typing import Annotated, Any, Literal
from uuid import uuid4

from fastapi import APIRouter, Depends, Path
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import to_jsonable_python
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ragcache import Answer, AsyncAnswerStream, Citation
from ragcache.db import StoredObject
from ragcache.errors import StoreError
from ragcache_api.http.bodies import TranslatedRequest
from ragcache_api.http.errors import ErrorInfo, HTTPProblem
from ragcache_api.http.openings import addressed, open_conversation, output_format
from ragcache_api.http.protocol import CompactResponse, ResponseModel, event_stream, openai_problems
from ragcache_api.http.requests import ActiveRequest
from ragcache_api.http.responses import RESULTS, ResponsesRequest, responses_chat
from ragcache_api.http.service import ContextDep, RequestContext, declare_base_collection
from ragcache_api.http.sources import CompletionSource, file_citations, found_files, source_of
from ragcache_api.http.streaming import AnswerFormat, deltas_of, format_event, respond
from ragcache_api.http.tools import OutputFormat, join_deltas
from ragcache_api.http.vector_stores import VectorStores

logger = logging.getLogger(__name__)

KEPT_SECONDS = 30 * 86_400.0
"""Time for which a response is stored."""
KIND = "response"
router = APIRouter()
_routes = APIRouter(responses=openai_problems())
ResponseId = Annotated[str, Path(min_length=1, max_length=200)]


class InputDetails(ResponseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int
    """Number of tokens that were not computed for this request."""
    cache_write_tokens: int
    """Number of computed tokens whose states were kept."""


class OutputDetails(ResponseModel):
    """Details of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class OpenAIResponse(ResponseModel):
    """An answer in items: a search, a message with its annotations, and calls of functions."""

    id: str
    object: Literal["response"]
    created_at: float
    status: Literal["completed", "incomplete", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage
    incomplete_details: dict[str, str] | None
    error: None
    instructions: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    max_output_tokens: int | None
    sources: list[CompletionSource] | None = None
    """Modules that the answer was read from, if a collection or a vector store was searched."""
    ragcache: dict[str, Any]
    """Mode, reuse, timings, spans, confidence and finish reason, as in `/v1/answers`."""


class DeletedObject(ResponseModel):
    """A deleted object."""

    id: str
    object: str
    deleted: Literal[True] = True


class ItemList(ResponseModel):
    """Items of a list, whole."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


@_routes.post("/responses", response_model=OpenAIResponse, responses=event_stream("The response"))
async def create_response(body: ResponsesRequest, context: ContextDep) -> Response:
    """Answer a text or a conversation.

    With the tool `file_search`, texts of a vector store stand before the user's last message.
    """
    earlier: Sequence[Mapping[str, Any]] = ()
    if body.previous_response_id is not None:
        earlier = (await run_in_threadpool(_previous, context, body.previous_response_id)).value[
            "messages"
        ]
    if body.file_search is not None:
        [store] = body.file_search.vector_store_ids
        await run_in_threadpool(VectorStores(context).touch, store)
    chat = _translated(body, context, earlier)
    generation = chat.generation(context.deadline, context.service.settings.chat_max_tokens)
    output = await output_format(chat, context)
    opening = open_conversation(
        context,
        chat,
        output.apply(generation),
        [each.plain() for each in chat.messages],
        tools=output.tools,
    )
    made: list[_ResponseWriter] = []

    def writer(active: ActiveRequest) -> _ResponseWriter:
        made.append(_ResponseWriter(context, body, chat, active, output, earlier))
        return made[-1]

    written = AnswerFormat(
        whole=lambda active, answers: writer(active).response(answers[0]),
        events=lambda active, stream: writer(active).events(stream),
        error=_error_event,
    )
    collection = chat.collection or ""
    told = await respond(context, written, "chat", collection, opening, stream=body.stream)
    if not body.stream:
        await made[-1].keep()
    return told


@_routes.get("/responses/{response}", response_model=OpenAIResponse)
def get_response(response: ResponseId, context: ContextDep) -> Response:
    """Return a stored response."""
    return CompactResponse(_stored(context, response).value["response"])


@_routes.delete("/responses/{response}")
def delete_response(response: ResponseId, context: ContextDep) -> DeletedObject:
    """Delete a stored response. Responses that continue it stay."""
    if not context.objects.delete(KIND, response):
        raise unknown_object("response", response)
    return DeletedObject(id=response, object="response")


@_routes.get("/responses/{response}/input_items")
def list_input_items(response: ResponseId, context: ContextDep) -> ItemList:
    """List the input of a stored response."""
    items = _stored(context, response).value["input"]
    ids = [each["id"] for each in items]
    return ItemList(data=items, first_id=next(iter(ids), None), last_id=next(iter(ids[-1:]), None))


router.include_router(_routes, prefix="/v1", tags=["responses"])
router.include_router(
    _routes,
    prefix="/v1/collections/{collection}",
    tags=["responses_collection"],
    dependencies=[Depends(declare_base_collection)],
)


def _translated(
    body: ResponsesRequest, context: RequestContext, earlier: Sequence[Mapping[str, Any]]
) -> TranslatedRequest:
    try:
        return addressed(responses_chat(body, earlier), context)
    except ValidationError as error:
        problems = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(problems) from None


def _stored(context: RequestContext, id: str) -> StoredObject:
    found = context.objects.get(KIND, id)
    if found is None:
        raise unknown_object("response", id)
    return found


def _previous(context: RequestContext, id: str) -> StoredObject:
    found = context.objects.get(KIND, id)
    if found is None:
        detail = f"the response {id!r:.200} is not stored, or has expired; send all messages"
        raise HTTPProblem(404, "previous-response-not-found", detail, None, "previous_response_id")
    return found


def unknown_object(kind: str, id: str) -> HTTPProblem:
    """Return the error of an object that is not there, or has expired."""
    return HTTPProblem(404, "not-found", f"there is no {kind} {id!r:.200}; it may have expired")


def _error_event(info: ErrorInfo) -> bytes:
    error = info.openai()["error"]
    told = {name: error[name] for name in ("message", "code", "param")}
    return format_event({"type": "error", **told, "sequence_number": 0}, "error")


class _ResponseWriter:
    """Writer of one response, whole or as events."""

    def __init__(
        self,
        context: RequestContext,
        body: ResponsesRequest,
        chat: TranslatedRequest,
        active: ActiveRequest,
        output: OutputFormat,
        earlier: Sequence[Mapping[str, Any]],
    ) -> None:
        self._context, self._body, self._chat = context, body, chat
        self._active, self._reader, self._earlier = active, output.reader(), earlier
        self._told: dict[str, Any] = {}
        self._number = 0
        token = active.id.partition("-")[2]
        self._ids = {"message": f"msg_{token}", "search": f"fs_{token}"}
        told = body.model_dump(mode="json", exclude_unset=True, by_alias=True)
        self._fields = {
            "id": f"resp_{token}",
            "object": "response",
            "created_at": int(time()),
            "model": context.service.served_name,
            "error": None,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "store": body.store,
            "temperature": body.temperature,
            "text": told.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": told.get("tools") or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "max_output_tokens": body.max_output_tokens,
        }

    def response(self, answer: Answer) -> dict[str, Any]:
        """Write the whole response."""
        choice = answer.choices[0]
        joined = join_deltas([self._reader.feed(choice.text), self._reader.finish()])
        calls = [self._call(call, "completed") for call in joined.get("tool_calls", ())]
        text = joined["content"] or ""
        items = self._search_items(answer.sources)
        if text or not calls:
            items.append(self._message(text, [] if calls else self._annotations(answer, text)))
        return self._completed(answer, items + calls)

    async def events(self, stream: AsyncAnswerStream) -> AsyncGenerator[bytes, None]:
        """Yield all events of the response. It is stored before the last one."""
        begun = self._fields | {"status": "in_progress", "output": [], "usage": None}
        begun["incomplete_details"] = None
        items = _ItemEvents(self._event, self._message, self._call)
        opening = [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]
        for found in self._search_items(stream.sources):
            opening += items.search(found)
        yield b"".join(opening)
        async with aclosing(deltas_of(self._active, stream)) as deltas:
            async for delta in deltas:
                if events := b"".join(items.feed(self._reader.feed(delta.text))):
                    yield events
        answer = self._active.answers[0]
        for event in items.feed(self._reader.finish()):
            yield event
        if not items.called:
            for event in items.begin_message():
                yield event
        cited = [] if items.called else self._annotations(answer, items.text)
        for event in items.end(cited):
            yield event
        told = self._completed(answer, items.done)
        await self.keep()
        yield self._event(f"response.{told['status']}", response=told)

    async def keep(self) -> None:
        """Store the response, if it is to be kept.

        If the ledger fails, the answer is given anyway, and cannot be continued by its id.
        """
        if not self._body.store:
            return
        told, ids = self._told, self._context.objects
        own: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        for item in told["output"]:
            if item["type"] == "message":
                own["content"] += item["content"][0]["text"]
            elif item["type"] == "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                own["tool_calls"].append(call)
        messages = [*self._earlier, *self._body.messages, own]
        given = self._body.model_dump(mode="json", exclude_unset=True, include={"input"})
        items = [{"id": f"item_{uuid4().hex[:24]}", **_typed(each)} for each in given["input"]]
        value = {"response": told, "messages": messages, "input": items}
        try:
            await run_in_threadpool(ids.add, KIND, value, id=told["id"], seconds=KEPT_SECONDS)
        except StoreError as error:
            logger.warning("%s; the response %s is not stored", error, told["id"])

    def _completed(self, answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
        cut = answer.choices[0].finish_reason in ("length", "repetition")
        details = {"reason": "max_output_tokens"} if cut else None
        reuse, generated = answer.reuse, len(answer.choices[0].token_ids)
        names = ("mode", "reuse", "timings", "spans", "confidence", "finish_reason")
        told = self._fields | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": details,
            "output": items,
            "usage": {
                "input_tokens": reuse.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": reuse.cached_tokens + reuse.shared_tokens,
                    "cache_write_tokens": reuse.created_tokens,
                },
                "output_tokens": generated,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reuse.prompt_tokens + generated,
            },
            "ragcache": _plain({name: getattr(answer, name) for name in names}),
        }
        if self._chat.collection is not None:
            told["sources"] = [source_of(each) for each in answer.sources]
        self._told = told
        return told

    def _search_items(self, sources: Sequence[Citation]) -> list[dict[str, Any]]:
        """Return the item of the search, if the request asks for one."""
        if self._body.file_search is None:
            return []
        asked = [each for each in self._chat.messages if each.role == "user"]
        results = found_files(sources) if RESULTS in (self._body.include or ()) else None
        return [
            {
                "id": self._ids["search"],
                "type": "file_search_call",
                "status": "completed",
                "queries": [each.plain()["content"] for each in asked[-1:]],
                "results": results,
            }
        ]

    def _annotations(self, answer: Answer, text: str) -> list[dict[str, Any]]:
        if self._chat.collection is None:
            return []
        return file_citations(answer, text, self._body.citations)

    def _message(
        self, text: str, annotations: Sequence[Mapping[str, Any]], status: str = "completed"
    ) -> dict[str, Any]:
        content = [_text_part(text, annotations)] if status == "completed" else []
        return {
            "id": self._ids["message"],
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _call(self, call: Mapping[str, Any], status: str) -> dict[str, Any]:
        """Write the item of a call, with the namespace of its function."""
        function = call["function"]
        space = self._body.namespaces.get(function["name"])
        return {
            "id": f"fc_{call['id'].removeprefix('call_')}",
            "type": "function_call",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": function["arguments"],
            "status": status,
            **({} if space is None else {"namespace": space}),
        }

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return format_event({"type": name, "sequence_number": number, **fields}, name)


class _ItemEvents:
    """The events of a response's items, in the order of its deltas."""

    def __init__(self, event: Any, message: Any, call: Any) -> None:
        self._event, self._message, self._call_item = event, message, call
        self.done: list[dict[str, Any]] = []
        """Items that are complete."""
        self.text = ""
        self.called = False
        """Whether the model has called a function."""
        self._in_message = False
        self._call: dict[str, Any] | None = None

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self.done)}

    def search(self, item: dict[str, Any]) -> Iterator[bytes]:
        """Yield the events of a search that has ended."""
        at = {"item_id": item["id"], **self._place}
        begun = item | {"status": "in_progress", "queries": [], "results": None}
        yield self._event("response.output_item.added", item=begun, **self._place)
        for state in ("in_progress", "searching", "completed"):
            yield self._event(f"response.file_search_call.{state}", **at)
        yield self._event("response.output_item.done", item=item, **self._place)
        self.done.append(item)

    def feed(self, fields: Mapping[str, Any]) -> Iterator[bytes]:
        """Yield the events of a delta in the fields of chat completions."""
        if text := fields.get("content"):
            yield from self.begin_message()
            self.text += text
            at = {"item_id": self._message("", ())["id"], "content_index": 0, **self._place}
            yield self._event("response.output_text.delta", delta=text, logprobs=[], **at)
        for part in fields.get("tool_calls", ()):
            if "id" in part:
                yield from self.end(())
                self.called, self._call = True, self._call_item(part, "in_progress")
                begun = self._call | {"arguments": ""}
                yield self._event("response.output_item.added", item=begun, **self._place)
                self._call["arguments"] = ""
            if self._call is not None and (more := part["function"]["arguments"]):
                self._call["arguments"] += more
                at = {"item_id": self._call["id"], **self._place}
                yield self._event("response.function_call_arguments.delta", delta=more, **at)

    def begin_message(self) -> Iterator[bytes]:
        """Yield the begin of the message, unless it has begun."""
        if self._in_message:
            return
        self._in_message = True
        item = self._message("", (), "in_progress")
        yield self._event("response.output_item.added", item=item, **self._place)
        at = {"item_id": item["id"], "content_index": 0, **self._place}
        yield self._event("response.content_part.added", part=_text_part("", ()), **at)

    def end(self, annotations: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
        """Yield the end of the item that is open, if there is one."""
        if self._call is not None:
            call = self._call | {"status": "completed"}
            at = {"item_id": call["id"], **self._place}
            told = {"arguments": call["arguments"], "name": call["name"]}
            yield self._event("response.function_call_arguments.done", **told, **at)
            yield self._event("response.output_item.done", item=call, **self._place)
            self.done.append(call)
            self._call = None
        elif self._in_message:
            item = self._message(self.text, annotations)
            at = {"item_id": item["id"], "content_index": 0, **self._place}
            for number, each in enumerate(annotations):
                told = {"annotation": each, "annotation_index": number}
                yield self._event("response.output_text.annotation.added", **told, **at)
            yield self._event("response.output_text.done", text=self.text, logprobs=[], **at)
            [part] = item["content"]
            yield self._event("response.content_part.done", part=part, **at)
            yield self._event("response.output_item.done", item=item, **self._place)
            self.done.append(item)
            self._in_message = False


def _text_part(text: str, annotations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [*annotations], "logprobs": []}


def _typed(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of the input with its type and, for a message, with parts."""
    told = {"type": "message", **item}
    if told["type"] == "message" and isinstance(told["content"], str):
        kind = "output_text" if told["role"] == "assistant" else "input_text"
        told["content"] = [{"type": kind, "text": told["content"]}]
    return told


def _plain(value: Any) -> Any:
    """Return dataclasses as JSON has them, for the ledger."""
    return to_jsonable_python(value, inf_nan_mode="null")
