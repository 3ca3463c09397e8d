"""Leases: states in use, and how missing states get into memory.

The caller drives; the store calls nothing back:

    with store.lease(keys, request) as lease:      # reads states that the tiers have
        while missing := lease.claim():            # keys that this caller has to encode
            for key, states in zip(missing, encode(missing), strict=True):
                lease.put(key, states)             # writes the blob, the row and the memory tier
        use(lease.states)

Each key of a lease is in one of four states. It is present (`Lease.found`), read by this thread (in
a `Flight` of its own), encoded by this caller (`Lease.encoding`), or read or encoded by another
thread or process. In the last case the lease waits for the end and looks again.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ragcache.db.ledger import Ledger
from ragcache.db.state_rows import StateMetadata, StateRow
from ragcache.errors import (
    LedgerUnavailable,
    StoreBudgetExceeded,
    StoreError,
    StoreFull,
    StoreUnwritable,
)
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import StoredStates, wait_for_arrival
from ragcache.store.lease_queue import LeaseQueue, QueuePlace, SizeOf, unknown_size
from ragcache.store.memory_tiers import Counters, MemoryTiers, TierIndex
from ragcache.store.persistent_tiers import Flight, PersistentTiers, Room, SingleFlight

logger = logging.getLogger(__name__)

_WRITERS = 2  # threads that write blobs
_WRITES = 8  # maximum running writes of one lease, each with a copy in main memory
_REMEMBERED = 10_000  # recently encoded keys
ENCODING_SECONDS = 600.0  # maximum wait for states that another process encodes
CLAIM_PATIENCE = 1.0  # maximum wait of a question, which then encodes them itself

Origin = Literal["ingest", "warm", "question"]
"""Reason of a lease: an ingestion, a call that names the states, or a question."""

_Read = tuple[KVKey, TierIndex, StoredStates]  # states, and the tier from which they were read


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Properties of the states that a lease names."""

    origin: Origin = "question"
    """Reason of the lease. States of ingestions and warm calls are written to every persistent
    tier. States of warm calls count as used again.
    """
    mode: str = ""
    """Encoding of the states. `root` for a preamble."""
    root: KVKey | None = None
    """Key of the preamble that the states depend on."""
    model: str = ""
    """Fingerprint of the model."""
    patience: float = math.inf
    """Seconds to wait for room in the first tier while other leases fill it."""
    size_of: SizeOf = unknown_size
    """Returns the bytes of a key's states. For states that have to be encoded, room is counted
    before."""


@dataclass(slots=True)
class _Encoding:
    """Keys returned by one call of `Lease.claim`, until their states are put."""

    keys: dict[KVKey, None]
    """Keys whose states are not put yet."""
    flight: Flight
    """Flight of the keys in this process."""
    in_ledger: set[KVKey]
    """Keys whose claim in the ledger has not ended."""
    persists: bool
    """Whether the states go to the persistent tiers."""
    since: float
    """Time at which the caller began to encode the next state."""


