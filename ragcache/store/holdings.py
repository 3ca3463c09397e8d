"""What this process holds: the tiers in memory, what is leased, and what is known of every key."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ragcache.errors import StoreBudgetExceeded
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import StoredStates, restored
from ragcache.states.serialization import Allocate
from ragcache.store.counters import Counters
from ragcache.store.notes import Notes
from ragcache.store.rows import Facts, StateRow
from ragcache.store.shelf import Leaving, Shelf
from ragcache.store.tiers import HostTier

_BLOCK = 4096  # bytes by which a blob may be larger than its states

_Demoted = tuple[KVKey, StoredStates, int]  # with their last use


class Holdings:
    """Tiers in memory, the fastest first. `lock` guards the bookkeeping of all tiers, and is never
    held while anything is copied, read or computed.

    loose: states in use that no tier in memory took: encoded for a question that is not admitted
    (they take room beside the budget, as much as it at most), or mapped from a disk (they take
    none). They go with their last lease.
    """

    def __init__(
        self,
        shelves: Sequence[Shelf],
        notes: Notes,
        counters: Counters,
        shared: Sequence[Shelf] = (),
    ) -> None:
        """shared: the tiers that outlive the process, whose states are leased as well."""
        self.lock = threading.RLock()
        self.shelves = tuple(shelves)
        self.every = (*shelves, *shared)
        self.top = shelves[0]
        self.facts: dict[KVKey, Facts] = {}
        self.pinned: set[KVKey] = set()
        self.until: dict[KVKey, float] = {}  # Unix seconds
        self.dropped: dict[KVKey, tuple[str, str | None]] = {}  # to go after their last lease
        self._notes, self._counters = notes, counters
        self._held: Counter[KVKey] = Counter()
        self._loose: dict[KVKey, tuple[KVStates, int]] = {}  # with bytes beside the budget
        self._placing = {shelf.name: threading.RLock() for shelf in self.shelves}

    def hold(self, keys: Iterable[KVKey]) -> None:
        """Begins a use of keys, whether they are here or not."""
        with self.lock:
            for key in keys:
                self._held[key] += 1
                if self._held[key] == 1:
                    for shelf in self.every:
                        if key in shelf.entries:
                            shelf.entries.lease(key)

    def let_go(self, keys: Iterable[KVKey]) -> None:
        """Ends a use."""
        with self.lock:
            for key in keys:
                self._held[key] -= 1
                if self._held[key] > 0:
                    continue
                del self._held[key]
                self._loose.pop(key, None)
                for shelf in self.every:
                    shelf.entries.release(key)
                if key in self.dropped:
                    self.drop(key, *self.dropped.pop(key))

    def is_held(self, key: KVKey) -> bool:
        return self._held[key] > 0

    def find(self, key: KVKey, tick: int) -> StoredStates | None:
        """States that are in use loosely or in the first tier, which are used now."""
        with self.lock:
            if key in self._loose:
                return self._loose[key][0]
            if key not in self.top.entries:
                return None
            self.top.touch(key, tick)
            return self.top.tier.get(key)

    def row(self, shelf: Shelf, key: KVKey, nbytes: int, tick: int) -> StateRow:
        """A row of states that enter a tier now."""
        facts = self.facts.get(key) or Facts(0)
        until = self.until.get(key, math.inf)
        pinned = key in self.pinned
        kind = shelf.tier.kv_dtype
        return StateRow(key, shelf.name, nbytes, 0, tick, pinned, until, kind, facts)

    def enter(self, shelf: Shelf, row: StateRow, *, admitted: bool = True) -> None:
        """Notes that a tier holds states."""
        with self.lock:
            shelf.add(row.entry(), admitted=admitted)
            if self.is_held(row.key):
                shelf.entries.lease(row.key)

    def know(self, shelf: Shelf, rows: Sequence[StateRow]) -> None:
        """Notes that a tier that outlives processes holds states, as the ledger says."""
        with self.lock:
            shelf.entries.extend([row.entry() for row in rows])
            for key in [row.key for row in rows if row.key in self._held]:
                shelf.entries.lease(key)
            self.facts.update((row.key, row.facts) for row in rows)
            self.pinned.update(row.key for row in rows if row.pinned)
            self.until.update((r.key, r.expires_at) for r in rows if r.expires_at != math.inf)

    def limit(self, limits: Mapping[KVKey, float]) -> None:
        """Sets until when states are kept, in Unix seconds; `math.inf` is without a limit."""
        with self.lock:
            self.until.update(limits)
            for shelf in self.every:
                for key, until in limits.items():
                    if key in shelf.entries:
                        shelf.entries.expire(key, until)

    def forget_limits(self, now: float) -> None:
        """Forgets the limits that have passed of states that are gone: those that are encoded
        again have none."""
        with self.lock:
            for key in [key for key, until in self.until.items() if until <= now]:
                if not any(key in shelf.entries for shelf in self.every):
                    del self.until[key]

    def place(
        self, shelf: Shelf, key: KVKey, states: StoredStates, tick: int, *, admitted: bool
    ) -> KVStates | None:
        """Puts states into a tier in memory; returns them as the tier has them, None where they
        found no room."""
        with self._placing[shelf.name]:
            loaded = isinstance(shelf.tier, HostTier) and shelf.tier.owns(states)
            room = 0 if loaded else shelf.tier.size_of(states)
            need = shelf.tier.used_bytes + room - (shelf.tier.budget_bytes or room)
            if need > 0 and not self._make_room(shelf, need, admitted=admitted):
                return None
            try:
                nbytes = shelf.tier.put(key, states)
            except StoreBudgetExceeded:  # what was let go is still being read elsewhere
                return None
            row = self.row(shelf, key, nbytes, tick)
            with self.lock:
                self.enter(shelf, row, admitted=admitted)
                self._notes.admitted(row)
            return restored(shelf.tier.get(key))

    def has_room(self, key: KVKey) -> bool:
        """Whether the first tier has room for a key as it is now, by its size in another tier,
        which counts whole blocks on a disk."""
        tier = self.top.tier
        with self.lock:
            sizes = [s.entries.get(key).nbytes for s in self.every if key in s.entries]
        free = math.inf if tier.budget_bytes is None else tier.budget_bytes - tier.used_bytes
        return bool(sizes) and min(sizes) - _BLOCK <= free

    def room(self, nbytes: int, *, admitted: bool) -> Allocate | None:
        """Memory of the first tier for so many bytes to be loaded into, where it can be given: what
        is loaded there is then placed without a copy."""
        tier = self.top.tier
        if not isinstance(tier, HostTier):
            return None
        with self._placing[tier.name]:
            need = tier.used_bytes + nbytes - (tier.budget_bytes or nbytes)
            if need > 0 and not self._make_room(self.top, need, admitted=admitted):
                return None
        return tier.allocate

    def keep_loose(self, key: KVKey, states: KVStates, *, beside: bool) -> None:
        """Keeps states for as long as they are leased. beside: whether they take room beside the
        budget of the first tier. Raises `StoreBudgetExceeded`."""
        nbytes = self.top.tier.size_of(states) if beside else 0
        with self.lock:
            used = sum(size for _, size in self._loose.values())
            for held in self._held:
                if held in self.top.entries:
                    used += self.top.entries.get(held).nbytes
            budget = self.top.tier.budget_bytes
            if nbytes and budget is not None and used + nbytes > budget:
                raise StoreBudgetExceeded(
                    f"the {self.top.name} tier holds {budget:,} bytes, of which {used:,} are in "
                    f"use by running requests; {nbytes:,} more do not fit. Raise "
                    f"{self.top.name}_bytes, or ask with a smaller k or fewer questions at once"
                )
            self._loose[key] = (states, nbytes)

    def cost(self, key: KVKey, seconds: float) -> None:
        """Takes what encoding states took, for the policy, which sees it at their next entry."""
        with self.lock:
            facts = self.facts.get(key)
            if facts is not None:
                self.facts[key] = facts._replace(cost=seconds)

    def drop(self, key: KVKey, reason: str, tier: str | None = None) -> None:
        """Forgets a key in a tier in memory, or in all; when it is in use, after its last lease."""
        with self.lock:
            if self.is_held(key):
                self.dropped[key] = (reason, tier)
                return
            for shelf in self.shelves:
                nbytes = shelf.remove(key) if tier in (None, shelf.name) else 0
                if nbytes:
                    shelf.tier.delete(key)
                    self._left(shelf, key, nbytes, reason)

    def take_out(self, shelf: Shelf, leaving: Iterable[Leaving]) -> None:
        """Takes states from a tier in memory; those that leave for pressure go to the next one."""
        with self.lock:
            demoted = self._remove(shelf, leaving)
        self._demote(shelf, demoted)

    def _remove(self, shelf: Shelf, leaving: Iterable[Leaving]) -> list[_Demoted]:
        demoted: list[_Demoted] = []
        below = self._below(shelf)
        for each in leaving:
            if each.reason == "pressure" and below and each.key not in below.entries:
                last_use = shelf.entries.get(each.key).last_use
                demoted.append((each.key, shelf.tier.get(each.key), last_use))
            shelf.remove(each.key)
            shelf.tier.delete(each.key)
            self._left(shelf, each.key, each.nbytes, each.reason)
        return demoted

    def _left(self, shelf: Shelf, key: KVKey, nbytes: int, reason: str | None) -> None:
        self._notes.left(shelf.name, key, nbytes, reason)
        if reason is not None:
            self._counters.evicted(shelf.name, reason, 1)

    def _demote(self, shelf: Shelf, demoted: list[_Demoted]) -> None:
        below = self._below(shelf)
        while demoted and below is not None:
            key, states, last_use = demoted.pop()
            self.place(below, key, restored(states), last_use, admitted=True)

    def _below(self, shelf: Shelf) -> Shelf | None:
        """The next tier in memory."""
        after = self.shelves[self.shelves.index(shelf) + 1 :]
        return after[0] if after else None

    def _make_room(self, shelf: Shelf, need: int, *, admitted: bool) -> bool:
        with self.lock:
            leaving = shelf.choose(need, time.time(), admitted=admitted)
            if leaving is None:
                return False
            demoted = self._remove(shelf, leaving)  # at once: nobody else finds or chooses them
        self._demote(shelf, demoted)
        return True
