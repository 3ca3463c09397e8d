"""The KV cache: tiers under one ledger and their options, recovery when it is opened, threads."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import func, select

from ragcache.db.database import Database
from ragcache.db.jobs import Jobs
from ragcache.db.ledger import Ledger, StateRow
from ragcache.db.references import ROOT_MODE, is_unowned, owned_among, retire
from ragcache.db.sessions import HEARTBEAT_SECONDS
from ragcache.db.tables import SessionTable, StateTable
from ragcache.errors import (
    LedgerUnavailable,
    RemoteMismatch,
    RemoteUnavailable,
    StoreError,
    StoreFull,
)
from ragcache.params import OpenConfig, parse_optional_bytes
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import KVDtype
from ragcache.store.leases import CLAIM_PATIENCE, Lease, LeaseManager, LeaseRequest
from ragcache.store.memory_tiers import Counters, MemoryTiers, TierIndex
from ragcache.store.persistent_tiers import PersistentTiers, SingleFlight
from ragcache.store.tiers import DeviceTier, DiskTier, HostTier, RemoteTier, Tier
from ragcache.tiers import TIERS

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
_RETIRED_SECONDS = 60.0  # for which retired states are looked for in memory


class KVStore:
    """Tiers under one ledger. Thread-safe; several processes may share ledger, disk and remote.

    memory: tiers that end with the process, the fastest first; persistent: those that outlive it,
    the nearest first. States that are leased for ingestion and by warm calls are stored in all
    persistent tiers; the first memory tier holds those in use. on_heartbeat: called after each
    heartbeat, in its thread.
    """

    def __init__(
        self, ledger: Ledger, memory: Sequence[Tier], persistent: Sequence[Tier] = (),
        claim_patience: float = CLAIM_PATIENCE,
    ) -> None:  # fmt: skip
        self.ledger = ledger
        self.counters = Counters()
        indexes, flights = list(map(TierIndex, persistent)), SingleFlight()
        self.memory = MemoryTiers(
            list(map(TierIndex, memory)), ledger.usage, self.counters, indexes
        )
        self.persistent = PersistentTiers(indexes, ledger, self.memory, flights, self.counters)
        self._leases = LeaseManager(
            self.memory, self.persistent, ledger, flights, self.counters, claim_patience
        )
        self.jobs = Jobs(ledger.database, ledger.sessions.id)
        self._retired: dict[KVKey, float] = {}
        self._keeping = threading.Lock()
        self.on_heartbeat: list[Callable[[], None]] = []
        self.remote_checked = False
        self._remote_fault = ""
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ahead = ThreadPoolExecutor(1, "ragcache-ahead")

    @classmethod
    def open(
        cls, folder: Path, database: Database, host_bytes: int, *, disk_bytes: int | None = None,
        kv_dtype: KVDtype = "model", tiers: Sequence[Tier] = (),
        claim_patience: float = CLAIM_PATIENCE,
    ) -> KVStore:  # fmt: skip
        """Open the store of a state folder, and make its ledger and its disk agree.

        Args:
            folder: The state folder.
            database: The database with the ledger.
            host_bytes: Budget of the host tier.
            disk_bytes: Budget of the disk tier. Defaults to no limit.
            kv_dtype: How the host and the disk keep states.
            tiers: Tiers in addition to host and disk, each at its place in `TIERS`.
            claim_patience: Seconds that a question waits for states which another process encodes,
                before it encodes them itself.
        """
        ledger = Ledger.of_folder(database, folder)
        host = HostTier(host_bytes, kv_dtype=kv_dtype)
        disk = DiskTier(folder / "states", disk_bytes, kv_dtype=kv_dtype)
        store = cls(ledger, *_in_order([host, disk, *tiers]), claim_patience)
        store.start()
        return store

    @classmethod
    def inspect(cls, folder: Path, database: Database, tiers: Sequence[Tier] = ()) -> KVStore:
        """Opens the store of a state folder without recovery and background threads: for `verify`
        and operators' commands, while other processes may have it open."""
        ledger = Ledger.of_folder(database, folder)
        disk = DiskTier.open(folder / "states")
        store = cls(ledger, *_in_order([HostTier(1 << 30), disk, *tiers]))
        store._check_remote_at_opening()
        store.persistent.learn(ledger.begin())
        store._run("heart", HEARTBEAT_SECONDS, KVStore.heartbeat)
        return store

    def start(self) -> None:
        """Begins the session: reads the ledger, ends what died, and starts the threads. Raises
        `RemoteMismatch` before anything is changed."""
        self._check_remote_at_opening()
        with _garbage_collector_paused():
            rows = self.ledger.begin()
            self.persistent.learn(rows)
            self.persistent.learned = self.ledger.tick
        recover(self.ledger, self.persistent, rows)
        self._run("heart", HEARTBEAT_SECONDS, KVStore.heartbeat)
        self._run("sweep", SWEEP_SECONDS, KVStore.sweep)
        if not self.remote_checked:  # a thread of its own: the remote may hang
            self._run("identity", SWEEP_SECONDS, KVStore.check_remote_again)

    def _run(self, name: str, seconds: float, work: Callable[[KVStore], None]) -> None:
        """Does some work again and again in a thread, until the store is closed."""
        thread = threading.Thread(
            target=_repeat, args=(weakref.ref(self), self._stopped, seconds, work),
            name=f"ragcache-{name}", daemon=True,
        )  # fmt: skip
        self._threads.append(thread)
        thread.start()

    def _check_remote_at_opening(self) -> None:
        """Compares the remote's identity with the ledger's; one that does not answer or is full now
        later, where the store has threads. Raises `RemoteMismatch` and `StoreUnreadable`."""
        try:
            self._check_remote()
        except RemoteMismatch:
            raise
        except (RemoteUnavailable, StoreFull) as error:
            logger.warning("%s; the remote is compared with the ledger when that is over", error)

    def _check_remote(self) -> None:
        """Compares the remote's identity with the ledger's; a new one gets it. Raises
        `StoreError`s, among them `RemoteMismatch` and `RemoteUnavailable`."""
        for index in self.persistent.indexes:
            index.tier.check_identity(self.ledger)
        self.remote_checked = True

    def check_remote_again(self) -> None:
        """Compares a remote that could not be compared at opening. Another one takes no states from
        now on. What is in its way is logged once."""
        if self.remote_checked:
            return
        try:
            self._check_remote()
        except RemoteMismatch as error:
            self.remote_checked = True  # it compares itself with the ledger's whenever it is used
            logger.warning("%s; states are kept without it", error)
        except (RemoteUnavailable, LedgerUnavailable):
            pass  # logged at opening
        except StoreError as error:
            if str(error) != self._remote_fault:
                self._remote_fault = str(error)
                logger.warning("%s; the remote is compared with the ledger when that ends", error)

    @property
    def host(self) -> HostTier:
        return next(s.tier for s in self.memory.indexes if isinstance(s.tier, HostTier))

    @property
    def disk(self) -> DiskTier:
        return next(s.tier for s in self.persistent.indexes if isinstance(s.tier, DiskTier))

    def bind_device(self, stream: Any, *, keep_free: int = 0) -> None:
        """Connects the device tier, if there is one, with the engine that reads it. stream: the one
        that the engine computes on. keep_free: what a tier without a budget of its own leaves free
        of its device. Raises `StoreFull`."""
        for index in self.memory.indexes:
            index.tier.bind(stream, keep_free)

    def lease(self, keys: Sequence[KVKey], request: LeaseRequest | None = None) -> Lease:
        """Leases keys, some of which may come twice, and reads the states that the tiers have. The
        caller claims, encodes and puts the others, without any lock held, and releases the lease.

        Raises `StoreBudgetExceeded` where more is in use than the first tier may hold.

        Example:
            >>> with store.lease(keys) as lease:                      # doctest: +SKIP
            ...     while missing := lease.claim():
            ...         for key, states in zip(missing, encode(missing), strict=True):
            ...             lease.put(key, states)
        """
        return self._leases.lease(keys, request or LeaseRequest())

    def put_states(self, key: KVKey, states: KVStates, request: LeaseRequest | None = None) -> None:
        """Stores states that were encoded elsewhere, as ingestion would."""
        with self.lease([key], request or LeaseRequest("ingest")) as lease:
            while lease.claim():
                lease.put(key, states)

    def prefetch(self, keys: Iterable[KVKey]) -> None:
        """Begins to bring states from lower tiers to the first one, where there is room. A lease of
        the same keys waits for it, and names the tier that they came from. What other processes
        have encoded is looked up before, in one transaction."""
        keys = list(keys)
        self.look_up(keys)
        if below := self._below(keys):
            with suppress(RuntimeError):  # the store has just been closed
                self._ahead.submit(_once, self, lambda store: store.read_ahead(below))

    def look_up(self, keys: Sequence[KVKey]) -> None:
        """Learns in one transaction what other processes have recorded of keys that this one knows
        nothing of: a lease of them then claims none that is recorded."""
        unknown = [key for key in keys if not self.memory.is_known(key)]
        if unknown and self.persistent.indexes:
            try:
                self.persistent.learn(self.ledger.find(unknown))
            except StoreError as error:
                logger.warning("%s; what others have encoded is not looked for", error)

    def read_ahead(self, keys: Iterable[KVKey]) -> None:
        """As `prefetch`, but returns when it is done."""
        for key in self._below(keys):
            self._leases.read_ahead(key)

    def _below(self, keys: Iterable[KVKey]) -> list[KVKey]:
        """The keys that a tier below the first has, and the first has not."""
        with self.memory.lock:
            return [
                key for key in dict.fromkeys(keys)
                if key not in self.memory.top.entries and self.memory.is_known(key)
            ]  # fmt: skip

    def fetch(self, keys: Sequence[KVKey]) -> Lease:
        """Leases what some tier has, or other threads are reading; `found` lacks the rest."""
        lease = self._leases.lease(keys, LeaseRequest())
        try:
            self._leases.load(lease, wait=True)
        except BaseException:
            lease.release()
            raise
        return lease

    def borrow(self, keys: Sequence[KVKey]) -> Lease:
        """As `fetch`, but does not count as a use: for what the store itself does with states."""
        lease = self.fetch(keys)
        lease.source.clear()
        return lease

    def discard(self, keys: Iterable[KVKey]) -> None:
        """Removes states whose rows a transaction has retired: blobs at once, states in use after
        their last lease."""
        self.persistent.discard(keys)

    def pin(self, keys: Sequence[KVKey], pinned: bool = True) -> None:
        """Keeps states from being evicted for pressure or time, in every tier and process."""
        self.ledger.pin(keys, pinned)
        self.memory.pin(keys, pinned)

    def expire(self, keys: Sequence[KVKey], at: float | None) -> None:
        """Keeps states until `at` (Unix seconds) at most; None for as long as there is room."""
        self.ledger.expire(keys, at)
        self.memory.set_expirations(dict.fromkeys(keys, math.inf if at is None else at))

    def evict(self, keys: Sequence[KVKey], tier: str | None = None) -> None:
        """Removes states from a tier, or from all; those in use leave memory after their last
        lease. Their modules keep owning them: they are encoded again when they are needed."""
        if tier is None or tier in [index.name for index in self.memory.indexes]:
            for key in keys:
                self.memory.drop(key, "manual", tier)
        for index in self.persistent.indexes:
            if tier in (None, index.name):
                with self.memory.lock:
                    here = [key for key in keys if key in index.entries]
                self.persistent.evict(index, here, "manual")

    def count_unkept(self) -> int:
        """How many of the states encoded last end with this process. What was used again is written
        before."""
        if self._leases.unkept():
            _once(self, KVStore._keep_reused)
        return len(self._leases.unkept())

    def sweep(self) -> None:
        """The upkeep of every second: removes expired states, writes reused ones to the disk and
        uses to the ledger."""
        now = time.time()
        with suppress(LedgerUnavailable):
            self.memory.set_expirations(
                self.ledger.expired(now)
            )  # which another process may have set
        for index in self.memory.every:
            if index.tier.traits.persistent:
                self.persistent.evict(index, self.memory.expired(index, now), "ttl")
            else:
                self.memory.expire(index, now)
            index.tier.settle()
        self.memory.forget_expirations(now)
        self._keep_reused()
        self.persistent.discard_later()
        with suppress(LedgerUnavailable):
            self._follow_retirements(now)
        self.ledger.flush()
        with suppress(LedgerUnavailable):
            self.persistent.learn_uses()

    def _follow_retirements(self, now: float) -> None:
        """Forgets what other processes have retired, and what was encoded here meanwhile."""
        self._retired.update((key, now) for key in self.ledger.retired())
        for key in [k for k, at in self._retired.items() if at < now - _RETIRED_SECONDS]:
            del self._retired[key]
        self._discard_unowned([key for key in self._retired if self.memory.is_known(key)])

    def _discard_unowned(self, keys: Sequence[KVKey]) -> None:
        if keys:
            owned = self._owned(keys)
            for key in owned:
                self._retired.pop(key, None)
            self.persistent.discard(key for key in keys if key not in owned)

    def heartbeat(self) -> None:
        """Tells other processes that this one lives. Where they took it for dead, its tiers in
        memory are written to the ledger again."""
        if not self.ledger.sessions.heartbeat():
            logger.warning("this process was silent, and others ended its session; it goes on")
            self.memory.resync_usage()
            with self.memory.lock:
                held = {key for index in self.memory.every for key in index.entries}
            self._discard_unowned(sorted(held))
        for follow in self.on_heartbeat:
            follow()

    def _keep_reused(self) -> None:
        """Writes states that questions used again to the disk, if something still owns them, and
        takes back what lost its owner meanwhile. Preambles belong to the store, and have no row
        before."""
        with self._keeping:
            keys = self._leases.take_reused()
            if not keys:
                return
            with self.memory.lock:
                known = {key: self.memory.metadata.get(key) for key in keys}
            roots = {key for key, each in known.items() if each and each.mode == ROOT_MODE}
            kept = [key for key in keys if key in roots | self._owned(keys)]
            with self.borrow(kept) as lease:
                self.persistent.add(lease.found, self.ledger.advance_clock())
            if lost := [key for key in kept if key not in self._owned(kept)]:
                with self.ledger.database.transaction() as session:
                    gone = retire(session, lost)
                self.persistent.discard(gone)

    def _owned(self, keys: Sequence[KVKey]) -> set[KVKey]:
        with self.ledger.database.reading() as session:
            return owned_among(session, keys)

    def close(self) -> None:
        """Writes what is pending and ends the session: rows of memory tiers go with it."""
        self._leases.close()
        self._stopped.set()
        self._ahead.shutdown(cancel_futures=True)
        for thread in self._threads:
            thread.join()
        _once(self, KVStore.sweep)
        self.ledger.end()