class Lease:
    """States in use, which no tier evicts until the lease is released.

    A lease is for one thread at a time. Any thread may release it.
    """

    def __init__(
        self,
        manager: LeaseManager,
        keys: Sequence[KVKey],
        request: LeaseRequest,
        tick: int,
        below: Sequence[str],
    ) -> None:
        self.keys = tuple(keys)
        """Keys in the caller's order."""
        self.request = request
        self.tick = tick
        """Tick of the logical clock at which the lease began."""
        self.place = QueuePlace(tick, request.patience)
        """Place in the queue for room in the first tier."""
        self.found: dict[KVKey, StoredStates] = {}
        self.source: dict[KVKey, str] = {}
        """For each key, the tier that had its states (`device`, `host`, `disk` or `remote`), or
        `encoded`.
        """
        self.moved: dict[str, int] = dict.fromkeys(below, 0)
        """Bytes read from each tier below the first."""
        self.unreadable: set[KVKey] = set()
        """Keys with a row whose states no tier could return."""
        self.lost_blobs = False
        """Whether a blob was corrupt or missing and has to be replaced."""
        self.waited = 0.0
        """Seconds spent waiting for other processes."""
        self.encoding: _Encoding | None = None
        self.writes: deque[Future[None]] = deque()
        """Running writes of blobs, from copies in main memory."""
        self._manager = manager
        self._released = False

    @property
    def states(self) -> tuple[StoredStates, ...]:
        """States in the order of the keys. All of them must be present."""
        return tuple(self.found[key] for key in self.keys)

    @property
    def missing(self) -> list[KVKey]:
        """Keys whose states are not present yet, without duplicates."""
        return [key for key in dict.fromkeys(self.keys) if key not in self.found]

    def claim(self) -> list[KVKey]:
        """Claim missing keys, whose states this caller must then encode and `put`.

        No other caller gets the keys until their states are put or this lease is released. Waits
        for keys that another thread or process is encoding only if no other key is missing, so that
        two leases never wait for each other. If the other one fails, its keys are claimed here.

        Returns:
            Claimed keys. Empty if all states are present.

        Raises:
            ValueError: States of the last claim have not been put.
            StoreError: The ledger does not answer, and the lease is not for a question.
            StoreBudgetExceeded: The leased states exceed the budget of the first tier.
        """
        return self._manager.claim(self)

    def put(self, key: KVKey, states: KVStates) -> None:
        """Store and share the states of a claimed key.

        A blob of states computed on a GPU may be written after this returns. If that fails, a later
        `put` or `release` raises the error.

        Raises:
            ValueError: This lease has not claimed the key.
            StoreError: The states cannot be stored, and the lease is not for a question.
            StoreBudgetExceeded: The leased states exceed the budget of the first tier.
        """
        self._manager.put(self, key, states)

    def extend(self, keys: Sequence[KVKey], request: LeaseRequest) -> None:
        """Add keys, such as modules after their preamble. All earlier states must be present."""
        self._manager.extend(self, keys, request)

    @property
    def is_writing(self) -> bool:
        """Whether blobs of this lease may still be in progress."""
        return bool(self.writes)

    def release(self) -> None:
        """Wait for the blobs and end the lease with its remaining claims. May be called again.

        Raises `StoreError` if a blob could not be written.
        """
        if not self._released:
            self._released = True
            self._manager.release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class LeaseManager:
    """Reads the states of leases and stores newly encoded states.

    No lock is held during a read, a copy or a computation.
    """

    def __init__(
        self,
        memory: MemoryTiers,
        persistent: PersistentTiers,
        ledger: Ledger,
        flights: SingleFlight,
        counters: Counters,
        claim_patience: float = CLAIM_PATIENCE,
    ) -> None:
        self._patience = claim_patience
        self._memory, self._persistent, self._ledger = memory, persistent, ledger
        self._flights, self._counters = flights, counters
        self._writers = ThreadPoolExecutor(_WRITERS, "ragcache-writer")  # starts threads on demand
        self._evicting = ThreadPoolExecutor(1, "ragcache-evicting")
        self._encoded: deque[KVKey] = deque(maxlen=_REMEMBERED)
        self._ahead: dict[KVKey, str] = {}  # unused states that were read ahead: their tiers
        self.queue = LeaseQueue(memory)

    def lease(self, keys: Sequence[KVKey], request: LeaseRequest) -> Lease:
        """Lease keys and read the states that the tiers have."""
        below = [index.name for index in self._memory.every[1:]]
        lease = Lease(self, keys, request, self._ledger.advance_clock(), below)
        self._enter(lease, lease.missing, extends=False)
        return lease

    def extend(self, lease: Lease, keys: Sequence[KVKey], request: LeaseRequest) -> None:
        """See `Lease.extend`."""
        assert not lease.missing, "a lease is extended when its states are here"
        lease.request, lease.lost_blobs = request, False
        before, lease.keys = lease.keys, (*lease.keys, *keys)
        try:
            self._enter(lease, lease.missing, extends=True)
        except BaseException:
            lease.keys = before
            raise

    def _enter(self, lease: Lease, keys: Sequence[KVKey], *, extends: bool) -> None:
        """Hold keys and read their states, as soon as there is room beside other leases."""
        while True:
            self.queue.enter(lease.place, keys, lease.request.size_of)
            try:
                self.load(lease)
                return
            except BaseException as error:
                self.queue.leave(lease.place, keys, ends=not extends)
                for key in keys:
                    lease.found.pop(key, None)
                if not isinstance(error, StoreBudgetExceeded):
                    raise
                full = error.with_traceback(None)  # its frames refer to states on the device
                full.__context__ = None
            if not self.queue.await_release(lease.place):
                raise full

    def unkept(self) -> set[KVKey]:
        """Return recently encoded keys that no persistent tier has."""
        return {key for key in self._encoded if not self._persistent.holds(key)}

    def take_reused(self) -> list[KVKey]:
        """Return keys used again since the last call that the nearest persistent tier lacks."""
        with self._memory.lock:
            keys, self._memory.reused = self._memory.reused, set()
            nearest = self._persistent.indexes[:1]
            return [key for index in nearest for key in keys if key not in index.entries]

    def release(self, lease: Lease) -> None:
        """End a lease and count its uses. A lease with remaining claims counts none."""
        abandoned = lease.encoding is not None
        failures = [write.exception() for write in lease.writes]  # waits
        lease.writes.clear()
        self._end_encoding(lease)
        self.queue.leave(lease.place, list(dict.fromkeys(lease.keys)))
        if self._memory.top.tier.traits.grouped:
            lease.found.clear()  # references keep memory of a device in use
        if not abandoned:
            found = [key for key, tier in lease.source.items() if tier != "encoded"]
            self._counters.hits.update(lease.source[key] for key in found)
            self._ledger.usage.touch(found, self._ledger.advance_clock())
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Wait for running writes of blobs."""
        self._evicting.shutdown(cancel_futures=True)
        self._writers.shutdown()

    def load(self, lease: Lease, *, wait: bool = False) -> None:
        """Read the states that the tiers have. `wait`: also states in flight elsewhere."""
        while keys := self._away(lease):
            with self._flights.begin(keys) as flight:
                self._read_all(lease, flight)
            if not (wait and flight.others):
                return
            flight.wait_for_others()

    def claim(self, lease: Lease) -> list[KVKey]:
        """See `Lease.claim`. Waits for flights of other threads after ending this thread's own."""
        if lease.encoding is not None:
            raise ValueError(f"{len(lease.encoding.keys)} claimed states are not put yet")
        while keys := self._away(lease):
            with self._flights.begin(keys) as flight:
                left = self._read_all(lease, flight)
                mine, shared = self._claim(lease, flight, left)
                if mine:
                    persists = shared and (lease.request.origin != "question" or lease.lost_blobs)
                    lease.encoding = _Encoding(
                        dict.fromkeys(mine),
                        flight.split(mine),
                        set(mine) if shared else set(),
                        persists,
                        time.perf_counter(),
                    )
                    self._make_room(mine, lease.request.size_of)
                    return mine
            flight.wait_for_others()
        return []

    def _make_room(self, keys: Sequence[KVKey], size_of: SizeOf) -> None:
        """Make room on a device for states that it is about to compute, in another thread."""
        tier = self._memory.top.tier
        if tier.traits.on_gpu:
            share = 1 if tier.kv_dtype == "model" else 2
            sizes = [size_of(key) // share for key in keys]
            with suppress(RuntimeError):  # the store has been closed
                self._evicting.submit(self._memory.make_room, sizes)

    def put(self, lease: Lease, key: KVKey, states: KVStates) -> None:
        """See `Lease.put`."""
        encoding = lease.encoding
        if encoding is None or key not in encoding.keys:
            raise ValueError(f"{key} is not claimed by this lease")
        self._counters.encode_seconds += time.perf_counter() - encoding.since
        self._counters.encoded_tokens += states.length
        self._keep(lease, encoding, key, states)
        del encoding.keys[key]
        encoding.flight.end([key])  # a key with a writer has left this flight
        if not encoding.keys:
            self._end_encoding(lease)
        encoding.since = time.perf_counter()

    def read_ahead(self, key: KVKey) -> None:
        """Read states into the first tier if it has room. Does not count as a use."""
        if not self._memory.has_room(key):
            return
        with self._flights.begin([key]) as flight:
            found = None
            if flight.mine:
                found = self._read_below(key, partial(self._memory.room, evict=False))
            if found is not None:
                tick, top = self._ledger.advance_clock(), self._memory.top
                if self._memory.place(top, key, found[1], tick, evict=False) is not None:
                    self._ahead[key] = found[0].name

    def _away(self, lease: Lease) -> list[KVKey]:
        """Return the missing keys of a lease that the first tier does not have either."""
        return self._find(lease, lease.missing)

    def _find(self, lease: Lease, keys: Sequence[KVKey]) -> list[KVKey]:
        """Look up keys in the first tier, and return the missing ones.

        The first lease of states that were read ahead counts as their first use.
        """
        ahead = {key: tier for key in keys if (tier := self._ahead.pop(key, None))}
        found, top = self._memory.find(keys, lease.tick, ahead), self._memory.top.name
        for key, states in found.items():
            lease.found[key], lease.source[key] = states.readable(), ahead.get(key, top)
        for key in ahead.keys() & found.keys():
            lease.moved[ahead[key]] += lease.found[key].nbytes
        return [key for key in keys if key not in found]

    def _read_all(self, lease: Lease, flight: Flight) -> list[KVKey]:
        """Read the keys of a flight. Returns the keys that no tier has.

        The first tier may have some of them from a flight that has just ended. Keys that could not
        be read are not tried again.
        """
        lost = self._counters.corrupt
        away = self._find(lease, flight.mine)
        self._read(lease, flight, [key for key in away if key not in lease.unreadable])
        left = [key for key in away if key not in lease.found]
        lease.unreadable.update(key for key in left if self._persistent.holds(key))
        lease.lost_blobs |= self._counters.corrupt > lost
        return left

    def _claim(self, lease: Lease, flight: Flight, left: list[KVKey]) -> tuple[list[KVKey], bool]:
        """Choose the keys that this caller encodes, of keys that no tier has.

        Reads states that another process has encoded in the meantime. If other processes encode all
        remaining keys, waits for one of them. A question encodes without a claim if the ledger does
        not answer or its patience ends.

        Returns:
            The keys, and whether they are claimed in the ledger.
        """
        while left and self._persistent.indexes:
            try:
                rows, mine = self._ledger.claim(left, lease.unreadable)
            except (StoreFull, StoreUnwritable, LedgerUnavailable) as error:
                if lease.request.origin != "question":
                    raise
                logger.warning("%s; states are encoded for this question only", error)
                self._counters.unclaimed += len(left)
                break
            try:
                self._read_rows(lease, flight, rows)
            except BaseException:
                self._release_claims(mine)
                raise
            if mine:
                return mine, True
            left = [key for key in left if key not in lease.found]
            if left and not rows and not self._wait_for_others(lease, left):
                break
        return left, False

    def _wait_for_others(self, lease: Lease, keys: Sequence[KVKey]) -> bool:
        """Wait for states that another process encodes.

        Returns False when the patience of a question has ended. Raises `LedgerUnavailable` for
        other leases.
        """
        question = lease.request.origin == "question"
        began, seconds = time.monotonic(), ENCODING_SECONDS
        if question:
            seconds = max(0.0, self._patience - lease.waited)
        released = self._ledger.locks.wait_for(keys, seconds)
        lease.waited += time.monotonic() - began
        if released:
            return True
        if not question:
            raise LedgerUnavailable(
                f"another process has been encoding {keys[0]} for {seconds:,.0f} seconds; look "
                "whether it hangs"
            )
        logger.warning("another process encodes %s for long; this question does, too", keys[0])
        self._counters.unclaimed += len(keys)
        return False

    def _read_rows(self, lease: Lease, flight: Flight, rows: Sequence[StateRow]) -> None:
        """Read states that other processes have recorded."""
        self._persistent.learn(rows)
        keys = list(dict.fromkeys(row.key for row in rows))
        self._read(lease, flight, keys)
        lease.unreadable.update(key for key in keys if key not in lease.found)

    def _end_encoding(self, lease: Lease) -> None:
        """End the claims in the ledger, then the flights.

        In this order, a thread that takes over a key claims it anew.
        """
        encoding, lease.encoding = lease.encoding, None
        if encoding is not None:
            try:
                self._release_claims(encoding.in_ledger)
            finally:
                encoding.flight.end()

    def _release_claims(self, keys: Iterable[KVKey]) -> None:
        """Release claims. If the ledger does not answer, a later heartbeat releases them."""
        try:
            self._ledger.locks.release(keys)
        except StoreError as error:
            logger.warning("%s; a later heartbeat releases the claims", error)

    def _read(self, lease: Lease, flight: Flight, keys: Sequence[KVKey]) -> None:
        """Read states from the tiers below the first. A device gets all of them side by side."""
        reads: list[_Read] = []
        for key in keys:
            found = self._read_below(key, self._memory.room)
            if found is not None:
                reads.append((key, *found))
            if reads and not self._memory.top.tier.traits.grouped:
                self._keep_read(lease, flight, reads)
                reads = []
        self._keep_read(lease, flight, reads)

    def _keep_read(self, lease: Lease, flight: Flight, reads: Sequence[_Read]) -> None:
        """Put states that were read into the first tier and end their flights."""
        memory, reused = self._memory, lease.request.origin == "warm"
        with memory.lock:
            for key, index, _ in reads:
                if key in index.entries:
                    index.entries.touch(key, lease.tick)
        entries = [(key, states) for key, _, states in reads]
        placed = memory.place_together(entries, lease.tick, reused=reused)
        for (key, index, read), here in zip(reads, placed, strict=True):
            states = here or read.readable()
            if here is None:
                mapped = index.tier.traits.mapped and index.tier.kv_dtype == "model"
                memory.keep_unbudgeted(key, states, extra=not mapped)
            lease.found[key], lease.source[key] = states, index.name
            lease.moved[index.name] += states.nbytes
            flight.end([key])

    def _read_below(self, key: KVKey, room: Room) -> tuple[TierIndex, StoredStates] | None:
        """Read states from the nearest tier below the first that has them."""
        with self._memory.lock:
            for index in self._memory.indexes[1:]:
                if key in index.entries:
                    return index, index.tier.get(key)
        return self._persistent.read(key, room)

    def _keep(self, lease: Lease, encoding: _Encoding, key: KVKey, states: KVStates) -> None:
        """Store encoded states: the blob, its row, then the first tier."""
        memory, request = self._memory, lease.request
        memory.describe(
            key, StateMetadata(states.length, request.mode, request.root, request.model)
        )
        if encoding.persists and not self._write_later(lease, encoding, key, states):
            try:
                self._persist(lease, key, states)
                encoding.in_ledger.discard(key)
            except StoreError as error:
                if request.origin != "question":
                    raise
                logger.warning("%s; the states stay in memory", error)
                self._counters.unreadable += 1
        warm = request.origin == "warm"
        placed = memory.place(memory.top, key, states, lease.tick, reused=warm)
        if placed is None:
            memory.keep_unbudgeted(key, states, extra=True)
        lease.found[key], lease.source[key] = placed or states, "encoded"
        self._counters.encoded += 1
        self._encoded.append(key)

    def _write_later(self, lease: Lease, encoding: _Encoding, key: KVKey, states: KVStates) -> bool:
        """Let a writer thread copy states computed on a GPU to main memory and write their blob.

        The GPU meanwhile computes the next states. Returns False if the blob must be written now.
        """
        if lease.request.origin == "question":
            return False
        while len(lease.writes) >= _WRITES or (lease.writes and lease.writes[0].done()):
            lease.writes.popleft().result()
        copy = self._memory.begin_download(states)
        if copy is None:
            return False
        encoding.in_ledger.discard(key)
        flight = encoding.flight.hand_over(key)
        lease.writes.append(self._writers.submit(self._write, lease, flight, key, copy))
        return True

    def _write(self, lease: Lease, flight: Flight, key: KVKey, states: StoredStates) -> None:
        """Write a blob and its row in a writer thread, then end the claim and the flight."""
        with flight:
            try:
                wait_for_arrival(states)
                self._persist(lease, key, states)
            except BaseException:
                self._release_claims([key])
                raise
            self._memory.end_download(key, states, lease.tick)

    def _persist(self, lease: Lease, key: KVKey, states: StoredStates) -> None:
        """Write a blob and its row. An ingestion waits for room that other leases take."""
        while True:
            try:
                return self._persistent.write(key, states, lease.tick)
            except StoreBudgetExceeded:
                if lease.request.origin == "question" or not self.queue.await_room(lease.place):
                    raise
