"""The tiers in memory: what they hold, what is leased, and what is known of every key."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ragcache.db.ledger import StateMetadata, StateRow, UsageBuffer
from ragcache.errors import StoreBudgetExceeded
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates, quantize, readable
from ragcache.states.serialization import Allocate
from ragcache.store.eviction import Entries, KVEntry, Policy, choose_victims, expired
from ragcache.store.tiers import DeviceTier, HostTier, Tier

_READING_SECONDS, _POLL_SECONDS = 1.0, 0.002
_ATTEMPTS = 4  # at an extent in one piece, each after an eviction
_BLOCK = 4096  # bytes by which a blob may be larger than its states

_Demoted = tuple[KVKey, StoredStates, int]  # with their last use


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
        measured = {}
        if seconds := self.read_seconds["remote"]:
            measured["remote_bandwidth"] = self.read_bytes["remote"] / seconds
        if self.encode_seconds:
            measured["encode_rate"] = self.encoded_tokens / self.encode_seconds
        return measured

    def evicted(self, tier: str, reason: str, number: int) -> None:
        self.evictions[tier, reason] += number


@dataclass(frozen=True, slots=True)
class Victim:
    """States that have to go. reason: `pressure` or `ttl`; None for those on probation, whose going
    is no eviction: they were never admitted."""

    key: KVKey
    nbytes: int
    reason: str | None


class TierIndex:
    """A tier, and the entries of its states for the eviction policy. Only bookkeeping, under the
    caller's lock; the tier does the I/O.

    States that were not admitted may be on probation where there is room: they push nothing out,
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

    def choose(self, need: int, now: float, *, admitted: bool) -> list[Victim] | None:
        """The states to remove so that `need` bytes become free; None where that is not possible.
        For states that are not admitted, only those on probation go."""
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
            leaving.append(Victim(key, self.entries.get(key).nbytes, reason))
        return leaving

    def overdue(self, now: float) -> list[Victim]:
        """The states that have expired."""
        return [Victim(k, self.entries.get(k).nbytes, "ttl") for k in expired(self.entries, now)]

    def _on_probation(self, need: int) -> Iterator[Victim]:
        for key in list(self.probation):
            entry = self.entries.get(key)
            if need <= 0:
                return
            if not (entry.leased or entry.pinned):
                need -= entry.nbytes
                yield Victim(key, entry.nbytes, None)


def _is_gpu(tier: Tier) -> bool:
    return isinstance(tier, DeviceTier) and tier.is_gpu


