"""The life of an answer: prepared with its request, pending, streamed, and complete."""

from __future__ import annotations

import asyncio
import threading
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
from dataclasses import asdict, dataclass, field, replace
from html import escape
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet

from ragcache.answers.policy import AnswerOutput, AnswerPolicy, AnswerSpan
from ragcache.engine import Choice, RequestHandle, RequestOutput, SampledToken, TokenDelta
from ragcache.errors import InvalidRequest
from ragcache.notebooks import TokenChart
from ragcache.retrieval import Hit
from ragcache.store import Lease

_SHOWN = 200
"""Most characters of an answer's text in its `repr`."""


@dataclass(frozen=True, slots=True)
class Citation:
    """A module that an answer was read from."""

    document: str
    """Id of the module's document."""
    module: str
    """Name of the module."""
    uri: str
    """Origin of the document, such as a `file:` URI."""
    score: float
    """Score of the search, as in `Hit.score`. A hybrid search fuses ranks, not scores."""
    tier: str = "computed"
    """Origin of the states: a tier such as `host` or `disk`, `encoded` (computed for this request
    and kept) or `computed` (mode `exact`)."""
    scaffold: str = ""
    """Names of the modules that were encoded together with this one, itself included. Empty for a
    module that was encoded alone."""
    bm25: float | None = None
    """BM25 score of the module's words, if words were compared."""
    cosine: float | None = None
    """Cosine of the module's vector, -1 to 1, if vectors were compared."""
    page: int | None = None
    """Page or slide of the document that the module begins on, if the format has pages."""
    headings: tuple[str, ...] = ()
    """Titles of the sections that the module is in, outermost first."""
    rerank: float | None = None
    """Score of the reranker, 0 to 1, if one was used."""
    text: str = field(default="", repr=False)
    """Text of the module. Empty for a module of a PML prompt."""

    @classmethod
    def of(cls, hit: Hit, scaffold: str = "") -> Citation:
        """Return the citation of a module that was found."""
        module = hit.module
        return cls(
            module.document,
            module.name,
            module.uri,
            hit.score,
            scaffold=scaffold,
            bm25=hit.bm25,
            cosine=hit.cosine,
            page=module.page,
            headings=module.headings,
            rerank=hit.rerank,
            text=module.text,
        )


