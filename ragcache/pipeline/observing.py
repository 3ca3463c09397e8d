"""Who asked what, while it runs and when it has ended.

A request may end at any line of any thread: in the engine's, in an event loop, in the garbage
collector. So its end is only put into a queue, and a thread of this module's tells the observers.
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

from ragcache.engine import RequestOutput, TokenDelta
from ragcache.engine.handle import RequestChannel
from ragcache.errors import RequestCancelled
from ragcache.pipeline.answer import Ready

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request under way. kind: `question`, `prompt` or `chat`; collection: or the schema. age: in
    seconds. generated: pieces of text so far. state: `waiting` in the queue, `computing` its
    prompt, or `generating`."""

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
    """A request that has ended. started: Unix seconds; ttft, total, queued: seconds, None where
    there was no such moment. tokens: of the prompt, by where their states came from: a tier,
    `encoded`, `shared` or `computed`. modules: names with the tiers. outcome: `done`, `cancelled`
    or `failed`; error: the name of what made it fail."""

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
class _Request:
    id: int
    namespace: str
    ready: Ready
    channel: RequestChannel[TokenDelta, RequestOutput]


class Observing:
    """The requests of all namespaces. No lock is taken where a request begins or ends."""

    def __init__(self) -> None:
        self._running: dict[int, _Request] = {}
        self._numbers = itertools.count(1)
        self._ended: SimpleQueue[tuple[_Request, float, float] | None] = SimpleQueue()
        self._observers: tuple[Observer, ...] = ()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(
        self, namespace: str, ready: Ready, channel: RequestChannel[TokenDelta, RequestOutput]
    ) -> None:
        """Follows a request to its end. It keeps the channel alive and not its handle, so that a
        request that nobody waits for is still given up."""
        number = next(self._numbers)
        self._running[number] = _Request(number, namespace, ready, channel)
        channel.when_done(partial(self._end, number))

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Calls an observer with every request that ends from now on, one after another, in a
        thread of its own; the result ends that. What an observer raises is logged."""
        with self._lock:
            self._observers = (*self._observers, observer)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._tell, name="ragcache-observing", daemon=True
                )
                self._thread.start()
        return partial(self._forget, observer)

    def running(self, namespace: str) -> list[RunningRequest]:
        """The namespace's requests under way, the oldest first."""
        now = time.perf_counter()
        found = [each for each in self._running.copy().values() if each.namespace == namespace]
        return [
            RunningRequest(
                each.id, namespace, each.ready.kind, each.ready.collection,
                now - each.ready.marks.called, each.ready.prompt_tokens, each.channel.count,
                state_of(each.channel),
            )
            for each in found
        ]  # fmt: skip

    def close(self) -> None:
        """Tells what has ended, and stops."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.put(None)
            thread.join()

    def _end(self, number: int) -> None:
        request = self._running.pop(number, None)
        if request is not None and self._observers:
            self._ended.put((request, time.time(), time.perf_counter()))

    def _forget(self, observer: Observer) -> None:
        with self._lock:
            self._observers = tuple(each for each in self._observers if each is not observer)

    def _tell(self) -> None:
        while (ended := self._ended.get()) is not None:
            record = _record(*ended)
            for observer in self._observers:
                try:
                    observer(record)
                except Exception:
                    logger.exception("an observer failed")


def state_of(channel: RequestChannel[TokenDelta, RequestOutput]) -> str:
    """`waiting` in the queue, `computing` the prompt, or `generating`."""
    if channel.count:
        return "generating"
    return "computing" if channel.started else "waiting"


def _record(request: _Request, at: float, now: float) -> RequestRecord:
    """at: when it ended, in Unix seconds; now: the same on the clock of the marks."""
    ready, outcome = request.ready, request.channel.outcome
    done = outcome if isinstance(outcome, RequestOutput) else None
    total = now - ready.marks.called
    tokens, shared, computed = dict(ready.tokens), 0, 0
    if done is not None:
        shared = done.shared_tokens
        computed = ready.prompt_tokens - ready.cached_tokens - shared
        tokens["shared"] = shared
        tokens["computed"] = computed - tokens.get("encoded", 0)
    failed = (
        "" if isinstance(outcome, (RequestOutput, RequestCancelled)) else type(outcome).__name__
    )
    return RequestRecord(
        request.id, request.namespace, ready.kind, ready.collection,
        started=at - total,
        ttft=None if done is None else done.first_token_at - ready.marks.called,
        total=total,
        queued=None if done is None else done.admitted_at - done.submitted_at,
        prompt_tokens=ready.prompt_tokens,
        cached_tokens=ready.cached_tokens,
        shared_tokens=shared,
        computed_tokens=computed,
        generated=request.channel.count,
        tokens=tokens,
        modules=tuple((source.module, source.tier) for source in ready.sources),
        outcome="failed" if failed else "cancelled" if done is None else "done",
        error=failed,
    )  # fmt: skip
