"""Filling a lease: what is in memory, what is read, and what has to be made."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from ragcache.errors import LedgerUnavailable, StoreError, StoreFull, StoreUnwritable
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import StoredStates, restored
from ragcache.store.admission import Origin, Sightings
from ragcache.store.counters import Counters
from ragcache.store.flights import Flights
from ragcache.store.holdings import Holdings
from ragcache.store.lease import Lease
from ragcache.store.ledger import Ledger
from ragcache.store.rows import Facts
from ragcache.store.shared import SharedTiers
from ragcache.store.shelf import Shelf

logger = logging.getLogger(__name__)

Produce = Callable[[Sequence[KVKey]], Iterable[KVStates]]

ENCODING_SECONDS = 600.0  # that another process may take to encode what this one waits for


@dataclass(frozen=True, slots=True)
class Wish:
    """What is known of the states that a lease asks for, beyond their keys.

    origin: what they are asked for by, which decides whether they are admitted. mode, root, model:
    what they depend on; the root itself is a preamble.
    """

    origin: Origin = "question"
    mode: str = ""
    root: KVKey | None = None
    model: str = ""

    def facts(self, key: KVKey, tokens: int) -> Facts:
        if key == self.root:
            return Facts(tokens, mode="root", model=self.model)
        return Facts(tokens, mode=self.mode, root=self.root, model=self.model)


class Filler:
    """Finds or makes the states of leases. Nothing is read, copied or computed under a lock."""

    def __init__(
        self,
        holdings: Holdings,
        shared: SharedTiers,
        ledger: Ledger,
        flights: Flights,
        sightings: Sightings,
        counters: Counters,
    ) -> None:
        self._holdings, self._shared, self._ledger = holdings, shared, ledger
        self._flights, self._sightings, self._counters = flights, sightings, counters
        self.reused: set[KVKey] = set()
        """Used again while on probation: admitted, and to be written to the disk."""
        self._ahead: dict[KVKey, str] = {}  # read ahead and not used since: the tiers they are from

    def fill(self, lease: Lease, wish: Wish, produce: Produce | None) -> None:
        """Fills a lease whose keys are held. Without `produce`, with what some tier has.

        A key that another thread is working at is left to it, and looked for again when it is done,
        after this thread's own are there: so no two threads wait for each other. The root comes
        first, because what stands on it is encoded after it.
        """
        tick = self._ledger.tick()
        missing = lease.missing
        for keys in (
            [k for k in missing if k == wish.root],
            [k for k in missing if k != wish.root],
        ):
            while keys:
                away = [key for key in keys if not self._find(lease, key, wish, tick)]
                mine, theirs = self._flights.begin(away)
                try:
                    self._fetch(lease, mine, wish, produce, tick)
                finally:
                    self._flights.end(mine)
                for flight in theirs:
                    flight.wait()
                keys = [key for key in keys if key not in lease.found] if theirs else []

    def read_ahead(self, key: KVKey) -> None:
        """Brings states to the first tier where there is room for them. It is no use of theirs."""
        if not self._holdings.has_room(key):
            return
        mine, _ = self._flights.begin([key])
        try:
            room = partial(self._holdings.room, admitted=False)
            found = (self._in_memory(key) or self._shared.read(key, room)) if mine else None
            if found is not None:
                tick, top = self._ledger.tick(), self._holdings.top
                if self._holdings.place(top, key, found[1], tick, admitted=False) is not None:
                    self._ahead[key] = found[0].name
        finally:
            self._flights.end(mine)

    def _find(self, lease: Lease, key: KVKey, wish: Wish, tick: int) -> bool:
        """Looks into the first tier."""
        holdings = self._holdings
        states = holdings.find(key, tick)
        if states is None:
            return False
        if key in holdings.top.probation and self._admits(lease, wish, key, tick):
            with holdings.lock:
                holdings.top.admit(key)
                self.reused.add(key)
        lease.found[key], lease.source[key] = restored(states), holdings.top.name
        tier = self._ahead.pop(key, None)
        if tier is not None:  # it was read for whoever uses it first
            lease.source[key] = tier
            lease.moved[tier] += lease.found[key].nbytes
        return True

    def _fetch(
        self, lease: Lease, keys: list[KVKey], wish: Wish, produce: Produce | None, tick: int
    ) -> None:
        """Of keys whose flights are this thread's. Another thread may just have ended its own."""
        lost = self._counters.corrupt
        left = [key for key in keys if not self._find(lease, key, wish, tick)]
        left = [key for key in left if not self._read(lease, key, wish, tick)]
        if not left or produce is None:
            return
        kept = wish.origin != "question" or self._counters.corrupt > lost
        if not self._shared.shelves or not self._make_claimed(
            lease, left, wish, produce, tick, kept
        ):
            left = [key for key in left if key not in lease.found]
            self._make(lease, left, wish, produce, tick, kept=False)

    def _make_claimed(
        self, lease: Lease, left: list[KVKey], wish: Wish, produce: Produce, tick: int, kept: bool
    ) -> bool:
        """Makes what no other process has made or is making, and waits for the others. Returns
        False where a question can do without the ledger, which does not answer."""
        known = [shelf.entries for shelf in self._shared.shelves]
        unreadable = {key for key in left if any(key in entries for entries in known)}
        while left:
            try:
                rows, mine = self._ledger.claim(left, unreadable)
            except (StoreFull, StoreUnwritable, LedgerUnavailable) as error:
                if wish.origin != "question":
                    raise
                logger.warning("%s; states are encoded for one question alone", error)
                self._counters.unclaimed += len(left)
                return False
            try:
                self._make(lease, mine, wish, produce, tick, kept=kept)
            finally:
                self._drop_claims(mine)
            self._shared.learn(rows)
            for key in dict.fromkeys(row.key for row in rows):
                if not self._read(lease, key, wish, tick):
                    unreadable.add(key)
            left = [key for key in left if key not in lease.found]
            if left and not mine and not rows:
                self._ledger.claims.wait_for(left, ENCODING_SECONDS)
        return True

    def _admits(self, lease: Lease, wish: Wish, key: KVKey, tick: int) -> bool:
        """Decided once a lease, which is one use however often its states are looked for."""
        with self._holdings.lock:
            if key not in lease.admitted:
                lease.admitted[key] = self._sightings.admits(wish.origin, key, tick)
            return lease.admitted[key]

    def _drop_claims(self, keys: list[KVKey]) -> None:
        """Of those that were not recorded, which ends a claim. A ledger that has gone away in the
        meantime forgets them with the session."""
        try:
            self._ledger.claims.drop(keys)
        except StoreError as error:
            logger.warning("%s; claims stay until this process ends", error)

    def _read(self, lease: Lease, key: KVKey, wish: Wish, tick: int) -> bool:
        """Looks into the tiers below the first."""
        holdings = self._holdings
        self._ahead.pop(key, None)
        found = self._in_memory(key)
        known = any(key in each.entries for each in holdings.every)
        admitted = known and self._admits(lease, wish, key, tick)
        room = partial(holdings.room, admitted=admitted)
        found = found or self._shared.read(key, room)
        if found is None:
            return False
        shelf, stored = found
        with holdings.lock:
            if key in shelf.entries:
                shelf.touch(key, tick)
        if admitted and shelf.tier.persistent and shelf is not self._shared.shelves[0]:
            self.reused.add(key)
        placed = holdings.place(holdings.top, key, stored, tick, admitted=admitted)
        states = placed or restored(stored)
        if placed is None:
            mapped = shelf.tier.name == "disk" and shelf.tier.kv_dtype == "model"
            holdings.keep_loose(key, states, beside=not mapped)
        lease.found[key], lease.source[key] = states, shelf.name
        lease.moved[shelf.name] += states.nbytes
        self._flights.end([key])
        return True

    def _in_memory(self, key: KVKey) -> tuple[Shelf, StoredStates] | None:
        """Looks into the tiers in memory below the first."""
        with self._holdings.lock:
            for shelf in self._holdings.shelves[1:]:
                if key in shelf.entries:
                    return shelf, shelf.tier.get(key)
        return None

    def _make(
        self,
        lease: Lease,
        keys: list[KVKey],
        wish: Wish,
        produce: Produce,
        tick: int,
        *,
        kept: bool,
    ) -> None:
        seconds, made = 0.0, iter(produce(keys) if keys else ())
        lengths: dict[KVKey, int] = {}
        for key in keys:
            began = time.perf_counter()
            states = next(made, None)
            seconds += time.perf_counter() - began
            if states is None:
                raise ValueError(f"{len(keys)} states were asked for, {len(lengths)} produced")
            lengths[key] = states.length
            self._keep(lease, key, states, wish, tick, kept)
        tokens = sum(lengths.values())
        for key, length in lengths.items():  # a pass encodes several: each has its share
            self._ledger.notes.cost(key, seconds * length / max(1, tokens))
            self._holdings.cost(key, seconds * length / max(1, tokens))

    def _keep(
        self, lease: Lease, key: KVKey, states: KVStates, wish: Wish, tick: int, kept: bool
    ) -> None:
        """Stores what was made: blob, row, and then the first tier."""
        holdings = self._holdings
        with holdings.lock:
            holdings.facts[key] = wish.facts(key, states.length)
            holdings.dropped.pop(key, None)
        admitted = kept or self._admits(lease, wish, key, tick)
        if kept:
            try:
                self._shared.write(key, states, tick)
            except StoreError as error:
                if wish.origin != "question":
                    raise
                logger.warning("%s; the states stay in memory", error)
                self._counters.unreadable += 1
        elif admitted:
            self.reused.add(key)
        placed = holdings.place(holdings.top, key, states, tick, admitted=admitted)
        if placed is None:
            holdings.keep_loose(key, states, beside=True)
        lease.found[key], lease.source[key] = placed or states, "encoded"
        self._counters.encoded += 1
        self._flights.end([key])
