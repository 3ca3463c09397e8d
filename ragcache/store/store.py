"""The KV store: tiers with one ledger, and background threads."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from ragcache.db.conversations import expire_conversations
from ragcache.db.database import Database
from ragcache.db.jobs import Jobs
from ragcache.db.ledger import Ledger
from ragcache.db.observed import expire_observed
from ragcache.db.references import (
    CONVERSATION_MODE,
    ROOT_MODE,
    needless_roots,
    owned_among,
    retire,
)
from ragcache.db.sessions import HEARTBEAT_SECONDS
from ragcache.db.state_rows import StateMetadata
from ragcache.errors import (
    LedgerUnavailable,
    RemoteMismatch,
    RemoteUnavailable,
    StoreError,
    StoreFull,
)
from ragcache.machine import garbage_collector_paused
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import KVDtype, StoredStates
from ragcache.store.leases import CLAIM_PATIENCE, Lease, LeaseManager, LeaseRequest
from ragcache.store.memory_tiers import Counters, MemoryTiers, TierIndex
from ragcache.store.persistent_tiers import PersistentTiers, SingleFlight
from ragcache.store.tiers import DiskTier, HostTier, Tier
from ragcache.store.tiers.host import Reserve
from ragcache.store.tiers.ranks import RankCopies
from ragcache.tiers import TIERS, TierOptions

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0
"""Seconds between runs of the upkeep."""
_RETIRED_SECONDS = 60.0  # during which retired states are removed from memory


class KVStore:
    """Tiers with one ledger. Thread-safe. Several processes may share ledger, disk and remote.

    States leased for ingestion and by warm calls are stored in all persistent tiers. The first
    memory tier has the states in use.
    """

    def __init__(
        self,
        ledger: Ledger,
        memory: Sequence[Tier],
        persistent: Sequence[Tier] = (),
        claim_patience: float = CLAIM_PATIENCE,
    ) -> None:
        """Create a store without opening a session.

        Args:
            ledger: The ledger.
            memory: Memory tiers, fastest first.
            persistent: Persistent tiers, nearest first.
            claim_patience: Seconds that a question waits for states that another process encodes.
        """
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
        """Functions called after each heartbeat, in its thread."""
        self.on_wait = self._leases.queue.on_wait
        self.remote_checked = False
        self._remote_fault = ""
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ahead = ThreadPoolExecutor(1, "ragcache-ahead")

    @classmethod
    def open(
        cls,
        folder: Path,
        database: Database,
        host_bytes: int,
        *,
        disk_bytes: int | None = None,
        kv_dtype: KVDtype = "model",
        tiers: Sequence[Tier] = (),
        claim_patience: float = CLAIM_PATIENCE,
        reserve: Reserve | None = None,
        ranks: RankCopies | None = None,
    ) -> KVStore:
        """Open the store of a state folder and reconcile its ledger with its disk.

        Args:
            folder: The state folder.
            database: The database with the ledger.
            host_bytes: Budget of the host tier.
            disk_bytes: Budget of the disk tier. Defaults to no limit.
            kv_dtype: Storage format of the host and disk tiers.
            tiers: Tiers in addition to host and disk. `TIERS` defines their order.
            claim_patience: Seconds that a question waits for states that another process encodes.
                It then encodes them itself.
            reserve: Allocates the host tier's memory (`CausalLM.host_memory`).
            ranks: Copies on several devices (`CausalLM.copies`).
        """
        ledger = Ledger.of_folder(database, folder)
        host = HostTier(host_bytes, kv_dtype=kv_dtype, reserve=reserve, ranks=ranks)
        disk = DiskTier(folder / "states", disk_bytes, kv_dtype=kv_dtype)
        store = cls(ledger, *_in_order([host, disk, *tiers]), claim_patience)
        store.start()
        return store

    @classmethod
    def inspect(cls, folder: Path, database: Database, tiers: Sequence[Tier] = ()) -> KVStore:
        """Open the store of a state folder without recovery and upkeep.

        For `verify` and operators' commands, while other processes may have the store open.
        """
        ledger = Ledger.of_folder(database, folder)
        disk = DiskTier.open(folder / "states")
        store = cls(ledger, *_in_order([HostTier(1 << 30), disk, *tiers]))
        store._check_remote_at_opening()
        store.persistent.learn(ledger.begin())
        store._run("heart", HEARTBEAT_SECONDS, KVStore.heartbeat)
        return store

    def start(self) -> None:
        """Open the session: read the ledger, recover, and start the background threads.

        Raises:
            RemoteMismatch: The ledger names another remote. Nothing has been changed.
        """
        self._check_remote_at_opening()
        with garbage_collector_paused():
            rows = self.ledger.begin()
            self.persistent.learn(rows)
            self.persistent.learned = self.ledger.tick
        self.persistent.recover(rows)
        self._run("heart", HEARTBEAT_SECONDS, KVStore.heartbeat)
        self._run("sweep", SWEEP_SECONDS, KVStore.sweep)
        if not self.remote_checked:  # in a thread of its own, because the remote may hang
            self._run("identity", SWEEP_SECONDS, KVStore.check_remote_again)

    def _run(self, name: str, seconds: float, work: Callable[[KVStore], None]) -> None:
        """Repeat some work in a thread until the store is closed."""
        thread = threading.Thread(
            target=_repeat,
            args=(weakref.ref(self), self._stopped, seconds, work),
            name=f"ragcache-{name}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def _check_remote_at_opening(self) -> None:
        """Compare the remote's identity with the ledger, now or later in a background thread.

        A remote that does not answer or is full is compared later. Raises `RemoteMismatch` and
        `StoreUnreadable`.
        """
        try:
            self._check_remote()
        except RemoteMismatch:
            raise
        except (RemoteUnavailable, StoreFull) as error:
            logger.warning("%s; the remote is compared with the ledger when that is over", error)

    def _check_remote(self) -> None:
        """Compare the remote's identity with the ledger. A new remote gets one."""
        for index in self.persistent.indexes:
            index.tier.check_identity(self.ledger)
        self.remote_checked = True

    def check_remote_again(self) -> None:
        """Compare a remote that could not be compared at opening.

        A wrong remote stores no states from then on. Each failure is logged once.
        """
        if self.remote_checked:
            return
        try:
            self._check_remote()
        except RemoteMismatch as error:
            self.remote_checked = True  # from now on every use compares its identity
            logger.warning("%s; states are kept without it", error)
        except (RemoteUnavailable, LedgerUnavailable):
            pass  # logged at opening
        except StoreError as error:
            if str(error) != self._remote_fault:
                self._remote_fault = str(error)
                logger.warning("%s; the remote is compared with the ledger when that ends", error)

    @property
    def host(self) -> HostTier:
        """The host tier."""
        return next(s.tier for s in self.memory.indexes if isinstance(s.tier, HostTier))

    @property
    def disk(self) -> DiskTier:
        """The disk tier."""
        return next(s.tier for s in self.persistent.indexes if isinstance(s.tier, DiskTier))

    def bind_device(self, stream: Any, *, keep_free: int = 0) -> None:
        """Connect the device tier, if any, with the engine that reads it.

        Args:
            stream: Stream on which the engine computes.
            keep_free: Bytes that a tier without a budget leaves free on its device.

        Raises:
            StoreFull: The device has no room for the tier.
        """
        for index in self.memory.indexes:
            index.tier.bind(stream, keep_free)

    def lease(self, keys: Sequence[KVKey], request: LeaseRequest | None = None) -> Lease:
        """Lease keys and read the states that the tiers have.

        The caller claims, encodes and puts missing states without holding a lock, and releases the
        lease. Keys may repeat.

        Waits in order for room in the first tier while other leases fill it.

        Raises:
            StoreBudgetExceeded: The states do not fit into the first tier, even alone.
            DeadlineExceeded: The patience of the request has ended.

        Example:
            >>> with store.lease(keys) as lease:                      # doctest: +SKIP
            ...     while missing := lease.claim():
            ...         for key, states in zip(missing, encode(missing), strict=True):
            ...             lease.put(key, states)
        """
        return self._leases.lease(keys, request or LeaseRequest())

    def put_states(self, key: KVKey, states: KVStates, request: LeaseRequest | None = None) -> None:
        """Store states that were encoded elsewhere, by default as an ingestion does."""
        with self.lease([key], request or LeaseRequest("ingest")) as lease:
            while lease.claim():
                lease.put(key, states)

    def add_states(
        self, found: Mapping[KVKey, StoredStates], request: LeaseRequest | None = None
    ) -> None:
        """Write states from elsewhere to every persistent tier that lacks them.

        They take no room in memory, and push nothing out of it. Keys that another process has
        claimed are skipped. Raises `StoreError`.
        """
        of = request or LeaseRequest("ingest")
        for key, states in found.items():
            self.memory.describe(key, StateMetadata(states.length, of.mode, of.root, of.model))
        self.persistent.add(found, self.ledger.advance_clock())

    def peek(self, key: KVKey) -> StoredStates | None:
        """Read verified states from a persistent tier, without a use, a lease or room in memory.

        Returns None if no tier can return them.
        """
        return self.persistent.peek(key)

    def put_in_memory(self, key: KVKey, states: KVStates, request: LeaseRequest) -> None:
        """Put states that were computed elsewhere into the first memory tier, if it has room."""
        self.memory.describe(
            key, StateMetadata(states.length, request.mode, request.root, request.model)
        )
        self.memory.place(self.memory.top, key, states, self.ledger.advance_clock())

    def prefetch(self, keys: Iterable[KVKey]) -> None:
        """Begin to read states from lower tiers into the first one, if it has room.

        A lease of the same keys waits for the reads and reports their tiers as sources. First looks
        up states that other processes have encoded, in one transaction.
        """
        keys = list(keys)
        self.look_up(keys)
        if below := self._below(keys):
            with suppress(RuntimeError):  # the store has been closed
                self._ahead.submit(_once, self, lambda store: store.read_ahead(below))

    def look_up(self, keys: Sequence[KVKey]) -> None:
        """Learn which unknown keys other processes have recorded, in one transaction.

        A lease then claims no recorded keys.
        """
        unknown = self.memory.unknown(keys)
        if unknown and self.persistent.indexes:
            try:
                self.persistent.learn(self.ledger.find(unknown))
            except StoreError as error:
                logger.warning("%s; what others have encoded is not looked for", error)

    def read_ahead(self, keys: Iterable[KVKey]) -> None:
        """Read states into the first tier, as `prefetch` does, before returning."""
        for key in self._below(keys):
            self._leases.read_ahead(key)

    def _below(self, keys: Iterable[KVKey]) -> list[KVKey]:
        """Return the keys that a tier below the first has and the first tier lacks."""
        with self.memory.lock:
            return [
                key
                for key in dict.fromkeys(keys)
                if key not in self.memory.top.entries and self.memory.is_known(key)
            ]

    def fetch(self, keys: Sequence[KVKey]) -> Lease:
        """Lease states that any tier has or that other threads are reading.

        Other keys are missing from `Lease.found`.
        """
        lease = self._leases.lease(keys, LeaseRequest(patience=0.0))
        try:
            self._leases.load(lease, wait=True)
        except BaseException:
            lease.release()
            raise
        return lease

    def borrow(self, keys: Sequence[KVKey]) -> Lease:
        """Lease states as `fetch` does, without counting a use. For the store's own work."""
        lease = self.fetch(keys)
        lease.source.clear()
        return lease

    def discard(self, keys: Iterable[KVKey]) -> None:
        """Remove states whose rows a transaction has retired.

        Blobs are deleted now, states in use after their last lease.
        """
        self.persistent.discard(keys)

    def retire(self, keys: Iterable[KVKey]) -> None:
        """Remove states of this process with the next sweep, unless they have an owner by then.

        Preambles among the keys stay where other states follow them.
        """
        now = time.time()
        self._retired.update((key, now) for key in keys)

    def pin(self, keys: Sequence[KVKey], pinned: bool = True) -> None:
        """Exempt states from eviction for pressure or time, in every tier and process."""
        self.ledger.pin(keys, pinned)
        self.memory.pin(keys, pinned)

    def expire(self, keys: Sequence[KVKey], at: float | None) -> None:
        """Set the expiration of states in Unix seconds. None removes the limit."""
        self.ledger.expire(keys, at)
        self.memory.set_expirations(dict.fromkeys(keys, math.inf if at is None else at))

    def evict(self, keys: Sequence[KVKey], tier: str | None = None) -> None:
        """Remove states from a tier, or from all tiers. Leased states go after their last lease.

        Their modules keep their keys, so that the states are encoded again when needed.
        """
        if tier is None or tier in [index.name for index in self.memory.indexes]:
            for key in keys:
                self.memory.drop(key, "manual", tier)
        for index in self.persistent.indexes:
            if tier in (None, index.name):
                with self.memory.lock:
                    here = [key for key in keys if key in index.entries]
                self.persistent.evict(index, here, "manual")

    def count_unkept(self) -> int:
        """Return how many recently encoded states would be lost with this process.

        First writes states that were used again to the disk.
        """
        if self._leases.unkept():
            _once(self, KVStore._keep_reused)
        return len(self._leases.unkept())

    def keep_encoded(self) -> None:
        """Write recently encoded states to the disk, as if they had been used again.

        A process that ends with its answer calls it, because it has no second use to wait for.
        """
        with self.memory.lock:
            self.memory.reused |= self._leases.unkept()
        _once(self, KVStore._keep_reused)

    def sweep(self) -> None:
        """Run the periodic upkeep.

        Removes expired states, conversations and recurring texts, writes reused states to the disk,
        and writes uses to the ledger.
        """
        now = time.time()
        with suppress(LedgerUnavailable):
            self.memory.set_expirations(self.ledger.expired(now))  # set by any process
        for index in self.memory.every:
            if index.tier.traits.persistent:
                self.persistent.evict(index, self.memory.expired(index, now), "ttl")
            else:
                self.memory.expire(index, now)
            index.tier.settle()
        self.memory.forget_expirations(now)
        self.memory.forget_metadata()
        self._keep_reused()
        self.persistent.discard_later()
        with suppress(LedgerUnavailable):
            self.persistent.discard(expire_conversations(self.ledger.database))
            self.persistent.discard(expire_observed(self.ledger.database))
            self._follow_retirements(now)
        self.ledger.flush(lazily=True)
        with suppress(LedgerUnavailable):
            self.persistent.learn_uses()

    def _follow_retirements(self, now: float) -> None:
        """Forget states that other processes have retired, including states encoded here since."""
        self._retired.update((key, now) for key in self.ledger.retired())
        for key in [k for k, at in list(self._retired.items()) if at < now - _RETIRED_SECONDS]:
            del self._retired[key]
        keys = [key for key in list(self._retired) if self.memory.is_known(key)]
        if keys:
            self._discard_unowned(keys)
            with self.ledger.database.reading() as session:  # without the states just discarded
                needless = needless_roots(session, keys)
            self._discard(needless, needless)

    def _discard_unowned(self, keys: Sequence[KVKey]) -> None:
        if keys:
            owned = self._owned(keys)
            self._discard([key for key in keys if key not in owned])

    def _discard(self, keys: Collection[KVKey], roots: Set[KVKey] = frozenset()) -> None:
        """Discard states without an owner.

        An ingestion may have stored them after its namespace was deleted: their rows go, too.

        Args:
            keys: Keys of the states.
            roots: Preambles among them.
        """
        if self.ledger.find(keys):
            with self.ledger.database.transaction() as session:
                keys = retire(session, keys, roots)
        self.persistent.discard(keys)

    def heartbeat(self) -> None:
        """Tell other processes that this one is alive.

        If they have ended its session, its memory tiers are written to the ledger again. Claims and
        jobs that ended while the ledger did not answer end in it.
        """
        if not self.ledger.sessions.heartbeat():
            logger.warning("this process was silent, and others ended its session; it goes on")
            self.memory.resync_usage()
            with self.memory.lock:
                held = {key for index in self.memory.every for key in index.entries}
            self._discard_unowned(sorted(held))
        self.jobs.end_late()
        for follow in self.on_heartbeat:
            follow()

    def _keep_reused(self) -> None:
        """Write states that questions used again to the disk, if they still have an owner.

        Preambles belong to the store itself. Conversations stay where `conversation_storage` says.
        States that lose their owner during the write are removed again.
        """
        with self._keeping:
            keys = self._leases.take_reused()
            if not keys:
                return
            with self.memory.lock:
                known = {key: self.memory.metadata.get(key) for key in keys}
            keys = [k for k, each in known.items() if each and each.mode != CONVERSATION_MODE]
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
        """Finish pending writes and end the session. The rows of memory tiers end with it."""
        self._leases.close()
        self._stopped.set()
        self._ahead.shutdown(cancel_futures=True)
        for thread in self._threads:
            thread.join()
        _once(self, KVStore.sweep)
        _once(self, lambda store: store.persistent.discard_at_end())
        self.ledger.end()


