"""A language model of LlamaIndex over a `RagCache`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import (
    achat_to_completion_decorator,
    astream_chat_to_completion_decorator,
    chat_to_completion_decorator,
    stream_chat_to_completion_decorator,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
    MessageRole,
    TextBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM
from pydantic import Field

from ragcache.errors import InvalidRequest
from ragcache.params import GenerationParams
from ragcache_connectors.langchain.shared import shared_rag

if TYPE_CHECKING:
    from ragcache import Answer, RagCache

_ROLES = {"chatbot": "assistant", "model": "assistant", "developer": "system", "function": "tool"}
"""Roles of LlamaIndex that chat templates know by other names."""


class RagCacheLLM(LLM):
    """LlamaIndex's language model on ragcache's engine.

    `RagCacheLLM(rag=rag)` uses an open `RagCache`. `RagCacheLLM(state=DIR)` opens a folder at the
    first call, which all classes of this process share.

    Texts of ingested modules in a prompt are recognized, and their states are reused: an ordinary
    query engine needs nothing else. `additional_kwargs` of a response has the number of reused
    tokens, `raw` the sources and the confidence.

    Fields of `GenerationParams` can be set in `generation` or in a call, which comes first.

    Example:
        >>> RagCacheLLM(state="state/").complete("Where is the boat?")  # doctest: +SKIP
    """

    rag: Any = Field(default=None, exclude=True, repr=False)
    """An open `RagCache`."""
    state: str | None = None
    """The state folder to open instead of `rag`, at first use."""
    model: Any = Field(default=None, exclude=True)
    """The model of the state folder: a folder or a hub name. Defaults to the embedded reader."""
    open_options: dict[str, Any] = Field(default_factory=dict)
    """More options of `RagCache.open`."""
    collection: str | None = None
    """The collection to answer from. By default nothing is retrieved."""
    mode: str | None = None
    """How states of modules are reused; see `RagCache.chat`."""
    generation: dict[str, Any] = Field(default_factory=dict)
    """Fields of `GenerationParams`, such as `{"max_tokens": 200}`."""

    @classmethod
    def class_name(cls) -> str:
        """Return the name under which LlamaIndex serializes the class."""
        return "RagCacheLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Window and name of the model, which is opened for it."""
        rag = self.open_rag()
        shared = rag.internals.shared
        return LLMMetadata(
            context_window=shared.model.causal.window,
            num_output=self._generation({}).max_tokens or shared.config.max_tokens,
            is_chat_model=True,
            model_name=shared.model.name,
        )

    def open_rag(self) -> RagCache:
        """Return `rag`, or the `RagCache` of the state folder, opened with the model."""
        state = None if self.state is None else Path(self.state)
        options = {} if self.rag is not None else {"model": self.model, **self.open_options}
        return shared_rag(self.rag, state, **options)

    def _generation(self, given: dict[str, Any]) -> GenerationParams:
        return GenerationParams(**{**self.generation, **given})

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        return {
            "collection": self.collection,
            "mode": self.mode,
            "generation": self._generation(given),
        }

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation. Raises the errors of `RagCache.chat`."""
        return _response(self.open_rag().chat(_conversation(messages), **self._options(kwargs)))

    @llm_chat_callback()
    def stream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> Generator[ChatResponse, None, None]:
        """Answer a conversation in pieces. The last response has `raw`."""
        stream = self.open_rag().stream_chat(_conversation(messages), **self._options(kwargs))

        def pieces() -> Generator[ChatResponse, None, None]:
            text = ""
            with stream:
                for piece in stream:
                    text += piece
                    yield _piece(text, piece)
                yield _response(stream.answer, delta="")

        return pieces()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation without a waiting thread."""
        from ragcache import AsyncRagCache

        asked = AsyncRagCache(self.open_rag()).chat(
            _conversation(messages), **self._options(kwargs)
        )
        return _response(await asked)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> AsyncGenerator[ChatResponse, None]:
        """Answer a conversation in pieces, without a waiting thread."""
        from ragcache import AsyncRagCache

        rag = AsyncRagCache(self.open_rag())
        stream = await rag.stream_chat(_conversation(messages), **self._options(kwargs))

        async def pieces() -> AsyncGenerator[ChatResponse, None]:
            text = ""
            async with stream:
                async for piece in stream:
                    text += piece
                    yield _piece(text, piece)
                yield _response(stream.answer, delta="")

        return pieces()

    @llm_completion_callback()
    def complete(
        self,
        prompt: str,
        formatted: bool = False,  # noqa: ARG002
        **kwargs: Any,
    ) -> CompletionResponse:
        """Answer a prompt as a message of the user."""
        return chat_to_completion_decorator(self.chat)(prompt, **kwargs)

    @llm_completion_callback()
    def stream_complete(
        self,
        prompt: str,
        formatted: bool = False,  # noqa: ARG002
        **kwargs: Any,
    ) -> Any:
        """Answer a prompt as a message of the user, in pieces."""
        return stream_chat_to_completion_decorator(self.stream_chat)(prompt, **kwargs)

    @llm_completion_callback()
    async def acomplete(
        self,
        prompt: str,
        formatted: bool = False,  # noqa: ARG002
        **kwargs: Any,
    ) -> CompletionResponse:
        """Answer a prompt as a message of the user, without a waiting thread."""
        return await achat_to_completion_decorator(self.achat)(prompt, **kwargs)

    @llm_completion_callback()
    async def astream_complete(
        self,
        prompt: str,
        formatted: bool = False,  # noqa: ARG002
        **kwargs: Any,
    ) -> Any:
        """Answer a prompt as a message of the user, in pieces, without a waiting thread."""
        return await astream_chat_to_completion_decorator(self.astream_chat)(prompt, **kwargs)


def _conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages for `RagCache.chat`. Raises `InvalidRequest` for content other than text."""
    found = []
    for message in messages:
        for block in message.blocks:
            if not isinstance(block, TextBlock):
                raise InvalidRequest(
                    f"a message holds a {type(block).__name__}, and ragcache reads text only"
                )
        role = MessageRole(message.role).value
        found.append({"role": _ROLES.get(role, role), "content": message.content or ""})
    return found


def _piece(text: str, delta: str) -> ChatResponse:
    return ChatResponse(message=ChatMessage(role=MessageRole.ASSISTANT, content=text), delta=delta)


def _response(answer: Answer, delta: str | None = None) -> ChatResponse:
    reuse = answer.reuse
    completion = sum(len(choice.token_ids) for choice in answer.choices)
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, content=answer.text),
        delta=delta,
        raw={
            "finish_reason": answer.finish_reason,
            "confidence": answer.confidence,
            "sources": [source.module for source in answer.sources],
        },
        additional_kwargs={
            "prompt_tokens": reuse.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": reuse.prompt_tokens + completion,
            "cached_tokens": reuse.cached_tokens,
        },
    )
