"""Request handles: events, results, cancellation, and waking event loops."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from ragcache.engine.handle import RequestHandle, Waiter, coalesced_wakeups, running_loop_waker
from ragcache.errors import RequestCancelled
from tests.ragcache.engine.channels import (
    LONG,
    CountingLoop,
    IntChannel,
    IntHandle,
    Wakes,
    finish_with_events,
    iterate,
    wait_for_callers,
)


def test_events_come_in_order_and_then_the_result(channel: IntChannel, handle: IntHandle) -> None:
    finish_with_events(channel, 3)
    assert [list(handle), list(handle)] == [[0, 1, 2]] * 2, "every iteration gets all"
    assert handle.result() == "the end"


def test_a_caller_waits_for_the_launch_or_the_end(
    channel: IntChannel, handle: IntHandle, threads: ThreadPoolExecutor
) -> None:
    assert not handle.wait_launched(0)
    assert channel.waiter_count == 0
    waiting = threads.submit(handle.wait_launched, LONG)
    wait_for_callers(channel)
    channel.mark_launched()
    assert waiting.result(LONG)
    refused = RequestHandle(IntChannel(lambda: None))
    refused.channel.fail(ValueError("never launched"))
    assert refused.wait_launched(0)


def test_events_reach_many_threads_while_they_are_put(
    channel: IntChannel, handle: IntHandle, threads: ThreadPoolExecutor
) -> None:
    readers: list[Future[list[int]]] = [threads.submit(list, handle) for _ in range(6)]
    results = [threads.submit(handle.result) for _ in range(6)]
    wait_for_callers(channel, 12)
    finish_with_events(channel, 500)
    assert [reader.result(LONG) for reader in readers] == [list(range(500))] * 6
    assert [result.result(LONG) for result in results] == ["the end"] * 6


def test_events_reach_several_loops_while_they_are_put(
    channel: IntChannel, handle: IntHandle, threads: ThreadPoolExecutor
) -> None:
    async def read_twice() -> tuple[list[int], list[int], str]:
        return await asyncio.gather(iterate(handle), iterate(handle), handle)

    loops = [threads.submit(asyncio.run, read_twice()) for _ in range(3)]
    wait_for_callers(channel, 9)
    finish_with_events(channel, 500)
    every = list(range(500))
    assert [loop.result(LONG) for loop in loops] == [[every, every, "the end"]] * 3


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_events_put_before_a_failure_come_before_it(
    in_a_loop: bool, channel: IntChannel, handle: IntHandle
) -> None:
    seen = []

    async def read() -> None:
        async for event in handle:
            seen.append(event)
            channel.fail(ValueError("broken"))

    def read_in_thread() -> None:
        for event in handle:
            seen.append(event)
            channel.fail(ValueError("broken"))

    channel.put(0)
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(read()) if in_a_loop else read_in_thread()
    assert seen == [0]


def test_result_times_out(channel: IntChannel, handle: IntHandle, wakes: Wakes) -> None:
    channel.put(0)
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        handle.result(timeout=0.01)
    assert (handle.done, channel.cancelled, wakes.count) == (False, False, 0)
    assert channel.waiter_count == 0, "the waiter has left"
    finish_with_events(channel, 0)
    assert handle.result(timeout=0) == "the end"


def test_awaiting_a_handle_gives_the_result_or_raises(
    channel: IntChannel, handle: IntHandle
) -> None:
    async def ask(handle: IntHandle, end: Callable[[], None]) -> str:
        asyncio.get_running_loop().call_soon(end)
        return await handle

    for _ in range(2):  # in one loop and again in another
        assert asyncio.run(ask(handle, lambda: finish_with_events(channel, 2))) == "the end"
    failing = IntChannel(lambda: None)
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(ask(IntHandle(failing), lambda: failing.fail(ValueError("broken"))))


def test_only_the_first_end_counts(channel: IntChannel, handle: IntHandle, wakes: Wakes) -> None:
    assert not handle.done
    finish_with_events(channel, 1)
    assert handle.done
    channel.put(9)
    channel.fail(ValueError("late"))
    handle.cancel()
    assert (list(handle), handle.result()) == ([0], "the end")
    assert (channel.cancelled, wakes.count) == (False, 0)


def test_event_before_the_waiter_is_added_wakes_it(channel: IntChannel) -> None:
    channel.put(0)  # after the caller looked, before it waits
    woken = threading.Event()
    channel.add_waiter(Waiter(0, woken.set))
    assert woken.is_set()


def leave_a_loop(handle: IntHandle) -> None:
    for _ in handle:
        break


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


async def cancel_a_task_of(waiting: Awaitable[object]) -> None:
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def cancel_a_task_that_awaits(handle: IntHandle) -> None:
    asyncio.run(cancel_a_task_of(handle))


def cancel_a_task_that_iterates(handle: IntHandle) -> None:
    asyncio.run(cancel_a_task_of(iterate(handle)))


def wait_too_short_in_a_loop(handle: IntHandle) -> None:
    async def wait() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle, 0.01)

    asyncio.run(wait())


WAYS_TO_LEAVE = (
    RequestHandle.cancel,
    leave_a_loop,
    leave_an_async_loop,
    close_an_async_iteration,
    cancel_a_task_that_awaits,
    cancel_a_task_that_iterates,
    wait_too_short_in_a_loop,
)


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE, ids=lambda way: way.__name__)
def test_leaving_early_cancels(
    leave: Callable[[IntHandle], None], channel: IntChannel, handle: IntHandle, wakes: Wakes
) -> None:
    channel.put(0)
    leave(handle)
    assert (channel.cancelled, wakes.count) == (True, 1)
    assert channel.waiter_count == 0
    channel.put(1)
    channel.finish("too late")
    with pytest.raises(RequestCancelled):
        handle.result()


def test_cancellation_ends_the_request_for_all_waiters(
    channel: IntChannel, handle: IntHandle, threads: ThreadPoolExecutor
) -> None:
    async def ask() -> str:
        return await handle

    others = [
        threads.submit(handle.result),
        threads.submit(lambda: str(list(handle))),
        threads.submit(asyncio.run, ask()),
    ]
    wait_for_callers(channel, 3)
    handle.cancel()
    for other in others:
        with pytest.raises(RequestCancelled):
            other.result(LONG)


@pytest.mark.parametrize("in_a_cycle", [False, True])
@pytest.mark.parametrize("ended", [False, True])
def test_losing_the_handle_cancels_unless_the_request_has_ended(
    in_a_cycle: bool, ended: bool, channel: IntChannel, wakes: Wakes
) -> None:
    held: list[object] = [IntHandle(channel)]
    if in_a_cycle:
        held.append(held)
    if ended:
        channel.finish("the end")
    assert not channel.cancelled
    del held
    gc.collect()
    assert (channel.cancelled, wakes.count) == (not ended, int(not ended))


def test_iterating_or_waiting_keeps_the_handle_alive(
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
        wait_for_callers(channel)
    gc.collect()
    for channel in channels:
        finish_with_events(channel, 2)
    assert [caller.result(LONG) for caller in callers] == [[0, 1], "the end", "the end"]
    assert wakes.count == 0


def test_garbage_collection_inside_put_does_not_deadlock(channel: IntChannel, wakes: Wakes) -> None:
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


def leave_waiting(handle: IntHandle) -> None:
    """Closes a loop under a task that waits for the handle's next event."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(iterate(handle))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert not task.done()