class MemoryTiers:
    """Tiers in memory, the fastest first. `lock` guards the bookkeeping of all tiers, and is never
    held while anything is copied, read or computed.

    loose: states in use that no tier in memory took: encoded for a question that is not admitted
    (they take room beside the budget, as much as it at most), or mapped from a disk (they take
    none). They go with their last lease.
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
        self.metadata: dict[KVKey, StateMetadata] = {}
        self.pinned: set[KVKey] = set()
        self.until: dict[KVKey, float] = {}  # Unix seconds
        self.dropped: dict[KVKey, tuple[str, str | None]] = {}  # to go after their last lease
        self._usage, self._counters = usage, counters
        self._held: Counter[KVKey] = Counter()
        self._loose: dict[KVKey, tuple[StoredStates, int]] = {}  # with bytes beside the budget
        self._placing = {index.name: threading.RLock() for index in self.indexes}

    def hold(self, keys: Iterable[KVKey]) -> None:
        """Begins a use of keys, whether or not they are in memory."""
        with self.lock:
            for key in keys:
                self._held[key] += 1
                if self._held[key] == 1:
                    for index in self.every:
                        if key in index.entries:
                            index.entries.lease(key)

    def let_go(self, keys: Iterable[KVKey]) -> None:
        """Ends a use."""
        with self.lock:
            for key in keys:
                self._held[key] -= 1
                if self._held[key] > 0:
                    continue
                del self._held[key]
                self._loose.pop(key, None)
                for index in self.every:
                    index.entries.release(key)
                if key in self.dropped:
                    self.drop(key, *self.dropped.pop(key))

    def is_held(self, key: KVKey) -> bool:
        return self._held[key] > 0

    def find(self, key: KVKey, tick: int) -> StoredStates | None:
        """States that are loose or in the first tier; this counts as a use."""
        with self.lock:
            if key in self._loose:
                return self._loose[key][0]
            if key not in self.top.entries:
                return None
            self.top.touch(key, tick)
            return self.top.tier.get(key)

    def row(self, index: TierIndex, key: KVKey, nbytes: int, tick: int) -> StateRow:
        """A row of states that enter a tier now."""
        metadata = self.metadata.get(key) or StateMetadata(0)
        until, kind = self.until.get(key, math.inf), index.tier.kv_dtype
        return StateRow(key, index.name, nbytes, 0, tick, key in self.pinned, until, kind, metadata)

    def enter(self, index: TierIndex, row: StateRow, *, admitted: bool = True) -> None:
        """Notes that a tier holds states."""
        with self.lock:
            index.add(KVEntry.of_row(row), admitted=admitted)
            if self.is_held(row.key):
                index.entries.lease(row.key)

    def note_all(self) -> None:
        """Notes all that the tiers in memory hold once more: the ledger has forgotten it."""
        with self.lock:
            for index in self.indexes:
                for entry in index.entries:
                    row = self.row(index, entry.key, entry.nbytes, entry.last_use)
                    self._usage.admitted(row._replace(hits=entry.hits))

    def know(self, index: TierIndex, rows: Sequence[StateRow]) -> None:
        """Notes that a tier that outlives processes holds states, as the ledger says."""
        with self.lock:
            index.entries.extend([KVEntry.of_row(row) for row in rows])
            for key in [row.key for row in rows if row.key in self._held]:
                index.entries.lease(key)
            self.metadata.update((row.key, row.metadata) for row in rows)
            self.pinned.update(row.key for row in rows if row.pinned)
            self.until.update((r.key, r.expires_at) for r in rows if r.expires_at != math.inf)

    def limit(self, limits: Mapping[KVKey, float]) -> None:
        """Sets until when states are kept, in Unix seconds; `math.inf` is without a limit."""
        with self.lock:
            self.until.update(limits)
            for index in self.every:
                for key, until in limits.items():
                    if key in index.entries:
                        index.entries.expire(key, until)

    def forget_limits(self, now: float) -> None:
        """Forgets the limits of gone states that have passed: encoded again, they have none."""
        with self.lock:
            for key in [key for key, until in self.until.items() if until <= now]:
                if not any(key in index.entries for index in self.every):
                    del self.until[key]

    def place(
        self, index: TierIndex, key: KVKey, states: StoredStates, tick: int, *, admitted: bool
    ) -> StoredStates | None:
        """Puts states into a tier in memory; returns them as the tier has them, None where there
        is no room."""
        tier = index.tier
        with self._placing[index.name]:
            loaded = isinstance(tier, HostTier) and tier.owns(states)
            room = 0 if loaded else tier.size_of(states)
            if not self._fit(index, room, admitted=admitted):
                return None
            left, deadline = _ATTEMPTS, time.monotonic() + _READING_SECONDS
            while True:
                try:
                    nbytes = tier.put(key, states)
                except StoreBudgetExceeded:
                    if self._reading(tier, room) and time.monotonic() < deadline:
                        time.sleep(_POLL_SECONDS)
                        continue
                    slabs = isinstance(tier, DeviceTier | HostTier) and tier.has_slabs
                    left -= 1
                    if slabs and left and self._make_room(index, room, admitted=admitted):
                        continue  # what was free was not in one piece
                    return None
                return self._placed(index, key, nbytes, tick, admitted=admitted)

    def _reading(self, tier: Tier, nbytes: int) -> bool:
        """Whether a GPU's tier has no room because of states that were let go, and that a step
        still reads: for one or two steps."""
        budget = tier.budget_bytes
        return _is_gpu(tier) and budget is not None and tier.used_bytes + nbytes > budget

    def place_together(
        self, entries: Sequence[tuple[KVKey, StoredStates, bool]], tick: int
    ) -> list[StoredStates | None]:
        """As `place` in the first tier, for each key with its states and whether it is admitted.
        A device gets them side by side, if it has room for all."""
        top = self.top
        if isinstance(top.tier, DeviceTier) and len(entries) > 1:
            with self._placing[top.name]:
                room = sum(top.tier.size_of(states) for _, states, _ in entries)
                if self._fit(top, room, admitted=all(admitted for *_, admitted in entries)):
                    with suppress(StoreBudgetExceeded):
                        sizes = top.tier.put_all([(key, states) for key, states, _ in entries])
                        return [
                            self._placed(top, key, nbytes, tick, admitted=admitted)
                            for (key, _, admitted), nbytes in zip(entries, sizes, strict=True)
                        ]
        return [self.place(top, key, states, tick, admitted=a) for key, states, a in entries]

    def _placed(
        self, index: TierIndex, key: KVKey, nbytes: int, tick: int, *, admitted: bool
    ) -> StoredStates:
        """Notes states that a tier in memory has taken; returns them as the tier has them."""
        row = self.row(index, key, nbytes, tick)
        with self.lock:
            self.enter(index, row, admitted=admitted)
            self._usage.admitted(row)
        return readable(index.tier.get(key))

    def _fit(self, index: TierIndex, nbytes: int, *, admitted: bool) -> bool:
        """Makes room for so many bytes within the budget; returns whether there is any."""
        tier = index.tier
        used = index.entries.used_bytes if _is_gpu(tier) else tier.used_bytes
        need = used + nbytes - (tier.budget_bytes or nbytes)
        return need <= 0 or self._make_room(index, need, admitted=admitted)

    def has_room(self, key: KVKey) -> bool:
        """Whether the first tier has room for a key now, by its size in another tier."""
        tier = self.top.tier
        with self.lock:
            sizes = [s.entries.get(key).nbytes for s in self.every if key in s.entries]
        free = math.inf if tier.budget_bytes is None else tier.budget_bytes - tier.used_bytes
        return bool(sizes) and min(sizes) - _BLOCK <= free

    def room(self, nbytes: int, *, admitted: bool) -> Allocate | None:
        """Main memory to load so many bytes into, None where there is none. What is loaded into
        the first tier is then placed without a copy; before a device, memory of the host tier is
        only passed through, and pushes nothing out."""
        found = self._host()
        if found is None:
            return None
        index, host = found
        if index is not self.top:
            return host.allocate if host.has_slabs else None
        with self._placing[index.name]:
            if not self._fit(index, nbytes, admitted=admitted):
                return None
        return host.allocate

    def begin_download(self, states: StoredStates) -> StoredStates | None:
        """A copy in memory of the host tier, which is not an entry yet, of states that the device
        before it has computed; None for others, and where there is no room."""
        found, device = self._host(), self.top.tier
        if found is None or not (isinstance(device, DeviceTier) and device.is_computed(states)):
            return None
        index, host = found
        kept = quantize(states, host.kv_dtype)
        with self._placing[index.name]:
            if self._fit(index, host.size_of(kept), admitted=True):
                with suppress(StoreBudgetExceeded):
                    return host.begin_copy(kept)
        return None

    def end_download(self, key: KVKey, states: StoredStates, tick: int) -> None:
        """Keeps a copy that has ended, on probation: the device may let go of its own for free."""
        found = self._host()
        if found is not None and key not in found[0].entries:
            self.place(found[0], key, states, tick, admitted=False)

    def _host(self) -> tuple[TierIndex, HostTier] | None:
        tiers = ((index, index.tier) for index in self.indexes)
        return next(((i, tier) for i, tier in tiers if isinstance(tier, HostTier)), None)

    def keep_loose(self, key: KVKey, states: StoredStates, *, beside: bool) -> None:
        """Keeps states for as long as they are leased. beside: whether they take room beside the
        budget of the first tier. Raises `StoreBudgetExceeded`, also where the first tier is a
        device that could not read them elsewhere."""
        tier = self.top.tier
        away = isinstance(tier, DeviceTier) and tier.is_gpu and not tier.is_computed(states)
        nbytes = tier.size_of(states) if beside or away else 0
        with self.lock:
            entries = self.top.entries
            used = sum(size for _, size in self._loose.values())
            used += sum(entries.get(held).nbytes for held in self._held if held in entries)
            budget = tier.budget_bytes
            if away or (nbytes and budget is not None and used + nbytes > budget):
                raise StoreBudgetExceeded(
                    f"the {self.top.name} tier holds {budget:,} bytes, of which {used:,} are in "
                    f"use by running requests; {nbytes:,} more do not fit. Raise "
                    f"{self.top.name}_bytes, or ask with a smaller k or fewer questions at once"
                )
            self._loose[key] = (states, nbytes)

    def describe(self, key: KVKey, metadata: StateMetadata) -> None:
        """Sets the metadata of states that were just encoded, and keeps them from being dropped."""
        with self.lock:
            self.metadata[key] = metadata
            self.dropped.pop(key, None)

    def cost(self, key: KVKey, seconds: float) -> None:
        """Sets the seconds that encoding took; the policy sees them at the next entry."""
        with self.lock:
            metadata = self.metadata.get(key)
            if metadata is not None:
                self.metadata[key] = metadata._replace(cost=seconds)

    def drop(self, key: KVKey, reason: str, tier: str | None = None) -> None:
        """Removes states from a tier in memory, or from all; those in use after the last lease."""
        with self.lock:
            if self.is_held(key):
                self.dropped[key] = (reason, tier)
                return
            for index in self.indexes:
                nbytes = index.remove(key) if tier in (None, index.name) else 0
                if nbytes:
                    index.tier.delete(key)
                    self._left(index, key, nbytes, reason)

    def take_out(self, index: TierIndex, leaving: Iterable[Victim]) -> None:
        """Takes states from a tier in memory; those that leave for pressure go to the next one."""
        with self.lock:
            demoted = self._remove(index, leaving)
        self._demote(index, demoted)

    def _remove(self, index: TierIndex, leaving: Iterable[Victim]) -> list[_Demoted]:
        demoted: list[_Demoted] = []
        below = self._below(index)
        for each in leaving:
            if each.reason == "pressure" and below and each.key not in below.entries:
                last_use = index.entries.get(each.key).last_use
                demoted.append((each.key, index.tier.get(each.key), last_use))
            index.remove(each.key)
            index.tier.delete(each.key)
            self._left(index, each.key, each.nbytes, each.reason)
        return demoted

    def _left(self, index: TierIndex, key: KVKey, nbytes: int, reason: str | None) -> None:
        self._usage.left(index.name, key, nbytes, reason)
        if reason is not None:
            self._counters.evicted(index.name, reason, 1)

    def _demote(self, index: TierIndex, demoted: list[_Demoted]) -> None:
        below = self._below(index)
        while demoted and below is not None:
            key, states, last_use = demoted.pop()
            self.place(below, key, states, last_use, admitted=True)

    def _below(self, index: TierIndex) -> TierIndex | None:
        """The next tier in memory."""
        after = self.indexes[self.indexes.index(index) + 1 :]
        return after[0] if after else None

    def _make_room(self, index: TierIndex, need: int, *, admitted: bool) -> bool:
        # a GPU reads states nowhere else: those of a question push others out, to the next tier
        admitted = admitted or _is_gpu(index.tier)
        with self.lock:  # no other thread finds or chooses what leaves
            leaving = index.choose(need, time.time(), admitted=admitted)
            if leaving is None:
                return False
            demoted = self._remove(index, leaving)
        self._demote(index, demoted)
        return True
