"""The engine: one thread that runs steps while there is anything to do."""

# MERGED ragcache.engine.offline: Requests and encodings, run to their end in the caller's own
#   thread: to measure, in scripts.

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from weakref import WeakSet

from ragcache.engine.config import EngineConfig, EngineStats
from ragcache.engine.core import Answers, EngineCore
from ragcache.engine.encoding import EncodeJob, Encoding, States
from ragcache.engine.handle import RequestHandle
from ragcache.engine.request import Request, RequestOutput, TokenDelta
from ragcache.engine.runner import runner_of
from ragcache.errors import EngineClosed, EngineFailed, QueueFull
from ragcache.models import LanguageModel
from ragcache.openmp import give_workers_back
from ragcache.states import KVStates

logger = logging.getLogger(__name__)

Message = Callable[[], None]


class LLMEngine:
    """Serves requests from any number of threads and tasks.

    A request is checked where it is submitted, and everything else happens in the engine's thread,
    which takes messages between steps: no lock is held while the model computes.
    """

    def __init__(self, model: LanguageModel, settings: EngineConfig | None = None) -> None:
        self.settings = settings or EngineConfig()
        self._core = EngineCore(runner_of(model), self.settings)
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._lock = threading.Lock()
        self._queue: WeakSet[Answers] = WeakSet()  # those that wait, and some that no longer do
        self._open = True
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="ragcache-engine", daemon=True)
        self._thread.start()
        give_workers_back()  # of whoever loaded the model

    @property
    def tally(self) -> EngineStats:
        """What was done since the engine started."""
        return self._core.tally

    @property
    def is_open(self) -> bool:
        """Whether requests are taken."""
        return self._open

    @property
    def core(self) -> EngineCore:
        """For looking at; only the engine's thread may change it."""
        return self._core

    def submit(self, request: Request) -> RequestHandle[TokenDelta, RequestOutput]:
        """Queues a request. Raises `PromptTooLong`, `QueueFull` or `EngineClosed`."""
        self._core.check(request)
        channel = Answers(self._wake)
        now = time.perf_counter()
        with self._lock:
            self._check_open()
            self._take_place(channel)
            self._inbox.put(lambda: self._core.add(request, channel, now))
        give_workers_back()
        return RequestHandle(channel)

    def encode(self, jobs: Sequence[EncodeJob]) -> RequestHandle[KVStates, None]:
        """Queues modules to encode beside the requests. Events are their states, in order."""
        channel = States(self._wake)
        with self._lock:
            self._check_open()
            self._inbox.put(lambda: self._core.add_encoding(list(jobs), channel))
        give_workers_back()
        return RequestHandle(channel)

    def close(self, *, drain: bool = False) -> None:
        """Stops the thread. What still runs fails with `EngineClosed`; with `drain` it ends
        first, and only what comes later is refused."""
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

    def _take_place(self, channel: Answers) -> None:
        """A request holds its place until it is begun or has ended, given up by its caller too."""
        if len(self._queue) >= self.settings.queue:
            self._queue = WeakSet(each for each in self._queue if each.waits)
        if len(self._queue) >= self.settings.queue:
            raise QueueFull(
                f"{len(self._queue)} requests wait already, as many as the queue holds; try again "
                "later, or open the engine with a longer queue"
            )
        self._queue.add(channel)

    def _wake(self) -> None:
        """A caller gave a request up: the engine looks at it before its next step."""
        self._inbox.put(_look)

    def _stop(self, *, drain: bool) -> None:
        self._stopping = True
        if not drain:
            self._core.fail_all(EngineClosed("the engine was closed before the request ended"))

    def _serve(self) -> None:
        while not (self._stopping and not self._core.busy):
            self._take_messages(wait=not self._core.busy)
            try:
                self._core.step()
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Nobody knows whose rows broke the step, so all requests end; later ones are served."""
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


def _look() -> None:
    """The message that only wakes."""


TOKENS_A_PASS = 2048


def complete(
    model: LanguageModel, requests: Sequence[Request], settings: EngineConfig | None = None
) -> list[RequestOutput]:
    """Runs the requests together and returns their completions, in order. See `Engine.submit`."""
    core = EngineCore(runner_of(model), settings or EngineConfig())
    handles = []
    for request in requests:
        core.check(request)
        channel = Answers(lambda: None)
        core.add(request, channel, time.perf_counter())
        handles.append(RequestHandle(channel))
    while core.busy:
        core.step()
    return [handle.result() for handle in handles]


def encode(model: LanguageModel, jobs: Sequence[EncodeJob]) -> Iterator[KVStates]:
    """Yields the states of each job, in order. Each run sees its root and, causally, itself."""
    runner = runner_of(model)
    for batch in _batches(jobs):
        under_way = [Encoding(model, job) for job in batch]
        works = [each.work(each.pending) for each in under_way if each.pending]
        if works:
            runner.prepare(works)()
        for each in under_way:
            each.computed(each.pending)
            yield each.states()


def _batches(jobs: Sequence[EncodeJob]) -> Iterator[list[EncodeJob]]:
    batch: list[EncodeJob] = []
    size = 0
    for job in jobs:
        if batch and size + len(job.token_ids) > TOKENS_A_PASS:
            yield batch
            batch, size = [], 0
        batch.append(job)
        size += len(job.token_ids)
    if batch:
        yield batch
