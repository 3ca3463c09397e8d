"""Eviction by 2Q (Johnson and Shasha, 1994), as pure bookkeeping without I/O or a clock.

States that were used once wait in a short first-in, first-out queue. States that were used again
are kept in order of their last use. Neither ingestion nor one-time questions therefore evict
popular documents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ragcache.states import KVKey

ONCE_SHARE = 0.05
"""Fraction of a tier's bytes above which states used once are evicted first."""
GONE_SHARE = 0.5
"""Maximum size of evicted states whose keys are remembered, as a fraction of the tier's bytes."""


class KVEntry(NamedTuple):
    """States in one tier."""

    nbytes: int
    """Allocated bytes."""
    last_use: int
    """Tick of the ledger's logical clock."""


class EvictionIndex:
    """The states of one tier in eviction order. Every change is O(1). Not thread-safe.

    There are three queues: states used once, states used again, and keys that were evicted after
    one use. States enter the second queue when they are used again, or when they return while their
    key is in the third queue.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._once: OrderedDict[KVKey, KVEntry] = OrderedDict()
        self._again: OrderedDict[KVKey, KVEntry] = OrderedDict()
        self._gone: OrderedDict[KVKey, int] = OrderedDict()
        self._once_bytes = self._gone_bytes = 0

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: object) -> bool:
        return key in self._once or key in self._again

    def __iter__(self) -> Iterator[KVKey]:
        """Iterate over the keys, in eviction order within each queue."""
        yield from self._once
        yield from self._again

    def get(self, key: KVKey) -> KVEntry:
        """Return the entry of a key. Raises `KeyError` if it is missing."""
        return self._once[key] if key in self._once else self._again[key]

    def is_reused(self, key: KVKey) -> bool:
        """Return whether states have been used again."""
        return key in self._again

    def add(self, key: KVKey, nbytes: int, last_use: int, *, reused: bool = False) -> bool:
        """Add states, in place of earlier states of the key.

        Args:
            key: Key of the states.
            nbytes: Allocated bytes.
            last_use: Tick of the logical clock.
            reused: The states were used again in another tier or by another process.

        Returns:
            Whether the states have just become states that were used again.
        """
        known = key in self._again
        reused = reused or known or key in self._gone
        self.remove(key)
        self._gone_bytes -= self._gone.pop(key, 0)
        self.used_bytes += nbytes
        if reused:
            self._again[key] = KVEntry(nbytes, last_use)
        else:
            self._once[key] = KVEntry(nbytes, last_use)
            self._once_bytes += nbytes
        return reused and not known

    def touch(self, key: KVKey, last_use: int) -> bool:
        """Count a use of present states. Returns as `add` does."""
        return self.add(key, self.get(key).nbytes, last_use, reused=True)

    def remove(self, key: KVKey, *, remember: bool = False) -> int:
        """Remove states. Returns their bytes, or 0 if they are missing.

        Args:
            key: Key of the states.
            remember: The reason is pressure. The next use of the key then counts as being used
                again.
        """
        once = key in self._once
        nbytes = (self._once if once else self._again).pop(key, KVEntry(0, 0)).nbytes
        self.used_bytes -= nbytes
        self._once_bytes -= nbytes if once else 0
        if once and remember:
            self._gone[key] = nbytes
            self._gone_bytes += nbytes
            while self._gone_bytes > GONE_SHARE * self.used_bytes:
                self._gone_bytes -= self._gone.popitem(last=False)[1]
        return nbytes

    def choose_victims(
        self, need_bytes: int, stays: Callable[[KVKey], bool] = lambda _: False
    ) -> list[KVKey] | None:
        """Choose states to evict, in order, until `need_bytes` become free.

        Args:
            need_bytes: Bytes to free.
            stays: Returns whether a state must stay, because it is leased or pinned.

        Returns:
            Keys of the states. None, if all states that may go are not enough.
        """
        once = (key for key in self._once if not stays(key))
        again = (key for key in self._again if not stays(key))
        chosen: list[KVKey] = []
        waiting = self._once_bytes
        while need_bytes > 0:
            queues = (once, again) if waiting > ONCE_SHARE * self.used_bytes else (again, once)
            key = next(queues[0], None) or next(queues[1], None)
            if key is None:
                return None
            nbytes = self.get(key).nbytes
            waiting -= nbytes if key in self._once else 0
            need_bytes -= nbytes
            chosen.append(key)
        return chosen
