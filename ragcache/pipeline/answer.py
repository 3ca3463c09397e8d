"""The life of an answer: prepared with its request, pending, streamed, and complete."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from ragcache.answers.policy import AnswerOutput, AnswerPolicy
from ragcache.answers.quotations import AnswerSpan
from ragcache.db import ModuleRow
from ragcache.engine import Choice, RequestHandle, RequestOutput, TokenDelta
from ragcache.errors import InvalidRequest
from ragcache.store import Lease


@dataclass(frozen=True, slots=True)
class Citation:
    """A module that an answer was read from.

    Attributes:
        document: Id of its document.
        module: Its name.
        uri: Where the document came from.
        score: Of retrieval: of hybrid search the fused one, which counts ranks.
        tier: Where its states came from: a tier such as `host` or `disk`, `encoded` (computed for
            this request and kept) or `computed` (mode `exact`).
        scaffold: The modules that it was encoded with, itself included; "" if there are no others.
        bm25: What its words score for the question; None where they were not compared.
        cosine: The same of its vector, -1 to 1.
        rerank: The reranker's score, 0 to 1; None without one.
        page: The page or slide that it is from, where its document has such.
        headings: The titles above it, outermost first.
    """

    document: str
    module: str
    uri: str
    score: float
    tier: str = "computed"
    scaffold: str = ""
    bm25: float | None = None
    cosine: float | None = None
    page: int | None = None
    headings: tuple[str, ...] = ()
    rerank: float | None = None

    @classmethod
    def of(
        cls, module: ModuleRow, score: float, scaffold: str = "", bm25: float | None = None,
        cosine: float | None = None, rerank: float | None = None,
    ) -> Citation:  # fmt: skip
        """The citation of a stored module."""
        return cls(
            module.document, module.name, module.uri, score, scaffold=scaffold, bm25=bm25,
            cosine=cosine, page=module.page, headings=module.headings, rerank=rerank,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens of the prompt, counted: cached + shared + computed = prompt.

    Attributes:
        prompt_tokens: All of them.
        cached_tokens: Their states were in the store.
        computed_tokens: The others.
        shared_tokens: Tokens of the question itself whose states another request over the same
            documents had left in the engine.
        bytes_moved: By tier, the bytes that were read from below the first tier.
        created_tokens: Those of the computed whose states were encoded for this request and kept.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    shared_tokens: int = 0
    bytes_moved: Mapping[str, int] = field(default_factory=dict)
    created_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, measured. first_token and total run from the call, with retrieval, copies, encoding
    of what was missing and waiting; queued is the wait for the engine alone; rerank is what the
    reranker took of retrieve. Requests of one batch share retrieve."""

    retrieve: float
    assemble: float
    first_token: float
    total: float
    queued: float = 0.0
    rerank: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its sources and what it cost.

    Attributes:
        question: The question, the last message of the user, or the new text of a prompt.
        text: Of the first choice, without outer whitespace.
        sources: The modules that it was read from.
        mode: The mode of the call, or `recognized:MODE`.
        finish_reason: `stop`, `length`, `no_documents` where retrieval found nothing, or
            `no_answer` where the answer was refused: the confidence in it was too low, and the text
            says so (`GenerationParams.min_confidence`, `refusal`).
        reuse: Tokens of the prompt that were read and computed.
        timings: In seconds.
        choices: All `n` answers as they were generated, with tokens and log-probabilities where
            `logprobs` was set.
        spans: Of extractive answers, where they stand in the documents, the best source first:
            places of the first choice, then of the others. Else none, as of refused ones.
        confidence: The probability, 0 to 1, that the first choice is right, also of one that was
            refused; None where it was not asked for and nothing is calibrated.
    """

    question: str
    text: str
    sources: tuple[Citation, ...]
    mode: str
    finish_reason: str
    reuse: Reuse
    timings: Timings
    choices: tuple[Choice, ...] = ()
    spans: tuple[AnswerSpan, ...] = ()
    confidence: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; without `Choice.first_logprobs`."""
        plain = asdict(self)
        for choice in plain["choices"]:
            del choice["first_logprobs"]
        return plain


@dataclass(frozen=True, slots=True)
class Timestamps:
    """`time.perf_counter` readings, in seconds: when the call came, when it was known which modules
    the prompt reads, and when their states were at hand. rerank: seconds of the reranker."""

    called: float = 0.0
    retrieved: float = 0.0
    assembled: float = 0.0
    rerank: float = 0.0


