"""The store: leases over the tiers, producing what is missing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ragcache.errors import LedgerUnavailable
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import KVDtype
from ragcache.store.admission import Sightings
from ragcache.store.background import Background
from ragcache.store.counters import Counters
from ragcache.store.database import Database
from ragcache.store.filling import Filler, Produce, Wish
from ragcache.store.flights import Flights
from ragcache.store.holdings import Holdings
from ragcache.store.jobs import Jobs
from ragcache.store.lease import Lease
from ragcache.store.ledger import Ledger
from ragcache.store.opening import place_of, reconcile, without_collection
from ragcache.store.ownership import owned_among
from ragcache.store.policy import Policy
from ragcache.store.shared import SharedTiers
from ragcache.store.shelf import Shelf
from ragcache.store.tiers import DiskTier, HostTier, Tier

WINDOW = 10_000  # uses within which a second one counts as observed reuse


class KVStore:
    """Tiers under one ledger. Thread-safe; several processes may share ledger, disk and remote.

    memory: tiers that end with the process, the fastest first; shared: those that outlive it, the
    nearest first. What ingestion and warm calls ask for is kept in all shared tiers; the first
    memory tier holds what is used.
    """

    def __init__(
        self,
        ledger: Ledger,
        memory: Sequence[Tier],
        shared: Sequence[Tier] = (),
        policy: Policy = "lru",
        window: int = WINDOW,
    ) -> None:
        self.ledger = ledger
        self.counters = Counters()
        shelves = [Shelf(tier, policy) for tier in shared]
        self.flights = Flights()
        self.holdings = Holdings(
            [Shelf(tier, policy) for tier in memory], ledger.notes, self.counters, shelves
        )
        self.shared = SharedTiers(shelves, ledger, self.holdings, self.flights, self.counters)
        self._filler = Filler(
            self.holdings, self.shared, ledger, self.flights, Sightings(window), self.counters
        )
        self.jobs = Jobs(ledger.database, ledger.sessions.id)
        self._background = Background(self)

    @classmethod
    def open(
        cls,
        folder: Path,
        database: Database,
        host_bytes: int,
        *,
        disk_bytes: int | None = None,
        kv_dtype: KVDtype = "model",
        device: Tier | None = None,
        remote: Tier | None = None,
        policy: Policy = "lru",
    ) -> KVStore:
        """Opens the store of a state folder and makes ledger and disk agree.

        disk_bytes: None for no limit. kv_dtype: of the host and disk tiers. device, remote: tiers
        before the host and after the disk.
        """
        states = folder / "states"
        ledger = Ledger(database, place_of(database, states))
        host = HostTier(host_bytes, kv_dtype=kv_dtype)
        disk = DiskTier(states, disk_bytes, kv_dtype=kv_dtype)
        memory = [host] if device is None else [device, host]
        shared = [disk] if remote is None else [disk, remote]
        store = cls(ledger, memory, shared, policy)
        store.start()
        return store

    @classmethod
    def inspect(cls, folder: Path, database: Database, remote: Tier | None = None) -> KVStore:
        """Opens the store of a state folder as it was left: nothing is mended, nothing runs beside.

        For `verify` and for operators' commands, while other processes may have it open.
        """
        ledger = Ledger(database, place_of(database, folder / "states"))
        disk = DiskTier.open(folder / "states")
        shared = [disk] if remote is None else [disk, remote]
        store = cls(ledger, [HostTier(1 << 30)], shared)
        store.shared.learn(ledger.begin())
        return store

    def start(self) -> None:
        """Begins the session: reads the ledger, ends what died, and starts the threads."""
        with without_collection():
            rows = self.ledger.begin()
            self.shared.learn(rows)
        reconcile(self.ledger, self.shared, rows)
        self._background.start()

    @property
    def host(self) -> HostTier:
        return next(s.tier for s in self.holdings.shelves if isinstance(s.tier, HostTier))

    @property
    def disk(self) -> DiskTier:
        return next(s.tier for s in self.shared.shelves if isinstance(s.tier, DiskTier))

    def lease(self, keys: Sequence[KVKey], produce: Produce, wish: Wish | None = None) -> Lease:
        """Holds the states of all keys in memory.

        What no tier holds, or holds corrupted, is made by `produce(missing keys)`, which runs
        without any lock held, once for each key whoever asks for it, in this process or others. A
        thread that waits for another one takes over if that fails. Raises `StoreBudgetExceeded`
        where more is in use than the first tier may hold, and what `produce` raises.
        """
        return self._lease(keys, produce, wish or Wish())

    def _lease(self, keys: Sequence[KVKey], produce: Produce | None, wish: Wish) -> Lease:
        names = [shelf.name for shelf in self.holdings.every[1:]]
        lease = Lease(keys, self._release, names)
        unique = list(dict.fromkeys(keys))
        self.holdings.hold(unique)
        try:
            self._filler.fill(lease, wish, produce)
        except BaseException:
            self.holdings.let_go(unique)
            raise
        return lease

    def _release(self, lease: Lease) -> None:
        """Ends a lease and notes its uses."""
        self.holdings.let_go(dict.fromkeys(lease.keys))
        found = [key for key, tier in lease.source.items() if tier != "encoded"]
        self.counters.hits.update(lease.source[key] for key in found)
        self.ledger.notes.touch(found, self.ledger.tick())

    def put(self, key: KVKey, states: KVStates, wish: Wish | None = None) -> None:
        """Keeps states that were made elsewhere, as ingestion would."""
        self._lease([key], lambda _: [states], wish or Wish("ingest")).release()

    def prefetch(self, keys: Iterable[KVKey]) -> None:
        """Begins to bring states that a lower tier has to the first one, and returns at once. What
        is not admitted pushes nothing out. A lease of the same keys waits for it, and tells the
        tier that they came from."""
        if below := self._below(keys):
            self._background.prefetch(below)

    def read_ahead(self, keys: Iterable[KVKey]) -> None:
        """As `prefetch`, in this thread: done when it returns."""
        for key in self._below(keys):
            self._filler.read_ahead(key)

    def _below(self, keys: Iterable[KVKey]) -> list[KVKey]:
        """Those that a tier below the first has, and the first has not."""
        with self.holdings.lock:
            return [
                key for key in dict.fromkeys(keys)
                if key not in self.holdings.top.entries
                and any(key in shelf.entries for shelf in self.holdings.every)
            ]  # fmt: skip

    def fetch(self, keys: Sequence[KVKey], wish: Wish | None = None) -> Lease:
        """Leases what some tier has; `found` of the lease lacks the rest."""
        return self._lease(keys, None, wish or Wish())

    def borrow(self, keys: Sequence[KVKey]) -> Lease:
        """As `fetch`, but no use of the states: for what the store itself does with them."""
        lease = self.fetch(keys, Wish("warm"))
        lease.source.clear()
        return lease

    def discard(self, keys: Iterable[KVKey]) -> None:
        """Removes states whose rows a transaction of the catalogue has retired: blobs at once, what
        is in use after its last lease."""
        self.shared.discard(keys)

    def pin(self, keys: Sequence[KVKey], pinned: bool = True) -> None:
        """Keeps states from being evicted for pressure or time, in every tier and process."""
        self.ledger.pin(keys, pinned)
        with self.holdings.lock:
            for key in keys:
                (self.holdings.pinned.add if pinned else self.holdings.pinned.discard)(key)
                for shelf in self.holdings.every:
                    if key in shelf.entries:
                        shelf.entries.pin(key, pinned)

    def expire(self, keys: Sequence[KVKey], at: float | None) -> None:
        """Keeps states until `at` (Unix seconds) at most; None for as long as there is room."""
        self.ledger.expire(keys, at)
        self.holdings.limit(dict.fromkeys(keys, math.inf if at is None else at))

    def evict(self, keys: Sequence[KVKey], tier: str | None = None) -> None:
        """Removes states from a tier, or from all; what is in use leaves memory when it is not.

        Modules keep their claim on them: they are encoded again when they are needed.
        """
        if tier is None or tier in [shelf.name for shelf in self.holdings.shelves]:
            for key in keys:
                self.holdings.drop(key, "manual", tier)
        for shelf in self.shared.shelves:
            if tier in (None, shelf.name):
                with self.holdings.lock:
                    here = [key for key in keys if key in shelf.entries]
                self.shared.expel(shelf, here, "manual")

    def sweep(self) -> None:
        """What the background does every second: expired states go, reused ones are written to the
        disk, uses to the ledger. Raises nothing that a request did not cause."""
        now = time.time()
        with suppress(LedgerUnavailable):
            self.holdings.limit(self.ledger.overdue(now))  # which another process may have set
        for shelf in self.holdings.every:
            with self.holdings.lock:
                overdue = shelf.overdue(now)
            if shelf.tier.persistent:
                self.shared.expel(shelf, [each.key for each in overdue], "ttl")
            else:
                self.holdings.take_out(shelf, overdue)
        self.holdings.forget_limits(now)
        self._keep_reused()
        self.shared.discard_later()
        self.ledger.flush()

    def _keep_reused(self) -> None:
        """Writes states that questions have shown to be worth it, if something still needs them."""
        with self.holdings.lock:
            keys, self._filler.reused = list(self._filler.reused), set()
        if not keys or not self.shared.shelves:
            return
        with self.ledger.database.reading() as session:
            owned = owned_among(session, keys)
        with self.borrow([key for key in keys if key in owned]) as lease:
            for key, states in lease.found.items():
                self.shared.add(key, states, self.ledger.tick())

    def close(self) -> None:
        """Writes what is pending and ends the session: rows of memory tiers go with it."""
        self._background.stop()
        self.ledger.end()
