"""A chat generator of Haystack over a `RagCache`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haystack import component, default_from_dict, default_to_dict
from haystack.dataclasses import (
    ChatMessage,
    StreamingCallbackT,
    StreamingChunk,
    TextContent,
    select_streaming_callback,
)
from haystack.utils import deserialize_callable, serialize_callable

from ragcache.errors import InvalidRequest
from ragcache.params import GenerationParams
from ragcache_connectors.langchain.shared import shared_rag

if TYPE_CHECKING:
    from ragcache import Answer, RagCache


@component
class RagCacheChatGenerator:
    """Haystack's chat generator on ragcache's engine.

    Texts of ingested modules in a prompt are recognized, and their states are reused: an ordinary
    pipeline of retriever, prompt builder and generator needs nothing else. `meta` of a reply has
    `usage` with the number of reused tokens, the sources and the confidence.

    Example:
        >>> generator = RagCacheChatGenerator(state="state/")  # doctest: +SKIP
        >>> generator.run([ChatMessage.from_user("Where is the boat?")])  # doctest: +SKIP
    """

    def __init__(
        self,
        state: str | None = None,
        model: str | None = None,
        collection: str | None = None,
        mode: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        open_options: dict[str, Any] | None = None,
        *,
        rag: Any = None,
    ) -> None:
        """Set up the component. The folder is opened by `warm_up` or at the first run.

        Args:
            state: The state folder, which all components of this process share.
            model: The model of the state folder: a folder or a hub name. Defaults to the embedded
                reader.
            collection: The collection to answer from. By default nothing is retrieved.
            mode: How states of modules are reused; see `RagCache.chat`.
            generation_kwargs: Fields of `GenerationParams`, such as `{"max_tokens": 200}`.
            streaming_callback: Called with a chunk for each piece of a reply.
            open_options: More options of `RagCache.open`.
            rag: An open `RagCache`, instead of `state`. It is left out of `to_dict`.
        """
        self.state, self.model, self.collection, self.mode = state, model, collection, mode
        self.generation_kwargs = generation_kwargs or {}
        self.streaming_callback = streaming_callback
        self.open_options = open_options or {}
        self.rag = rag

    def warm_up(self) -> None:
        """Open the state folder with its model."""
        self._open()

    def to_dict(self) -> dict[str, Any]:
        """Return the component for a pipeline's file."""
        callback = self.streaming_callback
        found: dict[str, Any] = default_to_dict(
            self,
            state=self.state,
            model=self.model,
            collection=self.collection,
            mode=self.mode,
            generation_kwargs=self.generation_kwargs,
            streaming_callback=None if callback is None else serialize_callable(callback),
            open_options=self.open_options,
        )
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> RagCacheChatGenerator:
        """Return the component of `to_dict`."""
        options = data.get("init_parameters", {})
        if options.get("streaming_callback"):
            options["streaming_callback"] = deserialize_callable(options["streaming_callback"])
        found: RagCacheChatGenerator = default_from_dict(cls, data)
        return found

    @component.output_types(replies=list[ChatMessage])
    def run(
        self,
        messages: list[ChatMessage] | str,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answer a conversation. Raises the errors of `RagCache.chat`.

        Args:
            messages: The conversation, or a question.
            streaming_callback: As in the constructor; this one comes first.
            generation_kwargs: As in the constructor; these come first.
        """
        rag, chat = self._open(), _conversation(messages)
        if not chat:
            return {"replies": []}
        callback = select_streaming_callback(
            self.streaming_callback, streaming_callback, requires_async=False
        )
        with rag.stream_chat(chat, **self._options(generation_kwargs)) as stream:
            for piece in stream:
                if callback is not None:
                    callback(self._chunk(piece))
        return {"replies": _replies(stream.answer, rag)}

    @component.output_types(replies=list[ChatMessage])
    async def run_async(
        self,
        messages: list[ChatMessage] | str,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answer a conversation as `run` does, without a waiting thread."""
        from ragcache import AsyncRagCache

        rag, chat = self._open(), _conversation(messages)
        if not chat:
            return {"replies": []}
        callback = select_streaming_callback(
            self.streaming_callback, streaming_callback, requires_async=True
        )
        options = self._options(generation_kwargs)
        async with await AsyncRagCache(rag).stream_chat(chat, **options) as stream:
            async for piece in stream:
                waited = None if callback is None else callback(self._chunk(piece))
                if inspect.isawaitable(waited):
                    await waited
        return {"replies": _replies(stream.answer, rag)}

    def _open(self) -> RagCache:
        options = {} if self.rag is not None else {"model": self.model, **self.open_options}
        return shared_rag(self.rag, self.state and Path(self.state), **options)

    def _options(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        generation = GenerationParams(**{**self.generation_kwargs, **(given or {})})
        return {"collection": self.collection, "mode": self.mode, "generation": generation}

    def _chunk(self, piece: str) -> StreamingChunk:
        return StreamingChunk(content=piece, meta={"model": self.model})


def _conversation(messages: Sequence[ChatMessage] | str) -> list[dict[str, Any]]:
    """Return messages for `RagCache.chat`. Raises `InvalidRequest` for content other than text."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    found = []
    message: Any
    for message in messages:
        other = [part for part in message._content if not isinstance(part, TextContent)]
        if other:
            raise InvalidRequest(
                f"a message holds a {type(other[0]).__name__}, and ragcache reads text only"
            )
        found.append({"role": message.role.value, "content": "\n".join(message.texts)})
    return found


def _replies(answer: Answer, rag: RagCache) -> list[ChatMessage]:
    """Return a reply for each choice. The first one counts the prompt."""
    reuse = answer.reuse
    return [
        ChatMessage.from_assistant(
            choice.text.strip(),
            meta={
                "model": rag.internals.shared.model.name,
                "index": number,
                "finish_reason": choice.finish_reason,
                "confidence": answer.confidence,
                "sources": [source.module for source in answer.sources],
                "usage": {
                    "prompt_tokens": reuse.prompt_tokens,
                    "completion_tokens": len(choice.token_ids),
                    "total_tokens": reuse.prompt_tokens + len(choice.token_ids),
                    "cached_tokens": reuse.cached_tokens,
                },
            },
        )
        for number, choice in enumerate(answer.choices)
    ]
