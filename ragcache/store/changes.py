"""What an operator asks of the tiers, by key: what it would change, and the change."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ragcache.errors import ConfigurationError
from ragcache.states import KVKey
from ragcache.store.shelf import Shelf
from ragcache.store.store import KVStore

Action = Literal["pin", "unpin", "expire", "keep", "evict", "move", "encode"]


@dataclass(frozen=True, slots=True)
class Change:
    """One state and what happens to it. tier: where from, or where it is pinned or encoded; to:
    where it moves; nbytes: allocated in `tier`, 0 where that is not known before."""

    key: KVKey
    action: Action
    tier: str
    to: str
    nbytes: int


def pin(
    store: KVStore, keys: Sequence[KVKey], pinned: bool = True, *, dry_run: bool = False
) -> list[Change]:
    """Pins states, or unpins them, in every tier that holds them."""
    action: Action = "pin" if pinned else "unpin"
    changes = [
        Change(key, action, shelf.name, "", nbytes) for key, shelf, nbytes in _held(store, keys)
    ]
    if not dry_run:
        store.pin(keys, pinned)
    return changes


def expire(
    store: KVStore, keys: Sequence[KVKey], seconds: float | None, *, dry_run: bool = False
) -> list[Change]:
    """Limits the life of states in every tier to `seconds` from now, or lifts the limit with None.

    Raises `ConfigurationError` for seconds that are negative or not finite.
    """
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ConfigurationError(f"states expire after 0 seconds or more, not {seconds}")
    action: Action = "keep" if seconds is None else "expire"
    changes = [
        Change(key, action, shelf.name, "", nbytes) for key, shelf, nbytes in _held(store, keys)
    ]
    if not dry_run:
        store.expire(keys, None if seconds is None else time.time() + seconds)
    return changes


def evict(
    store: KVStore, keys: Sequence[KVKey], tier: str | None = None, *, dry_run: bool = False
) -> list[Change]:
    """Removes states from a tier, or from all. Pinned ones go too: it is asked for by hand. Raises
    `ConfigurationError` for an unknown tier."""
    if tier is not None:
        _shelf(store, tier)
    changes = [
        Change(key, "evict", shelf.name, "", nbytes)
        for key, shelf, nbytes in _held(store, keys)
        if tier in (None, shelf.name)
    ]
    if not dry_run:
        store.evict(keys, tier)
    return changes


def move(
    store: KVStore, keys: Sequence[KVKey], tier: str, *, dry_run: bool = False
) -> list[Change]:
    """Brings states to a tier, and takes them from the tiers above it: from memory to the disk,
    say, or back. Tiers below keep their copies. Raises `ConfigurationError` for an unknown tier,
    and `StoreBudgetExceeded` where it has no room."""
    target = _shelf(store, tier)
    above = store.holdings.every[: store.holdings.every.index(target)]
    changes, nearest = [], {key: (shelf, n) for key, shelf, n in reversed(_held(store, keys))}
    for key, (shelf, nbytes) in nearest.items():
        if shelf is target:
            continue
        changes.append(Change(key, "move", shelf.name, tier, nbytes))
        if not dry_run:
            _bring(store, key, target)
            for each in above:
                store.evict([key], each.name)
    return changes


def _bring(store: KVStore, key: KVKey, target: Shelf) -> None:
    with store.borrow([key]) as lease:
        states = lease.found.get(key)
        if states is None or key in target.entries:
            return
        tick = store.ledger.tick()
        if target.tier.persistent:
            store.shared.add_to(target, key, states, tick)
        else:
            store.holdings.place(target, key, states, tick, admitted=True)


def _held(store: KVStore, keys: Sequence[KVKey]) -> list[tuple[KVKey, Shelf, int]]:
    """Each key with the tiers that hold it, the fastest first, and its bytes there."""
    with store.holdings.lock:
        return [
            (key, shelf, shelf.entries.get(key).nbytes)
            for shelf in store.holdings.every
            for key in dict.fromkeys(keys)
            if key in shelf.entries
        ]


def _shelf(store: KVStore, tier: str) -> Shelf:
    for shelf in store.holdings.every:
        if shelf.name == tier:
            return shelf
    known = ", ".join(shelf.name for shelf in store.holdings.every)
    raise ConfigurationError(f"there is no tier {tier!r} here; tiers: {known}")
