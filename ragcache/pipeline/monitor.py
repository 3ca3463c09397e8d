"""What operators watch: requests while they run, records of those that ended, and the batch.

A request may end at any line of any thread: in the engine's, in an event loop, in the garbage
collector. Its end is therefore only put into a queue, and a thread of the monitor calls the
observers.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from ragcache.config import NAMESPACE
from ragcache.db import Database
from ragcache.db.listing import module_names
from ragcache.engine import RequestOutput, TokenDelta
from ragcache.engine.handle import RequestChannel
from ragcache.engine.step import BatchSnapshot
from ragcache.errors import RequestCancelled
from ragcache.pipeline.answer import PreparedAnswer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that has not ended.

    id: counts the requests of this process. kind: `question`, `prompt` or `chat`; collection: or
    the schema of a prompt. age: in seconds since the call. generated: pieces of text so far.
    state: `waiting` in the queue, `computing` its prompt, or `generating`.
    """

    id: int
    namespace: str
    kind: str
    collection: str
    age: float
    prompt_tokens: int
    generated: int
    state: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended.

    started: time of the call, in Unix seconds. ttft: seconds to the first token; None if there was
    none. total: seconds to the end. queued: seconds in the engine's queue; None if it was not
    admitted. tokens: of the prompt, by the source of their states: a tier, `encoded`, `shared` or
    `computed`. modules: names of those that were read, each with its tier. outcome: `done`,
    `cancelled` or `failed`. error: class name of the error of a failed request, else empty.
    """

    id: int
    namespace: str
    kind: str
    collection: str
    started: float
    ttft: float | None
    total: float
    queued: float | None
    prompt_tokens: int
    cached_tokens: int
    shared_tokens: int
    computed_tokens: int
    generated: int
    tokens: Mapping[str, int]
    modules: tuple[tuple[str, str], ...]
    outcome: str
    error: str = ""


Observer = Callable[[RequestRecord], None]


@dataclass(frozen=True, slots=True, eq=False)
class _MonitoredRequest:
    id: int
    namespace: str
    prepared: PreparedAnswer
    channel: RequestChannel[TokenDelta, RequestOutput]


class RequestMonitor:
    """Follows the requests of all namespaces. No lock is taken where a request begins or ends."""

    def __init__(self) -> None:
        self._running: dict[int, _MonitoredRequest] = {}
        self._numbers = itertools.count(1)
        self._ended: SimpleQueue[tuple[_MonitoredRequest, float, float] | None] = SimpleQueue()
        self._observers: tuple[Observer, ...] = ()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(
        self, namespace: str, prepared: PreparedAnswer,
        channel: RequestChannel[TokenDelta, RequestOutput],
    ) -> None:  # fmt: skip
        """Follows a request to its end. Holds the channel and not the handle, so that a request
        that nobody waits for is still cancelled."""
        number = next(self._numbers)
        self._running[number] = _MonitoredRequest(number, namespace, prepared, channel)
        channel.call_when_done(partial(self._end, number))

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Calls an observer with the record of every request that ends from now on, in the thread
        of the monitor. Returns a function that removes the observer. Its exceptions are logged."""
        with self._lock:
            self._observers = (*self._observers, observer)
            if self._thread is None:
                name = "ragcache-monitor"
                self._thread = threading.Thread(target=self._notify, name=name, daemon=True)
                self._thread.start()
        return partial(self._remove, observer)

    def running(self, namespace: str) -> list[RunningRequest]:
        """The requests of a namespace that have not ended, the oldest first."""
        now = time.perf_counter()
        found = [each for each in self._running.copy().values() if each.namespace == namespace]
        return [
            RunningRequest(
                each.id, namespace, each.prepared.kind, each.prepared.collection,
                now - each.prepared.timestamps.called, each.prepared.prompt_tokens,
                each.channel.count, each.channel.state,
            )
            for each in found
        ]  # fmt: skip

    def close(self) -> None:
        """Notifies the observers of everything that has ended, and stops the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.put(None)
            thread.join()

    def _end(self, number: int) -> None:
        request = self._running.pop(number, None)
        if request is not None and self._observers:
            self._ended.put((request, time.time(), time.perf_counter()))

    def _remove(self, observer: Observer) -> None:
        with self._lock:
            self._observers = tuple(each for each in self._observers if each is not observer)

    def _notify(self) -> None:
        while (ended := self._ended.get()) is not None:
            record = _record(*ended)
            for observer in self._observers:
                try:
                    observer(record)
                except Exception:
                    logger.exception("an observer failed")


def _record(request: _MonitoredRequest, at: float, now: float) -> RequestRecord:
    """at: end of the request in Unix seconds; now: the same on the clock of its timestamps."""
    prepared, outcome = request.prepared, request.channel.outcome
    done = outcome if isinstance(outcome, RequestOutput) else None
    total = now - prepared.timestamps.called
    tokens, shared, computed = dict(prepared.tokens), 0, 0
    if done is not None:
        shared = done.shared_tokens
        computed = prepared.prompt_tokens - prepared.cached_tokens - shared
        tokens["shared"] = shared
        tokens["computed"] = computed - tokens.get("encoded", 0)
    expected = isinstance(outcome, (RequestOutput, RequestCancelled))
    failed = "" if expected else type(outcome).__name__
    return RequestRecord(
        request.id, request.namespace, prepared.kind, prepared.collection,
        started=at - total,
        ttft=None if done is None else done.first_token_at - prepared.timestamps.called,
        total=total,
        queued=None if done is None else done.admitted_at - done.submitted_at,
        prompt_tokens=prepared.prompt_tokens,
        cached_tokens=prepared.cached_tokens,
        shared_tokens=shared,
        computed_tokens=computed,
        generated=request.channel.count,
        tokens=tokens,
        modules=tuple((source.module, source.tier) for source in prepared.sources),
        outcome="failed" if failed else "cancelled" if done is None else "done",
        error=failed,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchSegment:
    """A segment that several rows of a batch read at once, and how many rows and requests do.

    name: key of its states, with the range if only a part is read. module: its name; None for a
    preamble, a scaffold or a schema's module.
    """

    name: str
    module: str | None
    tokens: int
    requests: int
    rows: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The step that the engine computes now. rows: its new tokens; requests: those that they belong
    to; encodings: modules that are encoded in the same step; segments: the most read first."""

    rows: int
    requests: int
    encodings: int
    segments: tuple[BatchSegment, ...]


def batch_of(view: BatchSnapshot, database: Database, namespace: str) -> Batch:
    """The batch as a namespace may see it. Rows and requests are those of all namespaces; only the
    default namespace sees segments that belong to no module of its own."""
    keys = {use.name: use.name.partition("[")[0] for use in view.segments}
    names: dict[str, str] = {}
    if keys:
        with database.reading() as session:
            names = module_names(session, list(keys.values()), namespace)
    segments = tuple(
        BatchSegment(use.name, names.get(keys[use.name]), use.tokens, use.requests, use.rows)
        for use in view.segments
        if namespace == NAMESPACE or keys[use.name] in names
    )
    return Batch(view.rows, view.requests, view.encodings, segments)