def _in_order(tiers: Iterable[Tier]) -> tuple[list[Tier], list[Tier]]:
    """Split tiers into memory tiers and persistent tiers, each in the order of `TIERS`."""
    order = list(TIERS)
    ordered = sorted(tiers, key=lambda tier: order.index(tier.name))
    memory = [tier for tier in ordered if not tier.traits.persistent]
    return memory, [tier for tier in ordered if tier.traits.persistent]


def _repeat(
    reference: weakref.ref[KVStore],
    stopped: threading.Event,
    seconds: float,
    work: Callable[[KVStore], None],
) -> None:
    """Repeat work for a store until it is closed or garbage-collected."""
    while not stopped.wait(seconds):
        store = reference()
        if store is None:
            return
        _once(store, work)
        del store


def _once(store: KVStore, work: Callable[[KVStore], None]) -> None:
    """Run work and log its failure, so that the thread goes on."""
    try:
        work(store)
    except StoreError as error:
        store.counters.unreadable += 1
        logger.warning("%s; the store goes on", error)
    except Exception:  # the thread goes on, whatever a round raised
        store.counters.unreadable += 1
        logger.exception("the upkeep of the store failed; it goes on")


def open_tiers(
    options: TierOptions,
    device: torch.device,
    names: Iterable[str] = TIERS,
    ranks: RankCopies | None = None,
) -> list[Tier]:
    """Open the tiers that a configuration asks for, in addition to host and disk.

    Args:
        options: Budgets and locations of the tiers.
        device: Device of the model.
        names: Tiers to open. Defaults to all.
        ranks: Copies on several devices (`CausalLM.copies`).

    Raises:
        ConfigurationError: The URL of the remote tier is not supported.
    """
    classes: Iterable[type[Tier]] = (resolve_name(TIERS[name].implementation) for name in names)
    opened = (each.from_options(options, device, ranks) for each in classes)
    return [tier for tier in opened if tier is not None]
