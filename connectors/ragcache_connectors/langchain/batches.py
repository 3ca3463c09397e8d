"""Lists of inputs as one ragged batch."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from langchain_core.globals import get_llm_cache
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_config_list

from ragcache.errors import InvalidRequest
from ragcache_connectors.langchain.ahead import (
    Ahead,
    Conversation,
    asubmit,
    handed_over,
    submit,
)
from ragcache_connectors.langchain.messages import conversation

if TYPE_CHECKING:
    from ragcache import RagCache
    from ragcache_connectors.langchain.options import Call

Configs = RunnableConfig | list[RunnableConfig] | None
Inputs = list[LanguageModelInput]

# Of `generate`, and no options of an answer.
_OF_THE_RUN = ("tags", "metadata", "run_name", "run_id")


class RaggedBatches(BaseChatModel):
    """`batch`, `abatch`, `generate` and `agenerate`: every conversation of the list is submitted
    before the first is waited for, and no thread waits for another.

    Each input still is a run of its own. `max_concurrency` of the first config is how many are
    submitted at once. With an LLM cache or a rate limiter, which decide run by run what is asked at
    all, LangChain's own batching is used; the engine joins what it asks at the same time.
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
        self, inputs: Inputs, config: Configs = None, *, return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:  # fmt: skip
        if len(inputs) < 2 or self._decides_by_run:
            return super().batch(inputs, config, return_exceptions=return_exceptions, **kwargs)
        outputs: list[Any] = []
        for some, configs in _parts(inputs, get_config_list(config, len(inputs))):
            with handed_over(self._submit([self._chat_of(each) for each in some], kwargs)):
                for each, own in zip(some, configs, strict=True):
                    try:
                        outputs.append(self.invoke(each, own, **kwargs))
                    except Exception as error:
                        if not return_exceptions:
                            raise
                        outputs.append(error)
        return outputs

    async def abatch(
        self, inputs: Inputs, config: Configs = None, *, return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:  # fmt: skip
        if len(inputs) < 2 or self._decides_by_run:
            return await super().abatch(
                inputs, config, return_exceptions=return_exceptions, **kwargs
            )
        outputs: list[Any] = []
        for some, configs in _parts(inputs, get_config_list(config, len(inputs))):
            chats = [self._chat_of(each) for each in some]
            with handed_over(await self._asubmit(chats, kwargs)):
                runs = (
                    self.ainvoke(each, own, **kwargs)
                    for each, own in zip(some, configs, strict=True)
                )
                outputs += await asyncio.gather(*runs, return_exceptions=return_exceptions)
        return outputs

    def generate(
        self, messages: list[list[BaseMessage]], stop: list[str] | None = None,
        callbacks: Any = None, **kwargs: Any,
    ) -> LLMResult:  # fmt: skip
        if len(messages) < 2 or self._decides_by_run:
            return super().generate(messages, stop, callbacks, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in _OF_THE_RUN}
        with handed_over(self._submit([_told(each) for each in messages], options, stop)):
            return super().generate(messages, stop, callbacks, **kwargs)

    async def agenerate(
        self, messages: list[list[BaseMessage]], stop: list[str] | None = None,
        callbacks: Any = None, **kwargs: Any,
    ) -> LLMResult:  # fmt: skip
        if len(messages) < 2 or self._decides_by_run:
            return await super().agenerate(messages, stop, callbacks, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in _OF_THE_RUN}
        chats = [_told(each) for each in messages]
        with handed_over(await self._asubmit(chats, options, stop)):
            return await super().agenerate(messages, stop, callbacks, **kwargs)

    @property
    def _decides_by_run(self) -> bool:
        cached = self.cache is not False and (self.cache is not None or get_llm_cache() is not None)
        return cached or self.rate_limiter is not None

    def _submit(
        self, chats: Sequence[Conversation | None], given: Mapping[str, Any],
        stop: list[str] | None = None,
    ) -> list[Ahead]:  # fmt: skip
        """Where something is wrong nothing is submitted here: the run that it belongs to raises it,
        so that its callbacks learn of it."""
        with suppress(Exception):
            rag = self._open()
            return submit(self, rag, chats, self._chat_options(rag, given, stop))
        return []

    async def _asubmit(
        self, chats: Sequence[Conversation | None], given: Mapping[str, Any],
        stop: list[str] | None = None,
    ) -> list[Ahead]:  # fmt: skip
        with suppress(Exception):
            rag = await self._aopen()
            return await asubmit(self, rag, chats, self._chat_options(rag, given, stop))
        return []

    def _chat_options(
        self, rag: RagCache, given: Mapping[str, Any], stop: list[str] | None
    ) -> dict[str, Any]:
        options = dict(given)
        return self._call(rag, options.pop("stop", stop), options).chat

    def _chat_of(self, given: LanguageModelInput) -> Conversation | None:
        """None for what is no conversation."""
        with suppress(Exception):
            return conversation(self._convert_input(given).to_messages())
        return None


def _parts(
    inputs: Inputs, configs: Sequence[RunnableConfig]
) -> Iterator[tuple[Inputs, Sequence[RunnableConfig]]]:
    most = configs[0].get("max_concurrency") or len(inputs)
    for begin in range(0, len(inputs), most):
        yield inputs[begin : begin + most], configs[begin : begin + most]


def _told(messages: Sequence[BaseMessage]) -> Conversation | None:
    """None for messages that no chat has a place for."""
    with suppress(InvalidRequest):
        return conversation(messages)
    return None
