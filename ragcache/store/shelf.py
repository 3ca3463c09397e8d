"""A tier with what the policy knows of the states in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ragcache.states import KVKey
from ragcache.store.entries import Entries, KVEntry
from ragcache.store.policy import Policy, choose_victims, expired
from ragcache.store.tiers import Tier


@dataclass(frozen=True, slots=True)
class Leaving:
    """States that have to go. reason: `pressure` or `ttl`; None for those on probation, whose going
    is no eviction: they were never admitted."""

    key: KVKey
    nbytes: int
    reason: str | None


class Shelf:
    """Bookkeeping alone, under the caller's lock; the tier does the I/O.

    States that were not admitted may stand on probation where there is room: they push nothing out,
    and go before everything else.
    """

    def __init__(self, tier: Tier, policy: Policy = "lru") -> None:
        self.tier, self.policy = tier, policy
        self.entries = Entries()
        self.probation: dict[KVKey, None] = {}  # the oldest first
        self.clock = 0.0

    @property
    def name(self) -> str:
        return self.tier.name

    def add(self, entry: KVEntry, *, admitted: bool = True) -> None:
        self.entries.add(entry)
        if admitted:
            self.probation.pop(entry.key, None)
        else:
            self.probation[entry.key] = None

    def admit(self, key: KVKey) -> None:
        """Ends the probation of states that were used again."""
        self.probation.pop(key, None)

    def touch(self, key: KVKey, tick: int) -> None:
        self.entries.touch(key, tick, self.clock)

    def remove(self, key: KVKey) -> int:
        """Forgets an entry; returns its bytes, 0 where there was none."""
        if key not in self.entries:
            return 0
        nbytes = self.entries.get(key).nbytes
        self.entries.remove(key)
        self.probation.pop(key, None)
        return nbytes

    def choose(self, need: int, now: float, *, admitted: bool) -> list[Leaving] | None:
        """What has to go so that `need` bytes become free; None where that cannot be. For states
        that are not admitted nothing goes but what is on probation."""
        leaving = list(self._on_probation(need))
        need -= sum(each.nbytes for each in leaving)
        if need <= 0:
            return leaving
        if not admitted:
            return None
        chosen = {each.key for each in leaving}
        for key in chosen:  # taken from the policy's sight, not yet from the tier
            self.entries.lease(key)
        victims = choose_victims(self.entries, need, self.policy, now=now, clock=self.clock)
        for key in chosen:
            self.entries.release(key)
        if victims.missing:
            return None
        self.clock = victims.clock
        for number, key in enumerate(victims.keys):
            reason = "ttl" if number < victims.expired else "pressure"
            leaving.append(Leaving(key, self.entries.get(key).nbytes, reason))
        return leaving

    def overdue(self, now: float) -> list[Leaving]:
        """What has expired."""
        return [
            Leaving(key, self.entries.get(key).nbytes, "ttl") for key in expired(self.entries, now)
        ]

    def _on_probation(self, need: int) -> Iterator[Leaving]:
        for key in list(self.probation):
            entry = self.entries.get(key)
            if need <= 0:
                return
            if not (entry.leased or entry.pinned):
                need -= entry.nbytes
                yield Leaving(key, entry.nbytes, None)