@dataclass(frozen=True, slots=True)
class Reuse:
    """Token counts of a prompt: cached + shared + computed = prompt."""

    prompt_tokens: int
    """Tokens of the whole prompt."""
    cached_tokens: int
    """Tokens whose states were in the store."""
    computed_tokens: int
    """Tokens that were computed for this request."""
    shared_tokens: int = 0
    """Tokens of the question whose states were in the engine already, from another request over the
    same documents."""
    bytes_moved: Mapping[str, int] = field(default_factory=dict)
    """Bytes that were read from each tier below the first one."""
    created_tokens: int = 0
    """Computed tokens of modules whose states were kept."""
    replaced_mode: str | None = None
    """Mode that was asked for, if the answer is in `exact` because the gate still measures the
    mode."""
    resumed_tokens: Mapping[str, int] = field(default_factory=dict)
    """Cached tokens of the conversation's earlier turns, by the tier of their states."""

    def _repr_svg_(self) -> str:
        """Return a bar of the tokens for notebooks."""
        return TokenChart({"prompt": self})._repr_svg_()


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of one answer, in seconds."""

    retrieve: float
    """Retrieval. Requests of one batch are retrieved together and report the same duration."""
    assemble: float
    """Leasing the states, with copies from lower tiers and encoding of missing states."""
    first_token: float
    """From the call to the first token of the answer."""
    total: float
    """From the call to the end of the answer."""
    queued: float = 0.0
    """Waiting in the engine's queue and, before that, for the request's turn in a service."""
    rerank: float = 0.0
    """Part of `retrieve` that the reranker took."""

    def after_wait(self, seconds: float) -> Timings:
        """Return the durations of a call that waited for its turn before it began."""
        return replace(
            self,
            first_token=self.first_token + seconds,
            total=self.total + seconds,
            queued=self.queued + seconds,
        )


@dataclass(frozen=True, slots=True, repr=False)
class Answer:
    """An answer with its sources, its costs and its confidence."""

    question: str
    """The question, the user's last message, or the new text of a PML prompt."""
    text: str
    """Text of the first choice, without outer whitespace."""
    sources: tuple[Citation, ...]
    """Modules that the answer was read from."""
    mode: str
    """Mode of the call, or `recognized:MODE` for a chat that reads modules."""
    finish_reason: str
    """`stop`, `length`, `repetition` (`GenerationParams.repetition_limit`), `no_documents` if
    retrieval found nothing, or `no_answer` if the answer was refused because its confidence was
    below `GenerationParams.min_confidence`."""
    reuse: Reuse
    """Tokens of the prompt that were read and computed."""
    timings: Timings
    """Durations, in seconds."""
    choices: tuple[Choice, ...] = ()
    """All `n` answers as they were generated, with tokens and, on request, log-probabilities."""
    spans: tuple[AnswerSpan, ...] = ()
    """Places of an extractive answer in the documents: first the places of the first choice, from
    the best source on. Empty for other answers and for refusals."""
    confidence: float | None = None
    """Probability, 0 to 1, that the first choice is right, also if it was refused. Set on request
    and for calibrated answers."""
    prompt_logprobs: tuple[SampledToken, ...] = ()
    """Tokens of the prompt with their log-probabilities, if `GenerationParams.prompt_logprobs` is
    set. The first token has none."""

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[: _SHOWN - 1]}…"
        named = list(dict.fromkeys(source.document for source in self.sources))
        more = "" if self.confidence is None else f", confidence={self.confidence:.2f}"
        return (
            f"Answer({text!r}, finish_reason={self.finish_reason!r}, mode={self.mode!r}, "
            f"sources={named!r}{more})"
        )

    def _repr_html_(self) -> str:
        """Return the answer with its sources and the tokens of its prompt for notebooks."""
        named = dict.fromkeys(
            source.document if source.page is None else f"{source.document}, page {source.page}"
            for source in self.sources
        )
        sources = "".join(f"<li>{escape(name)}</li>" for name in named)
        facts = [self.finish_reason, self.mode]
        facts += [] if self.confidence is None else [f"confidence {self.confidence:.2f}"]
        return (
            f"<p><b>{escape(self.question)}</b></p><p>{escape(self.text)}</p><ul>{sources}</ul>"
            f"<p><small>{escape(' · '.join(facts))}</small></p>{self.reuse._repr_svg_()}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain values for JSON.

        `Choice.first_logprobs` is left out, and `prompt_logprobs` unless the request asked for it.
        """
        plain = asdict(self)
        if not self.prompt_logprobs:
            del plain["prompt_logprobs"]
        for choice in plain["choices"]:
            del choice["first_logprobs"]
        return plain


@dataclass(frozen=True, slots=True)
class Timestamps:
    """Readings of `time.perf_counter` before the engine takes over, in seconds."""

    called: float = 0.0
    """Begin of the call."""
    retrieved: float = 0.0
    """End of retrieval."""
    assembled: float = 0.0
    """Time at which the prompt's states were leased."""
    rerank: float = 0.0
    """Duration of reranking."""


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
    """Tokens of the prompt whose states are read, by tier, or `encoded` for new states."""
    replaced_mode: str | None = None
    """Mode that `exact` replaces while the gate measures it."""
    resumed_tokens: Mapping[str, int] = field(default_factory=dict)
    """See `Reuse.resumed_tokens`."""
    policies: tuple[AnswerPolicy, ...] = ()
    """Features of the answer, in the order in which they finish it."""

    def answer(self, finished: AnswerOutput) -> Answer:
        """Return the whole answer."""
        completion, times = finished.output, self.timestamps
        kept = self.cached_tokens + completion.shared_tokens
        reuse = Reuse(
            self.prompt_tokens,
            self.cached_tokens,
            self.prompt_tokens - kept,
            completion.shared_tokens,
            self.bytes_moved,
            self.created_tokens,
            self.replaced_mode,
            self.resumed_tokens,
        )
        timings = Timings(
            retrieve=times.retrieved - times.called,
            assemble=times.assembled - times.retrieved,
            first_token=completion.first_token_at - times.called,
            total=completion.finished_at - times.called,
            queued=completion.admitted_at - completion.submitted_at,
            rerank=times.rerank,
        )
        return Answer(
            self.question,
            completion.choices[0].text.strip(),
            self.sources,
            self.mode,
            completion.finish_reason,
            reuse,
            timings,
            completion.choices,
            finished.spans,
            next(iter(finished.confidences), None),
            completion.prompt_logprobs,
        )


class DeferredReleases:
    """Leases that end later, because their request ended where nothing may block.

    Such places are event loops and the garbage collector. The next call releases the leases before
    it leases anything itself.
    """

    def __init__(self) -> None:
        self._leases: SimpleQueue[Lease] = SimpleQueue()
        self._lock = threading.Lock()
        self._answers: WeakSet[PendingAnswer] = WeakSet()

    def watch(self, answer: PendingAnswer) -> None:
        """Let `release_finished` end the lease of an answer whose caller has not taken it."""
        with self._lock:
            self._answers.add(answer)

    def release_finished(self) -> None:
        """Release the leases of all requests that have ended, for a lease that waits for room."""
        self.release()
        with self._lock:
            done = [answer for answer in self._answers if answer.handle.done]
            self._answers.difference_update(done)
        for answer in done:
            answer.release()

    def put(self, *leases: Lease | None) -> None:
        """Take over leases that are not None. Never blocks, and may run at any line of a thread."""
        for lease in leases:
            if lease is not None:
                self._leases.put(lease)

    def release(self) -> None:
        """Release all of the leases."""
        with suppress(Empty):
            while True:
                self._leases.get_nowait().release()


class PendingAnswer:
    """A submitted request with the leases of its states.

    The leases end with the request. Dropping the last reference cancels the request.
    """

    def __init__(
        self,
        prepared: PreparedAnswer,
        handle: RequestHandle[TokenDelta, RequestOutput],
        deferred: DeferredReleases,
        *leases: Lease | None,
    ) -> None:
        self.prepared, self.handle = prepared, handle
        self._output: AnswerOutput | None = None
        self._lease_end = weakref.finalize(self, deferred.put, *leases)
        self._lease_end.atexit = False
        if any(lease is not None for lease in leases):
            deferred.watch(self)

    def result(self) -> Answer:
        """Wait for the answer. Raises the error of a failed request."""
        return self.prepared.answer(self.output())

    def output(self) -> AnswerOutput:
        """Wait for the engine's output, and let the policies finish it."""
        if self._output is None:
            try:
                answer = AnswerOutput(self.handle.result())
            finally:
                self.handle.cancel()  # does nothing, unless the wait was interrupted
                self.release()
            for policy in self.prepared.policies:
                passes = [each.result() for each in policy.follow_up(answer.output)]
                answer = policy.finish(answer, passes)
            self._output = answer
        return self._output

    async def aresult(self) -> Answer:
        """Wait for the answer without blocking. Canceling the task cancels the request."""
        return self.prepared.answer(await self.aoutput())

    async def aoutput(self) -> AnswerOutput:
        """Wait for the finished output without blocking."""
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
        """Whether `result` returns at once."""
        waits = self._output is None and any(p.follows_up for p in self.prepared.policies)
        return self.handle.done and not waits

    @property
    def holds(self) -> bool:
        """Whether a stream shows nothing before the answer is finished."""
        return any(policy.holds for policy in self.prepared.policies)

    def release_deltas(self, deltas: list[TokenDelta], finished: AnswerOutput) -> list[TokenDelta]:
        """Return the deltas to show of a stream that was held until its answer was finished."""
        for policy in self.prepared.policies:
            deltas = policy.release(deltas, finished)
        return deltas

    def give_up(self) -> None:
        """Cancel the request, unless it has ended. Never blocks."""
        self.handle.cancel()
        self._lease_end()

    def release(self) -> None:
        """Release the leases, in the caller's thread."""
        held = self._lease_end.detach()
        for lease in () if held is None else held[2]:
            if lease is not None:
                lease.release()


def results(pending: Sequence[PendingAnswer]) -> list[Answer]:
    """Wait for all answers, in order. If one fails, all requests are canceled."""
    try:
        return [each.result() for each in pending]
    finally:
        give_up(pending)


async def aresults(pending: Sequence[PendingAnswer]) -> list[Answer]:
    """Wait for all answers without blocking. If one fails, all requests are canceled."""
    try:
        return [await each.aresult() for each in pending]
    finally:
        give_up(pending)


def give_up(pending: Sequence[PendingAnswer]) -> None:
    """Cancel the requests that have not ended."""
    for each in pending:
        each.give_up()


def _replaced_texts(output: RequestOutput, answer: AnswerOutput) -> Iterator[TokenDelta]:
    """Yield the texts that policies gave to choices without text."""
    pairs = zip(output.choices, answer.output.choices, strict=True)
    for number, (generated, finished) in enumerate(pairs):
        if finished.text.strip() and not generated.text.strip():
            yield TokenDelta(number, None, finished.text)


class _Stream:
    """Base of the streams for threads and for asyncio."""

    def __init__(self, pending: PendingAnswer) -> None:
        self._pending = pending

    @property
    def question(self) -> str:
        """The question, the user's last message, or the new text of a PML prompt."""
        return self._pending.prepared.question

    @property
    def mode(self) -> str:
        """The mode of the call, or `recognized:MODE` for a chat that reads modules."""
        return self._pending.prepared.mode

    @property
    def sources(self) -> tuple[Citation, ...]:
        """Modules that the answer is read from. Known before the first token."""
        return self._pending.prepared.sources

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt. Known before the first token."""
        return self._pending.prepared.prompt_tokens

    @property
    def read_tokens(self) -> Mapping[str, int]:
        """Tokens of the prompt whose states are read, by tier, or `encoded` for new states."""
        return self._pending.prepared.tokens

    @property
    def state(self) -> str:
        """`waiting` in the engine's queue, `computing` the prompt, or `generating` the answer."""
        return self._pending.handle.channel.state

    @property
    def generated(self) -> int:
        """Number of pieces that the engine has generated so far, including unread ones."""
        return self._pending.handle.channel.count

    @property
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            InvalidRequest: The answer has not ended.
            RequestError: The request failed.
        """
        if not self._pending.done:
            raise InvalidRequest("the answer is still under way; read its pieces first")
        return self._pending.result()

    def close(self) -> None:
        """Cancel the request, unless it has ended. Never blocks."""
        self._pending.give_up()


class AnswerStream(_Stream):
    """A stream of pieces of an answer's text, for threads.

    Iterating yields pieces of the first choice as soon as they are final. Joined and stripped of
    outer whitespace, they are `answer.text`. Leaving the iteration early, or `close`, cancels the
    request.

    Example:
        >>> with rag.stream("How many days of leave are there?", collection="handbook") as stream:
        ...     for piece in stream:
        ...         print(piece, end="")
        >>> sources = stream.answer.sources
    """

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces():
            if piece.choice == 0 and piece.text:
                yield piece.text

    def pieces(self) -> Iterator[TokenDelta]:
        """Yield new tokens and text of all choices.

        If the answer may be refused, everything comes at the end.
        """
        pending = self._pending
        try:
            if pending.holds:
                finished = pending.output()
                yield from pending.release_deltas(list(pending.handle), finished)
            else:
                yield from pending.handle
                yield from _replaced_texts(pending.handle.result(), pending.output())
        except BaseException:  # also where the garbage collector ends the iteration
            pending.give_up()
            raise
        pending.release()

    def result(self) -> Answer:
        """Wait for the end, and return the whole answer."""
        return self._pending.result()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncAnswerStream(_Stream):
    """A stream of pieces of an answer's text, for asyncio.

    Iterates as `AnswerStream` does. Awaiting the stream returns the `Answer`. Canceling the task
    that iterates or awaits cancels the request.
    """

    async def __aiter__(self) -> AsyncIterator[str]:
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                if piece.choice == 0 and piece.text:
                    yield piece.text

    async def pieces(self) -> AsyncGenerator[TokenDelta, None]:
        """Yield new tokens and text of all choices.

        If the answer may be refused, everything comes at the end.
        """
        pending = self._pending
        try:
            if pending.holds:
                finished = await pending.aoutput()
                held = [each async for each in pending.handle]
                for piece in pending.release_deltas(held, finished):
                    yield piece
            else:
                async for piece in pending.handle:
                    yield piece
                for piece in _replaced_texts(pending.handle.result(), await pending.aoutput()):
                    yield piece
        finally:
            pending.give_up()

    def __await__(self) -> Generator[Any, None, Answer]:
        return self._pending.aresult().__await__()

    async def __aenter__(self) -> AsyncAnswerStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