def _in_order(tiers: Iterable[Tier]) -> tuple[list[Tier], list[Tier]]:
    """Tiers in memory and those that outlive the process, each in the order of `TIERS`."""
    order = list(TIERS)
    ordered = sorted(tiers, key=lambda tier: order.index(tier.name))
    memory = [tier for tier in ordered if not tier.traits.persistent]
    return memory, [tier for tier in ordered if tier.traits.persistent]


def _repeat(
    reference: weakref.ref[KVStore], stopped: threading.Event, seconds: float,
    work: Callable[[KVStore], None],
) -> None:  # fmt: skip
    """A thread of an open store, which ends with `close`, or when the store is garbage."""
    while not stopped.wait(seconds):
        store = reference()
        if store is None:
            return
        _once(store, work)
        del store


def _once(store: KVStore, work: Callable[[KVStore], None]) -> None:
    """A failure ends a turn, never the thread."""
    try:
        work(store)
    except StoreError as error:
        store.counters.unreadable += 1
        logger.warning("%s; the store goes on", error)
    except Exception:
        store.counters.unreadable += 1
        logger.exception("the upkeep of the store failed; it goes on")


@contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """It takes a third of the time that reading 100,000 rows takes, and rows have no cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def recover(ledger: Ledger, persistent: PersistentTiers, rows: Sequence[StateRow]) -> None:
    """Recovery: removes states without an owner (rows, then blobs), rows without a blob, and
    blobs without a row that no living process is writing."""
    retired = _retire_leftovers(ledger)
    persistent.discard(retired)
    for index in persistent.indexes:
        if index.tier.traits.shared:
            continue  # listing it takes its time: `verify` does
        sizes = {row.key: row.nbytes for row in rows if row.tier == index.name}
        for key in retired:
            sizes.pop(key, None)
        blobs = set(index.tier.scan(sizes))
        vanished = sorted(sizes.keys() - blobs)
        if vanished:
            persistent.evict(index, vanished, "corrupt")
        persistent.discard(sorted(blobs - sizes.keys()))
        if _is_alone(ledger):
            index.tier.remove_parts(0.0)


def _retire_leftovers(ledger: Ledger) -> list[KVKey]:
    keys = select(StateTable.key).where(is_unowned()).distinct()
    with ledger.database.reading() as session:
        if session.scalar(keys.limit(1)) is None:
            return []
    with ledger.database.transaction() as session:
        return retire(session, list(session.scalars(keys)))


def _is_alone(ledger: Ledger) -> bool:
    with ledger.database.reading() as session:
        return session.scalar(select(func.count()).select_from(SessionTable)) == 1


def open_tiers(config: OpenConfig, device: torch.device) -> dict[str, Any]:
    """The arguments of `KVStore.open` that a configuration asks for.

    Args:
        config: Budgets and places of the tiers.
        device: Device of the model.

    Raises:
        ConfigurationError: The URL of the remote tier cannot be used.
    """
    opened = (open_tier(config, device) for open_tier in OPENERS.values())
    return {
        "disk_bytes": parse_optional_bytes(config.disk_bytes),
        "kv_dtype": config.kv_dtype,
        "claim_patience": config.claim_patience,
        "tiers": [tier for tier in opened if tier is not None],
    }


def _open_device(config: OpenConfig, device: torch.device) -> Tier | None:
    if config.device_bytes is None and device.type != "cuda":
        return None
    budget = parse_optional_bytes(config.device_bytes)
    return DeviceTier(budget, device, kv_dtype=config.device_kv_dtype)


def _open_remote(config: OpenConfig, device: torch.device) -> Tier | None:  # noqa: ARG001
    if config.remote is None:
        return None
    budget = parse_optional_bytes(config.remote_bytes)
    return RemoteTier.open(config.remote, budget, kv_dtype=config.kv_dtype)


TierOpener = Callable[[OpenConfig, torch.device], Tier | None]
OPENERS: dict[str, TierOpener] = {"device": _open_device, "remote": _open_remote}
"""Opens each tier that is optional on the model's device; None where the configuration does not
ask for it."""
