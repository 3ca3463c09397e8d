"""Eviction, decided purely: no I/O, no clock of its own, no store.

The policy sees the `Entries` of one tier: plain values in columns, updated one use at a time and
read all at once. So a tier of 100,000 states is ordered in milliseconds, without a Python object
for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np

from ragcache.db.ledger import StateRow
from ragcache.errors import ConfigurationError
from ragcache.states import KVKey

Policy = Literal["lru", "gdsf", "lfu"]
"""Who goes first. `lru`: the least recently used. `lfu`: the least often used. `gdsf`:
GreedyDual-Size-Frequency, what is least used and cheapest to encode again for its size."""

POLICIES: tuple[str, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True)
class Victims:
    """The states to evict, in order: the first `expired` keys have expired, the others go for
    pressure. freed: bytes of all. missing: bytes that could not be found. clock: GreedyDual's after
    the eviction, for the next choice and for every `Entries.touch` and `KVEntry` from now on."""

    keys: tuple[KVKey, ...]
    expired: int
    freed: int
    missing: int
    clock: float


def choose_victims(
    entries: Entries | Iterable[KVEntry], need_bytes: int, policy: Policy = "lru", *,
    now: float = 0.0, clock: float = 0.0,
) -> Victims:  # fmt: skip
    """The entries with the lowest priorities whose bytes together reach `need_bytes`.

    Priorities are the last use (`lru`), the hits (`lfu`), or, for `gdsf`,

        clock at the last use + (1 + hits) · cost / nbytes

    with the measured seconds of encoding as cost (Cherkasova 1998; RAGCache, where the cost is that
    of computing what the prefix before it does not hold: states are encoded after their root, so
    that the seconds measured are these). The clock is the highest priority that was ever evicted,
    by which entries that are no longer used grow old.

    Leased and pinned entries stay. Expired ones go first (`expires_at <= now`). States that others
    were encoded after have at least the priority of each of these, and go after them, as only the
    leaves of RAGCache's tree do. Ties: the least recently used, then the smaller key.
    """
    table = entries if isinstance(entries, Entries) else Entries.of(entries)
    free = np.flatnonzero(table["resident"] & (table["leases"] == 0) & ~table["pinned"])
    if need_bytes <= 0 or free.size == 0:
        return Victims((), 0, 0, max(0, need_bytes), clock)
    score, depth = _raise_roots(table, _priorities(table, policy, now))
    nbytes = table["nbytes"]
    order = free[np.argsort(score[free])]
    last = min(_count(nbytes[order], need_bytes), order.size) - 1
    tied = np.searchsorted(score[order], score[order[last]], side="right")
    order = _break_ties(table, order[:tied], score, depth)
    order = order[: _count(nbytes[order], need_bytes)]
    freed = int(nbytes[order].sum())
    expired = int((score[order] == -np.inf).sum())
    keys = tuple(map(table.key, order.tolist()))
    clock = max(clock, float(score[order[-1]])) if policy == "gdsf" else clock
    return Victims(keys, expired, freed, max(0, need_bytes - freed), clock)


def expired(entries: Entries, now: float) -> tuple[KVKey, ...]:
    """The entries that have expired and are neither leased nor pinned, in the order of keys."""
    over = (entries["expires_at"] <= now) & (entries["leases"] == 0) & ~entries["pinned"]
    return tuple(sorted(map(entries.key, np.flatnonzero(entries["resident"] & over).tolist())))


def check_policy(policy: str) -> Policy:
    """Raises `ConfigurationError` for an unknown policy."""
    if policy not in POLICIES:
        raise ConfigurationError(f"unknown policy {policy!r}; policies: {', '.join(POLICIES)}")
    return cast("Policy", policy)


def _priorities(table: Entries, policy: Policy, now: float) -> np.ndarray:
    """[N] float64, smaller goes first; -inf for what is expired or not there."""
    if policy == "gdsf":
        worth = (1 + table["hits"]) * table["cost"] / np.maximum(table["nbytes"], 1)
        score: np.ndarray = table["clock"] + worth
    else:
        score = table["last_use" if policy == "lru" else "hits"].astype(np.float64)
    score[~table["resident"] | (table["expires_at"] <= now)] = -np.inf
    return score


def _raise_roots(table: Entries, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gives every root the highest priority of what was encoded after it; also returns how many
    states precede each, [N]."""
    depth = np.zeros(score.size, np.int64)
    children = np.flatnonzero(table["resident"] & (table["root"] >= 0))
    roots = table["root"][children]
    held = table["resident"][roots]
    children, roots = children[held], roots[held]
    live = score[roots] != -np.inf  # what is expired goes, whatever depends on it
    for _ in range(children.size):  # as often as the deepest chain is long, which is once as a rule
        before = score.copy(), depth.copy()
        np.maximum.at(score, roots[live], score[children[live]])
        depth[children] = depth[roots] + 1
        if np.array_equal(before[0], score) and np.array_equal(before[1], depth):
            break
    return score, depth


