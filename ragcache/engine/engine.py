"""The engine: one thread that runs steps while there is anything to do.

`complete` and `encode` run without a thread, for scripts and measurements.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakSet, ref

import torch

from ragcache.engine.config import EngineConfig, EngineStats
from ragcache.engine.core import EngineCore
from ragcache.engine.encoding import EncodeJob, Encoding, StatesChannel, check_job
from ragcache.engine.handle import RequestChannel, RequestHandle
from ragcache.engine.kv_cache_manager import KVCacheManager
from ragcache.engine.queues import AnswerChannel
from ragcache.engine.request import (
    Request,
    RequestOutput,
    Segment,
    TokenDelta,
    check_composes,
    check_place,
    check_states,
    check_tokens,
    check_window,
    context_length,
)
from ragcache.engine.runner import ModelRunner, runner_for
from ragcache.errors import (
    EngineClosed,
    EngineFailed,
    PromptTooLong,
    QueueFull,
    UnsupportedModel,
)
from ragcache.machine import YOUNG_OBJECTS, close_at_exit, frozen_heap
from ragcache.models import CausalLM
from ragcache.openmp import fit_threads, give_workers_back
from ragcache.states import KVStates
from ragcache.states.quantization import StoredStates

logger = logging.getLogger(__name__)

Message = Callable[[], None]


class RequestChecker:
    """Checks requests against the model's window and the engine's pool. Thread-safe."""

    def __init__(self, runner: ModelRunner, kv_manager: KVCacheManager) -> None:
        self._runner, self._kv_manager = runner, kv_manager
        self._checked = WeakSet[StoredStates]()  # states that have passed the check

    def check_request(self, request: Request) -> None:
        """Check a request that is about to be submitted.

        Raises `PromptTooLong`, `UnsupportedModel` or `InvalidRequest` if it could never run.
        """
        context, model = request.context, self._runner.model
        if context.segments:
            check_composes(model)
        for segment in context.segments:
            self._check_segment(segment)
        check_tokens(
            context.token_ids,
            context.position_ids,
            vocabulary=model.vocabulary,
            window=model.window,
        )
        if not model.scheme.movable and any(each.delta for each in context.segments):
            raise UnsupportedModel(
                "the model's positions are absolute, so that cached states cannot stand elsewhere "
                "than where they were encoded; place schemas with placement='schema'"
            )
        self.check_sizes(
            own=len(context.token_ids),
            documents=context.cached_tokens,
            end=context.next_position,
            max_tokens=request.max_tokens,
        )

    def check_jobs(self, jobs: Iterable[EncodeJob]) -> None:
        """Raise `PromptTooLong` or `InvalidRequest` for modules that could never be encoded."""
        for job in jobs:
            check_job(job, self._runner.model)
            if job.root is not None:
                self._check_segment(job.root)

    def _check_segment(self, segment: Segment) -> None:
        runner, states = self._runner, segment.states
        if states not in self._checked:
            check_states(states, runner.model, by_address=runner.asynchronous)
            self._checked.add(states)
        check_place(segment, runner.model.window)

    def check_sizes(
        self, *, own: int, documents: int, end: int, max_tokens: int, recomputed: int = 0
    ) -> None:
        """Raise `PromptTooLong` for a prompt and answer that can never run.

        Args:
            own: Tokens of question and template.
            documents: Tokens of the documents that the prompt reads.
            end: Position after the prompt.
            max_tokens: Maximum length of the answer.
            recomputed: Document tokens that the request computes anew.
        """
        window = self._runner.model.window
        if documents:
            check_window(documents, own, window=window, max_tokens=max_tokens)
        if end + max_tokens > window:
            raise PromptTooLong(
                f"{context_length(window)}, the prompt ends at position {end} and the answer needs "
                f"{max_tokens} more; shorten the prompt"
            )
        tokens = own + recomputed + max_tokens
        if not self._kv_manager.can_hold(tokens):
            limit = " beside those that are cached, which the pool of private states holds"
            raise PromptTooLong(
                f"{context_length(self._pool_tokens, limit)}, the request needs {tokens} tokens of "
                "its own; shorten the prompt, or open the folder with larger private_bytes"
            )

    def max_answer_tokens(self, computed: int, end: int) -> int:
        """Maximum length of an answer after a prompt of `computed` tokens that ends at position
        `end`.

        At least 1, so that `check_sizes` refuses a prompt that leaves no room.
        """
        left = self._pool_tokens - computed
        return max(1, min(left, self._runner.model.window - end))

    @property
    def _pool_tokens(self) -> int:
        pool = self._kv_manager.pool
        return pool.num_blocks * pool.block_size


class LLMEngine:
    """Serves requests from any number of threads and asyncio tasks.

    A request is checked in the caller's thread. Everything else runs in the engine's own thread,
    which reads its inbox between steps. No lock is held while the model computes.

    Args:
        model: The model, wrapped by `ragcache.models.wrap`.
        config: Memory and limits. Defaults to `EngineConfig.for_device`.

    Attributes:
        stream: The CUDA stream of the engine's thread, on which all steps run. None on a CPU.

    Example:
        >>> with LLMEngine(model) as engine:  # doctest: +SKIP
        ...     output = engine.submit_request(Request(context, 64)).result()
    """

    def __init__(self, model: CausalLM, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig.for_device(model.device)
        fit_threads(model.ranks)
        runner = runner_for(
            model,
            prefill_tokens=self.config.prefill_tokens,
            int8_states=self.config.int8_states,
        )
        self._core = EngineCore(runner, self.config)
        self.checker = RequestChecker(runner, self._core.kv_manager)
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._lock = threading.Lock()
        # waiting requests, and some that have left the queue
        self._queue: WeakSet[AnswerChannel] = WeakSet()
        self._open = True
        self._stopping = False
        self._pid = os.getpid()
        self._failure: BaseException | None = None  # that ended the thread
        self.stream = runner.stream
        self._thread = threading.Thread(target=self._serve, name="ragcache-engine", daemon=True)
        self._thread.start()
        model.on_failure(_stopper(self))
        give_workers_back()  # this thread loaded the model
        close_at_exit(self)

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine started."""
        return self._core.stats

    @property
    def is_open(self) -> bool:
        """Whether the engine accepts requests: not closed, not failed, not of a parent process."""
        return self._open and self._pid == os.getpid()

    @property
    def core(self) -> EngineCore:
        """The engine core, for reading. Only the engine's thread may change it."""
        return self._core

    def submit_request(
        self, request: Request, *, follow_up: bool = False
    ) -> RequestHandle[TokenDelta, RequestOutput]:
        """Queue a request.

        Args:
            request: The request.
            follow_up: Whether the request completes one that has ended, such as a pass that
                scores its answer. It takes no place in the queue and is accepted when the queue
                is full, so that finished work is not lost.

        Returns:
            A handle to iterate, wait for or await.

        Raises:
            PromptTooLong: The request exceeds the model's window or the pool.
            UnsupportedModel: The request moves segments, but the model's positions are absolute.
            InvalidRequest: A token is not in the vocabulary, or a segment's states have the
                wrong shape, dtype or device.
            QueueFull: The queue is full.
            EngineClosed: The engine was closed, or opened before this process was forked.
            EngineFailed: The engine's thread has ended.
        """
        self._check_process()
        self.checker.check_request(request)
        if self.stream is None:
            give_workers_back()  # before the engine's thread computes
        channel = AnswerChannel(self._wake)
        now = time.perf_counter()
        with self._lock:
            self._check_open()
            if not follow_up:
                self._take_place(channel)
            self._send(channel, lambda: self._core.add_request(request, channel, now))
        return RequestHandle(channel)

    def encode(self, jobs: Sequence[EncodeJob]) -> RequestHandle[KVStates, None]:
        """Queue modules to encode in the same steps as requests.

        Args:
            jobs: The modules.

        Returns:
            A handle whose events are the states of the jobs, in order. One iteration takes
                them. States that are not taken count against `EngineConfig.encode_bytes` and
                can delay later jobs.

        Raises:
            PromptTooLong: A job exceeds the model's window.
            InvalidRequest: A token or the states of a root do not belong to the model.
            EngineClosed: The engine was closed, or opened before this process was forked.
            EngineFailed: The engine's thread has ended.
        """
        self._check_process()
        self.checker.check_jobs(jobs)
        channel = StatesChannel(self._wake)
        with self._lock:
            self._check_open()
            self._send(channel, lambda: self._core.add_encoding(list(jobs), channel))
        give_workers_back()
        return RequestHandle(channel)

    def close(self, *, drain: bool = False) -> None:
        """Stop the engine's thread. Does nothing in a forked process, which has no such thread.

        Args:
            drain: Whether to finish running requests first. Otherwise they fail with
                `EngineClosed`.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._inbox.put(lambda: self._stop(drain=drain))
        self._thread.join()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_process(self) -> None:
        """Checked before the lock is taken, which another thread may have held at the fork."""
        if self._pid != os.getpid():
            raise EngineClosed.of_fork()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise _thread_ended(self._failure)
        if not self._open:
            raise EngineClosed("the engine is closed; open it again to ask")

    def _take_place(self, channel: AnswerChannel) -> None:
        """Reserve a place in the queue until the request starts, ends or is canceled."""
        if len(self._queue) >= self.config.queue:
            self._queue = WeakSet(each for each in self._queue if each.waits)
        if len(self._queue) >= self.config.queue:
            raise QueueFull(
                f"{len(self._queue)} requests wait already, as many as the queue holds; try again "
                "later, or open the engine with a longer queue"
            )
        self._queue.add(channel)

    def _send(self, channel: RequestChannel[Any, Any], message: Message) -> None:
        """Put a request in the inbox. It fails if the engine cannot take it."""

        def deliver() -> None:
            try:
                message()
            except Exception as error:  # its caller is told, and others are served
                logger.exception("a request could not be taken")
                channel.fail(_step_failed(error))
            except BaseException as error:
                self._refuse_all(error)
                channel.fail(_thread_ended(error))
                raise

        self._inbox.put(deliver)

    def _wake(self) -> None:
        """Make the engine look for canceled requests before its next step."""
        self._inbox.put(_wake_up)

    def _stop(self, *, drain: bool) -> None:
        self._stopping = True
        self._core.lift_encode_budget()  # a caller may close before it takes
        if not drain:
            self._core.fail_all(EngineClosed("the engine was closed before the request ended"))

    def _stop_with(self, error: EngineFailed) -> None:
        """Message of a model whose other processes have ended: the thread ends, too."""
        if self._failure is None:
            raise error

    def _serve(self) -> None:
        try:
            with _computing_on(self.stream):
                self._warm_up()
                # a CPU's steps are too long for a collection to be felt, unless other ranks wait
                alone = self.stream is None and self._core.runner.model.ranks == 1
                with nullcontext() if alone else frozen_heap(YOUNG_OBJECTS):
                    self._run_steps()
        except BaseException as error:  # SystemExit, a panic of Rust: nothing may wait forever
            self._end(error)

    def _warm_up(self) -> None:
        if self.config.warm_up:
            try:
                self._core.warm_up()
            except Exception:  # the first requests will report it
                logger.exception("the engine could not be warmed up")

    def _run_steps(self) -> None:
        while not (self._stopping and not self._core.busy):
            try:
                idle = not self._core.busy or self._core.is_stalled
                self._take_messages(None if idle else self._core.seconds_to_spare())
                self._core.step()
            except Exception as error:  # the thread goes on, whatever a step raised
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Fail all requests after an error in a step. Later requests are served, unless other
        processes of the model have ended."""
        if self._core.runner.model.failure is not None:
            raise error
        logger.exception("a step of the engine failed")
        self._core.fail_all(_step_failed(error))

    def _refuse_all(self, error: BaseException) -> None:
        """Accept no more requests, because of an error that ends the thread."""
        with self._lock:
            self._open, self._failure = False, error

    def _end(self, error: BaseException) -> None:
        """Fail all requests and refuse later ones, after an error that ends the thread."""
        logger.critical("the engine's thread has ended", exc_info=error)
        self._refuse_all(error)
        failing = True
        while failing:  # requests that are still in the inbox join the others, and fail with them
            try:
                self._take_messages(0.0)
                failing = False
            except BaseException:
                logger.exception("a request could not be taken")
        try:
            self._core.fail_all(_thread_ended(error))
        except BaseException:  # all requests have failed by now
            logger.exception("the memory of the engine could not be freed")
        error.with_traceback(None)  # whose frames would keep states

    def _take_messages(self, patience: float | None) -> None:
        """Run all messages of the inbox. Wait for the first one as many seconds as `patience`, or
        without it as long as it takes."""
        try:
            message = self._inbox.get(block=patience != 0, timeout=patience)
            while True:
                message()
                message = self._inbox.get_nowait()
        except Empty:
            return


