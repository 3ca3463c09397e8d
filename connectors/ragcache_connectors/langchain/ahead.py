"""Conversations that are submitted together before LangChain runs them one by one.

LangChain gives every input of a batch a run of its own, with its own callbacks, tags and ids. The
runs stay as they are; what was submitted for them is handed over in a context variable.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragcache.errors import RagCacheError

if TYPE_CHECKING:
    from ragcache import RagCache

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