def _break_ties(
    table: Entries, order: np.ndarray, score: np.ndarray, depth: np.ndarray
) -> np.ndarray:
    """Orders slots by priority, then the deeper, the less recently used, the smaller key."""
    ranked = score[order]
    if not (ranked[1:] == ranked[:-1]).any():
        return order
    columns = (table["prefix"][order], table["last_use"][order], -depth[order], ranked)
    order = order[np.lexsort(columns)]
    rows = np.stack([c[order] for c in (score, depth, table["last_use"])]), table["prefix"][order]
    same = (rows[0][:, 1:] == rows[0][:, :-1]).all(axis=0) & (rows[1][1:] == rows[1][:-1])
    if not same.any():
        return order

    def full(slot: int) -> tuple[float, int, int, KVKey]:
        return score[slot], -depth[slot], table["last_use"][slot], table.key(slot)

    return np.array(sorted(order.tolist(), key=full))  # keys alike in their first 16 digits


def _count(nbytes: np.ndarray, need_bytes: int) -> int:
    """How many of the first rows it takes to reach a sum; one more than all where it is not."""
    return int(np.searchsorted(np.cumsum(nbytes), need_bytes)) + 1


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
    "root": np.int64,  # the slot of the states before these, or -1
    "prefix": np.uint64,  # the first 16 digits of the key, for ties
}
_VALUES = ("nbytes", "last_use", "hits", "pinned", "cost", "expires_at", "clock")  # of a `KVEntry`


@dataclass(frozen=True, slots=True)
class KVEntry:
    """States in one tier. nbytes: as allocated there. last_use: a logical clock. hits: uses since
    they were admitted. cost: seconds of encoding. expires_at: seconds on the caller's clock. clock:
    GreedyDual's at the last use. root: the states that these were encoded after (their place in the
    prefix), which are kept as long as these are."""

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

    @classmethod
    def of_row(cls, row: StateRow) -> KVEntry:
        """The entry of a row of the ledger."""
        return cls(
            row.key, row.nbytes, row.last_use, pinned=row.pinned, hits=row.hits,
            cost=row.metadata.cost, expires_at=row.expires_at, root=row.metadata.root,
        )  # fmt: skip


class Entries:
    """The entries of one tier in columns of numpy; every change is O(1). Not thread-safe.

    A row whose entry has left stays as long as another entry names it as its root.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self._keys: list[KVKey] = []
        self._slots: dict[KVKey, int] = {}
        self._free: list[int] = []
        self._columns: dict[str, np.ndarray] = {n: np.zeros(16, t) for n, t in _COLUMNS.items()}
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
        chosen = {name: row[name] for name in _VALUES}
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
        for name in _VALUES:
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

    def learn_use(self, key: KVKey, last_use: int, hits: int) -> None:
        """Takes over the uses of an entry that other processes have counted as well."""
        slot = self._resident(key)
        for name, value in (("last_use", last_use), ("hits", hits)):
            column = self._columns[name]
            column[slot] = max(column[slot], value)

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
        """Ends one lease; nothing happens for an entry that has left meanwhile."""
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
        if key not in self and not self._dependents[slot]:
            del self._slots[key]
            self._free.append(slot)
