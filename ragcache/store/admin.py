"""Operators' commands on states by key, each with a dry run, and how full the tiers are."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ragcache.errors import ConfigurationError
from ragcache.states import KVKey
from ragcache.store.memory_tiers import TierIndex
from ragcache.store.store import KVStore

Action = Literal["pin", "unpin", "expire", "keep", "evict", "move", "encode"]


@dataclass(frozen=True, slots=True)
class StateChange:
    """One state and what happens to it. tier: where it is, or will be encoded; to: where it moves;
    nbytes: allocated in `tier`, 0 where it is not encoded yet."""

    key: KVKey
    action: Action
    tier: str
    to: str
    nbytes: int


def pin(
    store: KVStore, keys: Sequence[KVKey], pinned: bool = True, *, dry_run: bool = False
) -> list[StateChange]:
    """Pins states, or unpins them, in every tier that holds them."""
    changes = _changes(store, keys, "pin" if pinned else "unpin")
    if not dry_run:
        store.pin(keys, pinned)
    return changes


def expire(
    store: KVStore, keys: Sequence[KVKey], seconds: float | None, *, dry_run: bool = False
) -> list[StateChange]:
    """Limits the life of states in every tier to `seconds` from now, or lifts the limit with None.
    Raises `ConfigurationError` for seconds that are negative or not finite."""
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ConfigurationError(f"states expire after 0 seconds or more, not {seconds}")
    changes = _changes(store, keys, "keep" if seconds is None else "expire")
    if not dry_run:
        store.expire(keys, None if seconds is None else time.time() + seconds)
    return changes


def evict(
    store: KVStore, keys: Sequence[KVKey], tier: str | None = None, *, dry_run: bool = False
) -> list[StateChange]:
    """Removes states from a tier, or from all. Pinned ones go too: an operator named them.
    Raises `ConfigurationError` for an unknown tier."""
    if tier is not None:
        _tier_index(store, tier)
    changes = [c for c in _changes(store, keys, "evict") if tier in (None, c.tier)]
    if not dry_run:
        store.evict(keys, tier)
    return changes


def move(
    store: KVStore, keys: Sequence[KVKey], tier: str, *, dry_run: bool = False
) -> list[StateChange]:
    """Brings states to a tier, and takes them from the tiers above it: from memory to the disk,
    say, or back. Tiers below keep their copies. Raises `ConfigurationError` for an unknown tier,
    and `StoreBudgetExceeded` where it has no room."""
    target = _tier_index(store, tier)
    above = store.memory.every[: store.memory.every.index(target)]
    changes, nearest = [], {key: (index, n) for key, index, n in reversed(_held(store, keys))}
    for key, (index, nbytes) in nearest.items():
        if index is target:
            continue
        changes.append(StateChange(key, "move", index.name, tier, nbytes))
        if not dry_run:
            _bring(store, key, target)
            for each in above:
                store.evict([key], each.name)
    return changes


def _bring(store: KVStore, key: KVKey, target: TierIndex) -> None:
    with store.borrow([key]) as lease:
        states = lease.found.get(key)
        if states is None or key in target.entries:
            return
        tick = store.ledger.advance_clock()
        if target.tier.traits.persistent:
            store.persistent.add({key: states}, tick, target)
        else:
            store.memory.place(target, key, states, tick)


def _changes(store: KVStore, keys: Sequence[KVKey], action: Action) -> list[StateChange]:
    held = _held(store, keys)
    return [StateChange(key, action, index.name, "", nbytes) for key, index, nbytes in held]


def _held(store: KVStore, keys: Sequence[KVKey]) -> list[tuple[KVKey, TierIndex, int]]:
    """Each key with the tiers that hold it, the fastest first, and its bytes there."""
    with store.memory.lock:
        return [
            (key, index, index.entries.get(key).nbytes)
            for index in store.memory.every
            for key in dict.fromkeys(keys)
            if key in index.entries
        ]


def _tier_index(store: KVStore, tier: str) -> TierIndex:
    for index in store.memory.every:
        if index.name == tier:
            return index
    known = ", ".join(index.name for index in store.memory.every)
    raise ConfigurationError(f"there is no tier {tier!r} here; tiers: {known}")


@dataclass(frozen=True, slots=True)
class TierStatus:
    """A tier now. used_bytes: as allocated. budget_bytes: None for no limit. hits: states that were
    found here since the store was opened. persistent: whether it outlives the process."""

    name: str
    used_bytes: int
    budget_bytes: int | None
    pinned_bytes: int
    states: int
    hits: int
    persistent: bool


def tier_status(store: KVStore) -> list[TierStatus]:
    """The tiers, the fastest first, from what is known in memory."""
    found = []
    for index in store.memory.every:
        with store.memory.lock:
            entries, states = index.entries, len(index.entries)
            pinned = [key for key in store.memory.pinned if key in entries]
            pinned_bytes = sum(entries.get(key).nbytes for key in pinned)
        tier, hits = index.tier, store.counters.hits[index.name]
        found.append(TierStatus(
            index.name, tier.used_bytes, tier.budget_bytes, pinned_bytes, states, hits,
            tier.traits.persistent,
        ))  # fmt: skip
    return found
