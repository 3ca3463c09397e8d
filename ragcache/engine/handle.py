"""A request between its caller and the engine's thread: events one way, cancellation the other.

The engine holds the `RequestChannel`, the caller the `RequestHandle`. No one polls: threads wait on
a lock of their own, asyncio tasks on a future that is set in their loop. A step ends with events
for many requests, whose tasks are mostly in one loop. Waking a loop costs system calls in both
threads and hands over the interpreter, so `coalesced_wakeups` wakes each loop once per step.
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

from ragcache.errors import RequestCancelled

EventT = TypeVar("EventT")
ResultT = TypeVar("ResultT")


UNLAUNCHED = -1
"""A waiter's `seen` that is ready at the launch of the request's first step."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """Woken once: at more than `seen` events, or at the end of the request."""

    seen: float
    """Number of events that the caller has seen, or `UNLAUNCHED`."""
    wake: Callable[[], None]


class RequestChannel(Generic[EventT, ResultT]):
    """The engine's end of a request. One thread puts events; any thread may cancel.

    Args:
        wake: Makes the engine look at `cancelled`. It must take no lock that the current thread
            may hold, because the garbage collector can drop a handle in any thread and at any
            line: `SimpleQueue.put` is safe, `Event.set` is not.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.cancelled = False
        self.started = False  # admitted by the scheduler
        self.launched = False  # its first step has been launched
        self._wake = wake
        self._events: list[EventT] = []  # only grows, so that every reader sees all
        self._outcome: tuple[ResultT] | BaseException | None = None  # the result may be None
        self._waiters: list[Waiter] = []
        self._lock = threading.RLock()  # reentrant: an iteration may be collected within

    @property
    def count(self) -> int:
        """Number of events so far."""
        return len(self._events)

    @property
    def waits(self) -> bool:
        """Whether the request has neither started nor ended."""
        return not self.started and self._outcome is None

    @property
    def waiter_count(self) -> int:
        """Number of callers that wait."""
        return len(self._waiters)

    @property
    def state(self) -> str:
        """`waiting` in the queue, `computing` the prompt, or `generating`."""
        if self._events:
            return "generating"
        return "computing" if self.started else "waiting"

    def event(self, number: int) -> EventT:
        """Return an event to an iterating caller."""
        return self._events[number]

    def put(self, event: EventT) -> None:
        """Hand an event to the caller. Ignored once the request has ended."""
        if self._outcome is not None:
            return
        self._events.append(event)
        if self._waiters:  # a waiter that comes later sees the event
            self._wake_ready()

    def mark_launched(self) -> None:
        """Wake callers that wait for the request's first step to be launched."""
        with self._lock:
            self.launched = True
        self._wake_ready()

    def finish(self, result: ResultT) -> None:
        """End the request with its result. Later ends are ignored."""
        self._end((result,))

    def fail(self, exception: BaseException) -> None:
        """End the request with the error that its caller will see."""
        self._end(exception)

    def cancel(self) -> None:
        """End the request with `RequestCancelled` and wake the engine, unless it has ended."""
        if self._end(RequestCancelled("the request was cancelled before it ended")):
            self.cancelled = True
            self._wake()

    def _end(self, outcome: tuple[ResultT] | BaseException) -> bool:
        with self._lock:
            if self._outcome is not None:
                return False
            self._outcome = outcome
        self._wake_ready()
        return True

    def _wake_ready(self) -> None:
        with self._lock:
            ready = [waiter for waiter in self._waiters if self._is_ready(waiter.seen)]
            self._waiters = [waiter for waiter in self._waiters if waiter not in ready]
        for waiter in ready:
            waiter.wake()

    def _is_ready(self, seen: float) -> bool:
        progress = len(self._events) if self.launched or self._events else UNLAUNCHED
        return self._outcome is not None or progress > seen

    def add_waiter(self, waiter: Waiter) -> None:
        """Wake the waiter once it is ready, possibly at once."""
        with self._lock:
            self._waiters.append(waiter)
        self._wake_ready()  # `put` may not have seen it

    def remove_waiter(self, waiter: Waiter) -> None:
        """Remove a waiter."""
        with self._lock:
            self._waiters = [other for other in self._waiters if other is not waiter]