def _stopper(engine: LLMEngine) -> Callable[[EngineFailed], None]:
    """A function that stops an engine, unless it is gone. A model keeps it as long as it lives."""
    reference = ref(engine)

    def stop(error: EngineFailed) -> None:
        engine = reference()
        if engine is not None:
            engine._inbox.put(partial(engine._stop_with, error))

    return stop


def _wake_up() -> None:
    """Message without an effect: wakes the thread."""


def _step_failed(error: BaseException) -> EngineFailed:
    failure = EngineFailed(f"the engine failed in a step: {error!r}")
    failure.__cause__ = error
    return failure


def _thread_ended(error: BaseException) -> EngineFailed:
    failure = EngineFailed(
        f"the engine's thread has ended after {error!r}, and computes no more requests; close the "
        "engine or the folder, and open it again"
    )
    failure.__cause__ = error
    return failure


MAX_TOKENS_PER_PASS = 2048


def complete(
    model: CausalLM, requests: Sequence[Request], config: EngineConfig | None = None
) -> list[RequestOutput]:
    """Run requests in one batch, in the calling thread.

    Args:
        model: The model.
        requests: Requests, which all run in the same batch.
        config: Memory and limits. Defaults to `EngineConfig.for_device`.

    Returns:
        The outputs, in the order of the requests.

    Raises:
        RagCacheError: As `LLMEngine.submit_request`.
    """
    core = EngineCore(runner_for(model), config or EngineConfig.for_device(model.device))
    checker, handles = RequestChecker(core.runner, core.kv_manager), []
    for request in requests:
        checker.check_request(request)
        channel = AnswerChannel(lambda: None)
        core.add_request(request, channel, time.perf_counter())
        handles.append(RequestHandle(channel))
    with _computing_on(core.runner.stream):
        while core.busy:
            core.step()
    return [handle.result() for handle in handles]


