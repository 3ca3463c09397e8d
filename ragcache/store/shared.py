"""The tiers that outlive the process: blobs, the rows that speak of them, and their order.

A blob is written, then its row; a row is deleted, then its blob. Whoever does either holds the
claim on the key, so that of several processes one at a time touches a blob.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from ragcache.errors import (
    RemoteUnavailable,
    StateCorrupt,
    StateMissing,
    StoreBudgetExceeded,
    StoreError,
    StoreUnreadable,
)
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import StoredStates, restored
from ragcache.states.serialization import Allocate
from ragcache.store.counters import Counters
from ragcache.store.flights import Flights
from ragcache.store.holdings import Holdings
from ragcache.store.ledger import Ledger
from ragcache.store.rows import StateRow
from ragcache.store.shelf import Shelf
from ragcache.store.tiers import DiskTier

logger = logging.getLogger(__name__)

Room = Callable[[int], Allocate | None]

_ATTEMPTS = 16  # at making room, against other processes that fill it


class SharedTiers:
    """Disk and remote, the nearer first, under the ledger."""

    def __init__(
        self,
        shelves: Sequence[Shelf],
        ledger: Ledger,
        holdings: Holdings,
        flights: Flights,
        counters: Counters,
    ) -> None:
        self.shelves = tuple(shelves)
        self._ledger, self._holdings = ledger, holdings
        self._flights, self._counters = flights, counters
        self._later: set[KVKey] = set()

    def shelf(self, name: str) -> Shelf | None:
        return next((shelf for shelf in self.shelves if shelf.name == name), None)

    def learn(self, rows: Iterable[StateRow]) -> None:
        """Takes rows of the ledger into memory, be they of this process or of others."""
        rows = list(rows)
        for shelf in self.shelves:
            self._holdings.know(shelf, [row for row in rows if row.tier == shelf.name])

    def read(self, key: KVKey, room: Room | None = None) -> tuple[Shelf, StoredStates] | None:
        """The states of a key whose flight is this thread's, from the nearest tier that has them.

        What is corrupt or vanished loses its row; what cannot be read now is passed over. room:
        asked for memory to load blobs of a disk into; where it has none, or without it, they are
        mapped.
        """
        for shelf in self.shelves:
            with self._holdings.lock:
                known = key in shelf.entries
            if not known:
                continue
            try:
                return shelf, self._get(shelf, key, room)
            except (StateCorrupt, StateMissing) as error:
                logger.warning("%s; the states are encoded again", error)
                self._counters.corrupt += 1
                self._expel_corrupt(shelf, key)
            except (StoreUnreadable, RemoteUnavailable) as error:
                logger.warning("%s; the states are looked for elsewhere", error)
                self._counters.unreadable += 1
        return None

    def _get(self, shelf: Shelf, key: KVKey, room: Room | None) -> StoredStates:
        if room is None or not isinstance(shelf.tier, DiskTier):
            return shelf.tier.get(key)
        with self._holdings.lock:
            nbytes = shelf.entries.get(key).nbytes if key in shelf.entries else 0
        allocate = room(nbytes)
        try:
            return shelf.tier.get(key) if allocate is None else shelf.tier.load(key, allocate)
        except StoreBudgetExceeded:  # another thread took the room
            return shelf.tier.get(key)

    def _expel_corrupt(self, shelf: Shelf, key: KVKey) -> None:
        """Where the ledger cannot be written, this process alone forgets what is corrupt."""
        try:
            self._expel(shelf, [key], "corrupt")
        except StoreError as error:
            logger.warning("%s; the row of corrupt states stays", error)
        with self._holdings.lock:
            shelf.remove(key)

    def write(self, key: KVKey, states: KVStates, tick: int) -> None:
        """Keeps states in every tier: blob, then row. The claim on the key is this session's, and
        ends with the last row. Raises `StoreError` where the nearest tier cannot take them."""
        for number, shelf in enumerate(self.shelves):
            last = number == len(self.shelves) - 1
            try:
                self._write(shelf, key, states, tick, last=last)
            except StoreError as error:
                if number == 0:
                    raise
                logger.warning("%s; the states stay in the tiers before", error)
                self._counters.unreadable += 1
                self._ledger.claims.drop([key])

    def add(self, key: KVKey, states: KVStates, tick: int) -> None:
        """Keeps states in the tiers that lack them, unless another process is at it. Raises
        `StoreError`."""
        with self._holdings.lock:
            lacking = [shelf for shelf in self.shelves if key not in shelf.entries]
        self._add(lacking, key, states, tick)

    def add_to(self, shelf: Shelf, key: KVKey, states: KVStates, tick: int) -> None:
        """As `add`, to one tier."""
        self._add([shelf], key, states, tick)

    def _add(self, lacking: list[Shelf], key: KVKey, states: KVStates, tick: int) -> None:
        mine, _ = self._flights.begin([key] if lacking else [])
        try:
            claimed = self._ledger.claims.take(mine) if mine else []
            for shelf in lacking if claimed else ():
                self._write(shelf, key, states, tick, last=shelf is lacking[-1])
        finally:
            self._ledger.claims.drop(mine)
            self._flights.end(mine)

    def _write(self, shelf: Shelf, key: KVKey, states: KVStates, tick: int, *, last: bool) -> None:
        budget = shelf.tier.budget_bytes
        if budget is not None:
            self._make_room(shelf, key, shelf.tier.size_of(states), budget)
        try:
            nbytes = shelf.tier.put(key, states)
        except StoreBudgetExceeded:
            if not isinstance(shelf.tier, DiskTier):
                raise
            shelf.tier.scan()  # other processes have deleted what this one still counts
            nbytes = shelf.tier.put(key, states)
        row = self._holdings.row(shelf, key, nbytes, tick)
        self._ledger.record(row, last=last)
        self.learn([row])

    def _make_room(self, shelf: Shelf, key: KVKey, nbytes: int, budget: int) -> None:
        """Reserves bytes under the tier's budget, which all processes share."""
        for _ in range(_ATTEMPTS):
            need = self._ledger.reserve(shelf.name, key, nbytes, budget)
            if not need:
                return
            with self._holdings.lock:
                leaving = shelf.choose(need, time.time(), admitted=True) or []
            gone = 0
            for reason in ("ttl", "pressure"):
                victims = [each.key for each in leaving if each.reason == reason]
                gone += len(self.expel(shelf, victims, reason))
            if not gone and not self._refresh(shelf):
                break
        self._ledger.reserve(shelf.name, key, 0, budget)
        raise StoreBudgetExceeded(
            f"the {shelf.name} tier may hold {budget:,} bytes; {nbytes:,} more do not fit beside "
            f"what is pinned or in use. Raise {shelf.name}_bytes"
        )

    def _refresh(self, shelf: Shelf) -> bool:
        """Reads what other processes have changed; returns whether anything differed."""
        rows = [row for row in self._ledger.load() if row.tier == shelf.name]
        keys = {row.key for row in rows}
        with self._holdings.lock:
            before = {entry.key for entry in shelf.entries}
            for key in before - keys:
                shelf.remove(key)
            self.learn(row for row in rows if row.key not in before)
            for row in rows:
                shelf.entries.pin(row.key, row.pinned)
                shelf.entries.expire(row.key, row.expires_at)
        return keys != before

    def expel(self, shelf: Shelf, keys: Sequence[KVKey], reason: str) -> list[KVKey]:
        """Evicts states from a tier: rows, then blobs. What is in flight, claimed by others or, for
        pressure and time, pinned by others, stays. Returns what went."""
        mine, _ = self._flights.begin(keys)
        try:
            if reason == "pressure":
                self._demote(shelf, mine)
            return self._expel(shelf, mine, reason)
        finally:
            self._flights.end(mine)

    def _demote(self, shelf: Shelf, keys: Sequence[KVKey]) -> None:
        """Copies what leaves a tier to the next one, where that does not have it yet."""
        after = self.shelves[self.shelves.index(shelf) + 1 :]
        for key in keys if after else ():
            if key in after[0].entries:
                continue
            found = self.read(key)
            if found is None or not self._ledger.claims.take([key]):
                continue
            try:
                self._write(after[0], key, restored(found[1]), self._ledger.tick(), last=True)
            except StoreError as error:
                logger.warning("%s; the states leave without a copy", error)
                self._ledger.claims.drop([key])

    def _expel(self, shelf: Shelf, keys: Sequence[KVKey], reason: str) -> list[KVKey]:
        if not keys:
            return []
        gone = self._ledger.expel(shelf.name, keys, reason)
        self._delete_blobs(shelf, gone)
        with self._holdings.lock:
            for key in gone:
                shelf.remove(key)
            self._counters.evicted(shelf.name, reason, len(gone))
        return gone

    def discard(self, keys: Iterable[KVKey]) -> None:
        """Deletes the blobs of states whose rows a transaction has retired, and forgets them."""
        keys = list(dict.fromkeys(keys))
        for key in keys:
            self._holdings.drop(key, "superseded")
        mine, _ = self._flights.begin(keys)
        try:
            self._later |= set(keys) - set(mine)
            for shelf in self.shelves:
                gone = self._ledger.reclaim(shelf.name, mine) if mine else []
                with self._holdings.lock:
                    held = sum(shelf.remove(key) > 0 for key in gone)
                    self._counters.evicted(shelf.name, "superseded", held)
                self._delete_blobs(shelf, gone)
        finally:
            self._flights.end(mine)

    def discard_later(self) -> None:
        """Discards what was in flight at the first attempt."""
        keys, self._later = self._later, set()
        if keys:
            self.discard(keys)

    def is_orphan(self, shelf: Shelf, key: KVKey, *, remove: bool) -> bool:
        """Whether a tier holds a blob without a row that no thread and no process is working at;
        removes it if asked to."""
        mine, _ = self._flights.begin([key])
        try:
            gone = self._ledger.reclaim(shelf.name, mine) if mine else []
            found = bool(gone) and key in shelf.tier
            self._delete_blobs(shelf, gone if remove else [])
            self._ledger.claims.drop(gone)
            return found
        finally:
            self._flights.end(mine)

    def _delete_blobs(self, shelf: Shelf, keys: Sequence[KVKey]) -> None:
        """Their claims, which this session holds, end in any case: a blob that could not be deleted
        has no row any more, and `verify` names it."""
        try:
            for key in keys:
                shelf.tier.delete(key)
        except StoreError as error:
            logger.warning("%s; blobs without a row stay until the next opening", error)
            self._counters.unreadable += 1
        finally:
            self._ledger.claims.drop(keys)
