"""The tiers in memory: what they hold, what is leased, and what is known of every key."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter

from ragcache.db.ledger import StateMetadata, StateRow, UsageBuffer
from ragcache.errors import StoreBudgetExceeded
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates, quantize, readable
from ragcache.states.serialization import Allocate
from ragcache.store.eviction import EvictionIndex
from ragcache.store.tiers import Tier
from ragcache.tiers import TIERS, shared_tiers

_READING_SECONDS, _POLL_SECONDS = 1.0, 0.002
_ATTEMPTS = 4  # at an extent in one piece, each after an eviction
_BLOCK = 4096  # bytes by which a blob may be larger than its states


@dataclass(slots=True)
class Counters:
    """What happened since a store was opened. encoded: states computed. corrupt: blobs that failed
    their checksum or vanished. unreadable: tiers that could not be read or written when they were
    wanted. unclaimed: states computed for one question without a claim: the ledger did not answer,
    or another process took too long. hits: by tier, states found there. evictions: by (tier,
    reason). encoded_tokens, encode_seconds: of the states computed, from the claim to their end.
    read_bytes, read_seconds: by tier, of blobs."""

    encoded: int = 0
    corrupt: int = 0
    unreadable: int = 0
    unclaimed: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    evictions: Counter[tuple[str, str]] = field(default_factory=Counter)
    encoded_tokens: int = 0
    encode_seconds: float = 0.0
    read_bytes: Counter[str] = field(default_factory=Counter)
    read_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def measured_costs(self) -> dict[str, float]:
        """The fields of `ragcache.routing.RoutingCosts` that have been measured so far."""
        measured, shared = {}, shared_tiers()
        if seconds := sum(self.read_seconds[name] for name in shared):
            read = sum(self.read_bytes[name] for name in shared)
            measured["remote_bandwidth"] = read / seconds
        if self.encode_seconds:
            measured["encode_rate"] = self.encoded_tokens / self.encode_seconds
        return measured


@dataclass(frozen=True, slots=True)
class TierIndex:
    """A tier and what is known of its states without asking it. Only bookkeeping, under the lock of
    `MemoryTiers`; the tier does the I/O."""

    tier: Tier
    entries: EvictionIndex = field(default_factory=EvictionIndex)

    @property
    def name(self) -> str:
        return self.tier.name


class MemoryTiers:
    """Tiers in memory, fastest first, and what is known of the states in every tier.

    `lock` guards the bookkeeping of all tiers, and is never held while anything is copied, read or
    computed.
    """

    def __init__(
        self, indexes: Sequence[TierIndex], usage: UsageBuffer, counters: Counters,
        persistent: Sequence[TierIndex] = (),
    ) -> None:  # fmt: skip
        """persistent: the tiers that outlive the process, whose states are leased as well."""
        self.lock = threading.RLock()
        self.indexes = tuple(indexes)
        self.every = (*indexes, *persistent)
        self.top = indexes[0]
        self.leases: Counter[KVKey] = Counter()
        """How often each key is in use."""
        self.metadata: dict[KVKey, StateMetadata] = {}
        self.reused: set[KVKey] = set()
        """Keys that were used again in the first tier since this was last emptied."""
        self.pinned: set[KVKey] = set()
        """Keys that stay, in every tier."""
        self.until: dict[KVKey, float] = {}
        """Unix seconds at which states expire, in every tier."""
        self.dropped: dict[KVKey, tuple[str, str | None]] = {}
        """Keys that go after their last lease: the reason, and the tier or None for all."""
        self._usage, self._counters = usage, counters
        self._unbudgeted: dict[KVKey, tuple[StoredStates, int]] = {}
        """States in use that no tier in memory took, until their last lease ends, with the bytes
        that they take in addition to the budget: encoded ones while leases or pins filled the first
        tier (as much as its budget at most), or ones mapped from a disk (no bytes)."""
        self._placing = {index.name: threading.RLock() for index in self.indexes}

    def hold(self, keys: Iterable[KVKey]) -> None:
        """Begins a use of keys, whether or not they are in memory."""
        with self.lock:
            for key in keys:
                self.leases[key] += 1

    def release(self, keys: Iterable[KVKey]) -> None:
        """Ends a use."""
        with self.lock:
            for key in keys:
                self.leases[key] -= 1
                if self.leases[key] > 0:
                    continue
                del self.leases[key]
                self._unbudgeted.pop(key, None)
                if key in self.dropped:
                    self.drop(key, *self.dropped.pop(key))

    def _stays(self, key: KVKey) -> bool:
        return key in self.leases or key in self.pinned

    def find(self, key: KVKey, tick: int | None) -> StoredStates | None:
        """States that are unbudgeted or in the first tier. Counts as a use at a tick, if any."""
        with self.lock:
            if key in self._unbudgeted:
                return self._unbudgeted[key][0]
            if key not in self.top.entries:
                return None
            if tick is not None and self.top.entries.touch(key, tick):
                self.reused.add(key)
            return self.top.tier.get(key)

    def is_known(self, key: KVKey) -> bool:
        """Whether any tier holds a key, so far as this process knows."""
        with self.lock:
            return any(key in index.entries for index in self.every)

    def row(self, index: TierIndex, key: KVKey, nbytes: int, tick: int) -> StateRow:
        """A row of states that enter a tier now."""
        metadata = self.metadata.get(key) or StateMetadata(0)
        until, kind = self.until.get(key, math.inf), index.tier.kv_dtype
        return StateRow(key, index.name, nbytes, 0, tick, key in self.pinned, until, kind, metadata)

    def resync_usage(self) -> None:
        """Notes all that the tiers in memory hold once more: the ledger has forgotten it."""
        with self.lock:
            for index in self.indexes:
                for key in index.entries:
                    self._usage.add_entry(self.row(index, key, *index.entries.get(key)))

    def load_rows(self, index: TierIndex, rows: Iterable[StateRow]) -> None:
        """Notes that a tier that outlives processes holds states, as the ledger says. States that
        the ledger counts uses of were used again."""
        with self.lock:
            for row in sorted(rows, key=attrgetter("last_use")):
                index.entries.add(row.key, row.nbytes, row.last_use, reused=row.hits > 0)
                self.metadata[row.key] = row.metadata
                if row.pinned:
                    self.pinned.add(row.key)
                if row.expires_at != math.inf:
                    self.until[row.key] = row.expires_at

    def pin(self, keys: Iterable[KVKey], pinned: bool) -> None:
        """Sets whether states stay, in every tier."""
        with self.lock:
            (self.pinned.update if pinned else self.pinned.difference_update)(keys)

    def set_expirations(self, limits: Mapping[KVKey, float]) -> None:
        """Sets until when states are kept, in Unix seconds; `math.inf` is without a limit."""
        with self.lock:
            for key, until in limits.items():
                if until == math.inf:
                    self.until.pop(key, None)
                else:
                    self.until[key] = until

    def forget_expirations(self, now: float) -> None:
        """Forgets the limits of gone states that have passed: encoded again, they have none."""
        with self.lock:
            for key in [key for key, until in self.until.items() if until <= now]:
                if not self.is_known(key):
                    del self.until[key]

    def expired(self, index: TierIndex, now: float) -> list[KVKey]:
        """The states of a tier that have expired and may go."""
        with self.lock:
            ended = [key for key, until in self.until.items() if until <= now]
            return [key for key in ended if key in index.entries and not self._stays(key)]

    def choose_victims(self, index: TierIndex, need: int) -> dict[KVKey, str] | None:
        """The states to remove from a tier, with the reason, so that `need` bytes become free:
        expired ones, then those that the queues name. None if that is not possible."""
        with self.lock:
            leaving = dict.fromkeys(self.expired(index, time.time()), "ttl")
            need -= sum(index.entries.get(key).nbytes for key in leaving)
            stays = lambda key: key in leaving or self._stays(key)  # noqa: E731
            chosen = index.entries.choose_victims(need, stays)
            return None if chosen is None else leaving | dict.fromkeys(chosen, "pressure")

    def place(
        self, index: TierIndex, key: KVKey, states: StoredStates, tick: int, *,
        evict: bool = True, reused: bool = False,
    ) -> StoredStates | None:  # fmt: skip
        """Puts states into a tier in memory; returns them as the tier has them, None if there is no
        room. evict: whether others may go for them. reused: they were used again elsewhere."""
        tier = index.tier
        with self._placing[index.name]:
            room = 0 if tier.owns(states) else tier.size_of(states)
            if not self._fit(index, room, evict=evict):
                return None
            left, deadline = _ATTEMPTS, time.monotonic() + _READING_SECONDS
            while True:
                try:
                    nbytes = tier.put(key, states)
                except StoreBudgetExceeded:
                    if self._reading(tier, room) and time.monotonic() < deadline:
                        time.sleep(_POLL_SECONDS)
                        continue
                    left -= 1
                    if tier.traits.slabs and left and evict and self._make_room(index, room):
                        continue  # what was free was not in one piece
                    return None
                return self._placed(index, key, nbytes, tick, reused=reused)

    def _reading(self, tier: Tier, nbytes: int) -> bool:
        """Whether a GPU's tier has no room because of states that were let go, and that a step
        still reads: for one or two steps."""
        budget = tier.budget_bytes
        return tier.traits.on_gpu and budget is not None and tier.used_bytes + nbytes > budget

    def place_together(
        self, entries: Sequence[tuple[KVKey, StoredStates]], tick: int, *, reused: bool
    ) -> list[StoredStates | None]:
        """As `place` in the first tier, for several keys. A device gets them side by side, if it
        has room for all."""
        top = self.top
        if top.tier.traits.grouped and len(entries) > 1:
            with self._placing[top.name]:
                room = sum(top.tier.size_of(states) for _, states in entries)
                if self._fit(top, room):
                    with suppress(StoreBudgetExceeded):
                        sizes = top.tier.put_all(entries)
                        return [
                            self._placed(top, key, nbytes, tick, reused=reused)
                            for (key, _), nbytes in zip(entries, sizes, strict=True)
                        ]
        return [self.place(top, key, states, tick, reused=reused) for key, states in entries]

    def _placed(
        self, index: TierIndex, key: KVKey, nbytes: int, tick: int, *, reused: bool
    ) -> StoredStates:
        """Notes states that a tier in memory has taken; returns them as the tier has them."""
        with self.lock:
            if index.entries.add(key, nbytes, tick, reused=reused) and index is self.top:
                self.reused.add(key)
            self._usage.add_entry(self.row(index, key, nbytes, tick))
        return readable(index.tier.get(key))

    def _fit(self, index: TierIndex, nbytes: int, *, evict: bool = True) -> bool:
        """Makes room for so many bytes within the budget; returns whether there is any."""
        tier = index.tier
        used = index.entries.used_bytes if tier.traits.on_gpu else tier.used_bytes
        need = used + nbytes - (tier.budget_bytes or nbytes)
        return need <= 0 or (evict and self._make_room(index, need))

    def has_room(self, key: KVKey) -> bool:
        """Whether the first tier has room for a key now, by its size in another tier."""
        tier = self.top.tier
        with self.lock:
            sizes = [s.entries.get(key).nbytes for s in self.every if key in s.entries]
        free = math.inf if tier.budget_bytes is None else tier.budget_bytes - tier.used_bytes
        return bool(sizes) and min(sizes) - _BLOCK <= free

    def room(self, nbytes: int, *, evict: bool = True) -> Allocate | None:
        """Main memory to load so many bytes into, None where there is none. What is loaded into
        the first tier is then placed without a copy; before a device, memory of the host tier is
        only passed through, and pushes nothing out."""
        index = self._buffers()
        if index is None:
            return None
        if index is not self.top:
            return index.tier.allocate if index.tier.traits.slabs else None
        with self._placing[index.name]:
            if not self._fit(index, nbytes, evict=evict):
                return None
        return index.tier.allocate

    def begin_download(self, states: StoredStates) -> StoredStates | None:
        """A copy in memory of the host tier, which is not an entry yet, of states that the device
        before it has computed; None for others, and where there is no room."""
        index = self._buffers()
        if index is None or not self.top.tier.is_computed(states):
            return None
        host, kept = index.tier, quantize(states, index.tier.kv_dtype)
        with self._placing[index.name]:
            if self._fit(index, host.size_of(kept)):
                with suppress(StoreBudgetExceeded):
                    return host.begin_copy(kept)
        return None

    def end_download(self, key: KVKey, states: StoredStates, tick: int) -> None:
        """Keeps a copy that has ended: the device may let go of its own for free."""
        index = self._buffers()
        if index is not None and key not in index.entries:
            self.place(index, key, states, tick)

    def _buffers(self) -> TierIndex | None:
        return next((index for index in self.indexes if index.tier.traits.buffers), None)

    def keep_unbudgeted(self, key: KVKey, states: StoredStates, *, beside: bool) -> None:
        """Keeps states for as long as they are leased. beside: whether they take room beside the
        budget of the first tier. Raises `StoreBudgetExceeded`, also where the first tier is a
        device that could not read them elsewhere."""
        tier = self.top.tier
        away = tier.traits.on_gpu and not tier.is_computed(states)
        nbytes = tier.size_of(states) if beside or away else 0
        with self.lock:
            entries = self.top.entries
            used = sum(size for _, size in self._unbudgeted.values())
            used += sum(entries.get(held).nbytes for held in self.leases if held in entries)
            budget = tier.budget_bytes
            if away or (nbytes and budget is not None and used + nbytes > budget):
                raise StoreBudgetExceeded(
                    f"the {self.top.name} tier holds {budget:,} bytes, of which {used:,} are in "
                    f"use by running requests; {nbytes:,} more do not fit. Raise "
                    f"{TIERS[self.top.name].budget_option}, or ask with a smaller k or fewer "
                    "questions at once"
                )
            self._unbudgeted[key] = (states, nbytes)

    def describe(self, key: KVKey, metadata: StateMetadata) -> None:
        """Sets the metadata of states that were just encoded, and keeps them from being dropped."""
        with self.lock:
            self.metadata[key] = metadata
            self.dropped.pop(key, None)

    def drop(self, key: KVKey, reason: str, tier: str | None = None) -> None:
        """Removes states from a tier in memory, or from all; those in use after the last lease."""
        with self.lock:
            if key in self.leases:
                self.dropped[key] = (reason, tier)
                return
            for index in self.indexes:
                if tier in (None, index.name) and key in index.entries:
                    self._remove(index, key, reason)

    def expire(self, index: TierIndex, now: float) -> None:
        """Removes the states of a tier in memory that have expired."""
        with self.lock:
            for key in self.expired(index, now):
                self._remove(index, key, "ttl")

    def _remove(self, index: TierIndex, key: KVKey, reason: str) -> None:
        nbytes = index.entries.remove(key, remember=reason == "pressure")
        index.tier.delete(key)
        self._usage.remove_entry(index.name, key, nbytes, reason)
        self._counters.evictions[index.name, reason] += 1

    def _make_room(self, index: TierIndex, need: int) -> bool:
        """Removes states from a tier in memory; what leaves for pressure goes to the next one."""
        below = next(iter(self.indexes[self.indexes.index(index) + 1 :]), None)
        demoted: list[tuple[KVKey, StoredStates, int, bool]] = []
        with self.lock:  # no other thread finds or chooses what leaves
            leaving = self.choose_victims(index, need)
            if leaving is None:
                return False
            for key, reason in leaving.items():
                if reason == "pressure" and below is not None and key not in below.entries:
                    last_use, reused = index.entries.get(key).last_use, index.entries.is_reused(key)
                    demoted.append((key, index.tier.get(key), last_use, reused))
                self._remove(index, key, reason)
        while demoted and below is not None:  # each ends where it was before the next is copied
            key, states, last_use, reused = demoted.pop()
            self.place(below, key, states, last_use, reused=reused)
        return True
