"""Moving states between tiers beside compute, a few at a time and each key once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates
from ragcache.store.tiers import DiskTier, HostTier, RemoteTier, Tier

Move = Callable[[], StoredStates]


class Transfers:
    """A small pool of threads. Reading a file, summing it and copying to a device leave Python's
    lock alone, so that they run beside the forward pass."""

    def __init__(self, workers: int = 2, waiting: int = 64) -> None:
        """workers: transfers at a time. waiting: how many more may stand in line."""
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="ragcache-transfer")
        self._limit = workers + waiting
        self._flying: dict[KVKey, Future[StoredStates]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Transfers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._flying)

    def start(self, key: KVKey, move: Move) -> Future[StoredStates] | None:
        """Begins to move a key, unless it is being moved: then the transfer under way is returned.

        None where the line is full or the pool closed: a prefetch that is dropped costs nothing but
        the wait later. What `move` raises is the future's exception.
        """
        with self._lock:
            known = self._flying.get(key)
            if known is not None:
                return known
            if self._closed or len(self._flying) >= self._limit:
                return None
            future = self._pool.submit(move)
            self._flying[key] = future
        future.add_done_callback(lambda done: self._land(key, done))
        return future

    def under_way(self, key: KVKey) -> Future[StoredStates] | None:
        """The transfer of a key that stands in line or runs."""
        return self._flying.get(key)

    def cancel(self, keys: Iterable[KVKey] | None = None) -> int:
        """Takes keys (None: all) out of the line; returns how many. One that runs is finished."""
        with self._lock:
            chosen = list(self._flying) if keys is None else [k for k in keys if k in self._flying]
            futures = [self._flying[key] for key in chosen]
        return sum(future.cancel() for future in futures)

    def close(self) -> None:
        """Cancels what waits and ends when what runs has ended."""
        with self._lock:
            self._closed = True
        self.cancel()
        self._pool.shutdown(wait=True)

    def _land(self, key: KVKey, done: Future[StoredStates]) -> None:
        with self._lock:
            if self._flying.get(key) is done:
                del self._flying[key]


def promote(key: KVKey, source: Tier, target: Tier) -> StoredStates:
    """Copies a key from a tier to another; returns what the target holds then.

    Between disk or remote and host the bytes are copied once, into memory of the host tier, and
    verified there. Raises what `source.get` and `target.put` raise.
    """
    if isinstance(target, HostTier) and isinstance(source, DiskTier | RemoteTier):
        target.put(key, source.load(key, target.allocate))
    else:
        target.put(key, source.get(key))
    return target.get(key)
