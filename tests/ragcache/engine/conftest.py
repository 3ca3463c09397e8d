"""The two ends of a request, as the tests of the engine hold them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest

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


@pytest.fixture
def wakes() -> Wakes:
    return Wakes()


@pytest.fixture
def channel(wakes: Wakes) -> IntChannel:
    return IntChannel(wakes)


@pytest.fixture
def handle(channel: IntChannel) -> IntHandle:
    return IntHandle(channel)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def write(channel: IntChannel, count: int) -> None:
    """The engine's part of a request with `count` events."""
    for event in range(count):
        channel.put(event)
    channel.finish("the end")


def waiting(channel: IntChannel, count: int = 1) -> None:
    """Returns when `count` callers wait on the channel."""
    tick = threading.Event()
    for _ in range(int(LONG * 200)):
        if len(channel._waiters) >= count:
            return
        tick.wait(0.005)
    raise AssertionError("nobody waits")


async def iterate(handle: IntHandle) -> list[int]:
    return [event async for event in handle]
