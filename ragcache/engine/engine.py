"""The engine: one thread that runs steps while there is anything to do.

`complete` and `encode` run without a thread, for scripts and measurements.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from weakref import WeakSet

import torch

from ragcache.engine.config import EngineConfig, EngineStats
from ragcache.engine.core import AnswerChannel, EngineCore
from ragcache.engine.encoding import EncodeJob, Encoding, StatesChannel, check_job
from ragcache.engine.handle import RequestHandle
from ragcache.engine.request import Request, RequestOutput, TokenDelta
from ragcache.engine.runner import runner_for
from ragcache.errors import EngineClosed, EngineFailed, QueueFull
from ragcache.models import CausalLM
from ragcache.openmp import give_workers_back
from ragcache.states import KVStates

logger = logging.getLogger(__name__)

Message = Callable[[], None]


class LLMEngine:
    """Serves requests from any number of threads and tasks.

    A request is checked where it is submitted; everything else happens in the engine's thread,
    which takes messages between steps. No lock is held while the model computes.

    Args:
        model: The model, wrapped by `ragcache.models.wrap`.
        config: Memory and limits; None for the defaults of the model's device.

    Attributes:
        stream: The CUDA stream of the engine's thread, on which all its steps run; None on a CPU.

    Example:
        >>> with LLMEngine(model) as engine:  # doctest: +SKIP
        ...     output = engine.submit_request(Request(context, 64)).result()
    """

    def __init__(self, model: CausalLM, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig.for_device(model.device)
        runner = runner_for(model, prefill_tokens=self.config.prefill_tokens)
        self._core = EngineCore(runner, self.config)
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._lock = threading.Lock()
        # waiting requests, and some that no longer wait
        self._queue: WeakSet[AnswerChannel] = WeakSet()
        self._open = True
        self._stopping = False
        self.stream = runner.stream
        self._thread = threading.Thread(target=self._serve, name="ragcache-engine", daemon=True)
        self._thread.start()
        give_workers_back()  # those of the thread that loaded the model

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine started."""
        return self._core.stats

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return self._open

    @property
    def core(self) -> EngineCore:
        """The core, to read from; only the engine's thread may change it."""
        return self._core

    def submit_request(
        self, request: Request, *, follow_up: bool = False
    ) -> RequestHandle[TokenDelta, RequestOutput]:
        """Queues a request. Returns a handle to iterate, wait for or await.

        Args:
            request: The request.
            follow_up: Whether it completes one that has ended, such as a pass that scores its
                answer. It takes no place of the queue and meets no full one, so that what is
                computed already is not lost.

        Raises:
            PromptTooLong: It could never run, or goes beyond the model's window.
            UnsupportedModel: It moves segments, and the model's positions are learned.
            InvalidRequest: A token is none of the model's, or the states of a segment are not
                those of the model, on its device.
            QueueFull: As many requests wait as the queue holds.
            EngineClosed: The engine was closed.
        """
        self._core.checker.check_request(request)
        give_workers_back()  # before the engine's thread computes
        channel = AnswerChannel(self._wake)
        now = time.perf_counter()
        with self._lock:
            self._check_open()
            if not follow_up:
                self._take_place(channel)
            self._inbox.put(lambda: self._core.add_request(request, channel, now))
        return RequestHandle(channel)

    def encode(self, jobs: Sequence[EncodeJob]) -> RequestHandle[KVStates, None]:
        """Queues modules to encode beside the requests. Returns a handle whose events are the jobs'
        states, in order. They are taken by one iteration, and those not taken bound what is begun:
        see `EngineConfig.encode_bytes`.

        Raises:
            PromptTooLong: A job goes beyond the model's window.
            InvalidRequest: A token or the states of a root are not the model's.
            EngineClosed: The engine was closed.
        """
        self._core.checker.check_jobs(jobs)
        channel = StatesChannel(self._wake)
        with self._lock:
            self._check_open()
            self._inbox.put(lambda: self._core.add_encoding(list(jobs), channel))
        give_workers_back()
        return RequestHandle(channel)

    def close(self, *, drain: bool = False) -> None:
        """Stops the thread. Requests that still run fail with `EngineClosed`, or with `drain` end
        first."""
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

    def _check_open(self) -> None:
        if not self._open:
            raise EngineClosed("the engine is closed; open it again to ask")

    def _take_place(self, channel: AnswerChannel) -> None:
        """A request holds its place until it is begun, has ended or is cancelled."""
        if len(self._queue) >= self.config.queue:
            self._queue = WeakSet(each for each in self._queue if each.waits)
        if len(self._queue) >= self.config.queue:
            raise QueueFull(
                f"{len(self._queue)} requests wait already, as many as the queue holds; try again "
                "later, or open the engine with a longer queue"
            )
        self._queue.add(channel)

    def _wake(self) -> None:
        """Makes the engine look for cancelled requests before its next step."""
        self._inbox.put(_wake_up)

    def _stop(self, *, drain: bool) -> None:
        self._stopping = True
        self._core.lift_encode_budget()  # a caller may close before it takes
        if not drain:
            self._core.fail_all(EngineClosed("the engine was closed before the request ended"))

    def _serve(self) -> None:
        with _computing_on(self.stream):
            self._run_steps()

    def _run_steps(self) -> None:
        if self.config.warm_up:
            try:
                self._core.runner.warm_up()
            except Exception:  # the first requests will tell, each by its own error
                logger.exception("the engine could not be warmed up")
        while not (self._stopping and not self._core.busy):
            self._take_messages(wait=not self._core.busy or self._core.is_stalled)
            try:
                self._core.step()
            except Exception as error:  # the thread goes on, whatever a step raised
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Ends all requests, since any row may have broken the step; later ones are served."""
        logger.exception("a step of the engine failed")
        failure = EngineFailed(f"the engine failed in a step: {error!r}")
        failure.__cause__ = error
        self._core.fail_all(failure)

    def _take_messages(self, *, wait: bool) -> None:
        try:
            message = self._inbox.get(block=wait)
            while True:
                message()
                message = self._inbox.get_nowait()
        except Empty:
            return


def _wake_up() -> None:
    """A message that only wakes the thread."""


MAX_TOKENS_PER_PASS = 2048


def complete(
    model: CausalLM, requests: Sequence[Request], config: EngineConfig | None = None
) -> list[RequestOutput]:
    """Runs requests in one batch, in the calling thread. Returns their outputs, in order. Raises
    what `LLMEngine.submit_request` raises."""
    core = EngineCore(runner_for(model), config or EngineConfig.for_device(model.device))
    handles = []
    for request in requests:
        core.checker.check_request(request)
        channel = AnswerChannel(lambda: None)
        core.add_request(request, channel, time.perf_counter())
        handles.append(RequestHandle(channel))
    with _computing_on(core.runner.stream):
        while core.busy:
            core.step()
    return [handle.result() for handle in handles]


def encode(model: CausalLM, jobs: Sequence[EncodeJob]) -> Iterator[KVStates]:
    """Encodes modules in the calling thread. Yields the states of each job, in order. Raises
    `InvalidRequest` or `PromptTooLong` for one that the model cannot compute."""
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
    """Queues what the block computes on a stream, behind what its thread's own stream has queued;
    the thread's stream and device are as before afterwards."""
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