@dataclass(frozen=True, slots=True)
class PreparedAnswer:
    """The parts of an answer that are known when its request is submitted."""

    question: str
    sources: tuple[Citation, ...]
    mode: str
    prompt_tokens: int
    cached_tokens: int
    bytes_moved: Mapping[str, int]
    timestamps: Timestamps
    created_tokens: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the prompt by the tier that their states came from, or `encoded`."""
    policies: tuple[AnswerPolicy, ...] = ()
    """The features of the answer, in the order in which they finish it."""

    def answer(self, finished: AnswerOutput) -> Answer:
        """The whole answer."""
        completion, times = finished.output, self.timestamps
        kept = self.cached_tokens + completion.shared_tokens
        reuse = Reuse(
            self.prompt_tokens, self.cached_tokens, self.prompt_tokens - kept,
            completion.shared_tokens, self.bytes_moved, self.created_tokens,
        )  # fmt: skip
        timings = Timings(
            retrieve=times.retrieved - times.called,
            assemble=times.assembled - times.retrieved,
            first_token=completion.first_token_at - times.called,
            total=completion.finished_at - times.called,
            queued=completion.admitted_at - completion.submitted_at,
            rerank=times.rerank,
        )
        return Answer(
            self.question, completion.choices[0].text.strip(), self.sources, self.mode,
            completion.finish_reason, reuse, timings, completion.choices,
            finished.spans, next(iter(finished.confidences), None),
        )  # fmt: skip


class DeferredReleases:
    """Leases of requests that ended where nothing may wait: in an event loop, or where the garbage
    collector found them. The next call ends them, before it leases anything itself."""

    def __init__(self) -> None:
        self._leases: SimpleQueue[Lease] = SimpleQueue()

    def put(self, lease: Lease | None) -> None:
        """Takes a lease. Waits for nothing, and may be called at any line of any thread."""
        if lease is not None:
            self._leases.put(lease)

    def release(self) -> None:
        """Ends all of them."""
        with suppress(Empty):
            while True:
                self._leases.get_nowait().release()


class PendingAnswer:
    """A submitted request with the lease of what it reads, which ends with the request. Losing the
    last reference gives the request up."""

    def __init__(
        self, prepared: PreparedAnswer, handle: RequestHandle[TokenDelta, RequestOutput],
        lease: Lease | None, deferred: DeferredReleases,
    ) -> None:  # fmt: skip
        self.prepared, self.handle = prepared, handle
        self._output: AnswerOutput | None = None
        self._lease_end = weakref.finalize(self, deferred.put, lease)
        self._lease_end.atexit = False

    def result(self) -> Answer:
        """Waits for the end. Raises what made the request fail."""
        return self.prepared.answer(self.output())

    def output(self) -> AnswerOutput:
        """Waits for the end, and lets the policies finish the answer. Raises as `result`."""
        if self._output is None:
            try:
                answer = AnswerOutput(self.handle.result())
            finally:
                self.handle.cancel()  # where the wait was interrupted; else it has ended
                self.release()
            for policy in self.prepared.policies:
                passes = [each.result() for each in policy.follow_up(answer.output)]
                answer = policy.finish(answer, passes)
            self._output = answer
        return self._output

    async def aresult(self) -> Answer:
        """`result` for asyncio. Canceling the task gives the request up."""
        return self.prepared.answer(await self.aoutput())

    async def aoutput(self) -> AnswerOutput:
        """`output` for asyncio."""
        if self._output is None:
            try:
                answer = AnswerOutput(await self.handle)
            except BaseException:
                self.give_up()
                raise
            await asyncio.to_thread(self.release)
            for policy in self.prepared.policies:
                passes = [await each for each in policy.follow_up(answer.output)]
                answer = policy.finish(answer, passes)
            self._output = answer
        return self._output

    @property
    def done(self) -> bool:
        """Whether `result` need not wait."""
        waits = self._output is None and any(p.follows_up for p in self.prepared.policies)
        return self.handle.done and not waits

    @property
    def holder(self) -> AnswerPolicy | None:
        """The policy that holds streams until it has finished the answer, if there is one."""
        return next((policy for policy in self.prepared.policies if policy.holds), None)

    def give_up(self) -> None:
        """Cancels the request, unless it has ended. Waits for nothing."""
        self.handle.cancel()
        self._lease_end()

    def release(self) -> None:
        """Ends the lease, in the caller's thread."""
        held = self._lease_end.detach()
        lease = None if held is None else held[2][0]
        if lease is not None:
            lease.release()


