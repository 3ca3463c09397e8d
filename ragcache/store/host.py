"""The host tier: states in main memory, under a budget of bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ragcache.errors import StoreBudgetExceeded
from ragcache.states import KVKey, KVStates
from ragcache.store.policy import KVEntry, choose_victims


class HostTier:
    """Holds states by key; what is leased is never evicted, the budget is never exceeded."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.evictions = 0
        self._states: dict[KVKey, KVStates] = {}
        self._last_use: dict[KVKey, int] = {}
        self._leases: Counter[KVKey] = Counter()
        self._clock = 0

    def __contains__(self, key: KVKey) -> bool:
        return key in self._states

    def __len__(self) -> int:
        return len(self._states)

    def get(self, key: KVKey) -> KVStates | None:
        """The states of a key, which are used now; None where they are not here."""
        states = self._states.get(key)
        if states is not None:
            self._touch(key)
        return states

    def put(self, key: KVKey, states: KVStates) -> tuple[KVKey, ...]:
        """Admits states; returns the keys that had to go. Raises `StoreBudgetExceeded` where what
        is leased leaves too little room."""
        if key in self._states:
            self._touch(key)
            return ()
        victims = self._make_room(states.nbytes)
        self._states[key] = states
        self.used_bytes += states.nbytes
        self._touch(key)
        return victims

    def drop(self, key: KVKey) -> None:
        """Forgets a key, leased or not: requests under way keep their own reference."""
        states = self._states.pop(key, None)
        if states is not None:
            self.used_bytes -= states.nbytes
            del self._last_use[key]

    def lease(self, keys: Iterable[KVKey]) -> None:
        self._leases.update(keys)

    def release(self, keys: Iterable[KVKey]) -> None:
        self._leases.subtract(keys)
        self._leases += Counter()  # drops the zeros

    def entries(self) -> list[KVEntry]:
        """What the policy sees."""
        return [
            KVEntry(key, states.nbytes, self._last_use[key], self._leases[key] > 0)
            for key, states in self._states.items()
        ]

    def _touch(self, key: KVKey) -> None:
        self._clock += 1
        self._last_use[key] = self._clock

    def _make_room(self, nbytes: int) -> tuple[KVKey, ...]:
        need = self.used_bytes + nbytes - self.budget_bytes
        if need <= 0:
            return ()
        entries = self.entries()
        victims = choose_victims(entries, need).keys
        if sum(self._states[key].nbytes for key in victims) < need:
            leased = sum(e.nbytes for e in entries if e.leased)
            raise StoreBudgetExceeded(
                f"the host tier holds {self.budget_bytes:,} bytes, of which {leased:,} are in use "
                f"by running requests; {nbytes:,} more do not fit. Raise host_bytes, or ask with a "
                "smaller k or fewer questions at once"
            )
        for key in victims:
            self.drop(key)
        self.evictions += len(victims)
        return victims
