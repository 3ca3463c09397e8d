"""Channels and handles of integers, engines that count wake-ups, and event loops that do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ragcache.engine.handle import RequestChannel, RequestHandle

LONG = 20.0
"""Seconds that no test waits unless it fails."""

IntChannel = RequestChannel[int, str]
IntHandle = RequestHandle[int, str]


class Wakes:
    """Counts how often the engine was woken, and lets a test wait for it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()

    def __call__(self) -> None:
        self._queue.put(None)

    def wait(self) -> None:
        self._queue.get(timeout=LONG)

    @property
    def count(self) -> int:
        return self._queue.qsize()


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often another thread wakes it, and lets that thread go on only after it has looked
    at what it was woken for: wake-ups that could have been one are never one by chance."""

    woken = 0

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.woken += 1
        handle = super().call_soon_threadsafe(callback, *args, **options)
        time.sleep(0.01)
        return handle


def finish_with_events(channel: IntChannel, count: int) -> None:
    """The engine's part of a request with `count` events."""
    for event in range(count):
        channel.put(event)
    channel.finish("the end")


def wait_for_callers(channel: IntChannel, count: int = 1) -> None:
    """Returns when `count` callers wait on the channel."""
    tick = threading.Event()
    for _ in range(int(LONG * 200)):
        if channel.waiter_count >= count:
            return
        tick.wait(0.005)
    raise AssertionError("nobody waits")


async def iterate(handle: IntHandle) -> list[int]:
    return [event async for event in handle]
