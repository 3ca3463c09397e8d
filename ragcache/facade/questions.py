"""Questions over a collection of documents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ragcache.config import DEFAULT_K, check_mode
from ragcache.pipeline import (
    GREEDY,
    Answer,
    AnswerStream,
    Asked,
    AsyncAnswerStream,
    Generation,
    Parts,
)
from ragcache.pipeline.asked import awaited, results
from ragcache.retrieval import Filters, SearchParams


class Questions:
    """The methods of `RagCache` that answer questions."""

    _parts: Parts

    def ask(
        self, question: str, *, collection: str, k: int = DEFAULT_K, mode: str = "rooted",
        generation: Generation = GREEDY, filters: Filters | None = None,
        threshold: float | None = None,
    ) -> Answer:  # fmt: skip
        """Answers a question from the `k` best modules of a collection.

        mode: `rooted` (default), `linked:N`, which computes the first N tokens of each module
        again, `isolated`, or `exact`, which reuses nothing. filters, threshold: as in `retrieve`.
        Raises `RequestError`.
        """
        return self.stream(
            question, collection=collection, k=k, mode=mode, generation=generation,
            filters=filters, threshold=threshold,
        ).result()  # fmt: skip

    def ask_batch(
        self, questions: Sequence[str], *, collection: str, k: int = DEFAULT_K,
        mode: str = "rooted", generation: Generation = GREEDY, filters: Filters | None = None,
        threshold: float | None = None,
    ) -> list[Answer]:  # fmt: skip
        """Answers questions together: every document that several share is read once a step."""
        criteria = SearchParams(k, filters=filters, threshold=threshold)
        return results(self._start(questions, collection, criteria, mode, generation))

    def stream(
        self, question: str, *, collection: str, k: int = DEFAULT_K, mode: str = "rooted",
        generation: Generation = GREEDY, filters: Filters | None = None,
        threshold: float | None = None,
    ) -> AnswerStream:  # fmt: skip
        """As `ask`, but returns when the question is queued; iterate for the text as it comes."""
        criteria = SearchParams(k, filters=filters, threshold=threshold)
        [asked] = self._start([question], collection, criteria, mode, generation)
        return AnswerStream(asked)

    async def aask(
        self, question: str, *, collection: str, k: int = DEFAULT_K, mode: str = "rooted",
        generation: Generation = GREEDY, filters: Filters | None = None,
        threshold: float | None = None,
    ) -> Answer:  # fmt: skip
        """`ask` for asyncio."""
        return await (
            await self.astream(
                question, collection=collection, k=k, mode=mode, generation=generation,
                filters=filters, threshold=threshold,
            )
        )  # fmt: skip

    async def aask_batch(
        self, questions: Sequence[str], *, collection: str, k: int = DEFAULT_K,
        mode: str = "rooted", generation: Generation = GREEDY, filters: Filters | None = None,
        threshold: float | None = None,
    ) -> list[Answer]:  # fmt: skip
        """`ask_batch` for asyncio."""
        criteria = SearchParams(k, filters=filters, threshold=threshold)
        arguments = (questions, collection, criteria, mode, generation)
        return await awaited(await asyncio.to_thread(self._start, *arguments))

    async def astream(
        self, question: str, *, collection: str, k: int = DEFAULT_K, mode: str = "rooted",
        generation: Generation = GREEDY, filters: Filters | None = None,
        threshold: float | None = None,
    ) -> AsyncAnswerStream:  # fmt: skip
        """`stream` for asyncio: `async for piece in await rag.astream(...)`. Documents are found
        and their states leased in a thread of asyncio's pool."""
        criteria = SearchParams(k, filters=filters, threshold=threshold)
        arguments = ([question], collection, criteria, mode, generation)
        [asked] = await asyncio.to_thread(self._start, *arguments)
        return AsyncAnswerStream(asked)

    def _start(
        self, questions: Sequence[str], collection: str, criteria: SearchParams, mode: str,
        generation: Generation,
    ) -> list[Asked]:  # fmt: skip
        checked = check_mode(mode)
        self._parts.returned.release()
        return self._parts.answerer.start(questions, collection, criteria, checked, generation)
