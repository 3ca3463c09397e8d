"""From a request to an answer: open, wait or stream, and end with the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from ragcache import Answer, AsyncAnswerStream
from ragcache.errors import RequestCancelled
from ragcache_api.http.errors import Fault
from ragcache_api.http.faults import fault_in_stream
from ragcache_api.http.running import Entry, unless_gone
from ragcache_api.http.service import Call
from ragcache_api.http.sse import Events

Opening = Callable[[], Awaitable[AsyncAnswerStream]]
Tell = Callable[[Entry, AsyncAnswerStream], AsyncGenerator[bytes, None]]
TellFault = Callable[[Fault], bytes]
TOLD_SECONDS = 5.0  # for the last events after the deadline


async def answered(call: Call, entry: Entry, *openings: Opening) -> list[Answer]:
    """Whole answers, which are given up if the client goes away."""

    async def open_and_wait() -> list[Answer]:
        streams = [entry.attach(await opening()) for opening in openings]
        return [await stream for stream in streams]

    try:
        entry.answers += await unless_gone(call.request, open_and_wait(), call.deadline)
    except RequestCancelled as error:
        raise entry.named(error) from None
    return entry.answers


async def streamed(
    call: Call, entry: Entry, opening: Opening, tell: Tell, fault: TellFault
) -> Events:
    """Events of an answer. What goes wrong before the first is raised, what comes later is told in
    an event. The entry ends with the response, and gives up what it reads when its time is over,
    whether or not the client reads."""
    running = entry.running
    try:
        stream = entry.attach(await unless_gone(call.request, opening(), call.deadline))
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
    entry: Entry, events: AsyncGenerator[bytes, None], fault: TellFault
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
