"""A request's two ends: no event is lost, and nobody waits in vain."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from ragcache.engine.handle import _Waiter
from tests.ragcache.engine.conftest import (
    LONG,
    IntChannel,
    IntHandle,
    Wakes,
    iterate,
    waiting,
    write,
)


def test_events_come_in_order_and_then_the_result(channel: IntChannel, handle: IntHandle) -> None:
    write(channel, 3)
    assert list(handle) == [0, 1, 2]
    assert handle.result() == "the end"


def test_events_are_given_to_every_iteration_from_the_first_on(
    channel: IntChannel, handle: IntHandle
) -> None:
    write(channel, 3)
    assert [list(handle), list(handle)] == [[0, 1, 2]] * 2


def test_events_reach_many_threads_while_they_are_put(
    channel: IntChannel, handle: IntHandle, threads: ThreadPoolExecutor
) -> None:
    readers: list[Future[list[int]]] = [threads.submit(list, handle) for _ in range(6)]
    results = [threads.submit(handle.result) for _ in range(6)]
    waiting(channel, 12)
    write(channel, 500)
    assert [reader.result(LONG) for reader in readers] == [list(range(500))] * 6
    assert [result.result(LONG) for result in results] == ["the end"] * 6


def test_events_reach_several_loops_while_they_are_put(
    channel: IntChannel, handle: IntHandle, threads: ThreadPoolExecutor
) -> None:
    async def read_twice() -> tuple[list[int], list[int], str]:
        return await asyncio.gather(iterate(handle), iterate(handle), handle)

    loops = [threads.submit(asyncio.run, read_twice()) for _ in range(3)]
    waiting(channel, 9)
    write(channel, 500)
    every = list(range(500))
    assert [loop.result(LONG) for loop in loops] == [[every, every, "the end"]] * 3


def test_events_put_before_a_failure_come_before_it(channel: IntChannel, handle: IntHandle) -> None:
    channel.put(0)
    channel.fail(ValueError("broken"))
    events = iter(handle)
    assert next(events) == 0
    with pytest.raises(ValueError, match="broken"):
        next(events)
    with pytest.raises(ValueError, match="broken"):
        handle.result()


def test_events_put_before_a_failure_come_before_it_in_a_loop(
    channel: IntChannel, handle: IntHandle
) -> None:
    seen = []

    async def read() -> None:
        async for event in handle:
            seen.append(event)
            channel.fail(ValueError("broken"))

    channel.put(0)
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(read())
    assert seen == [0]


def test_the_end_is_waited_for_no_longer_than_wanted(
    channel: IntChannel, handle: IntHandle, wakes: Wakes
) -> None:
    channel.put(0)
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        handle.result(timeout=0.01)
    assert (handle.done, channel.cancelled, wakes.count) == (False, False, 0)
    assert channel._waiters == [], "the waiter has left"
    write(channel, 0)
    assert handle.result(timeout=0) == "the end"


def test_the_end_is_awaited(channel: IntChannel, handle: IntHandle) -> None:
    async def ask() -> str:
        asyncio.get_running_loop().call_soon(write, channel, 2)
        return await handle

    assert asyncio.run(ask()) == "the end"
    assert asyncio.run(ask()) == "the end", "again, in another loop"


def test_the_end_is_raised_where_it_is_awaited(channel: IntChannel, handle: IntHandle) -> None:
    async def ask() -> str:
        asyncio.get_running_loop().call_soon(channel.fail, ValueError("broken"))
        return await handle

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(ask())


def test_the_end_comes_once(channel: IntChannel, handle: IntHandle, wakes: Wakes) -> None:
    assert not handle.done
    write(channel, 1)
    assert handle.done
    channel.put(9)
    channel.fail(ValueError("late"))
    handle.cancel()
    assert (list(handle), handle.result()) == ([0], "the end")
    assert (channel.cancelled, wakes.count) == (False, 0)


def test_an_event_put_while_a_caller_begins_to_wait_wakes_it(channel: IntChannel) -> None:
    channel.put(0)  # after the caller looked, before it waits
    woken = threading.Event()
    channel._join(_Waiter(0, woken.set))
    assert woken.is_set()
