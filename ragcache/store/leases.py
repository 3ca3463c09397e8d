"""Leases: states in use, and how those that are missing come to memory.

The caller drives, and nothing in the store calls back:

    with store.lease(keys, request) as lease:      # what the tiers hold is in memory now
        while missing := lease.claim():            # what this caller has to encode
            for key, states in zip(missing, encode(missing), strict=True):
                lease.put(key, states)             # blob, row, memory
        use(lease.states)

A key of a lease is in one of four states: its states are here (`Lease.found`), this thread reads
them (a `Flight` of its own), this caller encodes them (`Lease.encoding`), or another thread or
process reads or encodes them, and this one waits for the end and looks again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ragcache.db.ledger import Ledger, StateMetadata, StateRow
from ragcache.errors import LedgerUnavailable, StoreError, StoreFull, StoreUnwritable
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import StoredStates, readable, wait_for_arrival
from ragcache.store.memory_tiers import Counters, MemoryTiers, TierIndex
from ragcache.store.persistent_tiers import Flight, PersistentTiers, Room, SingleFlight

logger = logging.getLogger(__name__)

_WRITERS = 2  # threads that write blobs of what GPUs have computed
_WRITES = 8  # of one lease that are under way, each with a copy in main memory
ENCODING_SECONDS = 600.0  # that another process may take to encode what this one waits for
_REMEMBERED = 10_000  # states that were encoded here, those encoded last
CLAIM_PATIENCE = 1.0  # seconds of them for a question, before it encodes for itself

Origin = Literal["ingest", "warm", "question"]
"""Why states are leased: documents are ingested, a call names them, or a question needs them."""

_Read = tuple[KVKey, TierIndex, StoredStates]  # states and the tier below the first that has them


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Facts about the states that a lease names. origin: why they are leased: those of ingestions
    and warm calls are written to every tier that outlives the process, and those of warm calls
    count as used again. mode: how they are encoded, `root` for a preamble; root: the key of the
    preamble that they depend on; model: its fingerprint."""

    origin: Origin = "question"
    mode: str = ""
    root: KVKey | None = None
    model: str = ""


@dataclass(slots=True)
class _Encoding:
    """Keys that one call of `Lease.claim` returned, until their states are put.

    keys: those that are left. flight: of these in this process. in_ledger: those whose claim
    between processes has not ended. persists: whether their states go to the persistent tiers.
    since: when the caller began with the next one.
    """

    keys: dict[KVKey, None]
    flight: Flight
    in_ledger: set[KVKey]
    persists: bool
    since: float


