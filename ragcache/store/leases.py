"""Leases: states in use, and how those that are missing come to memory.

The caller drives, and nothing in the store calls back:

    with store.lease(keys, request) as lease:      # what the tiers hold is in memory now
        while missing := lease.claim():            # what this caller has to encode
            for key, states in zip(missing, encode(missing), strict=True):
                lease.put(key, states)             # blob, row, memory
        use(lease.states)
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from ragcache.db.ledger import Ledger, StateMetadata, StateRow
from ragcache.errors import LedgerUnavailable, StoreError, StoreFull, StoreUnwritable
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import StoredStates, readable, wait_for_arrival
from ragcache.store.memory_tiers import Counters, MemoryTiers, TierIndex
from ragcache.store.persistent_tiers import Flight, PersistentTiers, SingleFlight
from ragcache.store.tiers import DeviceTier

logger = logging.getLogger(__name__)

_WRITERS = 2  # threads that write blobs of what GPUs have computed
_WRITES = 8  # of one lease that are under way, each with a copy in main memory
ENCODING_SECONDS = 600.0  # that another process may take to encode what this one waits for
_REMEMBERED = 10_000  # states that were encoded here, those encoded last
CLAIM_PATIENCE = 1.0  # seconds of them for a question, before it encodes for itself

Origin = Literal["ingest", "warm", "question"]
"""Why states are leased: documents are ingested, a call names them, or a question needs them."""


def admits(origin: Origin, previous_use: int | None, tick: int, window: int) -> bool:
    """Whether states may enter a tier: from ingestion and warm calls always; from a question where
    an earlier one used the same states at most `window` ticks ago (`previous_use`, or None)."""
    if origin != "question":
        return True
    return previous_use is not None and tick - previous_use <= window


class AdmissionFilter:
    """The last `window` uses of keys that are not admitted, so that one-off questions push no
    documents out. Ticks must not run backwards."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._last: OrderedDict[KVKey, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._last)

    def see(self, key: KVKey, tick: int) -> int | None:
        """Notes a use; returns the tick of the one before, None where it is forgotten."""
        previous = self._last.pop(key, None)
        self._last[key] = tick
        while len(self._last) > self.window or tick - next(iter(self._last.values())) > self.window:
            self._last.popitem(last=False)
        if previous is not None and tick - previous > self.window:
            return None
        return previous

    def admits(self, origin: Origin, key: KVKey, tick: int) -> bool:
        """Notes a use and decides."""
        return admits(origin, self.see(key, tick), tick, self.window)


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Facts about the states that a lease names. origin: why they are leased, which decides whether
    they are admitted. mode: how they are encoded, `root` for a preamble; root: the key of the
    preamble that they depend on; model: its fingerprint."""

    origin: Origin = "question"
    mode: str = ""
    root: KVKey | None = None
    model: str = ""

    def metadata(self, tokens: int) -> StateMetadata:
        """The metadata of states of this length."""
        return StateMetadata(tokens, mode=self.mode, root=self.root, model=self.model)


@dataclass(slots=True)
class _Claimed:
    """Keys that one call of `Lease.claim` returned, until the states of all of them are put.

    flight: of these keys in this process. in_ledger: those whose claim between processes has not
    ended. persists: whether their states go to the persistent tiers. since: when the caller began
    with the next one; seconds: what it took for those before; lengths: of these, in tokens.
    """

    keys: dict[KVKey, None]
    flight: Flight
    in_ledger: set[KVKey]
    persists: bool
    since: float = 0.0
    seconds: float = 0.0
    lengths: dict[KVKey, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """States that were read below the first tier, and where. admitted: whether they may push others
    out of the first."""

    key: KVKey
    index: TierIndex
    states: StoredStates
    admitted: bool


class Lease:
    """States in use: no tier evicts them until the lease is released. For one thread at a time.

    keys: in the caller's order. tick: when it began, by the clock of all sessions; uses: by that of
    this one, which admission goes by. source: for each key the tier that it was found in (`device`,
    `host`, `disk` or `remote`) or `encoded`. moved: bytes read from each tier below the first.
    admitted: for keys that were not in the first tier, whether they may push others out.
    unreadable: keys whose rows exist, but whose states no tier could give. lost_blobs: whether a
    blob turned out to be corrupt or vanished, and has to be replaced. waited: seconds for what
    other processes encode. writes: of blobs of states that were put, from a copy in main memory,
    beside what the caller does next.
    """

    def __init__(
        self, loader: StateLoader, keys: Sequence[KVKey], request: LeaseRequest, tick: int,
        uses: int, below: Sequence[str],
    ) -> None:  # fmt: skip
        self.keys, self.request, self.tick, self.uses = tuple(keys), request, tick, uses
        self.found: dict[KVKey, StoredStates] = {}
        self.source: dict[KVKey, str] = {}
        self.moved: dict[str, int] = dict.fromkeys(below, 0)
        self.admitted: dict[KVKey, bool] = {}
        self.unreadable: set[KVKey] = set()
        self.lost_blobs = False
        self.waited = 0.0
        self.claimed: _Claimed | None = None
        self.writes: deque[Future[None]] = deque()
        self._loader = loader
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
        return self._loader.claim(self)

    def put(self, key: KVKey, states: KVStates) -> None:
        """Stores the states of a claimed key, and shares them. The blob of states that a GPU has
        computed may be written after this returns: what fails then, a later `put` or `release`
        raises. Raises `ValueError` for another key, `StoreError` where they cannot be stored and
        are not for a question, and `StoreBudgetExceeded` where more is in use than the first tier
        may hold."""
        self._loader.put(self, key, states)

    def extend(self, keys: Sequence[KVKey], request: LeaseRequest) -> None:
        """Adds keys to a lease whose states are all here, as `KVStore.lease` would: modules after
        the preamble that they depend on."""
        self._loader.extend(self, keys, request)

    @property
    def is_writing(self) -> bool:
        """Whether blobs of this lease may still be under way."""
        return bool(self.writes)

    def release(self) -> None:
        """Ends the lease when its blobs are written, and its claims if any are left; further calls
        do nothing. Raises `StoreError` where a blob could not be written."""
        if not self._released:
            self._released = True
            self._loader.release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class StateLoader:
    """Finds the states of leases, and keeps those that their callers encode. Nothing is read,
    copied or computed under a lock."""

    def __init__(
        self, memory: MemoryTiers, persistent: PersistentTiers, ledger: Ledger,
        flights: SingleFlight, admission: AdmissionFilter, counters: Counters,
        claim_patience: float = CLAIM_PATIENCE,
    ) -> None:  # fmt: skip
        self._patience = claim_patience
        self._memory, self._persistent, self._ledger = memory, persistent, ledger
        self._flights, self._admission, self._counters = flights, admission, counters
        self._writers = ThreadPoolExecutor(_WRITERS, "ragcache-writer")  # none until there is work
        self._reused: set[KVKey] = set()  # on probation, and to be written to the disk
        self._encoded: deque[KVKey] = deque(maxlen=_REMEMBERED)
        self._ahead: dict[KVKey, str] = {}  # read ahead and not used since: the tiers they are from

    def lease(self, keys: Sequence[KVKey], request: LeaseRequest) -> Lease:
        """Holds keys, and reads what the tiers have of them."""
        below = [index.name for index in self._memory.every[1:]]
        tick = self._ledger.advance_clock()
        lease = Lease(self, keys, request, tick, self._ledger.uses, below)
        unique = lease.missing
        self._memory.hold(unique)
        try:
            self.load(lease)
        except BaseException:
            self._memory.let_go(unique)
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
        with self._memory.lock:
            kept = [index.entries for index in self._persistent.indexes]
            return {key for key in self._encoded if not any(key in each for each in kept)}

    def release(self, lease: Lease) -> None:
        """Ends a lease and notes its uses; one that ends with claims used nothing."""
        abandoned = lease.claimed is not None
        failures = [write.exception() for write in lease.writes]  # waits for each
        lease.writes.clear()
        self._end_claims(lease)
        self._memory.let_go(dict.fromkeys(lease.keys))
        if isinstance(self._memory.top.tier, DeviceTier):
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
            away = [key for key in lease.missing if not self._find(lease, key)]
            with self._flights.begin(away) as flight:
                self._read_all(lease, flight)
            if not (wait and flight.others):
                return
            flight.wait_for_others()

    def claim(self, lease: Lease) -> list[KVKey]:
        """Claims missing keys: see `Lease.claim`. A key that is in flight in another thread is
        looked for again at the end of its flight, after this thread's own."""
        if lease.claimed is not None:
            put, left = len(lease.claimed.lengths), len(lease.claimed.keys)
            raise ValueError(f"{put + left} states were claimed, {put} put")
        while lease.missing:
            away = [key for key in lease.missing if not self._find(lease, key)]
            flight, claimed = self._flights.begin(away), None
            try:
                claimed = self._claim(lease, flight, self._read_all(lease, flight))
            finally:
                flight.end(set(flight.mine).difference(() if claimed is None else claimed.keys))
            if claimed is not None:
                claimed.since = time.perf_counter()
                return list(claimed.keys)
            flight.wait_for_others()
        return []

    def put(self, lease: Lease, key: KVKey, states: KVStates) -> None:
        """Stores states: see `Lease.put`. The cost of encoding is known when all that was claimed
        at once is put: a pass encodes several, and each has its share."""
        claimed = lease.claimed
        if claimed is None or key not in claimed.keys:
            raise ValueError(f"{key} is not claimed by this lease")
        claimed.seconds += time.perf_counter() - claimed.since
        self._keep(lease, claimed, key, states)
        claimed.lengths[key] = states.length
        del claimed.keys[key]
        claimed.flight.end([key])  # unless it was given to a writer
        if not claimed.keys:
            self._end_claims(lease)
            tokens = max(1, sum(claimed.lengths.values()))
            self._counters.encoded_tokens += tokens
            self._counters.encode_seconds += claimed.seconds
            for each, length in claimed.lengths.items():
                self._ledger.usage.cost(each, claimed.seconds * length / tokens)
                self._memory.cost(each, claimed.seconds * length / tokens)
        claimed.since = time.perf_counter()

    def read_ahead(self, key: KVKey) -> None:
        """Brings states to the first tier if it has room. This does not count as a use."""
        if not self._memory.has_room(key):
            return
        with self._flights.begin([key]) as flight:
            room = partial(self._memory.room, admitted=False)
            found = None
            if flight.mine:
                found = self._in_memory(key) or self._persistent.read(key, room)
            if found is not None:
                tick, top = self._ledger.advance_clock(), self._memory.top
                if self._memory.place(top, key, found[1], tick, admitted=False) is not None:
                    self._ahead[key] = found[0].name

    def take_reused(self) -> list[KVKey]:
        """Keys that were used again on probation since the last call: admitted, and to be written
        to the disk."""
        with self._memory.lock:
            keys, self._reused = list(self._reused), set()
        return keys

    def _note_reused(self, key: KVKey) -> None:
        with self._memory.lock:
            self._reused.add(key)

    def _find(self, lease: Lease, key: KVKey) -> bool:
        """Looks into the first tier."""
        memory = self._memory
        states = memory.find(key, lease.tick)
        if states is None:
            return False
        if key in memory.top.probation and self._admits(lease, key):
            with memory.lock:
                memory.top.admit(key)
            self._note_reused(key)
        lease.found[key], lease.source[key] = readable(states), memory.top.name
        tier = self._ahead.pop(key, None)
        if tier is not None:  # it was read for the first one who uses it
            lease.source[key] = tier
            lease.moved[tier] += lease.found[key].nbytes
        return True

    def _read_all(self, lease: Lease, flight: Flight) -> list[KVKey]:
        """Reads the keys of a flight; returns those that no tier gives. The first tier may have
        them from a flight that just ended. What could not be read once is not tried again."""
        lost, left = self._counters.corrupt, []
        reads: list[_Read] = []
        for key in flight.mine:
            if self._find(lease, key):
                continue
            read = None if key in lease.unreadable else self._read(lease, key)
            if read is None:
                left.append(key)
                continue
            reads.append(read)
            if not isinstance(self._memory.top.tier, DeviceTier):
                self._keep_read(lease, flight, reads)
                reads = []
        self._keep_read(lease, flight, reads)  # a device gets all of them side by side
        known = [index.entries for index in self._persistent.indexes]
        lease.unreadable.update(key for key in left if any(key in each for each in known))
        lease.lost_blobs |= self._counters.corrupt > lost
        return left

    def _claim(self, lease: Lease, flight: Flight, left: list[KVKey]) -> _Claimed | None:
        """Claims keys that no other process has encoded or claimed, and waits where there are none.
        A question does without the ledger, where that does not answer."""
        if not self._persistent.indexes:
            return self._begin_claims(lease, flight, left, shared=False)
        while left:
            try:
                rows, mine = self._ledger.claim(left, lease.unreadable)
            except (StoreFull, StoreUnwritable, LedgerUnavailable) as error:
                if lease.request.origin != "question":
                    raise
                logger.warning("%s; states are encoded for this question only", error)
                self._counters.unclaimed += len(left)
                return self._begin_claims(lease, flight, left, shared=False)
            claimed = self._begin_claims(lease, flight, mine, shared=True)
            try:
                self._read_rows(lease, flight, rows)
            except BaseException:
                self._end_claims(lease)
                raise
            if claimed is not None:
                return claimed
            left = [key for key in left if key not in lease.found]
            if left and not rows and not self._wait_for_others(lease, left):
                return self._begin_claims(lease, flight, left, shared=False)
        return None

    def _wait_for_others(self, lease: Lease, keys: Sequence[KVKey]) -> bool:
        """Waits for states that another process encodes; False where a question has waited for all
        of its patience. Raises `LedgerUnavailable`."""
        question = lease.request.origin == "question"
        began, seconds = time.monotonic(), ENCODING_SECONDS
        if question:
            seconds = max(0.0, self._patience - lease.waited)
        released = self._ledger.locks.wait_for(keys, seconds)
        lease.waited += time.monotonic() - began
        if not released and not question:
            raise LedgerUnavailable(
                f"another process has been encoding {keys[0]} for {seconds:,.0f} seconds; look "
                "whether it hangs"
            )
        if not released:
            logger.warning("another process encodes %s for long; this question does, too", keys[0])
            self._counters.unclaimed += len(keys)
        return released

    def _read_rows(self, lease: Lease, flight: Flight, rows: Sequence[StateRow]) -> None:
        """Reads what other processes have recorded."""
        self._persistent.learn(rows)
        reads = {key: self._read(lease, key) for key in dict.fromkeys(row.key for row in rows)}
        lease.unreadable.update(key for key, read in reads.items() if read is None)
        self._keep_read(lease, flight, [read for read in reads.values() if read is not None])

    def _begin_claims(
        self, lease: Lease, flight: Flight, keys: Sequence[KVKey], *, shared: bool
    ) -> _Claimed | None:
        """shared: whether the keys are claimed between processes."""
        if keys:
            persists = shared and (lease.request.origin != "question" or lease.lost_blobs)
            in_ledger = set(keys) if shared else set()
            lease.claimed = _Claimed(dict.fromkeys(keys), flight, in_ledger, persists)
        return lease.claimed

    def _end_claims(self, lease: Lease) -> None:
        """Ends the claims between processes before the flights, so that a thread which takes a key
        over claims it anew. A ledger that has gone away forgets them with the session."""
        claimed, lease.claimed = lease.claimed, None
        if claimed is None:
            return
        try:
            self._ledger.locks.release(claimed.in_ledger)
        except StoreError as error:
            logger.warning("%s; claims stay until this process ends", error)
        finally:
            claimed.flight.end(claimed.keys)

    def _admits(self, lease: Lease, key: KVKey) -> bool:
        """Decided once a lease, which is one use however often its states are looked for."""
        with self._memory.lock:
            if key not in lease.admitted:
                origin = lease.request.origin
                lease.admitted[key] = self._admission.admits(origin, key, lease.uses)
            return lease.admitted[key]

    def _read(self, lease: Lease, key: KVKey) -> _Read | None:
        """Looks into the tiers below the first."""
        memory = self._memory
        self._ahead.pop(key, None)
        found = self._in_memory(key)
        known = any(key in each.entries for each in memory.every)
        admitted = known and self._admits(lease, key)
        found = found or self._persistent.read(key, partial(memory.room, admitted=admitted))
        return None if found is None else _Read(key, *found, admitted)

    def _keep_read(self, lease: Lease, flight: Flight, reads: Sequence[_Read]) -> None:
        """Brings to the first tier what was read below it, and ends its flight."""
        memory = self._memory
        for read in reads:
            with memory.lock:
                if read.key in read.index.entries:
                    read.index.touch(read.key, lease.tick)
            below = read.index.tier.persistent and read.index is not self._persistent.indexes[0]
            if read.admitted and below:
                self._note_reused(read.key)
        entries = [(read.key, read.states, read.admitted) for read in reads]
        placed = memory.place_together(entries, lease.tick)
        for read, here in zip(reads, placed, strict=True):
            states = here or readable(read.states)
            if here is None:
                tier = read.index.tier
                mapped = tier.name == "disk" and tier.kv_dtype == "model"
                memory.keep_loose(read.key, states, beside=not mapped)
            lease.found[read.key], lease.source[read.key] = states, read.index.name
            lease.moved[read.index.name] += states.nbytes
            flight.end([read.key])

    def _in_memory(self, key: KVKey) -> tuple[TierIndex, StoredStates] | None:
        """Looks into the tiers in memory below the first."""
        with self._memory.lock:
            for index in self._memory.indexes[1:]:
                if key in index.entries:
                    return index, index.tier.get(key)
        return None

    def _keep(self, lease: Lease, claimed: _Claimed, key: KVKey, states: KVStates) -> None:
        """Stores what was encoded: blob, row, and then the first tier."""
        memory = self._memory
        memory.describe(key, lease.request.metadata(states.length))
        admitted = claimed.persists or self._admits(lease, key)
        if claimed.persists and self._write_later(lease, claimed, key, states):
            pass
        elif claimed.persists:
            try:
                self._persistent.write(key, states, lease.tick)
                claimed.in_ledger.discard(key)
            except StoreError as error:
                if lease.request.origin != "question":
                    raise
                logger.warning("%s; the states stay in memory", error)
                self._counters.unreadable += 1
        elif admitted:
            self._note_reused(key)
        placed = memory.place(memory.top, key, states, lease.tick, admitted=admitted)
        if placed is None:
            memory.keep_loose(key, states, beside=True)
        lease.found[key], lease.source[key] = placed or states, "encoded"
        self._counters.encoded += 1
        self._encoded.append(key)

    def _write_later(self, lease: Lease, claimed: _Claimed, key: KVKey, states: KVStates) -> bool:
        """Hands states that a GPU has computed to a writer: copied to main memory beside what the
        GPU computes next, and to a blob from there. False where they are written now."""
        if lease.request.origin == "question":
            return False
        while len(lease.writes) >= _WRITES or (lease.writes and lease.writes[0].done()):
            lease.writes.popleft().result()
        copy = self._memory.begin_download(states)
        if copy is None:
            return False
        claimed.in_ledger.discard(key)
        flight = claimed.flight.give_away([key])
        lease.writes.append(self._writers.submit(self._write, flight, key, copy, lease.tick))
        return True

    def _write(self, flight: Flight, key: KVKey, states: StoredStates, tick: int) -> None:
        """In a writer's thread: the blob, its row, and then the end of claim and flight."""
        with flight:
            try:
                wait_for_arrival(states)
                self._persistent.write(key, states, tick)
            except BaseException:
                try:
                    self._ledger.locks.release([key])
                except StoreError as error:
                    logger.warning("%s; a claim stays until this process ends", error)
                raise
            self._memory.end_download(key, states, tick)
