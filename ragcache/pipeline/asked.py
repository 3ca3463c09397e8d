"""A request under way: what it reads, until it ends or is given up."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from ragcache.engine import RequestHandle, RequestOutput, TokenDelta
from ragcache.pipeline.answer import Answer, Ready
from ragcache.store import Lease


class Returned:
    """Leases of requests that ended where nothing may wait: in an event loop, or where the garbage
    collector found them. The next call ends them, before it leases anything itself."""

    def __init__(self) -> None:
        self._leases: SimpleQueue[Lease] = SimpleQueue()

    def put(self, lease: Lease) -> None:
        """Takes a lease. Waits for nothing, and may be called at any line of any thread."""
        self._leases.put(lease)

    def release(self) -> None:
        """Ends all of them."""
        with suppress(Empty):
            while True:
                self._leases.get_nowait().release()


class Asked:
    """A submitted request with the lease of what it reads, which ends when the request does.

    Losing the last reference gives the request up.
    """

    def __init__(
        self,
        ready: Ready,
        handle: RequestHandle[TokenDelta, RequestOutput],
        lease: Lease | None,
        returned: Returned,
    ) -> None:
        self.ready, self.handle = ready, handle
        self._lease_end = weakref.finalize(self, _put, returned, lease)
        self._lease_end.atexit = False

    def result(self) -> Answer:
        """Waits for the end. Raises what made the request fail."""
        try:
            completion = self.handle.result()
        finally:
            self.handle.cancel()  # where the wait was interrupted; else it has ended
            self.release()
        return self.ready.answer(completion)

    async def awaited(self) -> Answer:
        """As `result`. Cancelling the task gives the request up."""
        try:
            completion = await self.handle
        except BaseException:
            self.give_up()
            raise
        await asyncio.to_thread(self.release)
        return self.ready.answer(completion)

    def give_up(self) -> None:
        """Cancels the request, unless it has ended. Waits for nothing."""
        self.handle.cancel()
        self._lease_end()

    def release(self) -> None:
        """Ends the lease, in the caller's thread."""
        held = self._lease_end.detach()
        lease = held[2][1] if held is not None else None
        if lease is not None:
            lease.release()


def results(asked: Sequence[Asked]) -> list[Answer]:
    """All answers, in order. If one fails, all are given up."""
    try:
        return [each.result() for each in asked]
    finally:
        give_up(asked)


async def awaited(asked: Sequence[Asked]) -> list[Answer]:
    """As `results`, for asyncio."""
    try:
        return [await each.awaited() for each in asked]
    finally:
        give_up(asked)


def give_up(asked: Sequence[Asked]) -> None:
    """Cancels what has not ended."""
    for each in asked:
        each.give_up()


def _put(returned: Returned, lease: Lease | None) -> None:
    if lease is not None:
        returned.put(lease)
