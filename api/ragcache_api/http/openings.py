"""How requests of all interfaces start their answers: a translated request opens a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from ragcache import AsyncRagCache, GenerationParams, SourceDocument
from ragcache.pipeline import Conversation
from ragcache_api.http.bodies import ChatRequest, GenerationRequest
from ragcache_api.http.service import RequestContext
from ragcache_api.http.streaming import Opening
from ragcache_api.http.tools import OutputFormat

RETENTION_HEADER = "x-prompt-cache-retention"
"""Time for which a chat that pauses should find its states again, for clients whose requests have
no field for it."""

Body = TypeVar("Body", bound=GenerationRequest)


def addressed(body: Body, context: RequestContext) -> Body:
    """Return a request for the served model, with the collection that it names anywhere.

    Raises:
        HTTPProblem: (404) The model is not served. (400) The request names several collections.
    """
    return body.addressed(context.service.served_name, context.base_collection)


def open_question(
    context: RequestContext, body: GenerationRequest, generation: GenerationParams, question: str
) -> Opening:
    """Return a function that asks a collection a question."""
    rag, options = AsyncRagCache(context.rag), body.retrieval() | context.selection
    collection = body.collection or ""
    return lambda: rag.stream(question, collection=collection, generation=generation, **options)


def open_conversation(
    context: RequestContext,
    body: GenerationRequest,
    generation: GenerationParams,
    messages: Conversation,
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    recognize: bool = True,
    documents: Sequence[SourceDocument] = (),
    keep: Mapping[str, float] | None = None,
) -> Opening:
    """Return a function that starts the answer to a conversation.

    Args:
        context: The request.
        body: The options of the answer, and the collection to answer from.
        generation: How the answer is generated.
        messages: The conversation.
        tools: Functions that the model may call.
        recognize: Whether texts of modules are read from states.
        documents: Documents to answer from, in place of a collection.
        keep: Texts to keep as modules, and the seconds for which they are kept. The conversation
            is retained for the longest of them.
    """
    generation = _with_retention(context, generation, keep or {})
    rag, options, key = AsyncRagCache(context.rag), body.reading(), context.caller.options
    if body.collection is not None:
        options = body.retrieval() | context.selection | {"collection": body.collection}
    options |= {
        "tools": tools,
        "recognize": recognize,
        "recognize_recurring": body.recognize_recurring and key.recognize_recurring,
        "documents": documents,
        "keep": keep or {},
        "keeper": context.keeper,
    }
    return lambda: rag.stream_chat(messages, generation=generation, **options)


def _with_retention(
    context: RequestContext, generation: GenerationParams, keep: Mapping[str, float]
) -> GenerationParams:
    """Add the time that a header or marks wish, unless the body has a wish."""
    wish = context.request.headers.get(RETENTION_HEADER) or max(keep.values(), default=None)
    if wish is None or generation.prompt_cache_retention is not None:
        return generation
    return generation.replace(prompt_cache_retention=wish)


async def output_format(body: ChatRequest, context: RequestContext) -> OutputFormat:
    """Return the form of the answers to a chat. Checking the schemas of tools may take seconds."""
    tokenizer = context.service.tokenizer
    if body.tools:
        return await run_in_threadpool(OutputFormat.of, body, tokenizer)
    return OutputFormat.of(body, tokenizer)
