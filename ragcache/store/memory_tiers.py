"""Memory tiers: their entries, leases, and the metadata of every key."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter

from ragcache.db.references import CONVERSATION_MODE
from ragcache.db.state_rows import StateMetadata, StateRow
from ragcache.db.usage import UsageBuffer
from ragcache.errors import StoreBudgetExceeded
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates, quantize
from ragcache.states.serialization import Allocate
from ragcache.store.eviction import TierEntries
from ragcache.store.tiers import Tier
from ragcache.tiers import TIERS, shared_tiers

_READING_SECONDS, _POLL_SECONDS = 1.0, 0.002  # limit and pause of waiting for a step that reads
_SPARE_METADATA = 1024  # of absent states, which is not worth a search
_ATTEMPTS = 4  # to allocate one extent, each after an eviction
BLOB_ROUNDING = 4096
"""Maximum bytes by which a blob is larger than its states."""


@dataclass(slots=True)
class Counters:
    """Events since the store was opened."""

    encoded: int = 0
    """Encoded states."""
    corrupt: int = 0
    """Blobs that failed their checksum or vanished."""
    unreadable: int = 0
    """Failed reads and writes of tiers."""
    unclaimed: int = 0
    """States encoded without a claim, for one question, because the ledger did not answer or
    another process took too long.
    """
    hits: Counter[str] = field(default_factory=Counter)
    """States found, by tier."""
    evictions: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Evictions, by tier and reason."""
    encoded_tokens: int = 0
    """Length of encoded states in tokens."""
    encode_seconds: float = 0.0
    """Duration of encoding, from a claim to its states."""
    read_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of blobs read, by tier."""
    read_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Duration of reading blobs, by tier."""

    def seconds_to_read(self, tier: str, nbytes: int) -> float:
        """Return the seconds of reading bytes of a tier, by its reads so far. 0 before these."""
        read = self.read_bytes[tier]
        return nbytes * self.read_seconds[tier] / read if read else 0.0

    def measured_costs(self) -> dict[str, float]:
        """Return the fields of `ragcache.routing.RoutingCosts` that have been measured."""
        measured, shared = {}, shared_tiers()
        if seconds := sum(self.read_seconds[name] for name in shared):
            read = sum(self.read_bytes[name] for name in shared)
            measured["remote_bandwidth"] = read / seconds
        if self.encode_seconds:
            measured["encode_rate"] = self.encoded_tokens / self.encode_seconds
        return measured


@dataclass(frozen=True, slots=True)
class TierIndex:
    """A tier and the bookkeeping of its entries.

    The lock of `MemoryTiers` guards the bookkeeping. I/O is done by the tier.
    """

    tier: Tier
    entries: TierEntries = field(default_factory=TierEntries)

    @property
    def name(self) -> str:
        return self.tier.name


