"""A chat model over a `RagCache`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, Field, model_validator

from ragcache.errors import ConfigurationError
from ragcache_connectors.langchain import batching
from ragcache_connectors.langchain.batching import RaggedBatches
from ragcache_connectors.langchain.call_options import Call
from ragcache_connectors.langchain.messages import Chunks, conversation, result
from ragcache_connectors.langchain.model_info import Served
from ragcache_connectors.langchain.shared import (
    as_langchain,
    ashared_rag,
    declare,
    opened_rag,
    shared_rag,
)
from ragcache_connectors.langchain.structured import described, structured_output

if TYPE_CHECKING:
    from ragcache import RagCache


EMBEDDED = "ragcache-reader"

# Fields that change an answer; those of the engine by LangChain's names.
_OPTIONS = (
    "mode recognize temperature top_p top_k min_p repetition_penalty frequency_penalty "
    "presence_penalty seed max_tokens min_tokens stop n timeout logprobs top_logprobs priority"
).split()
# What programs give to any chat model, and what means nothing to one in this process.
_ELSEWHERE = ("api_key", "base_url", "max_retries")


class ChatRagCache(RaggedBatches):
    """LangChain's chat model on ragcache's engine.

    `ChatRagCache(rag=rag)` uses an open `RagCache`, `ChatRagCache(state=DIR)` opens a folder at the
    first call, and `ChatRagCache()` a temporary one, with the embedded reader. Texts of ingested
    modules that stand in a prompt are read from their kept states: an ordinary chain that pastes
    retrieved documents needs nothing else. `response_metadata["ragcache"]` says what was recognized
    and how it was read, `usage_metadata` how many tokens that saved.

    Every option may be given to a call or to `bind` as well; the call's come first. Errors are
    those of `ragcache.errors` and LangChain's own at once (`ContextOverflowError` for a prompt that
    is too long).

    state: the state folder. model: None is the embedded reader; else a folder, a hub name or a
    `LoadedModel`, with which the state folder is opened. open_options: more of `RagCache.open`.
    mode, recognize: see `RagCache.chat`. max_tokens: None is the state folder's. stop: strings that
    end an answer and do not belong to it. n: how many answers `generate` gives. timeout: in
    seconds. logprobs, top_logprobs: as OpenAI has them. The rest: see `Generation`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", populate_by_name=True)

    rag: Any = Field(default=None, exclude=True, repr=False)
    state: str | Path | None = None
    model: Any = Field(default=None, alias="model_name")
    open_options: dict[str, Any] = Field(default_factory=dict)
    mode: str = "rooted"
    recognize: bool = True
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: list[str] | str | None = Field(default=None, alias="stop_sequences")
    n: int | None = None
    timeout: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    priority: int | None = None
    streaming: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        if values.get("rag") is not None and (values.get("state") or values.get("open_options")):
            raise ConfigurationError("give rag=, or else state= and open_options=; not both")
        return {name: value for name, value in values.items() if name not in _ELSEWHERE}

    @model_validator(mode="after")
    def _declare(self) -> Self:
        """Another class may open the folder before the first message comes."""
        if self.rag is None:
            declare(self.state, model=self.model, **self.open_options)
        elif self.model is not None and _name(self.model) != Served(self.rag).name:
            raise ConfigurationError(
                f"`rag` is open with the model {Served(self.rag).name!r}, not with "
                f"{_name(self.model)!r:.80}; leave model= out, or open another `RagCache`"
            )
        return self

    @property
    def model_name(self) -> str:
        """The model's name, as answers tell it once the folder is open."""
        rag = opened_rag(self.rag, self.state, **self._declared)
        if rag is not None:
            return Served(rag).name
        return EMBEDDED if self.model is None else _name(self.model)

    @property
    def _llm_type(self) -> str:
        return "ragcache"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that changes an answer: the model, the texts that are recognized, options."""
        where = {"state": None if self.state is None else str(Path(self.state).resolve())}
        if self.rag is not None:
            where = Served(self.rag).identity
        opened = {name: str(value) for name, value in sorted(self.open_options.items())}
        options = self._options()
        options["stop_sequences"] = options.pop("stop")  # LangChain sets `stop` to the call's
        return {"model": self.model_name, **where, "open_options": opened, **options}

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OPTIONS}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "ragcache"
        params["ls_model_name"] = str(kwargs.get("model") or self.model_name)
        if stop is None and self.stop:
            params["ls_stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        return params

    def _open(self) -> RagCache:
        """Opens the state folder, or finds it open. Loads the model."""
        return shared_rag(self.rag, self.state, **self._declared)

    async def _aopen(self) -> RagCache:
        return await ashared_rag(self.rag, self.state, **self._declared)

    @property
    def _declared(self) -> dict[str, Any]:
        return {} if self.rag is not None else {"model": self.model, **self.open_options}

    def _call(self, rag: RagCache, stop: Sequence[str] | None, given: Mapping[str, Any]) -> Call:
        return Call.of(self._options(), stop, given, Served(rag))

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:  # fmt: skip
        with as_langchain():
            rag, chat = self._open(), conversation(messages)
            call = self._call(rag, stop, kwargs)
            stream = batching.take(self, chat, call.chat) or rag.stream_chat(chat, **call.chat)
            return result(stream.result(), call, Served(rag))

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:  # fmt: skip
        with as_langchain():
            rag, chat = await self._aopen(), conversation(messages)
            call = self._call(rag, stop, kwargs)
            stream = batching.take(self, chat, call.chat) or await rag.astream_chat(
                chat, **call.chat
            )
            return result(await stream, call, Served(rag))

    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:  # fmt: skip
        """The first choice alone: LangChain adds all chunks of a stream to one message."""
        with as_langchain():
            rag, chat = self._open(), conversation(messages)
            call = self._call(rag, stop, {**kwargs, "n": 1})
            chunks = Chunks(call, Served(rag))
            stream = batching.take(self, chat, call.chat) or rag.stream_chat(chat, **call.chat)
            with stream:
                for piece in stream.pieces():
                    yield from chunks.read(piece)
                yield from chunks.end(stream.answer)

    async def _astream(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:  # fmt: skip
        with as_langchain():
            rag, chat = await self._aopen(), conversation(messages)
            call = self._call(rag, stop, {**kwargs, "n": 1})
            chunks = Chunks(call, Served(rag))
            stream = batching.take(self, chat, call.chat) or await rag.astream_chat(
                chat, **call.chat
            )
            async with stream, aclosing(stream.pieces()) as pieces:
                async for piece in pieces:
                    for chunk in chunks.read(piece):
                        yield chunk
                for chunk in chunks.end(stream.answer):
                    yield chunk

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None, **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:  # fmt: skip
        """The model with tools that it may call.

        tools: functions, classes, LangChain's tools, or JSON descriptions. tool_choice: `auto`,
        `any` (or `required`), `none`, or the name of a tool. Calls that are asked for are decoded
        under a grammar (extra `structured`), so that they always are some tool's; so are those of
        `auto` where the extra is installed and can hold to the schemas. strict: those of `auto`
        keep to the schemas too, or the call raises `MissingExtra` or `InvalidRequest`.

        Raises `InvalidRequest` here, and a call `UnsupportedModel` where the model's chat template
        takes no tools.
        """
        from ragcache.structured import resolve_tool_choice

        with as_langchain():
            formatted = described(tools)
            if tool_choice is not None:
                kwargs["tool_choice"] = resolve_tool_choice(tool_choice, formatted)
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        if strict is not None:
            kwargs["strict"] = strict
        return self.bind(tools=formatted, **kwargs)

    def with_structured_output(
        self, schema: Any = None, *, method: str = "json_schema", include_raw: bool = False,
        strict: bool | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:  # fmt: skip
        """The model with answers that keep to a schema while they are decoded (extra `structured`).

        schema: a Pydantic class, of which the answer is an instance; or a TypedDict, a JSON schema
        or a description of a function, for a dict. method: `json_schema`; `function_calling`, by a
        tool call, where the model's template takes tools; `json_mode`, which also takes a schema
        that decoding cannot hold to, or none. The prompt does not change: say in it what is wanted.
        include_raw: `{"raw": message, "parsed": ..., "parsing_error": ...}`; else an answer that
        `max_tokens` cut off raises `OutputParserException`.
        """
        with as_langchain():
            return structured_output(
                lambda **more: self.bind(**more, **kwargs),
                lambda tools, **more: self.bind_tools(tools, **more, **kwargs),
                schema, method, include_raw,
            )  # fmt: skip

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text as a message holds it."""
        with as_langchain():
            return Served(self._open()).token_ids(text)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None, **_: Any
    ) -> int:
        """Tokens of the whole prompt, in the words of the chat template; of no messages 0."""
        if not messages:
            return 0
        with as_langchain():
            served = Served(self._open())
            return served.count(conversation(messages), described(tools) if tools else None)


def _name(model: Any) -> str:
    return str(getattr(model, "name", model))
