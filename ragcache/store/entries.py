"""What the policy of eviction sees of one tier: plain values, kept in columns.

A tier of 100,000 states is ordered in milliseconds only where no Python object is made for each of
them, so that the columns are kept up to date one use at a time and read all at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ragcache.states import KVKey

_NONE = -1  # no root
_COLUMNS: dict[str, type] = {
    "resident": np.bool_,
    "nbytes": np.int64,
    "last_use": np.int64,
    "hits": np.int64,
    "leases": np.int32,
    "pinned": np.bool_,
    "cost": np.float64,
    "expires_at": np.float64,
    "clock": np.float64,
    "root": np.int64,  # the slot of the states that stood before these, or -1
    "prefix": np.uint64,  # the first 16 digits of the key, for ties
}


@dataclass(frozen=True, slots=True)
class KVEntry:
    """States in one tier.

    nbytes: as allocated there. last_use: a logical clock, larger is later. hits: uses since they
    were admitted. cost: seconds that encoding them took. expires_at: seconds on the caller's clock.
    clock: that of GreedyDual when they were last used. root: the states that stood before these
    while they were encoded (their place in the prefix), which are kept as long as these are.
    """

    key: KVKey
    nbytes: int
    last_use: int
    leased: bool = False
    pinned: bool = False
    hits: int = 0
    cost: float = 0.0
    expires_at: float = math.inf
    clock: float = 0.0
    root: KVKey | None = None


class Entries:
    """The entries of one tier in columns of numpy; every change is O(1). Not thread-safe.

    A row whose entry has left stays as long as another entry names it as its root.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._keys: list[KVKey] = []
        self._slots: dict[KVKey, int] = {}
        self._free: list[int] = []
        self._columns: dict[str, np.ndarray] = {
            name: np.zeros(16, dtype) for name, dtype in _COLUMNS.items()
        }
        self._dependents = np.zeros(16, np.int64)

    @classmethod
    def of(cls, entries: Iterable[KVEntry]) -> Entries:
        table = cls()
        for entry in entries:
            table.add(entry)
        return table

    def __len__(self) -> int:
        return int(self["resident"].sum())

    def __contains__(self, key: KVKey) -> bool:
        slot = self._slots.get(key)
        return slot is not None and bool(self._columns["resident"][slot])

    def __iter__(self) -> Iterator[KVEntry]:
        return (self.get(self._keys[slot]) for slot in np.flatnonzero(self["resident"]))

    def __getitem__(self, column: str) -> np.ndarray:
        """A column, [N] with one row a slot; rows that are not `resident` mean nothing. A view."""
        return self._columns[column][: len(self._keys)]

    def key(self, slot: int) -> KVKey:
        return self._keys[slot]

    def get(self, key: KVKey) -> KVEntry:
        """Raises `KeyError` for a key that is not here."""
        slot = self._resident(key)
        row = {name: column[slot].item() for name, column in self._columns.items()}
        root = self._keys[row["root"]] if row["root"] != _NONE else None
        values = ("nbytes", "last_use", "pinned", "hits", "cost", "expires_at", "clock")
        chosen = {name: row[name] for name in values}
        return KVEntry(key, leased=row["leases"] > 0, root=root, **chosen)

    def add(self, entry: KVEntry) -> None:
        """Adds an entry, in place of one of the same key."""
        if entry.key in self:
            self.remove(entry.key)
        slot = self._slot(entry.key)
        root = _NONE if entry.root is None else self._slot(entry.root)
        if root != _NONE:
            self._dependents[root] += 1
        row = (True, entry.nbytes, entry.last_use, entry.hits, int(entry.leased), entry.pinned,
               entry.cost, entry.expires_at, entry.clock, root)  # fmt: skip
        for name, value in zip(_COLUMNS, row, strict=False):  # all but the prefix
            self._columns[name][slot] = value
        self.used_bytes += entry.nbytes

    def extend(self, entries: Sequence[KVEntry]) -> None:
        """Adds many entries at once, as `add` would one by one."""
        fresh = list({entry.key: entry for entry in entries}.values())
        for entry in fresh:
            if entry.key in self._slots and entry.key in self:
                self.remove(entry.key)
        slots = np.fromiter((self._slot(entry.key) for entry in fresh), np.int64, len(fresh))
        roots = [_NONE if entry.root is None else self._slot(entry.root) for entry in fresh]
        chosen = np.array(roots, np.int64)
        np.add.at(self._dependents, chosen[chosen != _NONE], 1)
        columns = self._columns
        columns["resident"][slots] = True
        columns["root"][slots] = chosen
        columns["leases"][slots] = [int(entry.leased) for entry in fresh]
        for name in ("nbytes", "last_use", "hits", "pinned", "cost", "expires_at", "clock"):
            columns[name][slots] = [getattr(entry, name) for entry in fresh]
        self.used_bytes += int(columns["nbytes"][slots].sum())

    def remove(self, key: KVKey) -> None:
        """Removes an entry, leased or not. Raises `KeyError` for a key that is not here."""
        slot = self._resident(key)
        self.used_bytes -= int(self._columns["nbytes"][slot])
        self._columns["resident"][slot] = False
        root = int(self._columns["root"][slot])
        self._columns["root"][slot] = _NONE
        self._recycle(slot)
        if root != _NONE:
            self._dependents[root] -= 1
            self._recycle(root)

    def touch(self, key: KVKey, last_use: int, clock: float = 0.0) -> None:
        """Counts a use at this tick of the logical clock and of GreedyDual's."""
        slot = self._resident(key)
        self._columns["last_use"][slot] = last_use
        self._columns["clock"][slot] = clock
        self._columns["hits"][slot] += 1

    def lease(self, key: KVKey) -> None:
        """Holds an entry once more; as many releases end it."""
        self._columns["leases"][self._resident(key)] += 1

    def release(self, key: KVKey) -> None:
        """Ends one lease; of an entry that has left meanwhile, nothing is to be ended."""
        if key in self:
            slot = self._slots[key]
            self._columns["leases"][slot] = max(0, self._columns["leases"][slot] - 1)

    def pin(self, key: KVKey, pinned: bool = True) -> None:
        self._columns["pinned"][self._resident(key)] = pinned

    def expire(self, key: KVKey, at: float) -> None:
        """Sets when an entry expires; `math.inf` is never."""
        self._columns["expires_at"][self._resident(key)] = at

    def _resident(self, key: KVKey) -> int:
        slot = self._slots[key]
        if not self._columns["resident"][slot]:
            raise KeyError(key)
        return slot

    def _slot(self, key: KVKey) -> int:
        """The row of a key, made if need be."""
        slot = self._slots.get(key)
        if slot is not None:
            return slot
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = key
        else:
            slot = len(self._keys)
            self._keys.append(key)
            if slot == len(self._dependents):
                self._grow()
        self._slots[key] = slot
        self._columns["resident"][slot] = False
        self._columns["root"][slot] = _NONE
        self._columns["prefix"][slot] = int(key.digest[:16], 16)
        self._dependents[slot] = 0
        return slot

    def _grow(self) -> None:
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate([column, np.zeros_like(column)])
        self._dependents = np.concatenate([self._dependents, np.zeros_like(self._dependents)])

    def _recycle(self, slot: int) -> None:
        key = self._keys[slot]
        if key in self or self._dependents[slot]:
            return
        del self._slots[key]
        self._free.append(slot)
