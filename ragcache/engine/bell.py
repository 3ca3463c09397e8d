"""Waking tasks of event loops from other threads.

A step ends with news for many requests, whose tasks mostly stand in one loop. Each wake-up of a
loop costs system calls in both threads and hands the interpreter over, so that one wake-up tells of
all.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary, ref


class Bell:
    """Sets futures of one loop. May be rung in any thread and at any line of it: takes no lock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: deque[asyncio.Future[None]] = deque()
        self._rung = False

    def waiter(self) -> asyncio.Future[None]:
        """A future to ring for."""
        return self._loop.create_future()

    def ring(self, future: asyncio.Future[None]) -> None:
        """Sets a future soon, in its loop, unless it is done."""
        self._due.append(future)
        if _held.bells is None:
            self._tell()
        else:
            _held.bells.add(self)

    def _tell(self) -> None:
        if not self._rung:  # else the loop has not looked yet, and will find all that is due
            self._rung = True
            with suppress(RuntimeError):  # the loop was closed: nobody waits there any longer
                self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._rung = False
        while self._due:
            future = self._due.popleft()
            if not future.done():
                future.set_result(None)


class _Held(threading.local):
    """The bells that this thread tells later; None while it tells each at once."""

    bells: set[Bell] | None = None


_held = _Held()
_bells: WeakKeyDictionary[asyncio.AbstractEventLoop, ref[Bell]] = WeakKeyDictionary()


@contextmanager
def together() -> Iterator[None]:
    """Each bell that this thread rings within the block is heard once, at its end."""
    rung: set[Bell] = set()
    _held.bells = rung
    try:
        yield
    finally:
        _held.bells = None
        for bell in rung:
            bell._tell()


def bell_here() -> Bell:
    """The bell of the running loop, for as long as somebody keeps it."""
    loop = asyncio.get_running_loop()
    known = _bells.get(loop)
    bell = known() if known is not None else None
    if bell is None:
        bell = Bell(loop)
        _bells[loop] = ref(bell)
    return bell
