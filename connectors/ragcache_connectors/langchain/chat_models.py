"""A chat model over a `RagCache`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import AliasChoices, ConfigDict, Field, model_validator

from ragcache.errors import ConfigurationError
from ragcache.modes import ReuseMode
from ragcache.params import GenerationParams, SearchParams, Surface
from ragcache.params.request import StopStrings
from ragcache_connectors.langchain.batching import BatchingChatModel, Conversation, take_submitted
from ragcache_connectors.langchain.call_options import SEARCH, CallOptions, ModelInfo
from ragcache_connectors.langchain.messages import ChunkBuilder, chat_result, conversation
from ragcache_connectors.langchain.shared import (
    declare_options,
    find_open_rag,
    langchain_errors,
    shared_rag,
)
from ragcache_connectors.langchain.structured import convert_tools, structured_output

if TYPE_CHECKING:
    from ragcache import AnswerStream, AsyncAnswerStream, RagCache

EMBEDDED_READER = "ragcache-reader"

# Options of remote chat models that programs give to any model. Ignored.
_REMOTE_OPTIONS = ("api_key", "base_url", "max_retries")


class ChatRagCache(BatchingChatModel, Surface, GenerationParams, SearchParams):
    """LangChain's chat model on ragcache's engine.

    `ChatRagCache(rag=rag)` uses an open `RagCache`. `ChatRagCache(state=DIR)` opens a folder at the
    first call, and `ChatRagCache()` a temporary one, with the embedded reader.

    Texts of ingested modules in a prompt are recognized, and their states are reused: an ordinary
    chain that pastes retrieved documents needs nothing else. `response_metadata["ragcache"]` has
    the recognized modules, the spans of quotations and the confidence. `usage_metadata` has the
    number of reused tokens.

    With `collection`, documents that a search finds for the user's last message are put before that
    message, too. The fields of `SearchParams` are options of the search.

    The fields of `GenerationParams` and the other options can be set here, in `bind`, or in a call,
    which comes first. Errors are instances of ragcache's and of LangChain's class at once: a prompt
    that is too long raises `PromptTooLong` and `ContextOverflowError`.

    Example:
        >>> ChatRagCache(state="state/").invoke("Where is the boat?")  # doctest: +SKIP
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, extra="forbid", populate_by_name=True, frozen=False
    )
    withheld: ClassVar[Mapping[str, str]] = {
        "first_logprobs": "an option of evaluations",
        "prompt_logprobs": "an option of evaluations",
        "share": "an option of benchmarks",
        "skip_special_tokens": "set for tool calls",
        "json_schema": "use with_structured_output",
        "json_object": "use with_structured_output",
        "regex": "bind it to calls",
        "choice": "bind it to calls",
        "ebnf": "bind it to calls",
        "grammar": "bind it to calls, or use with_structured_output",
    }

    rag: Any = Field(default=None, exclude=True, repr=False)
    """An open `RagCache`."""
    state: str | Path | None = None
    """The state folder to open instead of `rag`."""
    model: Any = Field(default=None, alias="model_name")
    """The model of the state folder: a folder, a hub name or a `LoadedModel`. Defaults to the
    embedded reader."""
    open_options: dict[str, Any] = Field(default_factory=dict)
    """More options of `RagCache.open`."""
    mode: str | ReuseMode | None = None
    """How states of modules are reused; see `RagCache.chat`."""
    recognize: bool = True
    """Recognize texts of ingested modules in the prompt."""
    collection: str | None = None
    """The collection to answer from. By default nothing is retrieved."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""
    stop: Annotated[
        StopStrings, Field(validation_alias=AliasChoices("stop", "stop_sequences"))
    ] = ()
    logprobs: bool | None = None
    """Report the log-probability of each token, and of `top_logprobs` alternatives."""
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    """Number of alternatives to each token, 0 to 20."""
    streaming: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if values.get("rag") is not None and (values.get("state") or values.get("open_options")):
            raise ConfigurationError("give rag=, or else state= and open_options=; not both")
        return {name: value for name, value in values.items() if name not in _REMOTE_OPTIONS}

    @model_validator(mode="after")
    def _declare(self) -> Self:
        """Declare the options of the folder, which another class may open first."""
        if self.rag is None:
            declare_options(self.state, model=self.model, **self.open_options)
        elif self.model is not None and _name(self.model) != ModelInfo(self.rag).name:
            raise ConfigurationError(
                f"`rag` is open with the model {ModelInfo(self.rag).name!r}, not with "
                f"{_name(self.model)!r:.80}; leave model= out, or open another `RagCache`"
            )
        return self

    @property
    def model_name(self) -> str:
        """The open model's name, or before the folder is open the name of `model`."""
        rag = find_open_rag(self.rag, self.state, **self._declared)
        if rag is not None:
            return ModelInfo(rag).name
        return EMBEDDED_READER if self.model is None else _name(self.model)

    @property
    def _llm_type(self) -> str:
        return "ragcache"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Values that change an answer: the model, the recognized texts, and options."""
        where = {"state": None if self.state is None else str(Path(self.state).resolve())}
        if self.rag is not None:
            where = ModelInfo(self.rag).identity
        opened = {name: str(value) for name, value in sorted(self.open_options.items())}
        options = {name: getattr(self, name) for name in self._option_names}
        options["mode"] = None if self.mode is None else str(self.mode)
        options["stop_sequences"] = options.pop("stop")  # LangChain sets `stop` to the call's
        return {"model": self.model_name, **where, "open_options": opened, **options}

    @property
    def _option_names(self) -> list[str]:
        """Names of the fields that change an answer."""
        declared = (*GenerationParams.model_fields, *SEARCH)
        offered = [name for name in declared if name not in self.withheld]
        return ["mode", "recognize", "chat_template_kwargs", "top_logprobs", *offered]

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "ragcache"
        params["ls_model_name"] = str(kwargs.get("model") or self.model_name)
        if stop is None and self.stop:
            params["ls_stop"] = list(self.stop)
        return params

    def open_rag(self) -> RagCache:
        """Return `rag`, or the `RagCache` of the state folder, opened with the model."""
        return shared_rag(self.rag, self.state, **self._declared)

    async def aopen_rag(self) -> RagCache:
        rag = find_open_rag(self.rag, self.state, **self._declared)
        return await asyncio.to_thread(self.open_rag) if rag is None else rag

    @property
    def _declared(self) -> dict[str, Any]:
        return {} if self.rag is not None else {"model": self.model, **self.open_options}

    def _call_options(
        self, rag: RagCache, stop: Sequence[str] | None, given: Mapping[str, Any]
    ) -> CallOptions:
        own = {
            name: getattr(self, name)
            for name in self._option_names
            if name in self.model_fields_set
        }
        return CallOptions.resolve(own, stop, given, ModelInfo(rag))

    def _chat(self, rag: RagCache, chat: Conversation, options: CallOptions) -> AnswerStream:
        """Return the stream that a batch submitted for this run, or a new one."""
        arguments = options.chat_arguments
        return take_submitted(self, chat, arguments) or rag.stream_chat(chat, **arguments)

    async def _achat(
        self, rag: RagCache, chat: Conversation, options: CallOptions
    ) -> AsyncAnswerStream:
        from ragcache import AsyncRagCache

        arguments = options.chat_arguments
        submitted = take_submitted(self, chat, arguments)
        return submitted or await AsyncRagCache(rag).stream_chat(chat, **arguments)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            rag, chat = self.open_rag(), conversation(messages)
            options = self._call_options(rag, stop, kwargs)
            answer = self._chat(rag, chat, options).result()
            return chat_result(answer, options, ModelInfo(rag))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        with langchain_errors():
            rag, chat = await self.aopen_rag(), conversation(messages)
            options = self._call_options(rag, stop, kwargs)
            answer = await (await self._achat(rag, chat, options))
            return chat_result(answer, options, ModelInfo(rag))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        """Yield chunks of the first choice: LangChain adds all chunks to one message."""
        with langchain_errors():
            rag, chat = self.open_rag(), conversation(messages)
            options = self._call_options(rag, stop, {**kwargs, "n": 1})
            builder = ChunkBuilder(options, ModelInfo(rag))
            with self._chat(rag, chat, options) as stream:
                for delta in stream.pieces():
                    yield from builder.feed(delta)
                yield from builder.finish(stream.answer)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with langchain_errors():
            rag, chat = await self.aopen_rag(), conversation(messages)
            options = self._call_options(rag, stop, {**kwargs, "n": 1})
            builder = ChunkBuilder(options, ModelInfo(rag))
            stream = await self._achat(rag, chat, options)
            async with stream, aclosing(stream.pieces()) as deltas:
                async for delta in deltas:
                    for chunk in builder.feed(delta):
                        yield chunk
                for chunk in builder.finish(stream.answer):
                    yield chunk

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools that it may call.

        Calls are decoded under a grammar, so that they fit a tool's schema. With `auto`, the model
        decodes freely if no grammar can express the schemas.

        Args:
            tools: Functions, classes, LangChain's tools, or JSON descriptions.
            tool_choice: `auto`, `any` (or `required`), `none`, or the name of a tool.
            parallel_tool_calls: Whether an answer may have several calls.
            strict: With `auto`, raise `InvalidRequest` in a call if no grammar can express the
                schemas.

        Raises:
            InvalidRequest: A tool or the choice is invalid. A model whose chat template takes no
                tools answers in text; it raises `UnsupportedModel` if a call is required.
        """
        from ragcache.structured import resolve_tool_choice

        with langchain_errors():
            formatted = convert_tools(tools)
            if tool_choice is not None:
                kwargs["tool_choice"] = resolve_tool_choice(tool_choice, formatted)
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        if strict is not None:
            kwargs["strict"] = strict
        return self.bind(tools=formatted, **kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return the model with answers that are decoded under a schema.

        The prompt does not change: it should describe the answer.

        Args:
            schema: A Pydantic class for answers that are its instances; a TypedDict, a JSON schema
                or a description of a function for dicts.
            method: `json_schema`; `function_calling` for a tool call, if the model's template takes
                tools; or `json_mode`, for which the schema is optional and may be one that no
                grammar can express.
            include_raw: Answer with `{"raw": message, "parsed": ..., "parsing_error": ...}`.
                By default, an answer that `max_tokens` ends raises `OutputParserException`.
        """
        with langchain_errors():
            return structured_output(
                lambda **more: self.bind(**more, **kwargs),
                lambda tools, **more: self.bind_tools(tools, **more, **kwargs),
                schema,
                method,
                include_raw,
            )

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text in a message."""
        with langchain_errors():
            return ModelInfo(self.open_rag()).model.encode_untrusted(text)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None, **_: Any
    ) -> int:
        """Count the tokens of a prompt with its chat template. Without messages, 0."""
        if not messages:
            return 0
        with langchain_errors():
            info = ModelInfo(self.open_rag())
            chat = conversation(messages)
            return info.count_tokens(chat, convert_tools(tools) if tools else None)


def _name(model: Any) -> str:
    return str(getattr(model, "name", model))