class MemoryTiers:
    """Memory tiers, fastest first, and the bookkeeping of all tiers.

    `lock` guards the bookkeeping. It is never held during a copy, a read or a computation.
    """

    def __init__(
        self,
        indexes: Sequence[TierIndex],
        usage: UsageBuffer,
        counters: Counters,
        persistent: Sequence[TierIndex] = (),
    ) -> None:
        """Create the bookkeeping. States of `persistent` tiers can be leased as well."""
        self.lock = threading.RLock()
        self.indexes = tuple(indexes)
        self.every = (*indexes, *persistent)
        self.top = indexes[0]
        self.leases: Counter[KVKey] = Counter()
        """Number of leases of each key."""
        self.metadata: dict[KVKey, StateMetadata] = {}
        self.reused: set[KVKey] = set()
        """Keys used again in the first tier since this set was last emptied."""
        self.pinned: set[KVKey] = set()
        """Keys that stay in every tier."""
        self.retained: dict[KVKey, float] = {}
        """Unix seconds until which states are evicted after all others."""
        self.until: dict[KVKey, float] = {}
        """Unix seconds at which states expire in every tier."""
        self.dropped: dict[KVKey, tuple[str, str | None]] = {}
        """Keys to remove after their last lease, with the reason and the tier. None as the tier
        means all tiers.
        """
        self.conversation_bytes: int | None = None
        """Bytes of a full tier that conversations keep. None: a quarter of the tier."""
        self._usage, self._counters = usage, counters
        self._unbudgeted: dict[KVKey, tuple[StoredStates, int]] = {}
        """Leased states that no memory tier has taken, with their bytes in excess of the budget.

        They were encoded while leases or pins filled the first tier (at most its budget), or are
        mapped from a disk (no bytes). They are kept until their last lease ends.
        """
        self._copies: dict[str, dict[KVKey, None]] = {index.name: {} for index in self.indexes[1:]}
        """For each lower tier, its states that a faster tier has as well, oldest copies first."""
        self._placing = {index.name: threading.RLock() for index in self.indexes}

    def hold(self, keys: Iterable[KVKey]) -> None:
        """Lease keys, whether or not they are in memory."""
        with self.lock:
            for key in keys:
                self.leases[key] += 1

    def release(self, keys: Iterable[KVKey]) -> None:
        """End a lease of keys."""
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

    def find(
        self, keys: Iterable[KVKey], tick: int, uncounted: Container[KVKey] = ()
    ) -> dict[KVKey, StoredStates]:
        """Return the states that are unbudgeted or in the first tier.

        Counts a use of states in the tier, unless their key is `uncounted`.
        """
        found, entries = dict[KVKey, StoredStates](), self.top.entries
        with self.lock:
            for key in keys:
                if key in self._unbudgeted:
                    found[key] = self._unbudgeted[key][0]
                elif key in entries:
                    if key not in uncounted and entries.touch(key, tick):
                        self.reused.add(key)
                    found[key] = self.top.tier.get(key)
        return found

    def _is_conversation(self, key: KVKey) -> bool:
        metadata = self.metadata.get(key)
        return metadata is not None and metadata.mode == CONVERSATION_MODE

    def is_known(self, key: KVKey) -> bool:
        """Return whether any tier has a key, as far as this process knows."""
        return not self.unknown((key,))

    def unknown(self, keys: Collection[KVKey]) -> list[KVKey]:
        """Return the keys that no tier has, as far as this process knows."""
        absent = [*keys]
        with self.lock:
            for index in self.every:
                entries = index.entries
                absent = [key for key in absent if key not in entries]
        return absent

    def seconds_to_read(self, key: KVKey) -> float:
        """Return the measured seconds of reading a key into memory. 0 if memory has it."""
        with self.lock:
            found = next((index for index in self.every if key in index.entries), None)
            if found is None or found in self.indexes:
                return 0.0
            return self._counters.seconds_to_read(found.name, found.entries.get(key).nbytes)

    def row(self, index: TierIndex, key: KVKey, nbytes: int, tick: int) -> StateRow:
        """Return the ledger row of states that enter a tier now."""
        metadata = self.metadata.get(key) or StateMetadata(0)
        until, kind = self.until.get(key, math.inf), index.tier.kv_dtype
        return StateRow(key, index.name, nbytes, 0, tick, key in self.pinned, until, kind, metadata)

    def resync_usage(self) -> None:
        """Record all entries of memory tiers again, after the ledger has forgotten them."""
        with self.lock:
            for index in self.indexes:
                for key in index.entries:
                    self._usage.add_entry(self.row(index, key, *index.entries.get(key)))

    def load_rows(self, index: TierIndex, rows: Iterable[StateRow]) -> None:
        """Add the rows of a persistent tier to its bookkeeping.

        States with hits in the ledger count as used again.
        """
        with self.lock:
            for row in sorted(rows, key=attrgetter("last_use")):
                self.metadata[row.key] = row.metadata
                entered = self._is_conversation(row.key)
                index.entries.add(
                    row.key, row.nbytes, row.last_use, reused=row.hits > 0, conversation=entered
                )
                if row.pinned:
                    self.pinned.add(row.key)
                if row.expires_at != math.inf:
                    self.until[row.key] = row.expires_at

    def pin(self, keys: Iterable[KVKey], pinned: bool) -> None:
        """Pin or unpin states in every tier."""
        with self.lock:
            (self.pinned.update if pinned else self.pinned.difference_update)(keys)

    def set_expirations(self, limits: Mapping[KVKey, float]) -> None:
        """Set expirations in Unix seconds. `math.inf` removes a limit."""
        with self.lock:
            for key, until in limits.items():
                if until == math.inf:
                    self.until.pop(key, None)
                else:
                    self.until[key] = until

    def forget_expirations(self, now: float) -> None:
        """Forget past times, so that encoding states again sets no limit."""
        with self.lock:
            self.retained = {key: until for key, until in self.retained.items() if until > now}
            for key in [key for key, until in self.until.items() if until <= now]:
                if not self.is_known(key):
                    del self.until[key]

    def forget_metadata(self) -> None:
        """Forget the metadata of absent states, where it has become more than half of all."""
        with self.lock:
            known = sum(len(index.entries) for index in self.every)
            if len(self.metadata) > 2 * known + _SPARE_METADATA:
                kept = [key for key in self.metadata if key in self.leases or self.is_known(key)]
                self.metadata = {key: self.metadata[key] for key in kept}

    def expired(self, index: TierIndex, now: float) -> list[KVKey]:
        """Return the expired states of a tier that may be removed."""
        with self.lock:
            ended = [key for key, until in self.until.items() if until <= now]
            return [key for key in ended if key in index.entries and not self._stays(key)]

    def choose_victims(self, index: TierIndex, need: int) -> dict[KVKey, str] | None:
        """Choose states to remove until `need` bytes of a tier become free, with the reasons.

        Expired states go first, then copies of states that a faster tier has, then states in
        eviction order. If that is not enough, returns None.
        """
        with self.lock:
            leaving = dict.fromkeys(self.expired(index, time.time()), "ttl")
            need -= sum(index.entries.get(key).nbytes for key in leaving)
            for key in self._copies.get(index.name, ()):
                if need <= 0:
                    break
                if key not in leaving and key not in self.pinned:
                    leaving[key] = "pressure"
                    need -= index.entries.get(key).nbytes
            chosen = None
            if self.retained and index not in self.indexes[:-1]:  # others can go to a tier below
                retained = {key for key, until in self.retained.items() if until > time.time()}
                chosen = self._choose_others(index, need, leaving.keys() | retained)
            if chosen is None:
                chosen = self._choose_others(index, need, leaving.keys())
            return None if chosen is None else leaving | dict.fromkeys(chosen, "pressure")

    def _choose_others(
        self, index: TierIndex, need: int, chosen: AbstractSet[KVKey]
    ) -> list[KVKey] | None:
        """Choose states in eviction order, without leased, pinned and `chosen` ones."""
        return index.entries.choose_victims(
            need,
            lambda key: key in chosen or self._stays(key),
            self.conversation_share(index),
        )

    def conversation_share(self, index: TierIndex) -> int:
        """Return the bytes of a full tier that conversations keep."""
        share = self.conversation_bytes
        return (index.tier.budget_bytes or 0) // 4 if share is None else share

    def retain(self, limits: Mapping[KVKey, float]) -> None:
        """Evict states after all others until a time, in Unix seconds.

        States in a memory tier may still move to the memory tier below.
        """
        with self.lock:
            self.retained |= limits

    def place(
        self,
        index: TierIndex,
        key: KVKey,
        states: StoredStates,
        tick: int,
        *,
        evict: bool = True,
        reused: bool = False,
    ) -> StoredStates | None:
        """Put states into a memory tier.

        Args:
            index: The tier.
            key: Key of the states.
            states: The states.
            tick: Tick of the use.
            evict: Whether other states may be evicted for them.
            reused: The states were used again in another tier.

        Returns:
            The states as stored. Without room, None.
        """
        tier, budget = index.tier, index.tier.budget_bytes
        with self._placing[index.name]:
            room = 0 if tier.owns(states) else tier.size_of(states)
            if not self._fit(index, room, evict=evict):
                return None
            left, deadline = _ATTEMPTS, time.monotonic() + _READING_SECONDS
            while True:
                try:
                    nbytes = tier.put(key, states)
                except StoreBudgetExceeded:
                    waits = tier.traits.on_gpu and time.monotonic() < deadline
                    if waits and budget is not None and tier.used_bytes + room > budget:
                        time.sleep(_POLL_SECONDS)  # a step or two still read released states
                        continue
                    left -= 1
                    if tier.traits.slabs and left and evict and self._make_room(index, room):
                        continue  # the free bytes were not contiguous
                    return None
                return self._placed(index, key, nbytes, tick, reused=reused)

    def place_together(
        self, entries: Sequence[tuple[KVKey, StoredStates]], tick: int, *, reused: bool
    ) -> list[StoredStates | None]:
        """Put several states into the first tier, as `place` does.

        A device gets them side by side if it has room for all.
        """
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
        """Record states that a memory tier has taken. Returns them as stored."""
        with self.lock:
            entered = self._is_conversation(key)
            again = index.entries.add(key, nbytes, tick, reused=reused, conversation=entered)
            if again and index is self.top:
                self.reused.add(key)
            self._note_copies(key)
            self._usage.add_entry(self.row(index, key, nbytes, tick))
        return index.tier.get(key).readable()

    def _fit(self, index: TierIndex, nbytes: int, *, evict: bool = True) -> bool:
        """Make room for `nbytes` within the budget. Returns whether there is room."""
        tier = index.tier
        used = index.entries.used_bytes if tier.traits.on_gpu else tier.used_bytes
        need = used + nbytes - (tier.budget_bytes or nbytes)
        return need <= 0 or (evict and self._make_room(index, need))

    def has_room(self, key: KVKey) -> bool:
        """Return whether the first tier has room for a key, by its size in another tier."""
        tier = self.top.tier
        with self.lock:
            sizes = [s.entries.get(key).nbytes for s in self.every if key in s.entries]
        free = math.inf if tier.budget_bytes is None else tier.budget_bytes - tier.used_bytes
        return bool(sizes) and min(sizes) - BLOB_ROUNDING <= free

    def room(self, nbytes: int, *, evict: bool = True) -> Allocate | None:
        """Return an allocator of main memory to load `nbytes` into. Without room, None.

        States loaded for the first tier are placed without a copy; `evict` allows evictions for
        them. In front of a device, host memory is only a transfer buffer and evicts no states.
        """
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
        """Begin to copy states that the device has computed into the memory of the host tier.

        The copy is not an entry yet. Returns None without a device or without room.
        """
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
        """Add a finished copy to the host tier, so that the device can evict its own at no cost."""
        index = self._buffers()
        if index is not None and key not in index.entries:
            self.place(index, key, states, tick)

    def _buffers(self) -> TierIndex | None:
        return next((index for index in self.indexes if index.tier.traits.buffers), None)

    def keep_unbudgeted(self, key: KVKey, states: StoredStates, *, extra: bool) -> None:
        """Keep states that have no room in the first tier, for as long as they are leased.

        Args:
            key: Key of the states.
            states: The states.
            extra: Whether they take memory in addition to the budget.

        Raises:
            StoreBudgetExceeded: The leased states would exceed the budget, or the first tier is a
                GPU, which cannot read other memory.
        """
        tier = self.top.tier
        away = tier.traits.on_gpu and not tier.is_computed(states)
        nbytes = tier.size_of(states) if extra or away else 0
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
        """Set the metadata of newly encoded states and cancel their removal."""
        with self.lock:
            self.metadata[key] = metadata
            self.dropped.pop(key, None)

    def drop(self, key: KVKey, reason: str, tier: str | None = None) -> None:
        """Remove states from a memory tier, or from all; leased states after their last lease."""
        with self.lock:
            if key in self.leases:
                self.dropped[key] = (reason, tier)
                return
            for index in self.indexes:
                if tier in (None, index.name) and key in index.entries:
                    self._remove(index, key, reason)

    def expire(self, index: TierIndex, now: float) -> None:
        """Remove the expired states of a memory tier."""
        with self.lock:
            for key in self.expired(index, now):
                self._remove(index, key, "ttl")

    def _note_copies(self, key: KVKey) -> None:
        """Record in which lower tiers a key is a copy."""
        above = key in self.top.entries
        for index in self.indexes[1:]:
            copies, here = self._copies[index.name], key in index.entries
            if above and here:
                copies.setdefault(key)
            else:
                copies.pop(key, None)
            above |= here

    def _remove(self, index: TierIndex, key: KVKey, reason: str) -> int:
        """Remove states from a memory tier. Returns their bytes."""
        is_copy = key in self._copies.get(index.name, ())
        nbytes = index.entries.remove(key, remember=reason == "pressure" and not is_copy)
        index.tier.delete(key)
        self._note_copies(key)
        self._usage.remove_entry(index.name, key, nbytes, reason)
        self._counters.evictions[index.name, reason] += 1
        return nbytes

    def make_room(self, sizes: Iterable[int]) -> None:
        """Evict states of the first tier, one after another, until states of these bytes have room.

        For states that are about to be encoded: others go down while a device computes them.
        """
        room = 0
        for nbytes in sizes:
            room += nbytes
            with self._placing[self.top.name]:
                if not self._fit(self.top, room):
                    return

    def _make_room(self, index: TierIndex, need: int) -> bool:
        """Remove states from a memory tier. Evictions for pressure move to the next memory tier."""
        below = next(iter(self.indexes[self.indexes.index(index) + 1 :]), None)
        while need > 0:
            demoted = list[tuple[KVKey, TierIndex]]()
            with self.lock:  # no other thread may choose the same states
                leaving = self.choose_victims(index, need)
                if leaving is None:
                    return False
                for key, reason in leaving.items():
                    if reason == "pressure" and below is not None and key not in below.entries:
                        demoted.append((key, below))
                    else:
                        need -= self._remove(index, key, reason)
            for key, to in demoted:
                need -= self._demote(index, to, key)
        return True

    def _demote(self, index: TierIndex, below: TierIndex, key: KVKey) -> int:
        """Move states to the memory tier below, which has them before they leave this one.

        Returns the bytes that become free: none if the states are leased or pinned meanwhile.
        """
        with self._placing[below.name]:  # a copy would be the first to leave the tier below
            with self.lock:
                if key not in index.entries:
                    return 0
                states, reused = index.tier.get(key), index.entries.is_reused(key)
                last_use = index.entries.get(key).last_use
            self.place(below, key, states, last_use, reused=reused)
            with self.lock:
                if key not in index.entries or self._stays(key):
                    return 0
                return self._remove(index, key, "pressure")