def test_a_closed_loop_does_not_break_the_engine(channel: IntChannel, handle: IntHandle) -> None:
    leave_waiting(handle)
    assert channel.waiter_count == 1
    finish_with_events(channel, 2)
    assert handle.result() == "the end"


def test_request_of_a_closed_loop_is_cancelled_at_its_next_event(
    channel: IntChannel, wakes: Wakes
) -> None:
    leave_waiting(IntHandle(channel))
    assert not channel.cancelled
    channel.put(0)
    gc.collect()
    assert (channel.cancelled, wakes.count) == (True, 1)


def test_task_cancelled_right_after_an_event_ends_cleanly(
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


def in_a_loop(main: Callable[[], Any]) -> CountingLoop:
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, CountingLoop)
        runner.run(main())
        return loop


async def wake_from_a_thread(count: int, *, at_once: bool) -> None:
    waker = running_loop_waker()
    futures = [waker.new_future() for _ in range(count)]

    def wake_all() -> None:
        if at_once:
            with coalesced_wakeups():
                for future in futures:
                    waker.wake(future)
        else:
            for future in futures:
                waker.wake(future)

    thread = threading.Thread(target=wake_all)
    thread.start()
    await asyncio.wait_for(asyncio.gather(*futures), 60)
    thread.join()


def test_coalesced_wakeups_wake_a_loop_once() -> None:
    loop = in_a_loop(lambda: wake_from_a_thread(32, at_once=True))
    assert loop.woken == 1


def test_each_single_wakeup_arrives() -> None:
    for _ in range(20):
        asyncio.run(wake_from_a_thread(32, at_once=False))


def test_a_cancelled_future_is_skipped() -> None:
    async def main() -> None:
        waker = running_loop_waker()
        gone, waiting = waker.new_future(), waker.new_future()
        gone.cancel()
        waker.wake(gone)
        waker.wake(waiting)
        await asyncio.wait_for(waiting, 60)

    in_a_loop(main)


def test_waking_a_closed_loop_keeps_no_reference() -> None:
    woken = []

    async def main() -> None:
        waker = running_loop_waker()
        woken.append((waker, waker.new_future()))

    loop = weakref.ref(in_a_loop(main))
    waker, future = woken.pop()
    waker.wake(future)
    assert not future.done()
    del waker, future
    gc.collect()
    assert loop() is None


def test_tasks_of_one_loop_share_a_waker() -> None:
    async def main() -> None:
        async def mine() -> object:
            waker = running_loop_waker()
            await asyncio.sleep(0)  # both tasks hold theirs by now
            return waker

        first, second = await asyncio.gather(mine(), mine())
        assert first is second

    in_a_loop(main)
