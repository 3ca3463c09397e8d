"""Operators' commands on states, each with a dry run, and the status of the tiers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from ragcache.db import Catalog, NamespaceDeletion, NamespaceRows
from ragcache.errors import ConfigurationError, StoreFull
from ragcache.states import KVKey
from ragcache.store.memory_tiers import TierIndex
from ragcache.store.store import KVStore

T = TypeVar("T")

Action = Literal["pin", "unpin", "expire", "keep", "evict", "move", "encode"]


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change of one state."""

    key: KVKey
    action: Action
    tier: str
    """Tier of the state, or the tier in which it will be encoded."""
    to: str
    """Target tier of a move."""
    nbytes: int
    """Allocated bytes in `tier`. 0 for a state to encode."""


def pin(
    store: KVStore, keys: Sequence[KVKey], pinned: bool = True, *, dry_run: bool = False
) -> list[StateChange]:
    """Pin or unpin states in every tier that has them."""
    changes = _changes(store, keys, "pin" if pinned else "unpin")
    if not dry_run:
        store.pin(keys, pinned)
    return changes


def expire(
    store: KVStore, keys: Sequence[KVKey], seconds: float | None, *, dry_run: bool = False
) -> list[StateChange]:
    """Limit the lifetime of states in every tier, or remove the limit with None.

    Args:
        store: The store.
        keys: Keys of the states.
        seconds: Lifetime from now.
        dry_run: Return the changes without making them.

    Raises:
        ConfigurationError: The seconds are negative or not finite.
    """
    if seconds is not None and not 0 <= seconds < math.inf:
        raise ConfigurationError(f"states expire after 0 seconds or more, not {seconds}")
    changes = _changes(store, keys, "keep" if seconds is None else "expire")
    if not dry_run:
        store.expire(keys, None if seconds is None else time.time() + seconds)
    return changes


def evict(
    store: KVStore, keys: Sequence[KVKey], tier: str | None = None, *, dry_run: bool = False
) -> list[StateChange]:
    """Remove states from a tier, or from all tiers, including pinned states.

    Raises:
        ConfigurationError: The tier does not exist.
    """
    if tier is not None:
        _tier_index(store, tier)
    changes = [c for c in _changes(store, keys, "evict") if tier in (None, c.tier)]
    if not dry_run:
        store.evict(keys, tier)
    return changes


def move(
    store: KVStore, keys: Sequence[KVKey], tier: str, *, dry_run: bool = False
) -> list[StateChange]:
    """Move states to a tier and remove them from the tiers above it.

    Tiers below keep their copies.

    Raises:
        ConfigurationError: The tier does not exist.
        StoreBudgetExceeded: The tier has no room.
    """
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
    """Return each key with the tiers that have it, fastest first, and its bytes there."""
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
    """The current state of a tier."""

    name: str
    used_bytes: int
    """Allocated bytes."""
    budget_bytes: int | None
    """Maximum of allocated bytes. Unlimited if None."""
    pinned_bytes: int
    """Bytes of pinned states."""
    conversation_bytes: int
    """Bytes of states of conversations."""
    states: int
    """Number of states."""
    hits: int
    """States found in this tier since the store was opened."""
    persistent: bool
    """Whether the tier outlives the process."""


def tier_status(store: KVStore) -> list[TierStatus]:
    """Return the status of all tiers, fastest first, without I/O."""
    found = []
    for index in store.memory.every:
        with store.memory.lock:
            entries, states = index.entries, len(index.entries)
            pinned = [key for key in store.memory.pinned if key in entries]
            pinned_bytes = sum(entries.get(key).nbytes for key in pinned)
        tier, hits = index.tier, store.counters.hits[index.name]
        found.append(
            TierStatus(
                index.name,
                tier.used_bytes,
                tier.budget_bytes,
                pinned_bytes,
                entries.conversations.used_bytes,
                states,
                hits,
                tier.traits.persistent,
            )
        )
    return found


def delete_documents(
    catalog: Catalog, store: KVStore, collection: str, source_ids: Sequence[str] | None = None
) -> int:
    """Delete documents with their states, and return how many there were. Works on a full disk.

    Args:
        catalog: Catalog of the namespace.
        store: The store.
        collection: Collection of the documents.
        source_ids: Ids of the documents; unknown ids are skipped. By default, deletes the
            collection with all documents.

    Raises:
        UnknownCollection: There is no such collection.
        StoreFull: The documents have no blobs that would make room.
    """

    def delete() -> tuple[int, list[KVKey]]:
        if source_ids is None:
            return catalog.delete_collection(collection)
        known = catalog.documents(collection, source_ids)
        return len(known), catalog.delete_documents(collection, source_ids)

    return _delete_rows(store, delete, lambda: catalog.state_keys(collection, source_ids))


def delete_namespace(
    store: KVStore, name: str, roots: Collection[KVKey] = (), *, dry_run: bool = False
) -> NamespaceDeletion:
    """Delete a namespace with everything in it. Works on a full disk.

    Args:
        store: The store.
        name: The namespace.
        roots: As for `NamespaceRows.delete`.
        dry_run: Change nothing.

    Returns:
        The numbers of the deletion.

    Raises:
        UnknownNamespace: There is no such namespace.
        ConfigurationError: The namespace has the service's only API keys.
        StoreFull: The namespace has no blobs that would make room.
    """
    rows = NamespaceRows(store.ledger.database)
    store.ledger.flush()  # counts the states in memory
    if dry_run:
        return rows.preview_deletion(name, roots)
    return _delete_rows(
        store, lambda: rows.delete(name, roots), lambda: rows.state_keys(name, roots)
    )


def _delete_rows(
    store: KVStore,
    delete: Callable[[], tuple[T, Iterable[KVKey]]],
    state_keys: Callable[[], Iterable[KVKey]],
) -> T:
    """Delete rows, and then the states that have lost their last owner.

    On a full disk, the ledger has no room for its log of the deletion: the blobs are then deleted
    first. If the process ends before the rows go, their states count as lost and are encoded again.

    Args:
        store: The store.
        delete: Deletes the rows in one transaction. Returns a result, and the keys of the states.
        state_keys: Returns the keys of the states that will go.
    """
    try:
        result, freed = delete()
    except StoreFull:
        blobs = [key for key in state_keys() if key in store.disk]
        if not blobs:
            raise
        for key in blobs:
            store.disk.delete(key)
        result, freed = delete()
    store.discard(freed)
    return result
