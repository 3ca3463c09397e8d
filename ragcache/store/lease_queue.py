"""The order in which leases get room in the first tier.

Leased states cannot be evicted. A lease whose states do not fit beside those of other leases
therefore waits until one of them ends, as a request waits for blocks of the engine's pool. Older
leases go first. A lease that waits holds at most states that it had before, and begins no reads and
no claims, so that no two leases wait for each other.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

from ragcache.errors import DeadlineExceeded
from ragcache.states import KVKey
from ragcache.store.memory_tiers import BLOB_ROUNDING, MemoryTiers

ROOM_SECONDS = 60.0
"""Longest wait of an ingestion for room on a disk that leased states fill."""

_POLL_SECONDS = 0.02
"""Pause after which a waiting lease looks for leases whose requests have ended."""


SizeOf = Callable[[KVKey], int]
"""Returns the expected bytes of a key's states."""


def unknown_size(_: KVKey) -> int:
    """Return 0: nothing is known before the states are read or encoded."""
    return 0


class QueuePlace:
    """The place of a lease in the queue.

    tick: Tick of the logical clock at which the lease began, by which leases are ordered.
    patience: Seconds to wait for room. Without any, the lease neither waits nor keeps to the order.
    """

    def __init__(self, tick: int, patience: float) -> None:
        self.tick, self.patience = tick, patience
        self.until = time.monotonic() + patience
        self.holds = False
        """Whether the lease is counted as one that others wait for."""
        self.entered = False
        """Whether the lease has got room since it last began to wait."""


class LeaseQueue:
    """Counts the bytes that leases hold in the first tier, and lets leases in by turns.

    Thread-safe. Shares the lock of the memory tiers.
    """

    def __init__(self, memory: MemoryTiers) -> None:
        self._memory = memory
        self._changed = threading.Condition(memory.lock)
        self._waiting: list[QueuePlace] = []
        self._holding = 0  # leases that hold states and do not wait
        self._nbytes: dict[KVKey, int] = {}  # of each leased key, as far as it is known
        self._total = 0
        self._releases = 0
        self.on_wait: list[Callable[[], None]] = []
        """Functions that a waiting lease calls from time to time. They end leases whose requests
        have ended."""

    def enter(self, place: QueuePlace, keys: Sequence[KVKey], size_of: SizeOf) -> None:
        """Lease keys as soon as there is room for their states.

        Args:
            place: The lease.
            keys: Keys that the lease does not have yet.
            size_of: Expected bytes of states that no tier has.

        Raises:
            DeadlineExceeded: The patience of the lease has ended.
        """
        with self._changed, self._in_line(place):
            while not self._is_next(place, keys, size_of):
                self._wait(place)
            place.entered = True
            for key in keys:
                if key not in self._memory.leases:
                    self._nbytes[key] = nbytes = self._expected_bytes(key, size_of)
                    self._total += nbytes
            self._memory.hold(keys)

    def leave(self, place: QueuePlace, keys: Sequence[KVKey], *, ends: bool = True) -> None:
        """Release keys. `ends`: the lease holds no other states."""
        with self._changed:
            self._memory.release(keys)
            for key in keys:
                if key not in self._memory.leases:
                    self._total -= self._nbytes.pop(key, 0)
            if ends:
                self._count(place, holds=False)
            self._releases += 1
            self._changed.notify_all()

    def await_release(self, place: QueuePlace) -> bool:
        """Wait until another lease ends.

        Returns False at once if there is no other lease, or the lease does not wait. Raises
        `DeadlineExceeded` as `enter` does.
        """
        with self._changed, self._in_line(place):
            seen = self._releases
            while self._releases == seen:
                if not self._holding or not place.patience:
                    return False
                self._wait(place)
        return True

    def await_room(self, place: QueuePlace) -> bool:
        """Wait until any lease ends, beside the queue: this lease and later ones do not hinder each
        other.

        Returns False if no other lease holds states, none of them ends within `ROOM_SECONDS`, or
        the patience of this one has ended.
        """
        until = min(place.until, time.monotonic() + ROOM_SECONDS)
        with self._changed:
            held, seen = place.holds, self._releases
            self._count(place, holds=False)
            try:
                while self._releases == seen:
                    left = until - time.monotonic()
                    if not self._holding or left <= 0:
                        return False
                    self._pause(left)
            finally:
                self._count(place, holds=held)
        return True

    @contextmanager
    def _in_line(self, place: QueuePlace) -> Iterator[None]:
        """Keep a place in the queue within the block, in which the lease counts as holding none."""
        held, place.entered = place.holds, False
        self._count(place, holds=False)
        insort(self._waiting, place, key=attrgetter("tick"))
        try:
            yield
        finally:
            self._waiting.remove(place)
            self._count(place, holds=held or place.entered)
            self._changed.notify_all()

    def _count(self, place: QueuePlace, *, holds: bool) -> None:
        self._holding += holds - place.holds
        place.holds = holds

    def _is_next(self, place: QueuePlace, keys: Sequence[KVKey], size_of: SizeOf) -> bool:
        """Whether a lease may begin: its states fit, or no other lease could make room."""
        if not place.patience:
            return True
        if self._waiting[0] is not place:
            return False
        budget = self._memory.top.tier.budget_bytes
        if not self._holding or budget is None:
            return True
        new = [key for key in keys if key not in self._memory.leases]
        unleased = self._memory.pinned - self._nbytes.keys()
        pinned = sum(self._expected_bytes(key, unknown_size) for key in unleased)
        needed = sum(self._expected_bytes(key, size_of) for key in new)
        return not needed or self._total + pinned + needed <= budget

    def _expected_bytes(self, key: KVKey, size_of: SizeOf) -> int:
        """Bytes that states take in the first tier, as far as they are known.

        States that a host reads where a disk has mapped them take none.
        """
        top, *below = self._memory.every
        if (here := top.entries.find(key)) is not None:
            return here.nbytes
        known = next((index for index in below if key in index.entries), None)
        if known is None:
            return size_of(key)
        mapped = known.tier.traits.mapped and known.tier.kv_dtype == "model"
        if mapped and not top.tier.traits.on_gpu:
            return 0
        nbytes = known.entries.get(key).nbytes
        return size_of(key) or (nbytes - BLOB_ROUNDING if known.tier.traits.persistent else nbytes)

    def _wait(self, place: QueuePlace) -> None:
        left = place.until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                f"the request's {place.patience:.1f} s were over while it waited for room in the "
                f"{self._memory.top.name} tier, which states of running requests fill; give it "
                "more time, or ask fewer questions at once"
            )
        self._pause(left)

    def _pause(self, seconds: float) -> None:
        self._changed.wait(min(seconds, _POLL_SECONDS))
        if self.on_wait:
            with _unlocked(self._changed):
                for look in self.on_wait:
                    look()


@contextmanager
def _unlocked(condition: threading.Condition) -> Iterator[None]:
    """Release a condition's lock within the block."""
    condition.release()
    try:
        yield
    finally:
        condition.acquire()
