"""The store: leases over the tiers, producing what is missing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ragcache.errors import StateCorrupt, StoreFull, StoreUnwritable
from ragcache.states import KVKey, KVStates
from ragcache.store.database import Database
from ragcache.store.disk import DiskTier
from ragcache.store.host import HostTier
from ragcache.store.ledger import Ledger

logger = logging.getLogger(__name__)

ABANDONED_SECONDS = 3600.0  # after which a blob without a row was left by a writer that died

Produce = Callable[[Sequence[KVKey]], Iterable[KVStates]]


@dataclass(slots=True)
class Counters:
    """What happened since the store was opened."""

    encoded: int = 0
    corrupt: int = 0
    hits: dict[str, int] = field(default_factory=lambda: {"host": 0, "disk": 0})


class Lease:
    """States in use: they stay in the host tier until the lease is released.

    states: in the order of the keys. source: for each key `host`, `disk` or `encoded`. moved:
    bytes read from each tier below the host.
    """

    def __init__(self, store: KVStore, keys: Sequence[KVKey]) -> None:
        self._store = store
        self.keys = tuple(keys)
        self.found: dict[KVKey, KVStates] = {}
        self.source: dict[KVKey, str] = {}
        self.moved: dict[str, int] = {"disk": 0}

    @property
    def states(self) -> tuple[KVStates, ...]:
        return tuple(self.found[key] for key in self.keys)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Ends the lease and counts its hits."""
        self._store.release(self)


class KVStore:
    """Host and disk tiers under one ledger. Every state that is put is kept on disk.

    Thread-safe. No lock is held while states are produced or written: two threads that miss the
    same key may both make it, and either result serves.
    """

    def __init__(self, ledger: Ledger, host: HostTier, disk: DiskTier) -> None:
        self.ledger, self.host, self.disk = ledger, host, disk
        self.counters = Counters()
        self._lock = threading.RLock()  # reentrant: finding a corrupt blob deletes it

    @classmethod
    def open(cls, folder: Path, database: Database, host_bytes: int) -> KVStore:
        """Opens the store of a state folder and makes ledger and disk agree."""
        store = cls(Ledger(database), HostTier(host_bytes), DiskTier(folder / "states"))
        store.reconcile()
        return store

    def reconcile(self) -> None:
        """Rows of memory tiers go; rows without a blob go; abandoned blobs without a row go."""
        self.ledger.clear("host")
        rows, blobs = self.ledger.keys("disk"), set(self.disk.keys())
        self.ledger.remove("disk", rows - blobs)
        for key in blobs - rows:
            if self.disk.age(key) > ABANDONED_SECONDS:
                self.disk.delete(key)
        self.disk.remove_parts(ABANDONED_SECONDS)

    def lease(self, keys: Sequence[KVKey], produce: Produce) -> Lease:
        """Pins the states of all keys in the host tier.

        What no tier holds, or holds corrupted, is made by `produce(missing keys)` and stored.
        """
        lease = Lease(self, keys)
        with self._lock:
            self.host.lease(lease.keys)
        try:
            with self._lock:
                for key in dict.fromkeys(keys):
                    self._find(key, lease)
            missing = [key for key in dict.fromkeys(keys) if key not in lease.found]
            for key, states in zip(missing, produce(missing) if missing else (), strict=True):
                lease.found[key], lease.source[key] = states, "encoded"
                self.put(key, states)
        except BaseException:
            with self._lock:
                self.host.release(lease.keys)
            raise
        return lease

    def put(self, key: KVKey, states: KVStates) -> None:
        """Keeps states: blob, then row, then the host tier."""
        nbytes = self.disk.put(key, states)
        with self._lock:
            self.ledger.record("disk", key, states, nbytes)
            self._admit(key, states)
            self.counters.encoded += 1

    def release(self, lease: Lease) -> None:
        """Ends a lease and counts its hits."""
        found = {key: tier for key, tier in lease.source.items() if tier in self.counters.hits}
        with self._lock:
            self.host.release(lease.keys)
            for tier in found.values():
                self.counters.hits[tier] += 1
        _note(lambda: self.ledger.touch(found))

    def close(self) -> None:
        """Forgets the rows of the host tier, which ends with the process."""
        _note(lambda: self.ledger.clear("host"))

    def delete(self, keys: Iterable[KVKey]) -> None:
        """Removes states from every tier: row, then blob."""
        for key in keys:
            with self._lock:
                self.ledger.remove("host", [key])
                self.host.drop(key)
                self.ledger.remove("disk", [key])
                self.disk.delete(key)

    def _find(self, key: KVKey, lease: Lease) -> None:
        states = self.host.get(key)
        if states is not None:
            lease.found[key], lease.source[key] = states, "host"
            return
        if not self.ledger.holds("disk", key):
            return
        try:
            states = self.disk.get(key)
        except (StateCorrupt, FileNotFoundError) as error:
            logger.warning("%s; the states are encoded again", error)
            self.counters.corrupt += 1
            self.delete([key])
            return
        lease.found[key], lease.source[key] = states, "disk"
        lease.moved["disk"] += states.nbytes
        self._admit(key, states)

    def _admit(self, key: KVKey, states: KVStates) -> None:
        victims = self.host.put(key, states)
        _note(lambda: self.ledger.remove("host", victims))
        _note(lambda: self.ledger.record("host", key, states, states.nbytes))


def _note(write: Callable[[], None]) -> None:
    """Writes what only statistics need: a full disk does not stop a request that only reads."""
    try:
        write()
    except (StoreFull, StoreUnwritable) as error:
        logger.warning("%s; the use of states is not counted", error)
