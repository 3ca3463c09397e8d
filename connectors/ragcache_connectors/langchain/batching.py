"""Lists of conversations as one ragged batch.

LangChain gives every input of a batch a run with callbacks, tags and an id of its own. The runs
stay as they are: all conversations are submitted before the first run begins, and each run takes
its stream from a context variable (`SubmittedChats`).
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import aclosing, closing, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.globals import get_llm_cache
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list, get_executor_for_config

from ragcache.errors import InvalidRequest, RagCacheError
from ragcache_connectors.langchain.messages import conversation

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache_connectors.langchain.call_options import CallOptions

Config = RunnableConfig | list[RunnableConfig] | None
Configs = Config | Sequence[RunnableConfig]
Conversation = list[dict[str, Any]]
Inputs = list[LanguageModelInput]

_RUN_OPTIONS = ("tags", "metadata", "run_name", "run_id")  # options of `generate` itself
_MAX_THREADS = 64  # threads that wait for the answers of one batch


class BatchingChatModel(BaseChatModel):
    """A chat model that answers all conversations of a list in one ragged batch of the engine.

    `batch`, `abatch`, `batch_as_completed`, `abatch_as_completed`, `generate` and `agenerate`
    submit every conversation before they wait for the first answer. `max_concurrency` of the first
    config limits how many are submitted at once.

    Each input is a run of its own: at most 64 at once without asyncio. `generate` ends all runs
    with the last answer. If a run fails, the others are canceled, unless `return_exceptions` is
    set.

    An LLM cache or a rate limiter decides for each run whether it is computed. With one of them,
    LangChain's own batching is used, and the engine joins concurrent requests.
    """

    @abstractmethod
    def open_rag(self) -> RagCache:
        """Return the `RagCache` that answers. Opens it at the first use."""

    @abstractmethod
    async def aopen_rag(self) -> RagCache:
        """Do the same as `open_rag`, for asyncio."""

    @abstractmethod
    def _call_options(
        self, rag: RagCache, stop: Sequence[str] | None, given: Mapping[str, Any]
    ) -> CallOptions: ...

    def batch(
        self,
        inputs: Inputs,
        config: Config = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        if len(inputs) < 2 or self._decides_by_run:
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        outputs = dict(self._completed(inputs, config, return_exceptions, kwargs))
        return [outputs[number] for number in range(len(inputs))]

    async def abatch(
        self,
        inputs: Inputs,
        config: Config = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        if len(inputs) < 2 or self._decides_by_run:
            more = {"return_exceptions": return_exceptions, **kwargs}
            return await super().abatch(inputs, config, **more)
        async with aclosing(self._acompleted(inputs, config, return_exceptions, kwargs)) as ended:
            outputs = {number: output async for number, output in ended}
        return [outputs[number] for number in range(len(inputs))]

    def batch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:
        if len(inputs) < 2 or self._decides_by_run:
            more = {"return_exceptions": return_exceptions, **kwargs}
            return super().batch_as_completed(inputs, config, **more)
        return self._completed(inputs, config, return_exceptions, kwargs)

    def abatch_as_completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        if len(inputs) < 2 or self._decides_by_run:
            more = {"return_exceptions": return_exceptions, **kwargs}
            return super().abatch_as_completed(inputs, config, **more)
        return self._acompleted(inputs, config, return_exceptions, kwargs)

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        if len(messages) < 2 or self._decides_by_run:
            return super().generate(messages, stop, callbacks, **kwargs)
        submitted = self.submit_chats(messages, kwargs, stop)
        with closing(submitted), submitted.offered():
            return super().generate(messages, stop, callbacks, **kwargs)

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        if len(messages) < 2 or self._decides_by_run:
            return await super().agenerate(messages, stop, callbacks, **kwargs)
        submitted = await self.asubmit_chats(messages, kwargs, stop)
        with closing(submitted), submitted.offered():
            return await super().agenerate(messages, stop, callbacks, **kwargs)

    @property
    def _decides_by_run(self) -> bool:
        cached = self.cache is not False and (self.cache is not None or get_llm_cache() is not None)
        return cached or self.rate_limiter is not None

    def _completed(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs,
        return_exceptions: bool,
        kwargs: dict[str, Any],
    ) -> Iterator[tuple[int, Any]]:
        """Yield the index and the answer of each input, as they end."""
        configs = get_config_list(config, len(inputs))
        for part in _parts(configs):
            submitted = self.submit_chats([inputs[n] for n in part], kwargs)
            run = partial(self._run, submitted, return_exceptions, kwargs)
            threads: RunnableConfig = {"max_concurrency": min(len(part), _MAX_THREADS)}
            with get_executor_for_config(threads) as executor, closing(submitted):
                runs = [executor.submit(run, n, inputs[n], configs[n]) for n in part]
                try:
                    for ended in as_completed(runs):
                        yield ended.result()
                finally:
                    for each in runs:
                        each.cancel()

    def _run(
        self,
        submitted: SubmittedChats,
        return_exceptions: bool,
        kwargs: dict[str, Any],
        number: int,
        given: LanguageModelInput,
        config: RunnableConfig,
    ) -> tuple[int, Any]:
        with submitted.offered():
            try:
                return number, self.invoke(given, config, **kwargs)
            except Exception as error:  # what `return_exceptions` is for
                if not return_exceptions:
                    raise
                return number, error

    async def _acompleted(
        self,
        inputs: Sequence[LanguageModelInput],
        config: Configs,
        return_exceptions: bool,
        kwargs: dict[str, Any],
    ) -> AsyncGenerator[tuple[int, Any]]:
        """Do the same as `_completed`, for asyncio."""
        configs = get_config_list(config, len(inputs))
        for part in _parts(configs):
            submitted = await self.asubmit_chats([inputs[n] for n in part], kwargs)
            run = partial(self._arun, submitted, return_exceptions, kwargs)
            with closing(submitted):
                runs = [asyncio.create_task(run(n, inputs[n], configs[n])) for n in part]
                try:
                    for ended in asyncio.as_completed(runs):
                        yield await ended
                finally:
                    for each in runs:
                        each.cancel()
                    await asyncio.gather(*runs, return_exceptions=True)

    async def _arun(
        self,
        submitted: SubmittedChats,
        return_exceptions: bool,
        kwargs: dict[str, Any],
        number: int,
        given: LanguageModelInput,
        config: RunnableConfig,
    ) -> tuple[int, Any]:
        with submitted.offered():
            try:
                return number, await self.ainvoke(given, config, **kwargs)
            except Exception as error:  # what `return_exceptions` is for
                if not return_exceptions:
                    raise
                return number, error

    def submit_chats(
        self,
        inputs: Sequence[LanguageModelInput],
        given: Mapping[str, Any],
        stop: list[str] | None = None,
    ) -> SubmittedChats:
        """Submit all valid conversations among the inputs.

        Invalid conversations and options raise errors in their runs, so that the runs' callbacks
        receive them.
        """
        with suppress(Exception):
            rag, valid = self.open_rag(), self._conversations(inputs)
            options = self._chat_arguments(rag, given, stop, asynchronous=False)
            with suppress(RagCacheError):
                streams = rag.stream_chat_batch(valid, **options)
                return SubmittedChats(self, options, zip(valid, streams, strict=True))
            single = []
            for chat in valid:
                with suppress(RagCacheError):
                    single.append((chat, rag.stream_chat(chat, **options)))
            return SubmittedChats(self, options, single)
        return SubmittedChats(self, {}, ())

    async def asubmit_chats(
        self,
        inputs: Sequence[LanguageModelInput],
        given: Mapping[str, Any],
        stop: list[str] | None = None,
    ) -> SubmittedChats:
        """Do the same as `submit_chats`, for asyncio."""
        from ragcache import AsyncRagCache

        with suppress(Exception):
            opened, valid = await self.aopen_rag(), self._conversations(inputs)
            options = self._chat_arguments(opened, given, stop, asynchronous=True)
            rag = AsyncRagCache(opened)
            with suppress(RagCacheError):
                streams = await rag.stream_chat_batch(valid, **options)
                return SubmittedChats(self, options, zip(valid, streams, strict=True))
            single = []
            for chat in valid:
                with suppress(RagCacheError):
                    single.append((chat, await rag.stream_chat(chat, **options)))
            return SubmittedChats(self, options, single)
        return SubmittedChats(self, {}, ())

    def _chat_arguments(
        self, rag: RagCache, given: Mapping[str, Any], stop: list[str] | None, *, asynchronous: bool
    ) -> dict[str, Any]:
        options = {name: value for name, value in given.items() if name not in _RUN_OPTIONS}
        if self._should_stream(async_api=asynchronous, **given):
            options["n"] = 1  # as in `_stream`
        return self._call_options(rag, options.pop("stop", stop), options).chat_arguments

    def _conversations(self, inputs: Iterable[LanguageModelInput]) -> list[Conversation]:
        """Convert the valid inputs to conversations."""
        valid = []
        for each in inputs:
            with suppress(Exception):
                valid.append(conversation(self._convert_input(each).to_messages()))
        return valid


def _parts(configs: Sequence[RunnableConfig]) -> Iterator[range]:
    """Yield the indexes of inputs that are submitted at once."""
    most = configs[0].get("max_concurrency") or len(configs)
    if most < 1:
        raise InvalidRequest(f"max_concurrency is {most}; it must be at least 1")
    for begin in range(0, len(configs), most):
        yield range(begin, min(begin + most, len(configs)))


class SubmittedChats:
    """Conversations that were submitted to one model with the same arguments of `RagCache.chat`.

    Runs in any thread or task take their streams, each stream once. `close` cancels all streams
    that have not ended.
    """

    def __init__(
        self, model: object, options: Mapping[str, Any], streams: Iterable[tuple[Conversation, Any]]
    ) -> None:
        self._model, self._options = model, options
        self._all = list(streams)
        self._left = list(self._all)
        self._lock = threading.Lock()

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Let runs inside the block take these streams."""
        token = _offered.set(self)
        try:
            yield
        finally:
            _offered.reset(token)

    def take(self, model: object, chat: Conversation, options: Mapping[str, Any]) -> Any:
        """Return the stream of a conversation, or None."""
        if model is not self._model or options != self._options:
            return None
        with self._lock:
            for number, (submitted, stream) in enumerate(self._left):
                if submitted == chat:
                    del self._left[number]
                    return stream
        return None

    def close(self) -> None:
        """Cancel all streams that have not ended."""
        for _, stream in self._all:
            stream.close()


_offered: ContextVar[SubmittedChats | None] = ContextVar("ragcache_submitted", default=None)


def take_submitted(model: object, chat: Conversation, options: Mapping[str, Any]) -> Any:
    """Return the stream that a batch submitted for a conversation, or None.

    Model and arguments must be the same. Each stream is returned once.
    """
    submitted = _offered.get()
    return None if submitted is None else submitted.take(model, chat, options)