class Lease:
    """States in use: no tier evicts them until the lease is released. For one thread at a time.

    keys: in the caller's order. tick: when it began, by the clock of all sessions. source: for each
    key the tier that it was found in (`device`, `host`, `disk` or `remote`) or `encoded`. moved:
    bytes read from each tier below the first. unreadable: keys whose rows exist, but whose states
    no tier could give. lost_blobs: whether a blob turned out to be corrupt or vanished, and has to
    be replaced. waited: seconds for what other processes encode. writes: of blobs of states that
    were put, from a copy in main memory, beside what the caller does next.
    """

    def __init__(
        self, manager: LeaseManager, keys: Sequence[KVKey], request: LeaseRequest, tick: int,
        below: Sequence[str],
    ) -> None:  # fmt: skip
        self.keys, self.request, self.tick = tuple(keys), request, tick
        self.found: dict[KVKey, StoredStates] = {}
        self.source: dict[KVKey, str] = {}
        self.moved: dict[str, int] = dict.fromkeys(below, 0)
        self.unreadable: set[KVKey] = set()
        self.lost_blobs = False
        self.waited = 0.0
        self.encoding: _Encoding | None = None
        self.writes: deque[Future[None]] = deque()
        self._manager = manager
        self._released = False

    @property
    def states(self) -> tuple[StoredStates, ...]:
        """In the order of the keys; all of them must be here."""
        return tuple(self.found[key] for key in self.keys)

    @property
    def missing(self) -> list[KVKey]:
        """The keys whose states are not here yet, once each."""
        return [key for key in dict.fromkeys(self.keys) if key not in self.found]

    def claim(self) -> list[KVKey]:
        """The missing keys that this caller must encode and `put`; none when all states are here.
        No other caller gets them until their states are put or this lease is released.

        A key that another thread or process is encoding is waited for only when nothing else is
        missing, so that no two wait for each other; where the other one fails, it is claimed here.

        Raises `ValueError` where states of the last claim were not put, `StoreError` where the
        ledger does not answer and these states are not for a question, and `StoreBudgetExceeded`
        where more is in use than the first tier may hold.
        """
        return self._manager.claim(self)

    def put(self, key: KVKey, states: KVStates) -> None:
        """Stores the states of a claimed key, and shares them. The blob of states that a GPU has
        computed may be written after this returns: what fails then, a later `put` or `release`
        raises. Raises `ValueError` for another key, `StoreError` where they cannot be stored and
        are not for a question, and `StoreBudgetExceeded` where more is in use than the first tier
        may hold."""
        self._manager.put(self, key, states)

    def extend(self, keys: Sequence[KVKey], request: LeaseRequest) -> None:
        """Adds keys to a lease whose states are all here, as `KVStore.lease` would: modules after
        the preamble that they depend on."""
        self._manager.extend(self, keys, request)

    @property
    def is_writing(self) -> bool:
        """Whether blobs of this lease may still be under way."""
        return bool(self.writes)

    def release(self) -> None:
        """Ends the lease when its blobs are written, and its claims if any are left; further calls
        do nothing. Raises `StoreError` where a blob could not be written."""
        if not self._released:
            self._released = True
            self._manager.release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class LeaseManager:
    """Finds the states of leases, and keeps those that their callers encode. Nothing is read,
    copied or computed under a lock."""

    def __init__(
        self, memory: MemoryTiers, persistent: PersistentTiers, ledger: Ledger,
        flights: SingleFlight, counters: Counters, claim_patience: float = CLAIM_PATIENCE,
    ) -> None:  # fmt: skip
        self._patience = claim_patience
        self._memory, self._persistent, self._ledger = memory, persistent, ledger
        self._flights, self._counters = flights, counters
        self._writers = ThreadPoolExecutor(_WRITERS, "ragcache-writer")  # none until there is work
        self._encoded: deque[KVKey] = deque(maxlen=_REMEMBERED)
        self._ahead: dict[KVKey, str] = {}  # read ahead and not used since: the tiers they are from

    def lease(self, keys: Sequence[KVKey], request: LeaseRequest) -> Lease:
        """Holds keys, and reads what the tiers have of them."""
        below = [index.name for index in self._memory.every[1:]]
        lease = Lease(self, keys, request, self._ledger.advance_clock(), below)
        unique = lease.missing
        self._memory.hold(unique)
        try:
            self.load(lease)
        except BaseException:
            self._memory.release(unique)
            raise
        return lease

    def extend(self, lease: Lease, keys: Sequence[KVKey], request: LeaseRequest) -> None:
        """Adds keys to a lease: see `Lease.extend`."""
        assert not lease.missing, "a lease is extended when its states are here"
        lease.keys, lease.request, lease.lost_blobs = (*lease.keys, *keys), request, False
        self._memory.hold(lease.missing)
        self.load(lease)

    def unkept(self) -> set[KVKey]:
        """Keys of the states encoded last that no tier has which outlives the process."""
        return {key for key in self._encoded if not self._persistent.holds(key)}

    def take_reused(self) -> list[KVKey]:
        """Keys that were used again since the last call, and that the nearest tier which outlives
        the process does not have."""
        with self._memory.lock:
            keys, self._memory.reused = self._memory.reused, set()
            nearest = self._persistent.indexes[:1]
            return [key for index in nearest for key in keys if key not in index.entries]

    def release(self, lease: Lease) -> None:
        """Ends a lease and notes its uses; one that ends with claims used nothing."""
        abandoned = lease.encoding is not None
        failures = [write.exception() for write in lease.writes]  # waits for each
        lease.writes.clear()
        self._end_encoding(lease)
        self._memory.release(dict.fromkeys(lease.keys))
        if self._memory.top.tier.traits.grouped:
            lease.found.clear()  # memory of a device is used again when nothing refers to it
        if not abandoned:
            found = [key for key, tier in lease.source.items() if tier != "encoded"]
            self._counters.hits.update(lease.source[key] for key in found)
            self._ledger.usage.touch(found, self._ledger.advance_clock())
        for failure in failures:
            if failure is not None:
                raise failure

    def close(self) -> None:
        """Waits for blobs that are being written."""
        self._writers.shutdown()

    def load(self, lease: Lease, *, wait: bool = False) -> None:
        """Brings what the tiers have to memory. wait: also for keys that are in flight in other
        threads."""
        while True:
            with self._begin(lease) as flight:
                self._read_all(lease, flight)
            if not (wait and flight.others):
                return
            flight.wait_for_others()

    def claim(self, lease: Lease) -> list[KVKey]:
        """Claims missing keys: see `Lease.claim`. A key that is in flight in another thread is
        looked for again at the end of its flight, after this thread's own."""
        if lease.encoding is not None:
            raise ValueError(f"{len(lease.encoding.keys)} claimed states are not put yet")
        while lease.missing:
            with self._begin(lease) as flight:
                left = self._read_all(lease, flight)
                mine, shared = self._claim(lease, flight, left)
                if mine:
                    persists = shared and (lease.request.origin != "question" or lease.lost_blobs)
                    lease.encoding = _Encoding(
                        dict.fromkeys(mine), flight.split(mine), set(mine) if shared else set(),
                        persists, time.perf_counter(),
                    )  # fmt: skip
                    return mine
            flight.wait_for_others()
        return []

    def put(self, lease: Lease, key: KVKey, states: KVStates) -> None:
        """Stores states: see `Lease.put`."""
        encoding = lease.encoding
        if encoding is None or key not in encoding.keys:
            raise ValueError(f"{key} is not claimed by this lease")
        self._counters.encode_seconds += time.perf_counter() - encoding.since
        self._counters.encoded_tokens += states.length
        self._keep(lease, encoding, key, states)
        del encoding.keys[key]
        encoding.flight.end([key])  # unless a writer has it
        if not encoding.keys:
            self._end_encoding(lease)
        encoding.since = time.perf_counter()

    def read_ahead(self, key: KVKey) -> None:
        """Brings states to the first tier if it has room. This does not count as a use."""
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

    def _begin(self, lease: Lease) -> Flight:
        """Begins flights on the keys of a lease that are not in the first tier."""
        return self._flights.begin([key for key in lease.missing if not self._find(lease, key)])

    def _find(self, lease: Lease, key: KVKey) -> bool:
        """Looks into the first tier. States that were read ahead are used for the first time by the
        lease that finds them."""
        tier = self._ahead.pop(key, None)
        states = self._memory.find(key, lease.tick if tier is None else None)
        if states is None:
            return False
        lease.found[key], lease.source[key] = readable(states), tier or self._memory.top.name
        if tier is not None:
            lease.moved[tier] += lease.found[key].nbytes
        return True

    def _read_all(self, lease: Lease, flight: Flight) -> list[KVKey]:
        """Reads the keys of a flight; returns those that no tier gives. The first tier may have
        them from a flight that just ended. What could not be read once is not tried again."""
        lost = self._counters.corrupt
        away = [key for key in flight.mine if not self._find(lease, key)]
        self._read(lease, flight, [key for key in away if key not in lease.unreadable])
        left = [key for key in away if key not in lease.found]
        lease.unreadable.update(key for key in left if self._persistent.holds(key))
        lease.lost_blobs |= self._counters.corrupt > lost
        return left

    def _claim(self, lease: Lease, flight: Flight, left: list[KVKey]) -> tuple[list[KVKey], bool]:
        """Chooses which of the keys that no tier gives are encoded by this caller, and whether they
        are claimed between processes. What another process has encoded meanwhile is read; where
        others encode all that is left, this waits for one of them.

        A question does without the ledger where that does not answer, and where the other process
        takes longer than its patience.
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
        """Waits for states that another process encodes; False where a question has waited for all
        of its patience. Raises `LedgerUnavailable`."""
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
        """Reads what other processes have recorded."""
        self._persistent.learn(rows)
        keys = list(dict.fromkeys(row.key for row in rows))
        self._read(lease, flight, keys)
        lease.unreadable.update(key for key in keys if key not in lease.found)

    def _end_encoding(self, lease: Lease) -> None:
        """Ends the claims between processes before the flights, so that a thread which takes a key
        over claims it anew."""
        encoding, lease.encoding = lease.encoding, None
        if encoding is not None:
            try:
                self._release_claims(encoding.in_ledger)
            finally:
                encoding.flight.end()

    def _release_claims(self, keys: Iterable[KVKey]) -> None:
        """A ledger that has gone away forgets claims with the session."""
        try:
            self._ledger.locks.release(keys)
        except StoreError as error:
            logger.warning("%s; claims stay until this process ends", error)

    def _read(self, lease: Lease, flight: Flight, keys: Sequence[KVKey]) -> None:
        """Looks into the tiers below the first, and brings what they have there: to a device all at
        once, side by side."""
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
        """Brings to the first tier what was read below it, and ends its flight."""
        memory, reused = self._memory, lease.request.origin == "warm"
        with memory.lock:
            for key, index, _ in reads:
                if key in index.entries:
                    index.entries.touch(key, lease.tick)
        entries = [(key, states) for key, _, states in reads]
        placed = memory.place_together(entries, lease.tick, reused=reused)
        for (key, index, read), here in zip(reads, placed, strict=True):
            states = here or readable(read)
            if here is None:
                mapped = index.tier.traits.mapped and index.tier.kv_dtype == "model"
                memory.keep_unbudgeted(key, states, beside=not mapped)
            lease.found[key], lease.source[key] = states, index.name
            lease.moved[index.name] += states.nbytes
            flight.end([key])

    def _read_below(self, key: KVKey, room: Room) -> tuple[TierIndex, StoredStates] | None:
        """Reads states from the nearest tier below the first that has them."""
        with self._memory.lock:
            for index in self._memory.indexes[1:]:
                if key in index.entries:
                    return index, index.tier.get(key)
        return self._persistent.read(key, room)

    def _keep(self, lease: Lease, encoding: _Encoding, key: KVKey, states: KVStates) -> None:
        """Stores what was encoded: blob, row, and then the first tier."""
        memory, request = self._memory, lease.request
        memory.describe(
            key, StateMetadata(states.length, request.mode, request.root, request.model)
        )
        if encoding.persists and not self._write_later(lease, encoding, key, states):
            try:
                self._persistent.write(key, states, lease.tick)
                encoding.in_ledger.discard(key)
            except StoreError as error:
                if request.origin != "question":
                    raise
                logger.warning("%s; the states stay in memory", error)
                self._counters.unreadable += 1
        warm = request.origin == "warm"
        placed = memory.place(memory.top, key, states, lease.tick, reused=warm)
        if placed is None:
            memory.keep_unbudgeted(key, states, beside=True)
        lease.found[key], lease.source[key] = placed or states, "encoded"
        self._counters.encoded += 1
        self._encoded.append(key)

    def _write_later(self, lease: Lease, encoding: _Encoding, key: KVKey, states: KVStates) -> bool:
        """Hands states that a GPU has computed to a writer: copied to main memory beside what the
        GPU computes next, and to a blob from there. False where they are written now."""
        if lease.request.origin == "question":
            return False
        while len(lease.writes) >= _WRITES or (lease.writes and lease.writes[0].done()):
            lease.writes.popleft().result()
        copy = self._memory.begin_download(states)
        if copy is None:
            return False
        encoding.in_ledger.discard(key)
        flight = encoding.flight.hand_over(key)
        lease.writes.append(self._writers.submit(self._write, flight, key, copy, lease.tick))
        return True

    def _write(self, flight: Flight, key: KVKey, states: StoredStates, tick: int) -> None:
        """In a writer's thread: the blob, its row, and then the end of claim and flight."""
        with flight:
            try:
                wait_for_arrival(states)
                self._persistent.write(key, states, tick)
            except BaseException:
                self._release_claims([key])
                raise
            self._memory.end_download(key, states, tick)
