"""Pins of callers: states of documents that a caller keeps from eviction, within a budget.

An operator pins without a limit (`Modules.pin`). A caller's pin has an owner, a size and an end.
Its states may be evicted again when the last pin that covers them has ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ragcache.config import check_texts
from ragcache.db import StoredObject, StoredObjects
from ragcache.errors import ConfigurationError, PinBudgetExceeded
from ragcache.pipeline.keeper import Keeper
from ragcache.pipeline.modules import Modules
from ragcache.states import KVKey
from ragcache.store import KVStore

KIND = "pin"


@dataclass(frozen=True, slots=True)
class Pin:
    """States of documents that a caller keeps. Times are Unix seconds."""

    id: str
    owner: str
    """Name of the caller."""
    collection: str
    documents: tuple[str, ...] | None
    """Ids of the documents. None for all documents that the collection had."""
    states: int
    """Number of states."""
    nbytes: int
    created_at: float
    expires_at: float | None
    """None for a pin without an end."""

    @classmethod
    def of(cls, stored: StoredObject) -> Pin:
        """Return the pin of a stored object."""
        value, documents = stored.value, stored.value["documents"]
        return cls(
            stored.id,
            stored.owner,
            value["collection"],
            None if documents is None else tuple(documents),
            len(value["keys"]),
            value["nbytes"],
            stored.created_at,
            value["until"],
        )


class Pins:
    """The callers' pins of one namespace; `RagCache.pins`.

    Example:
        >>> pin = rag.pins.add("handbook", ["leave.md"], seconds=3600)
        >>> rag.pins.end(pin.id)
        True
    """

    def __init__(self, modules: Modules, store: KVStore, objects: StoredObjects) -> None:
        self._modules, self._store, self._objects = modules, store, objects
        self._next_end = 0.0  # Unix seconds; the first look reads the pins

    def add(
        self,
        collection: str,
        documents: Sequence[str] | None = None,
        *,
        seconds: float | None = None,
        keeper: Keeper | None = None,
    ) -> Pin:
        """Keep the states of documents from eviction, until a time or until `end`.

        Args:
            collection: The collection.
            documents: Ids of documents. By default all documents that the collection has now.
            seconds: Seconds from now. No limit by default.
            keeper: The caller, with its budget.

        Raises:
            UnknownCollection: There is no such collection.
            PinBudgetExceeded: The caller's pins would exceed its budget.
            ConfigurationError: `seconds` is not a positive number.
        """
        check_texts("documents", documents)
        if seconds is not None and not 0 < seconds < math.inf:
            raise ConfigurationError(f"a pin ends after more than 0 seconds, not {seconds}")
        keeper = keeper or Keeper()
        self.end_expired()
        sizes: dict[KVKey, int] = {}
        for change in self._modules.pin(collection, documents, dry_run=True):
            sizes[change.key] = max(change.nbytes, sizes.get(change.key, 0))
        self._check_budget(keeper, sum(sizes.values()))
        until = None if seconds is None else time.time() + seconds
        value = {
            "collection": collection,
            "documents": None if documents is None else list(documents),
            "keys": sorted(sizes),
            "before": sorted(self._store.ledger.pinned(sizes) - self._pinned_keys()),
            "nbytes": sum(sizes.values()),
            "until": until,
        }
        made = self._objects.add(KIND, value, owner=keeper.name)
        self._next_end = min(self._next_end, until or math.inf)
        self._store.pin(list(sizes))
        return Pin.of(made)

    def list(self, owner: str | None = None) -> Sequence[Pin]:
        """Return the pins of a caller or, by default, of all callers, the oldest first."""
        self.end_expired()
        return [Pin.of(each) for each in self._objects.list(KIND, owner)]

    def end(self, id: str, owner: str | None = None) -> bool:
        """End a pin, and tell whether there was one.

        Args:
            id: Id of the pin.
            owner: Only a pin of this caller.
        """
        found = self._objects.get(KIND, id)
        if found is None or owner not in (None, found.owner):
            return False
        self._end(found)
        return True

    def end_expired(self) -> None:
        """End the pins whose time is over."""
        now = time.time()
        if now < self._next_end:
            return
        ends = []
        for each in self._objects.list(KIND):
            until = each.value["until"]
            if until is not None and until <= now:
                self._end(each)
            elif until is not None:
                ends.append(until)
        self._next_end = min(ends, default=now + 60.0)  # other processes make pins, too

    def _end(self, pin: StoredObject) -> None:
        """Remove a pin. Its states stay pinned for other callers, and for operators before it."""
        self._objects.delete(KIND, pin.id)
        kept = self._pinned_keys() | set(pin.value["before"])
        self._store.pin([KVKey(key) for key in pin.value["keys"] if key not in kept], False)

    def _pinned_keys(self) -> set[KVKey]:
        pins = self._objects.list(KIND)
        return {KVKey(key) for each in pins for key in each.value["keys"]}

    def _check_budget(self, keeper: Keeper, nbytes: int) -> None:
        if keeper.budget_bytes is None:
            return
        used = sum(each.value["nbytes"] for each in self._objects.list(KIND, keeper.name))
        if used + nbytes > keeper.budget_bytes:
            raise PinBudgetExceeded(
                f"the pins of this key would keep {used + nbytes:,} bytes, and its budget is "
                f"{keeper.budget_bytes:,}; end other pins, or ask an operator for a key with "
                "more pin_bytes"
            )