class RequestHandle(Generic[EventT, ResultT]):
    """The caller's end of a request, for any number of threads and asyncio loops.

    Every iteration, blocking or asynchronous, yields all events from the first one on, and then
    ends or raises the request's error. The request is canceled when an iteration is left early,
    when a task that awaits the handle is canceled, and when the last reference to the handle is
    lost.
    """

    def __init__(self, channel: RequestChannel[EventT, ResultT]) -> None:
        self._channel = channel
        # a weak reference: an error that the caller saw holds its frames, and they the handle
        weakref.finalize(self, _abandon, weakref.ref(channel)).atexit = False

    @property
    def channel(self) -> RequestChannel[EventT, ResultT]:
        """The engine's end. Watching it does not keep the request alive."""
        return self._channel

    @property
    def done(self) -> bool:
        """Whether the request has finished, failed or been canceled."""
        return self._channel._outcome is not None

    def cancel(self) -> None:
        """Cancel the request, unless it has ended: `result` then raises `RequestCancelled`."""
        self._channel.cancel()

    def result(self, timeout: float | None = None) -> ResultT:
        """Wait for the result.

        Args:
            timeout: Maximum time to wait, in seconds. Defaults to no limit.

        Raises:
            TimeoutError: The request has not ended in time. It goes on.
            RagCacheError: The request failed.
        """
        if not self._wait(math.inf, timeout):
            raise TimeoutError(f"the request has not ended within {timeout} s; it goes on")
        return self._get()

    def wait_launched(self, timeout: float) -> bool:
        """Wait until the request's first step has been launched, or the request has ended.

        Returns:
            False after `timeout` seconds.
        """
        return self._wait(UNLAUNCHED, timeout)

    def __await__(self) -> Generator[Any, None, ResultT]:
        return self._result().__await__()

    def __iter__(self) -> Iterator[EventT]:
        seen = 0
        try:
            while self._wait(seen) and seen < len(self._channel._events):
                yield self._channel.event(seen)
                seen += 1
            self._get()  # raises where the request failed
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[EventT]:
        seen = 0
        try:
            while await self._ready(seen) and seen < len(self._channel._events):
                yield self._channel.event(seen)
                seen += 1
            self._get()  # raises where the request failed
        finally:
            self.cancel()

    async def _result(self) -> ResultT:
        try:
            await self._ready(math.inf)
            return self._get()
        finally:
            self.cancel()

    def _get(self) -> ResultT:
        outcome = self._channel._outcome
        assert outcome is not None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome[0]

    def _wait(self, seen: float, timeout: float | None = None) -> bool:
        """Block until the waiter is ready. Returns False after the timeout."""
        if self._channel._is_ready(seen):
            return True
        woken = threading.Lock()  # an `Event` takes longer to wake
        woken.acquire()
        waiter = Waiter(seen, woken.release)
        self._channel.add_waiter(waiter)
        is_woken = False
        try:
            is_woken = woken.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            if not is_woken:
                self._channel.remove_waiter(waiter)
        return is_woken

    async def _ready(self, seen: float) -> bool:
        """Waits in the running loop until there are more than `seen` events or the end."""
        if self._channel._is_ready(seen):
            return True
        waker = running_loop_waker()
        woken = waker.new_future()
        waiter = Waiter(seen, partial(waker.wake, woken))
        self._channel.add_waiter(waiter)
        try:
            await woken
        except BaseException:
            self._channel.remove_waiter(waiter)
            raise
        return True


def _abandon(channel: weakref.ref[RequestChannel[Any, Any]]) -> None:
    if (abandoned := channel()) is not None:
        abandoned.cancel()


class LoopWaker:
    """Sets futures of one event loop from any thread, without taking a lock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    def new_future(self) -> asyncio.Future[None]:
        """Create a future of the loop, for `wake`."""
        return self._loop.create_future()

    def wake(self, future: asyncio.Future[None]) -> None:
        """Set a future soon, in its loop, unless it is done."""
        self._due.append(future)
        if _deferred.wakers is None:
            self.schedule()
        else:
            _deferred.wakers.add(self)

    def schedule(self) -> None:
        """Make the loop set all due futures."""
        if not self._scheduled:  # otherwise the loop has yet to run, and sets all due futures
            self._scheduled = True
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._set_due)

    def _set_due(self) -> None:
        self._scheduled = False
        while self._due:
            future = self._due.popleft()
            if not future.done():
                future.set_result(None)


class _Deferred(threading.local):
    """The wakers that the current thread schedules later. Outside of a block, each is scheduled at
    once."""

    wakers: set[LoopWaker] | None = None


_deferred = _Deferred()
_wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, ref[LoopWaker]] = WeakKeyDictionary()


@contextmanager
def coalesced_wakeups() -> Iterator[None]:
    """Wake each loop at most once, at the end of the block."""
    deferred: set[LoopWaker] = set()
    _deferred.wakers = deferred
    try:
        yield
    finally:
        _deferred.wakers = None
        for waker in deferred:
            waker.schedule()


def running_loop_waker() -> LoopWaker:
    """Return the waker of the running loop, which lives as long as a caller keeps it."""
    loop = asyncio.get_running_loop()
    known = _wakers.get(loop)
    waker = known() if known is not None else None
    if waker is None:
        waker = LoopWaker(loop)
        _wakers[loop] = ref(waker)
    return waker