def encode(model: CausalLM, jobs: Sequence[EncodeJob]) -> Iterator[KVStates]:
    """Encode modules in the calling thread.

    Yields:
        The states of each job, in order.

    Raises:
        InvalidRequest: A token or a position is invalid.
        PromptTooLong: A job exceeds the model's window.
    """
    for job in jobs:
        check_job(job, model)
    runner = runner_for(model)
    for batch in _batches(jobs):
        with _computing_on(runner.stream):
            running = [Encoding(model, job) for job in batch]
            while portions := [each for each in running if each.pending]:
                counts = [min(each.pending, MAX_TOKENS_PER_PASS) for each in portions]
                chunks = [e.next_chunk(n) for e, n in zip(portions, counts, strict=True)]
                runner.prepare_batch(chunks)()
                for each, count in zip(portions, counts, strict=True):
                    each.launched(count)
                    each.computed()
            if runner.stream is not None:  # other threads and streams may read the states
                runner.stream.synchronize()
        yield from (each.states() for each in running)


@contextmanager
def _computing_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the block on a CUDA stream, after the work queued so far on the thread's stream."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


def _batches(jobs: Sequence[EncodeJob]) -> Iterator[list[EncodeJob]]:
    batch: list[EncodeJob] = []
    size = 0
    for job in jobs:
        if batch and size + len(job.token_ids) > MAX_TOKENS_PER_PASS:
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += len(job.token_ids)
    if batch:
        yield batch
