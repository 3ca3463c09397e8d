"""`AsyncRagCache`: `RagCache` for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, TypeVar

from ragcache.config import check_texts
from ragcache.documents.source import DocumentSource
from ragcache.options import AskOptions, ChatOptions, IngestOptions, PromptOptions, SearchOptions
from ragcache.params import TakesOptions
from ragcache.pipeline import Answer, AsyncAnswerStream, Conversation, Ingestion
from ragcache.pipeline.answer import PendingAnswer, aresults
from ragcache.rag import RagCache
from ragcache.retrieval import Selection

T = TypeVar("T")
Options = TypeVar("Options")

_LAUNCH_SECONDS = 0.002


class StreamCall:
    """A stream that is about to be queued: `await` it, or enter it with `async with`.

    Leaving the block cancels the request, unless it has ended.
    """

    def __init__(self, started: Coroutine[Any, Any, list[PendingAnswer]]) -> None:
        """Take the coroutine that queues one request."""
        self._started = started
        self._stream: AsyncAnswerStream | None = None

    def __await__(self) -> Generator[Any, None, AsyncAnswerStream]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncAnswerStream:
        self._stream = await self._open()
        return self._stream

    async def __aexit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    async def _open(self) -> AsyncAnswerStream:
        return AsyncAnswerStream(*await self._started)


class AsyncRagCache:
    """A `RagCache` whose methods are coroutines.

    Methods have the names, arguments and errors of `RagCache`. No thread waits for an answer.
    Canceling a task cancels its requests. The end of an `async with` block closes the folder.

    Example:
        >>> from ragcache import AsyncRagCache, RagCache
        >>> async def ask(question: str) -> str:
        ...     async with AsyncRagCache(RagCache.open("state")) as rag:
        ...         return (await rag.ask(question, collection="handbook")).text
    """

    def __init__(self, rag: RagCache) -> None:
        """Wrap an open folder. Any number of wrappers and threads may use it at once.

        Args:
            rag: The open folder.
        """
        self.rag = rag
        """The wrapped object, for calls without a coroutine, such as `rag.collections`."""

    async def __aenter__(self) -> AsyncRagCache:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, *, drain: bool = False) -> None:
        """Close the folder, and stop the engine; see `RagCache.close`."""
        await asyncio.to_thread(self.rag.close, drain=drain)

    def within(self, namespace: str) -> AsyncRagCache:
        """Return the same folder, model and engine for another tenant; see `RagCache.within`."""
        return AsyncRagCache(self.rag.within(namespace))

    @TakesOptions(IngestOptions)
    async def ingest(
        self,
        collection: str,
        sources: Iterable[DocumentSource] | DocumentSource,
        options: IngestOptions,
    ) -> Ingestion:
        """Store documents and encode their modules; see `RagCache.ingest`."""
        return await asyncio.to_thread(self.rag._ingest, collection, sources, options, sync=False)

    @TakesOptions(IngestOptions)
    async def sync(
        self,
        collection: str,
        sources: Iterable[DocumentSource] | DocumentSource,
        options: IngestOptions,
    ) -> Ingestion:
        """Store documents, and remove documents that no longer exist; see `RagCache.sync`."""
        return await asyncio.to_thread(self.rag._ingest, collection, sources, options, sync=True)

    async def delete(self, collection: str, document_ids: Sequence[str]) -> int:
        """Delete documents, and return how many there were; see `RagCache.delete`."""
        return await asyncio.to_thread(self.rag.delete, collection, document_ids)

    @TakesOptions(SearchOptions)
    async def retrieve(self, query: str, options: SearchOptions) -> Selection:
        """Find the best modules for a query; see `RagCache.retrieve`."""
        return await self.rag.retriever().aretrieve(query, options.collection, options)

    @TakesOptions(AskOptions)
    async def ask(self, question: str, options: AskOptions) -> Answer:
        """Answer a question from a collection; see `RagCache.ask`."""
        return await (await StreamCall(_start(self.rag._start_questions, [question], options)))

    @TakesOptions(AskOptions)
    async def ask_batch(self, questions: Sequence[str], options: AskOptions) -> list[Answer]:
        """Answer questions as one batch; see `RagCache.ask_batch`."""
        check_texts("questions", questions)
        return await aresults(await _start(self.rag._start_questions, questions, options))

    @TakesOptions(AskOptions)
    def stream(self, question: str, options: AskOptions) -> StreamCall:
        """Queue a question, and return a stream of its answer; see `RagCache.stream`.

        Example:
            >>> async def show(rag: AsyncRagCache) -> None:
            ...     async with rag.stream("Who is ill?", collection="handbook") as stream:
            ...         async for piece in stream:
            ...             print(piece, end="")
        """
        return StreamCall(_start(self.rag._start_questions, [question], options))

    @TakesOptions(ChatOptions)
    async def chat(self, messages: Conversation, options: ChatOptions) -> Answer:
        """Answer a conversation; see `RagCache.chat`."""
        return await (await StreamCall(_start(self.rag._start_chats, [messages], options)))

    @TakesOptions(ChatOptions)
    async def chat_batch(
        self, conversations: Sequence[Conversation], options: ChatOptions
    ) -> list[Answer]:
        """Answer conversations as one batch; see `RagCache.chat_batch`."""
        return await aresults(await _start(self.rag._start_chats, conversations, options))

    @TakesOptions(ChatOptions)
    def stream_chat(self, messages: Conversation, options: ChatOptions) -> StreamCall:
        """Queue a conversation, and return a stream; see `RagCache.stream_chat`."""
        return StreamCall(_start(self.rag._start_chats, [messages], options))

    @TakesOptions(ChatOptions)
    async def stream_chat_batch(
        self, conversations: Sequence[Conversation], options: ChatOptions
    ) -> list[AsyncAnswerStream]:
        """Queue conversations, and return a stream for each; see `RagCache.stream_chat_batch`."""
        pending = await _start(self.rag._start_chats, conversations, options)
        return [AsyncAnswerStream(each) for each in pending]

    @TakesOptions(PromptOptions)
    async def prompt(self, text: str, options: PromptOptions) -> Answer:
        """Answer a PML prompt; see `RagCache.prompt`."""
        return await (await StreamCall(_start(self.rag._start_prompts, [text], options)))

    @TakesOptions(PromptOptions)
    def stream_prompt(self, text: str, options: PromptOptions) -> StreamCall:
        """Queue a PML prompt, and return a stream; see `RagCache.stream_prompt`."""
        return StreamCall(_start(self.rag._start_prompts, [text], options))


async def _start(
    start: Callable[[T, Options], list[PendingAnswer]], requests: T, options: Options
) -> list[PendingAnswer]:
    """Queue requests in a thread.

    The thread waits a moment for the engine to launch a single request. Otherwise the event loop,
    which resumes when the thread returns, would take the interpreter from the engine's thread.
    """

    def started() -> list[PendingAnswer]:
        pending = start(requests, options)
        if len(pending) == 1:
            pending[0].handle.wait_launched(_LAUNCH_SECONDS)
        return pending

    return await asyncio.to_thread(started)
