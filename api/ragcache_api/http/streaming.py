"""Server-sent events of an answer under way."""

# MERGED ragcache_api.http.asking: From a request to an answer: open, wait or stream, and end
#   with the client.

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

import anyio
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Message, Receive, Scope, Send

from ragcache import Answer, AsyncAnswerStream
from ragcache.errors import RequestCancelled
from ragcache_api.http.errors import ErrorInfo, fault_in_stream
from ragcache_api.http.protocol import compact
from ragcache_api.http.requests import ActiveRequest, cancel_on_disconnect
from ragcache_api.http.service import Call

logger = logging.getLogger(__name__)
PING_SECONDS, STALL_SECONDS, WATCH_SECONDS = 15.0, 30.0, 5.0
_BODY = "http.response.body"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Events(EventSourceResponse):
    """Sends events as they come, and a comment in every pause, so that no proxy gives up.

    Stops as soon as the client goes away, also while nothing is sent; where it takes nothing for
    `STALL_SECONDS`; and after `seconds`. Its connection is closed then. close: called when it is
    over, however it ended, even if nothing was ever sent.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], None] = lambda: None,
        seconds: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(events, headers=_HEADERS)
        self._events, self._close, self._seconds = events, close, seconds
        self._sending, self._since = False, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            async with asyncio.timeout(self._seconds) as limit:
                watch = _Watch(self, receive, send, limit)
                try:
                    await self._send_all(send)
                finally:
                    watch.end()
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            try:
                with anyio.CancelScope(shield=True):  # below a scope of whoever mounted the app
                    await self._events.aclose()
            finally:
                self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await self.send_now(send, {"type": "http.response.start", **start})
        async for event in self._events:
            await self.send_now(send, {"type": _BODY, "body": event, "more_body": True})
        self._sending, self._since = True, time.monotonic()  # for good: nothing may follow
        await send({"type": _BODY, "body": b"", "more_body": False})

    async def send_now(self, send: Send, message: Message) -> None:
        """Notes since when the client has not taken it."""
        self._sending, self._since = True, time.monotonic()
        await send(message)
        self._sending, self._since = False, time.monotonic()

    def state(self) -> tuple[bool, float]:
        """Whether something is being sent, and since when, or since when nothing is (seconds)."""
        return self._sending, time.monotonic() - self._since


class _Watch:
    """Ends a response whose client has gone, or takes nothing, and fills its pauses.

    Looks now and then: a timer for each send would cost as much as the send. limit: of the block
    that sends; it ends where the watch fails, too, since nobody would notice a gone client then.
    """

    def __init__(
        self, events: Events, receive: Receive, send: Send, limit: asyncio.Timeout
    ) -> None:
        self._events, self._send, self._limit = events, send, limit
        self._tasks = [self._begin(self._until_gone(receive))]
        self._rest()

    def end(self) -> None:
        self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def _rest(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._look)

    def _look(self) -> None:
        sending, quiet = self._events.state()
        if sending and quiet >= STALL_SECONDS:
            self._stop()
            return
        if not sending and quiet >= PING_SECONDS:
            self._tasks[1:] = [self._begin(self._fill())]
        self._rest()

    async def _fill(self) -> None:
        sending, _ = self._events.state()  # by now something may be, the last event for one
        if not sending:
            comment = {"type": _BODY, "body": KEEPALIVE_COMMENT, "more_body": True}
            await self._events.send_now(self._send, comment)

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stop()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.info("a stream ends, as its client cannot be watched: %r", error)
            self._stop()

    def _stop(self) -> None:
        with suppress(RuntimeError):  # the block has ended, or ends
            self._limit.reschedule(asyncio.get_running_loop().time())


def event(value: Any, name: str | None = None) -> bytes:
    """An event with a value as JSON."""
    return format_sse_event(data_str=compact(value).decode(), event=name)


Opening = Callable[[], Awaitable[AsyncAnswerStream]]
Tell = Callable[[ActiveRequest, AsyncAnswerStream], AsyncGenerator[bytes, None]]
TellFault = Callable[[ErrorInfo], bytes]
TOLD_SECONDS = 5.0  # for the last events after the deadline


async def answered(call: Call, entry: ActiveRequest, *openings: Opening) -> list[Answer]:
    """Whole answers, which are given up if the client goes away."""

    async def open_and_wait() -> list[Answer]:
        streams = [entry.attach(await opening()) for opening in openings]
        return [await stream for stream in streams]

    try:
        entry.answers += await cancel_on_disconnect(call.request, open_and_wait(), call.deadline)
    except RequestCancelled as error:
        raise entry.named(error) from None
    return entry.answers


async def streamed(
    call: Call, entry: ActiveRequest, opening: Opening, tell: Tell, fault: TellFault
) -> Events:
    """Events of an answer. What goes wrong before the first is raised, what comes later is told in
    an event. The entry ends with the response, and gives up what it reads when its time is over,
    whether or not the client reads."""
    running = entry.running
    try:
        stream = entry.attach(await cancel_on_disconnect(call.request, opening(), call.deadline))
        left = call.deadline
    except BaseException as error:
        running.end(entry, error)
        raise
    expiring = asyncio.get_running_loop().call_later(left, entry.expire)

    def close() -> None:
        expiring.cancel()
        running.end(entry, RequestCancelled("the client went away"))

    return Events(_guarded(entry, tell(entry, stream), fault), close, left + TOLD_SECONDS)


async def _guarded(
    entry: ActiveRequest, events: AsyncGenerator[bytes, None], fault: TellFault
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except Exception as error:  # the answer has begun: only an event can tell of it
            named = entry.named(error)
            entry.running.end(entry, named)
            yield fault(fault_in_stream(named))
            return
    entry.running.end(entry)
