"""Eviction by 2Q (Johnson and Shasha, 1994), decided purely: no I/O, no clock, no store.

States that were used once wait in a short queue, first in, first out; states that were used again
are kept in the order of their last use. So neither an ingestion nor questions that nobody repeats
push out the documents that many ask for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ragcache.states import KVKey

ONCE_SHARE = 0.05
"""The share of a tier's bytes above which states that were used once go first."""
GONE_SHARE = 0.5
"""The bytes of states that went after one use and whose keys are remembered, as a share of the
tier's bytes."""


class KVEntry(NamedTuple):
    """States in one tier. nbytes: as allocated there. last_use: on the ledger's logical clock."""

    nbytes: int
    last_use: int


class EvictionIndex:
    """The states of one tier, in the order in which they go. Every change is O(1). Not thread-safe.

    Three queues, the next to go first: states used once, states used again, and the keys of states
    that went after one use. A state enters the second queue when it is used again, while it is in
    the first one or while its key is remembered in the third.
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
        """The keys, the next to go first within each queue."""
        yield from self._once
        yield from self._again

    def get(self, key: KVKey) -> KVEntry:
        """The entry of a key. Raises `KeyError` for a key that is not here."""
        return self._once[key] if key in self._once else self._again[key]

    def is_reused(self, key: KVKey) -> bool:
        """Whether states are here that were used again."""
        return key in self._again

    def add(self, key: KVKey, nbytes: int, last_use: int, *, reused: bool = False) -> bool:
        """Adds states, in place of those of the same key.

        Args:
            reused: They were used again, in another tier or by another process.

        Returns:
            Whether this is the use that makes them states that were used again.
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
        """Counts a use of states that are here; returns whether it is the first one that counts as
        being used again."""
        return self.add(key, self.get(key).nbytes, last_use, reused=True)

    def remove(self, key: KVKey, *, remember: bool = False) -> int:
        """Removes states; returns their bytes, 0 if there were none.

        Args:
            remember: They go for pressure: the next use of the key counts as being used again.
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
        """Choose the states to remove so that so many bytes become free, in order.

        Args:
            stays: Whether a state may not go: it is leased or pinned.

        Returns:
            Their keys; None if all that may go are not enough.
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
