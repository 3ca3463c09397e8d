"""Who leaves a request cancels it, and the engine hears of it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import pytest

from ragcache.engine.handle import Handle
from ragcache.errors import RequestCancelled
from tests.ragcache.engine.conftest import (
    LONG,
    IntChannel,
    IntHandle,
    Wakes,
    iterate,
    waiting,
    write,
)


def leave_a_loop(handle: IntHandle) -> None:
    for _ in handle:
        break


def raise_in_a_loop(handle: IntHandle) -> None:
    with suppress(ZeroDivisionError):
        for event in handle:
            event // 0


def leave_an_async_loop(handle: IntHandle) -> None:
    async def leave() -> None:
        async for _ in handle:
            break

    asyncio.run(leave())


def close_an_async_iteration(handle: IntHandle) -> None:
    async def close() -> None:
        events = aiter(handle)
        assert await anext(events) == 0
        await events.aclose()  # type: ignore[attr-defined]
        assert handle.done

    asyncio.run(close())


def cancel_a_task_that_awaits(handle: IntHandle) -> None:
    async def cancel() -> None:
        task = asyncio.ensure_future(handle)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())


def cancel_a_task_that_iterates(handle: IntHandle) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(iterate(handle))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())


def wait_too_short_in_a_loop(handle: IntHandle) -> None:
    async def wait() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle, 0.01)

    asyncio.run(wait())


WAYS_TO_LEAVE = (
    Handle.cancel,
    leave_a_loop,
    raise_in_a_loop,
    leave_an_async_loop,
    close_an_async_iteration,
    cancel_a_task_that_awaits,
    cancel_a_task_that_iterates,
    wait_too_short_in_a_loop,
)


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE, ids=lambda way: way.__name__)
def test_cancellation_follows_from_leaving_early(
    leave: Callable[[IntHandle], None],
    channel: IntChannel,
    handle: IntHandle,
    wakes: Wakes,
) -> None:
    channel.put(0)
    leave(handle)
    assert (channel.cancelled, wakes.count) == (True, 1)
    assert channel._waiters == []
    channel.put(1)
    channel.finish("too late")
    with pytest.raises(RequestCancelled):
        handle.result()


def test_cancellation_ends_what_others_wait_for(
    channel: IntChannel, handle: IntHandle, threads: ThreadPoolExecutor
) -> None:
    async def ask() -> str:
        return await handle

    others = [
        threads.submit(handle.result),
        threads.submit(lambda: str(list(handle))),
        threads.submit(asyncio.run, ask()),
    ]
    waiting(channel, 3)
    handle.cancel()
    for other in others:
        with pytest.raises(RequestCancelled):
            other.result(LONG)


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_cancellation_follows_from_losing_the_handle(
    in_a_cycle: bool, channel: IntChannel, wakes: Wakes
) -> None:
    channel.put(0)
    held: list[object] = [IntHandle(channel)]
    if in_a_cycle:
        held.append(held)
    assert not channel.cancelled
    del held
    gc.collect()
    assert (channel.cancelled, wakes.count) == (True, 1)


def test_cancellation_does_not_follow_from_losing_the_handle_of_an_ended_request(
    channel: IntChannel, wakes: Wakes
) -> None:
    handle = IntHandle(channel)
    channel.finish("the end")
    del handle
    gc.collect()
    assert (channel.cancelled, wakes.count) == (False, 0)


def test_cancellation_does_not_strike_who_iterates_or_waits_without_another_reference(
    wakes: Wakes, threads: ThreadPoolExecutor
) -> None:
    channels = [IntChannel(wakes) for _ in range(3)]

    async def ask() -> str:
        return await IntHandle(channels[2])

    callers: list[Future[object]] = [
        threads.submit(lambda: list(IntHandle(channels[0]))),
        threads.submit(lambda: IntHandle(channels[1]).result()),
        threads.submit(asyncio.run, ask()),
    ]
    for channel in channels:
        waiting(channel)
    gc.collect()
    for channel in channels:
        write(channel, 2)
    assert [caller.result(LONG) for caller in callers] == [[0, 1], "the end", "the end"]
    assert wakes.count == 0


def test_cancellation_by_a_collection_inside_of_a_put_does_not_lock_up(
    channel: IntChannel, wakes: Wakes
) -> None:
    iterations = [iter(IntHandle(channel))]
    channel.put(0)
    next(iterations[0])

    def collect_inside() -> None:
        with channel._lock:  # as `put` holds it when the collector runs
            iterations.clear()

    thread = threading.Thread(target=collect_inside, daemon=True)
    thread.start()
    thread.join(LONG)
    assert not thread.is_alive()
    assert (channel.cancelled, wakes.count) == (True, 1)


def test_cancellation_is_heard_by_the_engine_from_another_thread(
    channel: IntChannel, handle: IntHandle, wakes: Wakes, threads: ThreadPoolExecutor
) -> None:
    woken = threads.submit(wakes.wait)
    handle.cancel()
    woken.result(LONG)
    assert channel.cancelled


def leave_waiting(handle: IntHandle) -> None:
    """Closes a loop under a task that waits for the handle's next event."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(iterate(handle))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert not task.done()


def test_a_closed_loop_does_not_break_the_engine(channel: IntChannel, handle: IntHandle) -> None:
    leave_waiting(handle)
    assert len(channel._waiters) == 1
    write(channel, 2)
    assert handle.result() == "the end"


def test_a_request_that_a_closed_loop_left_is_cancelled_at_its_next_event(
    channel: IntChannel, wakes: Wakes
) -> None:
    leave_waiting(IntHandle(channel))
    assert not channel.cancelled
    channel.put(0)
    gc.collect()
    assert (channel.cancelled, wakes.count) == (True, 1)


def test_a_task_cancelled_right_after_an_event_was_put_ends_in_peace(
    channel: IntChannel, handle: IntHandle
) -> None:
    errors: list[object] = []

    async def cancel() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
        task = asyncio.create_task(iterate(handle))
        await asyncio.sleep(0)
        channel.put(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    asyncio.run(cancel())
    assert errors == []
    assert channel.cancelled
