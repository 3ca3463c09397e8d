"""A request between its caller and the engine's thread: events one way, cancellation the other.

The engine holds the `RequestChannel`, the caller the `RequestHandle`. Nobody polls: threads wait on
a lock of their own, asyncio tasks on a future that is set in their loop. A step ends with news
for many requests, whose tasks are mostly in one loop. Each wake-up of a loop costs system calls in
both threads and hands the interpreter over, so `coalesced_wakeups` makes one of them all.
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


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """Woken once, when there are more than `seen` events or the request has ended. `UNLAUNCHED`:
    when the first step that computes the request has been launched."""

    seen: float
    wake: Callable[[], None]


class RequestChannel(Generic[EventT, ResultT]):
    """The engine's end. One thread puts events and ends the request; any thread may cancel it.

    wake: tells the engine to look at `cancelled`. A handle is abandoned whenever the garbage
    collector finds it, which may be in the engine's own thread and at any line. `wake` must
    therefore take no lock that this thread may hold: `SimpleQueue.put` is safe, `Event.set` is not.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.cancelled = False
        self.started = False  # the engine has begun to compute it
        self.launched = False  # what computes it needs the engine's thread no longer
        self._wake = wake
        self._events: list[EventT] = []  # only grows, so that every reader sees all
        self._outcome: tuple[ResultT] | BaseException | None = None  # the result may be None
        self._waiters: list[Waiter] = []
        self._lock = threading.RLock()  # reentrant: an iteration may be collected inside of `put`

    @property
    def count(self) -> int:
        """How many events there were."""
        return len(self._events)

    @property
    def waits(self) -> bool:
        """Whether the request is neither begun nor ended."""
        return not self.started and self._outcome is None

    @property
    def waiter_count(self) -> int:
        """How many callers wait for an event or the end."""
        return len(self._waiters)

    @property
    def state(self) -> str:
        """`waiting` in the queue, `computing` the prompt, or `generating`."""
        if self._events:
            return "generating"
        return "computing" if self.started else "waiting"

    def event(self, number: int) -> EventT:
        """An event, for a caller that iterates."""
        return self._events[number]

    def put(self, event: EventT) -> None:
        """Hands an event to the caller. Once the request has ended, events are dropped."""
        with self._lock:
            if self._outcome is not None:
                return
            self._events.append(event)
        self._wake_ready()

    def mark_launched(self) -> None:
        """Wakes the caller that waits for the launch of what computes the request."""
        with self._lock:
            self.launched = True
        self._wake_ready()

    def finish(self, result: ResultT) -> None:
        """Ends the request with its result. The first end counts, later ones are dropped."""
        self._end((result,))

    def fail(self, exception: BaseException) -> None:
        """Ends the request with what its caller will see raised."""
        self._end(exception)

    def cancel(self) -> None:
        """Ends the request with `RequestCancelled`, and wakes the engine, unless it has ended."""
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
        if not self._waiters:
            return
        with self._lock:
            ready = [waiter for waiter in self._waiters if self._is_ready(waiter.seen)]
            self._waiters = [waiter for waiter in self._waiters if waiter not in ready]
        for waiter in ready:
            waiter.wake()

    def _is_ready(self, seen: float) -> bool:
        progress = len(self._events) if self.launched or self._events else UNLAUNCHED
        return self._outcome is not None or progress > seen

    def add_waiter(self, waiter: Waiter) -> None:
        """Wakes the waiter when it is ready, or at once."""
        with self._lock:
            if not self._is_ready(waiter.seen):
                self._waiters.append(waiter)
                return
        waiter.wake()

    def remove_waiter(self, waiter: Waiter) -> None:
        """Removes a waiter that no longer waits."""
        with self._lock:
            self._waiters = [other for other in self._waiters if other is not waiter]


class RequestHandle(Generic[EventT, ResultT]):
    """The caller's end of a request, for any number of threads and asyncio loops.

    Every iteration, blocking or asynchronous, gives all events from the first one on, and then
    ends or raises what made the request fail. Leaving an iteration early cancels the request, and
    so do canceling a task that awaits the handle and losing the last reference to it.
    """

    def __init__(self, channel: RequestChannel[EventT, ResultT]) -> None:
        self._channel = channel
        # a weak reference: an error that the caller saw holds its frames, and they the handle
        weakref.finalize(self, _abandon, weakref.ref(channel)).atexit = False

    @property
    def channel(self) -> RequestChannel[EventT, ResultT]:
        """The engine's end, which can be watched without keeping the request."""
        return self._channel

    @property
    def done(self) -> bool:
        """Whether the request has ended: finished, failed or cancelled."""
        return self._channel._outcome is not None

    def cancel(self) -> None:
        """Cancels the request, unless it has ended: `result` raises `RequestCancelled`."""
        self._channel.cancel()

    def result(self, timeout: float | None = None) -> ResultT:
        """Waits for the end of the request, at most `timeout` seconds. Returns the result.

        Raises:
            TimeoutError: The request has not ended by then; it goes on.
            RagCacheError: What made the request fail.
        """
        if not self._wait(math.inf, timeout):
            raise TimeoutError(f"the request has not ended within {timeout} s; it goes on")
        return self._get()

    def wait_launched(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds until a step that computes the request has been launched,
        or the request has ended; returns whether it has."""
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
        """Blocks until there are more than `seen` events or the end, or until the timeout."""
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
    """Sets futures of one event loop, from any thread and at any line of it: takes no lock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    def new_future(self) -> asyncio.Future[None]:
        """A future of the loop, for `wake`."""
        return self._loop.create_future()

    def wake(self, future: asyncio.Future[None]) -> None:
        """Sets a future soon, in its loop, unless it is done."""
        self._due.append(future)
        if _deferred.wakers is None:
            self.schedule()
        else:
            _deferred.wakers.add(self)

    def schedule(self) -> None:
        """Makes the loop set what is due."""
        if not self._scheduled:  # else the loop has not run yet, and will find all that is due
            self._scheduled = True
            with suppress(RuntimeError):  # the loop was closed: nobody waits there any longer
                self._loop.call_soon_threadsafe(self._set_due)

    def _set_due(self) -> None:
        self._scheduled = False
        while self._due:
            future = self._due.popleft()
            if not future.done():
                future.set_result(None)


class _Deferred(threading.local):
    """The wakers that this thread schedules later; None while it schedules each at once."""

    wakers: set[LoopWaker] | None = None


_deferred = _Deferred()
_wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, ref[LoopWaker]] = WeakKeyDictionary()


@contextmanager
def coalesced_wakeups() -> Iterator[None]:
    """Each loop that this thread wakes within the block is woken once, at its end."""
    deferred: set[LoopWaker] = set()
    _deferred.wakers = deferred
    try:
        yield
    finally:
        _deferred.wakers = None
        for waker in deferred:
            waker.schedule()


def running_loop_waker() -> LoopWaker:
    """The waker of the running loop, which lives as long as a caller keeps it."""
    loop = asyncio.get_running_loop()
    known = _wakers.get(loop)
    waker = known() if known is not None else None
    if waker is None:
        waker = LoopWaker(loop)
        _wakers[loop] = ref(waker)
    return waker
