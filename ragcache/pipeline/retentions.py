"""States of conversations that pause: their callers ask to find them when they come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ragcache.pipeline.keeper import Keeper
from ragcache.states import KVKey
from ragcache.store import KVStore


class Retained(NamedTuple):
    """One state that stays in the tiers until a time."""

    until: float
    """Unix seconds."""
    nbytes: int
    keeper: str
    """Name of the caller."""


@dataclass(eq=False)
class Retentions:
    """The states of a namespace's conversations that are evicted last. Thread-safe.

    A hint of a caller, not a guarantee: a retained state goes when nothing else is left to evict.
    Hints beyond the caller's budget, or beyond the conversations' share of the last memory tier,
    are ignored.
    """

    store: KVStore
    _held: dict[KVKey, Retained] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def add(self, sizes: Mapping[KVKey, int], seconds: float, keeper: Keeper) -> bool:
        """Evict states after all others for some time.

        Args:
            sizes: Bytes of the states.
            seconds: Seconds from now.
            keeper: The caller, with its budget.

        Returns:
            Whether they fit the budget.
        """
        now = time.time()
        with self._lock:
            held = self._held = {k: each for k, each in self._held.items() if each.until > now}
            mine = sum(each.nbytes for each in held.values() if each.keeper == keeper.name)
            every = sum(each.nbytes for each in held.values())
            new = sum(nbytes for key, nbytes in sizes.items() if key not in held)
            share = self.store.memory.conversation_share(self.store.memory.indexes[-1])
            most = share if keeper.budget_bytes is None else keeper.budget_bytes
            if mine + new > most or every + new > share:
                return False
            for key, nbytes in sizes.items():
                before = held.get(key)
                until = max(now + seconds, before.until if before else 0.0)
                held[key] = Retained(until, nbytes, keeper.name)
            self.store.memory.retain({key: held[key].until for key in sizes})
            return True
