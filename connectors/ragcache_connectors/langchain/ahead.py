"""Conversations that are submitted together before LangChain runs them one by one.

LangChain gives every input of a batch a run of its own, with its own callbacks, tags and ids. The
runs stay as they are; what was submitted for them is handed over in a context variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragcache.errors import RagCacheError

if TYPE_CHECKING:
    from ragcache import RagCache

Conversation = list[dict[str, Any]]


@dataclass(slots=True, eq=False)
class Ahead:
    """What was submitted: of which model, for which conversation, and the answer's stream."""

    owner: object
    conversation: Conversation
    stream: Any


_waiting: ContextVar[list[Ahead] | None] = ContextVar("ragcache_ahead", default=None)


@contextmanager
def handed_over(submitted: Sequence[Ahead]) -> Iterator[None]:
    """The runs within take these. What none of them took is given up at the end."""
    left = list(submitted)
    token = _waiting.set(left)
    try:
        yield
    finally:
        _waiting.reset(token)
        for each in left:
            each.stream.close()


def take(owner: object, conversation: Conversation) -> Any:
    """The stream that was submitted for this conversation of this model, once; None where there is
    none, or no longer."""
    left = _waiting.get() or []
    for each in left:
        if each.owner is owner and each.conversation == conversation:
            left.remove(each)
            return each.stream
    return None


def submit(
    owner: object, rag: RagCache, chats: Sequence[Conversation | None], options: Mapping[str, Any]
) -> list[Ahead]:
    """Submits conversations together; where one of them is wrong, those that are not."""
    right = [chat for chat in chats if chat is not None]
    with suppress(RagCacheError):
        streams = rag.stream_chat_batch(right, **options)
        return [Ahead(owner, *pair) for pair in zip(right, streams, strict=True)]
    submitted = []
    for chat in right:
        with suppress(RagCacheError):
            submitted.append(Ahead(owner, chat, rag.stream_chat(chat, **options)))
    return submitted


async def asubmit(
    owner: object, rag: RagCache, chats: Sequence[Conversation | None], options: Mapping[str, Any]
) -> list[Ahead]:
    """As `submit`, for asyncio."""
    right = [chat for chat in chats if chat is not None]
    with suppress(RagCacheError):
        streams = await rag.astream_chat_batch(right, **options)
        return [Ahead(owner, *pair) for pair in zip(right, streams, strict=True)]
    submitted = []
    for chat in right:
        with suppress(RagCacheError):
            submitted.append(Ahead(owner, chat, await rag.astream_chat(chat, **options)))
    return submitted