def results(pending: Sequence[PendingAnswer]) -> list[Answer]:
    """All answers, in order. If one fails, all are given up."""
    try:
        return [each.result() for each in pending]
    finally:
        give_up(pending)


async def aresults(pending: Sequence[PendingAnswer]) -> list[Answer]:
    """`results` for asyncio."""
    try:
        return [await each.aresult() for each in pending]
    finally:
        give_up(pending)


def give_up(pending: Sequence[PendingAnswer]) -> None:
    """Cancels what has not ended."""
    for each in pending:
        each.give_up()


class _Stream:
    """What streams for threads and for asyncio have in common."""

    def __init__(self, pending: PendingAnswer) -> None:
        self._pending = pending

    @property
    def question(self) -> str:
        return self._pending.prepared.question

    @property
    def mode(self) -> str:
        return self._pending.prepared.mode

    @property
    def sources(self) -> tuple[Citation, ...]:
        """The modules that the answer is read from, known before its first token."""
        return self._pending.prepared.sources

    @property
    def prompt_tokens(self) -> int:
        """Of the whole prompt, known before its first token."""
        return self._pending.prepared.prompt_tokens

    @property
    def read_tokens(self) -> Mapping[str, int]:
        """Tokens of the prompt whose states were read, by the tier that they came from, or
        `encoded` for it."""
        return self._pending.prepared.tokens

    @property
    def state(self) -> str:
        """`waiting` in the engine's queue, `computing` the prompt, or `generating`."""
        return self._pending.handle.channel.state

    @property
    def generated(self) -> int:
        """How many pieces the engine has generated so far, read or not."""
        return self._pending.handle.channel.count

    @property
    def answer(self) -> Answer:
        """The whole answer, once it has ended. Raises `InvalidRequest` before, and what made the
        request fail."""
        if not self._pending.done:
            raise InvalidRequest("the answer is still under way; read its pieces first")
        return self._pending.result()

    def close(self) -> None:
        """Gives the answer up, unless it has ended. Waits for nothing."""
        self._pending.give_up()


class AnswerStream(_Stream):
    """Iterates over pieces of the first answer's text as they become safe to show.

    Joined, they are the text of the first choice: `answer.text` is the same without outer
    whitespace. Leaving the iteration early, or `close`, cancels the request.
    """

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces():
            if piece.choice == 0 and piece.text:
                yield piece.text

    def pieces(self) -> Iterator[TokenDelta]:
        """The engine's news of all choices: tokens with log-probabilities, and their text. Where
        answers may be refused, all of it comes at the end."""
        pending = self._pending
        try:
            if (holder := pending.holder) is not None:
                finished = pending.output()
                yield from holder.release(list(pending.handle), finished)
            else:
                yield from pending.handle
                pending.output()
        except BaseException:  # also where the garbage collector ends the iteration
            pending.give_up()
            raise
        pending.release()

    def result(self) -> Answer:
        """Waits for the end."""
        return self._pending.result()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncAnswerStream(_Stream):
    """As `AnswerStream`, for asyncio; awaiting it gives the `Answer`. Canceling the task that
    iterates or awaits cancels the request."""

    async def __aiter__(self) -> AsyncIterator[str]:
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                if piece.choice == 0 and piece.text:
                    yield piece.text

    async def pieces(self) -> AsyncGenerator[TokenDelta, None]:
        """The engine's news of all choices: tokens with log-probabilities, and their text. Where
        answers may be refused, all of it comes at the end."""
        pending = self._pending
        try:
            if (holder := pending.holder) is not None:
                finished = await pending.aoutput()
                for piece in holder.release([each async for each in pending.handle], finished):
                    yield piece
            else:
                async for piece in pending.handle:
                    yield piece
                if not pending.done:
                    await pending.aoutput()
        finally:
            pending.give_up()

    def __await__(self) -> Generator[Any, None, Answer]:
        return self._pending.aresult().__await__()

    async def __aenter__(self) -> AsyncAnswerStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
