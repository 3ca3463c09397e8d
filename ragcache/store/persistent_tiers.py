"""Persistent tiers: blobs, their rows in the ledger, and the order of changes to both.

A blob is written before its row, and a row is deleted before its blob. Both changes need the claim
on the key, so that one process at a time changes a blob, and a flight, so that one thread does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from sqlalchemy import func, select

from ragcache.db.ledger import Ledger
from ragcache.db.references import is_unowned, retire
from ragcache.db.state_rows import StateRow
from ragcache.db.tables import SessionTable, StateTable
from ragcache.errors import (
    LedgerUnavailable,
    RemoteUnavailable,
    StateCorrupt,
    StateMissing,
    StoreBudgetExceeded,
    StoreError,
    StoreUnreadable,
)
from ragcache.states import KVKey
from ragcache.states.quantization import StoredStates
from ragcache.states.serialization import Allocate
from ragcache.store.memory_tiers import Counters, MemoryTiers, TierIndex
from ragcache.tiers import TIERS

logger = logging.getLogger(__name__)

Room = Callable[[int], Allocate | None]
"""Returns an allocator of main memory for a size in bytes. None without room."""

_ATTEMPTS = 16  # to make room while other processes fill it
_CLEARINGS = 4  # of a disk that is fuller than the ledger says, while other threads fill it
_WRITES = 6  # attempts at a blob whose claim is lost
_CLOSING_SECONDS = 1.0  # for other processes' claims on states that are to be discarded


@dataclass(slots=True, eq=False)
class _End:
    """The end of a flight on one key."""

    thread: int | None = field(default_factory=threading.get_ident)
    """Thread that ends the flight and therefore must not wait for it. A writer's flight has none.
    """
    reached: threading.Event = field(default_factory=threading.Event)


class SingleFlight:
    """At most one flight per key in this process.

    One thread reads, encodes or deletes the states of a key. Other threads wait for the end of its
    flight, look again, and do the work themselves if it failed.
    """

    def __init__(self) -> None:
        self.ends: dict[KVKey, _End] = {}
        self.lock = threading.Lock()

    def begin(self, keys: Iterable[KVKey]) -> Flight:
        """Begin flights on the keys that are not in flight."""
        with self.lock:
            keys = dict.fromkeys(keys)
            others = {key: self.ends[key] for key in keys if key in self.ends}
            mine = {key: _End() for key in keys if key not in self.ends}
            self.ends |= mine
        return Flight(self, mine, others)


class Flight:
    """The flights of one call of `SingleFlight.begin`.

    `mine` are the keys whose flights began. `others` are the flights of other threads on the
    remaining keys, to be waited for after `mine` has ended.
    """

    def __init__(
        self, flights: SingleFlight, mine: dict[KVKey, _End], others: Mapping[KVKey, _End]
    ) -> None:
        self.mine, self.others = tuple(mine), others
        self._flights, self._open = flights, mine

    def end(self, keys: Iterable[KVKey] | None = None) -> None:
        """End the flights on some keys, or on all. Ended flights are ignored."""
        with self._flights.lock:
            for key in list(self._open if keys is None else keys):
                if end := self._open.pop(key, None):
                    del self._flights.ends[key]
                    end.reached.set()

    def split(self, keys: Iterable[KVKey]) -> Flight:
        """Move some keys to a flight of their own, which this thread or another one ends."""
        return Flight(self._flights, {key: self._open.pop(key) for key in keys}, {})

    def hand_over(self, key: KVKey) -> Flight:
        """Move a key to a flight that a writer thread ends. Every thread may wait for it."""
        flight = self.split([key])
        flight._open[key].thread = None
        return flight

    def wait_for_others(self) -> None:
        """Wait for the flights of other threads.

        Raises:
            ValueError: This thread has claimed a key in another lease and would wait for itself.
        """
        me = threading.get_ident()
        for key, end in self.others.items():
            if end.thread == me and not end.reached.is_set():
                raise ValueError(
                    f"this thread has claimed {key} in another lease; put its states, or release "
                    "that lease, before this one claims"
                )
        for end in self.others.values():
            end.reached.wait()

    def __enter__(self) -> Flight:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class PersistentTiers:
    """Disk and remote, nearest first, and their rows in the ledger."""

    def __init__(
        self,
        indexes: Sequence[TierIndex],
        ledger: Ledger,
        memory: MemoryTiers,
        flights: SingleFlight,
        counters: Counters,
    ) -> None:
        self.indexes = tuple(indexes)
        self._ledger, self._memory = ledger, memory
        self._flights, self._counters = flights, counters
        self._later: set[KVKey] = set()
        self.learned = 0
        """Tick of the last use taken over from other processes."""

    def holds(self, key: KVKey) -> bool:
        """Return whether one of the tiers has a key, as far as this process knows."""
        with self._memory.lock:
            return any(key in index.entries for index in self.indexes)

    def learn(self, rows: Iterable[StateRow]) -> None:
        """Add rows of the ledger to the bookkeeping, whichever process wrote them."""
        rows = list(rows)
        for index in self.indexes:
            self._memory.load_rows(index, [row for row in rows if row.tier == index.name])

    def recover(self, rows: Sequence[StateRow]) -> None:
        """Remove remains of killed processes: states without an owner, rows without a blob, and
        blobs without a row.

        Blobs that a living process is writing stay.

        Args:
            rows: The ledger's rows of all tiers.
        """
        with self._ledger.database.reading() as session:
            alone = session.scalar(select(func.count()).select_from(SessionTable)) == 1
            retired = list(session.scalars(select(StateTable.key).where(is_unowned()).distinct()))
        if retired:
            with self._ledger.database.transaction() as session:
                retired = retire(session, retired)
        self.discard(retired)
        for index in self.indexes:
            if index.tier.traits.shared:
                continue  # slow to list; `verify` does
            sizes = {row.key: row.nbytes for row in rows if row.tier == index.name}
            for key in retired:
                sizes.pop(key, None)
            blobs = set(index.tier.scan(sizes))
            vanished = sorted(sizes.keys() - blobs)
            if vanished:
                self.evict(index, vanished, "corrupt")
            self.discard(sorted(blobs - sizes.keys()))
            if alone:
                index.tier.remove_parts(0.0)

    def learn_uses(self) -> None:
        """Take over uses by other processes and uses in memory tiers.

        Eviction from a tier with a budget depends on the uses of all processes.
        """
        if all(index.tier.budget_bytes is None for index in self.indexes):
            return
        entries = {index.name: index.entries for index in self.indexes}
        for tier, key, last_use in self._ledger.used_since(self.learned):
            self.learned = max(self.learned, last_use)
            with self._memory.lock:
                if key in entries.get(tier, ()):
                    entries[tier].touch(key, last_use)

    def read(self, key: KVKey, room: Room) -> tuple[TierIndex, StoredStates] | None:
        """Read the states of a key in this thread's flight, from the nearest tier that has them.

        Corrupt or missing blobs lose their row. Unreadable tiers are skipped.

        Args:
            key: Key of the states.
            room: Provides memory to load blobs of a disk into. Blobs are mapped if it has none.
        """
        for index in self.indexes:
            with self._memory.lock:
                known = key in index.entries
            if not known:
                continue
            begun = time.perf_counter()
            try:
                states = self._get(index, key, room)
            except (StateCorrupt, StateMissing) as error:
                logger.warning("%s; the states are encoded again", error)
                self._counters.corrupt += 1
                self._evict_corrupt(index, key)
            except (StoreUnreadable, RemoteUnavailable) as error:
                logger.warning("%s; the states are looked for elsewhere", error)
                self._counters.unreadable += 1
            else:
                self._counters.read_seconds[index.name] += time.perf_counter() - begun
                self._counters.read_bytes[index.name] += states.nbytes
                return index, states
        return None

    def peek(self, key: KVKey) -> StoredStates | None:
        """Read the states of a key as `read` does, without memory of the tiers before."""
        while True:
            with self._flights.begin([key]) as flight:
                if flight.mine:
                    found = self.read(key, lambda _: None)  # no memory: map the blob
                    return None if found is None else found[1]
            flight.wait_for_others()

    def _get(self, index: TierIndex, key: KVKey, room: Room) -> StoredStates:
        if not index.tier.traits.mapped:
            return index.tier.get(key)
        with self._memory.lock:
            nbytes = index.entries.get(key).nbytes if key in index.entries else 0
        allocate = room(nbytes)
        try:
            return index.tier.get(key) if allocate is None else index.tier.load(key, allocate)
        except StoreBudgetExceeded:  # another thread took the room
            return index.tier.get(key)

    def _evict_corrupt(self, index: TierIndex, key: KVKey) -> None:
        """Evict corrupt states. If the ledger cannot be written, only this process forgets them."""
        try:
            self._evict(index, [key], "corrupt")
        except StoreError as error:
            logger.warning("%s; the row of corrupt states stays", error)
        with self._memory.lock:
            index.entries.remove(key)

    def write(self, key: KVKey, states: StoredStates, tick: int) -> None:
        """Store states in every tier. The last row ends this session's claim on the key.

        Raises `StoreError` if the nearest tier cannot store them.
        """
        for index in self.indexes:
            last = {key} if index is self.indexes[-1] else set[KVKey]()
            try:
                self._write(index, {key: states}, tick, last)
            except StoreError as error:
                if index is self.indexes[0]:
                    raise
                logger.warning("%s; the states stay in the tiers before", error)
                self._counters.unreadable += 1
                self._ledger.locks.release([key])

    def add(
        self, found: Mapping[KVKey, StoredStates], tick: int, tier: TierIndex | None = None
    ) -> None:
        """Store states in all tiers that lack them, or in one tier.

        One transaction claims the keys, and one per tier records them. Skips keys that another
        process has claimed. Raises `StoreError`.
        """
        indexes = self.indexes if tier is None else (tier,)
        with self._memory.lock:
            lacking = {k: [i for i in indexes if i is tier or k not in i.entries] for k in found}
        with self._flights.begin([key for key in found if lacking[key]]) as flight:
            claimed = self._ledger.locks.acquire(flight.mine) if flight.mine else []
            left = set(claimed)
            try:
                for index in indexes:
                    chosen = {key: found[key] for key in claimed if index in lacking[key]}
                    last = {key for key in chosen if index is lacking[key][-1]}
                    self._write(index, chosen, tick, last)
                    left -= last
            finally:
                self._ledger.locks.release(left)

    def _write(
        self, index: TierIndex, found: Mapping[KVKey, StoredStates], tick: int, last: Set[KVKey]
    ) -> None:
        """Write blobs, then their rows in one transaction that ends the claims on the `last` keys.

        If a blob fails, the blobs before it are still recorded. If a claim was lost because this
        process was silent, another process may have deleted the blob: it is claimed and written
        again. Raises `LedgerUnavailable` if another process keeps the claim.
        """
        for attempt in range(_WRITES):
            rows: list[StateRow] = []
            try:
                for key, states in found.items():
                    rows.append(self._memory.row(index, key, self._put(index, key, states), tick))
            finally:
                recorded = self._ledger.record(rows, last) if rows else set()
                self.learn(row for row in rows if row.key in recorded)
            found = {key: states for key, states in found.items() if key not in recorded}
            if not found:
                return
            taken = self._ledger.locks.acquire(list(found))
            if lost := [key for key in found if key not in taken]:
                self._ledger.locks.wait_for(lost, 2.0**attempt)
                self._ledger.locks.acquire(lost)
        raise LedgerUnavailable(
            f"this process was silent, and another one has claimed {next(iter(found))} since; look "
            "whether it hangs"
        )

    def _put(self, index: TierIndex, key: KVKey, states: StoredStates) -> int:
        tier, budget = index.tier, index.tier.budget_bytes
        if budget is None:
            return tier.put(key, states)
        for _ in range(_CLEARINGS):
            self._make_room(index, key, tier.size_of(states), budget)
            try:
                return tier.put(key, states)
            except StoreBudgetExceeded:
                if tier.traits.shared:  # slow to list
                    raise
                self._clear(index, key, tier.size_of(states), budget)
        return tier.put(key, states)

    def _clear(self, index: TierIndex, key: KVKey, nbytes: int, budget: int) -> None:
        """Free bytes of a disk that has no room although the ledger counts some.

        Blobs without a row take it: rows that another process retired a moment ago, and blobs of a
        process that died. They are deleted. If others still claim them, states are evicted.
        """
        blobs = index.tier.scan()
        self._refresh(index)
        with self._memory.lock:
            unknown = [blob for blob in blobs if blob != key and blob not in index.entries]
        with self._flights.begin(unknown) as flight:
            gone, _ = self._ledger.reclaim(index.name, flight.mine)
            self._delete_blobs(index, gone)
        if (excess := index.tier.used_bytes + nbytes - budget) > 0:
            leaving = self._memory.choose_victims(index, excess) or {}
            self.evict(index, list(leaving), "pressure")

    def _make_room(self, index: TierIndex, key: KVKey, nbytes: int, budget: int) -> None:
        """Reserve bytes of the budget, which all processes share, and evict states if needed."""
        for _ in range(_ATTEMPTS):
            need = self._ledger.reserve(index.name, key, nbytes, budget)
            if not need:
                return
            leaving = self._memory.choose_victims(index, need) or {}
            gone = 0
            for reason in ("ttl", "pressure"):
                victims = [key for key, why in leaving.items() if why == reason]
                gone += len(self.evict(index, victims, reason))
            if not gone and not self._refresh(index):
                break
        self._ledger.reserve(index.name, key, 0, budget)
        raise StoreBudgetExceeded(
            f"the {index.name} tier may hold {budget:,} bytes; {nbytes:,} more do not fit, because "
            f"the rest is pinned or in use. Raise {TIERS[index.name].budget_option}"
        )

    def _refresh(self, index: TierIndex) -> bool:
        """Read changes by other processes. Returns whether the keys of the tier differ."""
        rows = [row for row in self._ledger.load() if row.tier == index.name]
        keys = {row.key for row in rows}
        with self._memory.lock:
            before = set(index.entries)
            for key in before - keys:
                index.entries.remove(key)
            self.learn(row for row in rows if row.key not in before)
            self._memory.pin([row.key for row in rows], False)
            self._memory.pin([row.key for row in rows if row.pinned], True)
            self._memory.set_expirations({row.key: row.expires_at for row in rows})
        return keys != before

    def evict(self, index: TierIndex, keys: Sequence[KVKey], reason: str) -> list[KVKey]:
        """Evict states from a tier.

        Returns:
            Evicted keys. Keys in flight and keys claimed by other processes stay. For pressure and
            time, states pinned by other processes stay as well.
        """
        with self._flights.begin(keys) as flight:
            if reason == "pressure":
                self._demote(index, flight.mine)
            return self._evict(index, flight.mine, reason)

    def _demote(self, index: TierIndex, keys: Sequence[KVKey]) -> None:
        """Copy states that leave a tier to the next tier, unless it has them."""
        after = self.indexes[self.indexes.index(index) + 1 :]
        for key in keys if after else ():
            if key in after[0].entries:
                continue
            found = self.read(key, lambda _: None)  # no memory: map the blob
            if found is None or not self._ledger.locks.acquire([key]):
                continue
            states, tick = found[1].restore(), self._ledger.advance_clock()
            try:
                self._write(after[0], {key: states}, tick, {key})
            except StoreError as error:
                logger.warning("%s; the states leave without a copy", error)
                self._ledger.locks.release([key])

    def _evict(self, index: TierIndex, keys: Sequence[KVKey], reason: str) -> list[KVKey]:
        if not keys:
            return []
        gone = self._ledger.evict_rows(index.name, keys, reason)
        self._delete_blobs(index, gone)
        with self._memory.lock:
            for key in gone:
                index.entries.remove(key, remember=reason == "pressure")
            self._counters.evictions[index.name, reason] += len(gone)
        return gone

    def discard(self, keys: Iterable[KVKey]) -> None:
        """Delete and forget the blobs of retired states, whose rows are gone."""
        keys = list(dict.fromkeys(keys))
        for key in keys:
            self._memory.drop(key, "superseded")
        with self._flights.begin(keys) as flight:
            self._later |= set(keys).difference(flight.mine)
            for index in self.indexes if flight.mine else ():
                gone, busy = self._ledger.reclaim(index.name, flight.mine)
                self._later.update(busy)
                with self._memory.lock:
                    held = sum(index.entries.remove(key) > 0 for key in gone)
                    self._counters.evictions[index.name, "superseded"] += held
                self._delete_blobs(index, gone)

    def discard_later(self) -> None:
        """Discard states that were in flight or claimed elsewhere at the first attempt."""
        keys, self._later = self._later, set()
        if keys:
            self.discard(keys)

    def discard_at_end(self) -> None:
        """Discard the remaining states, and wait a moment for other processes' claims on them.

        Another process that claims states without a row is deleting or writing them. States in
        flights of this process are left.
        """
        deadline = time.monotonic() + _CLOSING_SECONDS
        while (before := self._later) and (left := deadline - time.monotonic()) > 0:
            self._ledger.locks.wait_for(list(before), left)
            self.discard_later()
            if self._later == before:
                return

    def is_orphan(self, index: TierIndex, key: KVKey, *, remove: bool) -> bool:
        """Return whether a tier has a blob without a row, a flight and a claim.

        Args:
            index: The tier.
            key: Key of the blob.
            remove: Delete an orphan.
        """
        with self._flights.begin([key]) as flight:
            gone, _ = self._ledger.reclaim(index.name, flight.mine)
            found = bool(gone) and key in index.tier
            self._delete_blobs(index, gone if remove else [])
            self._ledger.locks.release(gone)
            return found

    def _delete_blobs(self, index: TierIndex, keys: Sequence[KVKey]) -> None:
        """Delete blobs and end this session's claims on them.

        A blob that cannot be deleted has no row any more. `verify` reports it.
        """
        try:
            for key in keys:
                index.tier.delete(key)
        except StoreError as error:
            logger.warning("%s; blobs without a row stay until the next opening", error)
            self._counters.unreadable += 1
        finally:
            self._ledger.locks.release(keys)
