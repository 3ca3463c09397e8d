"""What chats and completions have in common."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ragcache import Answer, AsyncAnswerStream
from ragcache.engine import TokenDelta
from ragcache_api.http.compact import compact
from ragcache_api.http.errors import Fault
from ragcache_api.http.running import Entry
from ragcache_api.http.sse import event
from ragcache_api.http.wire.openai_told import Head, extras, told_sources, usage

DONE = b"data: [DONE]\n\n"
ChunkOf = Callable[[TokenDelta], dict[str, Any] | None]
"""The choice that a piece makes in a chunk; None where it tells nothing."""


@dataclass(slots=True)
class Chunks:
    """Writes the chunks of one streamed answer."""

    head: Head
    with_usage: bool
    with_sources: bool
    _prefix: bytes = field(init=False)

    def __post_init__(self) -> None:
        self._prefix = b"data: " + self.head.prefix()

    def chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        """An event with some choices."""
        if self.with_usage:
            more.setdefault("usage", None)
        return self._prefix + compact({"choices": choices, **more})[1:] + b"\n\n"

    def ending(self, answers: list[Answer]) -> bytes:
        """Usage, if it was asked for, and the end."""
        if not self.with_usage:
            return DONE
        return self.chunk(usage=usage(answers)) + DONE

    def extras(self, answers: list[Answer]) -> dict[str, Any]:
        """The fields of the last chunk that has choices, which OpenAI does not know."""
        told: dict[str, Any] = {"ragcache": extras(answers)}
        return told | ({"sources": told_sources(answers)} if self.with_sources else {})


async def pieces_of(entry: Entry, stream: AsyncAnswerStream) -> AsyncGenerator[TokenDelta, None]:
    """The stream's pieces; the entry has the answer afterwards."""
    async with aclosing(stream.pieces()) as pieces:
        async for piece in pieces:
            yield piece
    entry.answers.append(stream.answer)


def told_fault(fault: Fault) -> bytes:
    """An error in the middle of a stream, as OpenAI tells it."""
    return event(fault.openai())
