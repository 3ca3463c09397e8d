"""Answers while they are generated, for threads and for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any

from ragcache.engine import TokenDelta
from ragcache.errors import InvalidRequest
from ragcache.pipeline.answer import Answer, Source
from ragcache.pipeline.asked import Asked


class _Stream:
    """What both kinds have in common."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    @property
    def question(self) -> str:
        return self._asked.ready.question

    @property
    def mode(self) -> str:
        return self._asked.ready.mode

    @property
    def sources(self) -> tuple[Source, ...]:
        """The modules that the answer is read from, known before its first token."""
        return self._asked.ready.sources

    @property
    def prompt_tokens(self) -> int:
        """Of the whole prompt, known before its first token."""
        return self._asked.ready.prompt_tokens

    @property
    def read_tokens(self) -> Mapping[str, int]:
        """Tokens of the prompt whose states were read, by the tier that they came from, or
        `encoded` for it."""
        return self._asked.ready.tokens

    @property
    def state(self) -> str:
        """`waiting` in the engine's queue, `computing` the prompt, or `generating`."""
        return self._asked.handle.channel.state

    @property
    def generated(self) -> int:
        """How many pieces the engine has generated so far, whether or not anybody reads them."""
        return self._asked.handle.channel.count

    @property
    def answer(self) -> Answer:
        """The whole answer, once it has ended. Raises `InvalidRequest` before, and what made the
        request fail."""
        if not self._asked.handle.done:
            raise InvalidRequest("the answer is still under way; read its pieces first")
        return self._asked.result()

    def close(self) -> None:
        """Gives the answer up, unless it has ended. Waits for nothing."""
        self._asked.give_up()


class AnswerStream(_Stream):
    """Iterates over pieces of the first answer's text as they become safe to show.

    Together the pieces are the text of the first choice: `answer.text` is the same without outer
    whitespace. Leaving the iteration early, or `close`, cancels the request.
    """

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces():
            if piece.choice == 0 and piece.text:
                yield piece.text

    def pieces(self) -> Iterator[TokenDelta]:
        """The engine's news of all choices: tokens with log-probabilities, and their text."""
        try:
            yield from self._asked.handle
        finally:
            self._asked.handle.cancel()
            self._asked.release()

    def result(self) -> Answer:
        """Waits for the end."""
        return self._asked.result()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncAnswerStream(_Stream):
    """As `AnswerStream`, for asyncio; awaiting it gives the `Answer`. Cancelling the task that
    iterates or awaits cancels the request."""

    async def __aiter__(self) -> AsyncIterator[str]:
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                if piece.choice == 0 and piece.text:
                    yield piece.text

    async def pieces(self) -> AsyncGenerator[TokenDelta, None]:
        """The engine's news of all choices: tokens with log-probabilities, and their text."""
        try:
            async for piece in self._asked.handle:
                yield piece
        finally:
            self._asked.give_up()

    def __await__(self) -> Generator[Any, None, Answer]:
        return self._asked.awaited().__await__()

    async def __aenter__(self) -> AsyncAnswerStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
