"""Lists of inputs as one ragged batch."""

# MERGED ragcache_connectors.langchain.ahead: Conversations that are submitted together before
#   LangChain runs them one by one. LangChain gives every input of a batch a run of its own,
#   with its own callbacks, tags and ids. The runs stay as they are; what was submitted for
#   them is handed over in a context variable.

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import aclosing, closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
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
    from ragcache_connectors.langchain.call_options import Call


Config = RunnableConfig | list[RunnableConfig] | None
Configs = Config | Sequence[RunnableConfig]
Inputs = list[LanguageModelInput]

# Of `generate`, and no options of an answer.
_OF_THE_RUN = ("tags", "metadata", "run_name", "run_id")


_THREADS = 64  # that wait for answers of one batch; the engine computes in its own


class RaggedBatches(BaseChatModel):
    """`batch`, `abatch`, both `as_completed`, `generate` and `agenerate`: every conversation of the
    list is submitted before the first is waited for, and the engine has one ragged batch of them.

    Each input still is a run of its own, from then until its answer is there: at most 64 at once
    without asyncio, and for `generate` all of them until the last answer is there. If one fails the
    others are given up, unless exceptions are to be returned. `max_concurrency` of the first config
    is how many are submitted at once. With an LLM cache or a rate limiter, which decide run by run
    what is asked at all, LangChain's own batching is used; the engine joins what it asks at the
    same time.
    """

    @abstractmethod
    def _open(self) -> RagCache: ...

    @abstractmethod
    async def _aopen(self) -> RagCache: ...

    @abstractmethod
    def _call(
        self, rag: RagCache, stop: Sequence[str] | None, given: Mapping[str, Any]
    ) -> Call: ...

    def batch(
        self, inputs: Inputs, config: Config = None, *, return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:  # fmt: skip
        if len(inputs) < 2 or self._decides_by_run:
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        outputs = dict(self._completed(inputs, config, return_exceptions, kwargs))
        return [outputs[number] for number in range(len(inputs))]

    async def abatch(
        self, inputs: Inputs, config: Config = None, *, return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:  # fmt: skip
        if len(inputs) < 2 or self._decides_by_run:
            return await super().abatch(
                inputs, config, return_exceptions=return_exceptions, **kwargs
            )
        completed = self._acompleted(inputs, config, return_exceptions, kwargs)
        async with aclosing(completed):
            outputs = {number: output async for number, output in completed}
        return [outputs[number] for number in range(len(inputs))]

    def batch_as_completed(
        self, inputs: Sequence[LanguageModelInput], config: Configs = None, *,
        return_exceptions: bool = False, **kwargs: Any,
    ) -> Iterator[tuple[int, Any]]:  # fmt: skip
        if len(inputs) < 2 or self._decides_by_run:
            more = {"return_exceptions": return_exceptions, **kwargs}
            return super().batch_as_completed(inputs, config, **more)
        return self._completed(inputs, config, return_exceptions, kwargs)

    def abatch_as_completed(
        self, inputs: Sequence[LanguageModelInput], config: Configs = None, *,
        return_exceptions: bool = False, **kwargs: Any,
    ) -> AsyncIterator[tuple[int, Any]]:  # fmt: skip
        if len(inputs) < 2 or self._decides_by_run:
            more = {"return_exceptions": return_exceptions, **kwargs}
            return super().abatch_as_completed(inputs, config, **more)
        return self._acompleted(inputs, config, return_exceptions, kwargs)

    def _completed(
        self, inputs: Sequence[LanguageModelInput], config: Configs, return_exceptions: bool,
        kwargs: dict[str, Any],
    ) -> Iterator[tuple[int, Any]]:  # fmt: skip
        """Places of inputs and their answers, as they end."""
        configs = get_config_list(config, len(inputs))
        for part in _parts(configs):
            handed = self._submit([self._chat_of(inputs[n]) for n in part], kwargs)
            run = partial(self._run, handed, return_exceptions, kwargs)
            threads: RunnableConfig = {"max_concurrency": min(len(part), _THREADS)}
            with get_executor_for_config(threads) as executor, closing(handed):
                runs = [executor.submit(run, n, inputs[n], configs[n]) for n in part]
                try:
                    for ended in as_completed(runs):
                        yield ended.result()
                finally:
                    for each in runs:
                        each.cancel()

    def _run(
        self, handed: Handed, return_exceptions: bool, kwargs: dict[str, Any],
        number: int, given: LanguageModelInput, config: RunnableConfig,
    ) -> tuple[int, Any]:  # fmt: skip
        with within(handed):
            try:
                return number, self.invoke(given, config, **kwargs)
            except Exception as error:  # what `return_exceptions` is for
                if not return_exceptions:
                    raise
                return number, error

    async def _acompleted(
        self, inputs: Sequence[LanguageModelInput], config: Configs, return_exceptions: bool,
        kwargs: dict[str, Any],
    ) -> AsyncGenerator[tuple[int, Any]]:  # fmt: skip
        """As `_completed`, for asyncio."""
        configs = get_config_list(config, len(inputs))
        for part in _parts(configs):
            handed = await self._asubmit([self._chat_of(inputs[n]) for n in part], kwargs)
            run = partial(self._arun, handed, return_exceptions, kwargs)
            with closing(handed):
                runs = [asyncio.create_task(run(n, inputs[n], configs[n])) for n in part]
                try:
                    for ended in asyncio.as_completed(runs):
                        yield await ended
                finally:
                    for each in runs:
                        each.cancel()
                    await asyncio.gather(*runs, return_exceptions=True)

    async def _arun(
        self, handed: Handed, return_exceptions: bool, kwargs: dict[str, Any],
        number: int, given: LanguageModelInput, config: RunnableConfig,
    ) -> tuple[int, Any]:  # fmt: skip
        with within(handed):
            try:
                return number, await self.ainvoke(given, config, **kwargs)
            except Exception as error:  # what `return_exceptions` is for
                if not return_exceptions:
                    raise
                return number, error

    def generate(
        self, messages: list[list[BaseMessage]], stop: list[str] | None = None,
        callbacks: Any = None, **kwargs: Any,
    ) -> LLMResult:  # fmt: skip
        if len(messages) < 2 or self._decides_by_run:
            return super().generate(messages, stop, callbacks, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in _OF_THE_RUN}
        handed = self._submit([_told(each) for each in messages], options, stop)
        with closing(handed), within(handed):
            return super().generate(messages, stop, callbacks, **kwargs)

    async def agenerate(
        self, messages: list[list[BaseMessage]], stop: list[str] | None = None,
        callbacks: Any = None, **kwargs: Any,
    ) -> LLMResult:  # fmt: skip
        if len(messages) < 2 or self._decides_by_run:
            return await super().agenerate(messages, stop, callbacks, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in _OF_THE_RUN}
        handed = await self._asubmit([_told(each) for each in messages], options, stop)
        with closing(handed), within(handed):
            return await super().agenerate(messages, stop, callbacks, **kwargs)

    @property
    def _decides_by_run(self) -> bool:
        cached = self.cache is not False and (self.cache is not None or get_llm_cache() is not None)
        return cached or self.rate_limiter is not None

    def _submit(
        self, chats: Sequence[Conversation | None], given: Mapping[str, Any],
        stop: list[str] | None = None,
    ) -> Handed:  # fmt: skip
        """Where something is wrong nothing is submitted here: the run that it belongs to raises it,
        so that its callbacks learn of it."""
        with suppress(Exception):
            rag = self._open()
            options = self._chat_options(rag, given, stop, asynchronous=False)
            return Handed(submit(self, rag, chats, options))
        return Handed([])

    async def _asubmit(
        self, chats: Sequence[Conversation | None], given: Mapping[str, Any],
        stop: list[str] | None = None,
    ) -> Handed:  # fmt: skip
        with suppress(Exception):
            rag = await self._aopen()
            options = self._chat_options(rag, given, stop, asynchronous=True)
            return Handed(await asubmit(self, rag, chats, options))
        return Handed([])

    def _chat_options(
        self, rag: RagCache, given: Mapping[str, Any], stop: list[str] | None, *, asynchronous: bool
    ) -> dict[str, Any]:
        options = dict(given)
        if self._should_stream(async_api=asynchronous, **given):
            options["n"] = 1  # as the runs will ask
        return self._call(rag, options.pop("stop", stop), options).chat

    def _chat_of(self, given: LanguageModelInput) -> Conversation | None:
        """None for what is no conversation."""
        with suppress(Exception):
            return conversation(self._convert_input(given).to_messages())
        return None


def _parts(configs: Sequence[RunnableConfig]) -> Iterator[range]:
    """Places of the inputs that are submitted at once."""
    most = configs[0].get("max_concurrency") or len(configs)
    if most < 1:
        raise InvalidRequest(f"max_concurrency is {most}; it must be at least 1")
    for begin in range(0, len(configs), most):
        yield range(begin, min(begin + most, len(configs)))


def _told(messages: Sequence[BaseMessage]) -> Conversation | None:
    """None for messages that no chat has a place for."""
    with suppress(InvalidRequest):
        return conversation(messages)
    return None


Conversation = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """What was submitted: of which model, for which conversation, with which arguments of
    `RagCache.chat`, and the answer's stream."""

    owner: object
    conversation: Conversation
    options: Mapping[str, Any]
    stream: Any


class Handed:
    """What was submitted for some runs, in whatever threads or tasks they are. Each is taken once;
    `close` gives up those that have not ended, taken or not."""

    def __init__(self, submitted: Sequence[Ahead]) -> None:
        self._submitted = submitted
        self._left = list(submitted)
        self._lock = threading.Lock()

    def take(self, owner: object, conversation: Conversation, options: Mapping[str, Any]) -> Any:
        with self._lock:
            for each in self._left:
                if (
                    each.owner is owner
                    and each.conversation == conversation
                    and each.options == options
                ):
                    self._left.remove(each)
                    return each.stream
        return None

    def close(self) -> None:
        for each in self._submitted:
            each.stream.close()


_waiting: ContextVar[Handed | None] = ContextVar("ragcache_ahead", default=None)


@contextmanager
def within(handed: Handed) -> Iterator[None]:
    """Runs within take what was handed over."""
    token = _waiting.set(handed)
    try:
        yield
    finally:
        _waiting.reset(token)


def take(owner: object, conversation: Conversation, options: Mapping[str, Any]) -> Any:
    """The stream that was submitted for this conversation of this model with these arguments,
    once; None where there is none, or no longer."""
    handed = _waiting.get()
    return None if handed is None else handed.take(owner, conversation, options)


def submit(
    owner: object, rag: RagCache, chats: Sequence[Conversation | None], options: Mapping[str, Any]
) -> list[Ahead]:
    """Submits conversations together; where one of them is wrong, those that are not."""
    right = [chat for chat in chats if chat is not None]
    with suppress(RagCacheError):
        streams = rag.stream_chat_batch(right, **options)
        return [Ahead(owner, chat, options, s) for chat, s in zip(right, streams, strict=True)]
    submitted = []
    for chat in right:
        with suppress(RagCacheError):
            submitted.append(Ahead(owner, chat, options, rag.stream_chat(chat, **options)))
    return submitted


async def asubmit(
    owner: object, rag: RagCache, chats: Sequence[Conversation | None], options: Mapping[str, Any]
) -> list[Ahead]:
    """As `submit`, for asyncio."""
    right = [chat for chat in chats if chat is not None]
    with suppress(RagCacheError):
        streams = await rag.astream_chat_batch(right, **options)
        return [Ahead(owner, chat, options, s) for chat, s in zip(right, streams, strict=True)]
    submitted = []
    for chat in right:
        with suppress(RagCacheError):
            stream = await rag.astream_chat(chat, **options)
            submitted.append(Ahead(owner, chat, options, stream))
    return submitted
