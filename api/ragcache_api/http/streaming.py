"""Answers of requests: awaited whole, or streamed as server-sent events.

An answer is cancelled, and the states that it reads are released, when its client disconnects, when
the client stops reading, or when the deadline passes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import anyio
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ragcache import Answer, AsyncAnswerStream
from ragcache.engine import TokenDelta
from ragcache.errors import RequestCancelled
from ragcache_api.http.envelope import stream_error
from ragcache_api.http.errors import ErrorInfo
from ragcache_api.http.incoming import wait_for_disconnect
from ragcache_api.http.protocol import CompactResponse, compact
from ragcache_api.http.requests import ActiveRequest, cancel_on_disconnect
from ragcache_api.http.service import RequestContext

logger = logging.getLogger(__name__)
PING_SECONDS, STALL_SECONDS, WATCH_SECONDS = 15.0, 30.0, 5.0
LAST_EVENTS_SECONDS = 5.0  # for the last events after the deadline
_BODY = "http.response.body"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Opening = Callable[[], Awaitable[AsyncAnswerStream]]
EventsOf = Callable[[ActiveRequest, AsyncAnswerStream], AsyncGenerator[bytes, None]]
ErrorEvent = Callable[[ErrorInfo], bytes]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one API writes the answers of a request."""

    whole: Callable[[ActiveRequest, list[Answer]], Any]
    """Makes the JSON of a response that is not streamed."""
    events: EventsOf
    """Makes the events of a stream."""
    error: ErrorEvent
    """Makes the event that ends a stream after an error."""


async def respond(
    context: RequestContext,
    answer_format: AnswerFormat,
    kind: str,
    collection: str,
    *openings: Opening,
    stream: bool,
    n: int = 1,
) -> Response:
    """Register a request, and answer it whole or as a stream of its only opening.

    Each opening has `n` choices.
    """
    requests = context.service.requests
    tags = kind, context.caller, collection, len(openings) * n
    if stream:
        active = requests.begin_request(*tags)
        return await _stream_answer(context, active, openings[0], answer_format)
    with requests.track_request(*tags) as active:
        answers = await _complete_answers(context, active, *openings)
        return CompactResponse(answer_format.whole(active, answers))


async def _complete_answers(
    context: RequestContext, active: ActiveRequest, *openings: Opening
) -> list[Answer]:
    """Await whole answers. They are cancelled if the client disconnects."""

    async def open_and_wait() -> list[Answer]:
        await active.wait_for_turn()
        streams = [active.attach(await opening()) for opening in openings]
        return [await stream for stream in streams]

    try:
        answers = await cancel_on_disconnect(context.request, open_and_wait(), context.deadline)
    except RequestCancelled as error:
        raise active.cause_of(error) from None
    for answer in answers:
        active.add_answer(answer)
    return active.answers


async def _stream_answer(
    context: RequestContext, active: ActiveRequest, opening: Opening, answer_format: AnswerFormat
) -> EventStream:
    """Make the response that streams the events of an answer.

    An error before the first event is raised; a later one becomes the last event. The request ends
    with the response, and its deadline cancels it even if the client does not read.
    """
    requests = active.registry

    async def open_in_turn() -> AsyncAnswerStream:
        await active.wait_for_turn()
        return await opening()

    try:
        opened = await cancel_on_disconnect(context.request, open_in_turn(), context.deadline)
        stream, left = active.attach(opened), context.deadline
    except BaseException as error:
        requests.end_request(active, error)
        raise
    expiring = asyncio.get_running_loop().call_later(left, active.expire)

    def close() -> None:
        expiring.cancel()
        requests.end_request(active, RequestCancelled("the client went away"))

    events = answer_format.events(active, stream)
    events = _end_with_error_event(active, events, answer_format.error)
    return EventStream(events, close, left + LAST_EVENTS_SECONDS)


async def _end_with_error_event(
    active: ActiveRequest, events: AsyncGenerator[bytes, None], error_event: ErrorEvent
) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except Exception as error:  # a response that has begun can only end with an event
            cause = active.cause_of(error)
            active.registry.end_request(active, cause)
            yield error_event(stream_error(cause))
            return
    active.registry.end_request(active)


async def deltas_of(
    active: ActiveRequest, stream: AsyncAnswerStream
) -> AsyncGenerator[TokenDelta, None]:
    """Yield the deltas of a stream, then append its answer to the request."""
    async with aclosing(stream.pieces()) as deltas:
        async for delta in deltas:
            yield delta
    active.add_answer(stream.answer)


def format_event(value: Any, name: str | None = None) -> bytes:
    """Write an event with a value as JSON."""
    return format_sse_event(data_str=compact(value).decode(), event=name)


class EventStream(EventSourceResponse):
    """A response of server-sent events.

    A comment in each pause keeps proxies from closing the connection. The response ends when the
    client disconnects, even while nothing is sent; when the client takes nothing for
    `STALL_SECONDS`; and at its own time limit.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None] = lambda: None,
        seconds: float | None = None,
    ) -> None:
        """Prepare the response.

        Args:
            events: Events as `format_event` writes them.
            close: Called when the response ends in any way, even if nothing was sent.
            seconds: Time limit. By default there is none.
        """
        super().__init__(events, headers=_HEADERS)
        self._events, self._close, self._seconds = events, close, seconds
        self._sending, self._since = False, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            async with asyncio.timeout(self._seconds) as limit:
                watch = _StreamWatch(self, receive, send, limit)
                try:
                    await self._send_all(send)
                finally:
                    watch.end()
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            try:
                with anyio.CancelScope(shield=True):  # an app that mounts this may have a scope
                    await self._events.aclose()
            finally:
                self._close()

    async def _send_all(self, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await self.send_now(send, {"type": "http.response.start", **start})
        async for event in self._events:
            await self.send_now(send, {"type": _BODY, "body": event, "more_body": True})
        self._sending, self._since = True, time.monotonic()  # for good: no comment may follow
        await send({"type": _BODY, "body": b"", "more_body": False})

    async def send_now(self, send: Send, message: Message) -> None:
        """Send a message, and record since when the client has not taken it."""
        self._sending, self._since = True, time.monotonic()
        await send(message)
        self._sending, self._since = False, time.monotonic()

    def state(self) -> tuple[bool, float]:
        """Return whether a message is being sent, and the seconds since that last changed."""
        return self._sending, time.monotonic() - self._since


class _StreamWatch:
    """Ends a response whose client is gone or stalls, and sends comments in its pauses.

    The watch looks every `WATCH_SECONDS`: a timer for each message would cost as much as sending
    it. If the watch itself fails, the response ends too, since a lost client would go unnoticed.
    """

    def __init__(
        self, events: EventStream, receive: Receive, send: Send, limit: asyncio.Timeout
    ) -> None:
        """Begin to watch. `limit` is the timeout of the block that sends the response."""
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
            self._tasks[1:] = [self._begin(self._ping())]
        self._rest()

    async def _ping(self) -> None:
        sending, _ = self._events.state()  # a send may have begun since, even the last one
        if not sending:
            comment = {"type": _BODY, "body": KEEPALIVE_COMMENT, "more_body": True}
            await self._events.send_now(self._send, comment)

    async def _until_gone(self, receive: Receive) -> None:
        await wait_for_disconnect(receive)
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
        with suppress(RuntimeError):  # the block has ended, or is ending
            self._limit.reschedule(asyncio.get_running_loop().time())
