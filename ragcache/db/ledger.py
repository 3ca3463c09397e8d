"""The ledger of states: what each tier holds, its size and its uses.

`StateRow` is a row as a plain value. Uses, entries and evictions of tiers in memory, which hot
paths count, wait in a `UsageBuffer` until they are written in one transaction, once a second.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from sqlalchemy import ColumnElement, and_, case, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session

from ragcache.db.database import Database
from ragcache.db.sessions import KeyLocks, Sessions
from ragcache.db.sql import CHUNK, chunks, insert_new, lock_rows, table_of, upsert
from ragcache.db.tables import (
    Base,
    ClaimTable,
    ClockTable,
    EvictionTable,
    FactTable,
    RetirementTable,
    StateTable,
)
from ragcache.errors import StoreError
from ragcache.states import KVKey
from ragcache.tiers import TIERS, persistent_tiers

logger = logging.getLogger(__name__)

_COMMIT_SECONDS = 30.0  # that a transaction takes at most
EVICTIONS_KEPT = 100_000  # rows; older ones are forgotten

# What recording states again changes, in tiers that outlive the process and in those in memory.
_RECORDED = (
    "nbytes", "kv_dtype", "tokens", "mode", "root", "model",
    "expires_at",
)  # fmt: skip
_IN_MEMORY = ("nbytes", "pinned", "expires_at", "kv_dtype", "tokens")


class StateMetadata(NamedTuple):
    """Facts about states that hold in every tier.

    tokens: their length. mode: `rooted`, `isolated`, `root` (a preamble), `schema`; root: the key
    of the states before them; model: its fingerprint.
    """

    tokens: int
    mode: str = ""
    root: KVKey | None = None
    model: str = ""


class StateRow(NamedTuple):
    """States in one tier. nbytes: as allocated there."""

    key: KVKey
    tier: str
    nbytes: int
    hits: int
    last_use: int
    pinned: bool
    expires_at: float
    kv_dtype: str
    metadata: StateMetadata

    def values(self, place: str) -> dict[str, Any]:
        """As a row of `StateTable`."""
        metadata = self.metadata
        return {
            "key": self.key, "tier": self.tier, "place": place, "nbytes": self.nbytes,
            "hits": self.hits, "last_use": self.last_use, "pinned": self.pinned,
            "expires_at": None if math.isinf(self.expires_at) else self.expires_at,
            "kv_dtype": self.kv_dtype, "tokens": metadata.tokens, "mode": metadata.mode,
            "root": metadata.root or "", "model": metadata.model,
        }  # fmt: skip


COLUMNS = (
    StateTable.key, StateTable.tier, StateTable.nbytes, StateTable.hits, StateTable.last_use,
    StateTable.pinned, StateTable.expires_at, StateTable.kv_dtype, StateTable.tokens,
    StateTable.mode, StateTable.root, StateTable.model,
)  # fmt: skip


def state_row(row: Any) -> StateRow:
    """The value of a row of `COLUMNS`."""
    key, tier, nbytes, hits, last_use, pinned, expires_at, kv_dtype, tokens, *rest = row
    mode, root, model = rest
    metadata = StateMetadata(tokens, mode, KVKey(root) if root else None, model)
    until = math.inf if expires_at is None else expires_at
    return StateRow(key, tier, nbytes, hits, last_use, pinned, until, kv_dtype, metadata)


@dataclass(frozen=True, slots=True)
class TierTotals:
    """The sums of one tier's states."""

    states: int
    nbytes: int
    tokens: int
    hits: int


class Ledger:
    """Rows of (key, tier), as one session sees them: tiers in memory are its own, the disk is
    that of its `place`, everything else is shared.

    usage: what is not written yet; `flush` writes it. failures: writes of `usage` that failed.
    """

    def __init__(self, database: Database, place: str = "") -> None:
        self.database, self.place = database, place
        self.sessions = Sessions(database)
        self.locks = KeyLocks(self.sessions)
        self.usage = UsageBuffer()
        self.failures = 0
        self._uses = 0
        self._behind = 0  # by how many ticks the uses of this session are behind the clock
        self._written = 0  # of `_uses`, those that the clock counts
        self._retirements: deque[tuple[float, int]] = deque()  # when the largest number was which
        self._known_retirements: set[int] = set()
        self._clock_lock = threading.Lock()
        self._flushing = threading.Lock()

    @classmethod
    def of_folder(cls, database: Database, folder: Path, *, reads: bool = False) -> Ledger:
        """The ledger as processes with this state folder see it. In one that several machines
        share, a disk has a name, which is kept beside its blobs; SQLite's file is beside its only
        disk. reads: nothing is written, so that a disk without a name gets none."""
        if database.engine.dialect.name == "sqlite":
            return cls(database)
        name = folder / "states" / "place"
        if reads and not name.exists():
            return cls(database)
        name.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), name.open("x", encoding="ascii") as file:
            file.write(uuid4().hex)
        return cls(database, name.read_text(encoding="ascii"))

    def begin(self) -> list[StateRow]:
        """Opens a session; returns the rows of tiers that outlive processes."""
        self.sessions.begin()
        self.read_clock()
        with self.database.reading() as session:
            newest = session.scalar(select(func.max(RetirementTable.id)))
        self._retirements.append((time.monotonic(), newest or 0))
        return self.load()

    def end(self) -> None:
        """Writes what is pending and ends the session."""
        self.flush()
        try:
            self.sessions.end()
        except StoreError as error:
            logger.warning("%s; the next process to open the ledger ends this session", error)

    @property
    def tick(self) -> int:
        """The logical clock as this session knows it."""
        return self._uses + self._behind

    def advance_clock(self) -> int:
        """The next tick of the logical clock, which counts the uses of all sessions: those of
        others as of the last `flush` or `read_clock`."""
        with self._clock_lock:
            self._uses += 1
            return self._uses + self._behind

    def read_clock(self) -> None:
        """Learns of the uses of other sessions."""
        with self.database.reading() as session:
            self._set_clock(session.scalars(select(ClockTable.tick)).one())

    def _set_clock(self, tick: int) -> None:
        with self._clock_lock:
            self._behind = max(self._behind, tick - self._uses)

    def get_fact(self, name: str) -> str | None:
        """A fact that all processes agree by, None where it is not known."""
        with self.database.reading() as session:
            return session.scalar(select(FactTable.value).where(FactTable.name == name))

    def facts(self, prefix: str) -> dict[str, str]:
        """All facts whose names begin with a prefix, by name."""
        named = FactTable.name.startswith(prefix, autoescape=True)
        with self.database.reading() as session:
            facts = session.scalars(select(FactTable).where(named))
            return {fact.name: fact.value for fact in facts}

    def agree_on_fact(self, name: str, value: str) -> str:
        """Writes a fact, unless another process has; returns what holds now."""
        with self.database.transaction() as session:
            insert_new(session, FactTable, {"name": name, "value": value})
            return session.scalars(select(FactTable.value).where(FactTable.name == name)).one()

    def has_states(self, tier: str) -> bool:
        """Whether any row is one of this tier."""
        with self.database.reading() as session:
            first = select(StateTable.key).where(StateTable.tier == tier).limit(1)
            return session.scalar(first) is not None

    def retired(self) -> list[KVKey]:
        """The keys that processes have retired since this session began, or since the call before;
        some come twice.

        Numbers of rows are given before a transaction commits: a smaller one may appear after a
        larger one, so that each is looked for until `_COMMIT_SECONDS` have passed.
        """
        now, seen = time.monotonic(), self._retirements
        while len(seen) > 1 and seen[1][0] < now - _COMMIT_SECONDS:
            seen.popleft()
        columns = select(RetirementTable.id, RetirementTable.key)
        with self.database.reading() as session:
            rows = list(session.execute(columns.where(RetirementTable.id > seen[0][1])))
        new = [key for number, key in rows if number not in self._known_retirements]
        self._known_retirements = {number for number, _ in rows}
        seen.append((now, max((number for number, _ in rows), default=seen[-1][1])))
        return new

    def used_since(self, tick: int) -> list[tuple[str, KVKey, int]]:
        """Tier, key and last use of the shared states that any session has used after a tick, in
        the order of uses."""
        columns = (StateTable.tier, StateTable.key, StateTable.last_use)
        used = (StateTable.last_use > tick) & (StateTable.hits > 0)
        chosen = select(*columns).where(self._shared(), used)
        with self.database.reading() as session:
            return list(session.execute(chosen.order_by(StateTable.last_use)))

    def load(self) -> list[StateRow]:
        """The rows of tiers that outlive processes."""
        with self.database.reading() as session:
            return self._rows(session)

    def find(self, keys: Iterable[KVKey]) -> list[StateRow]:
        """The rows that `load` would give of these keys."""
        with self.database.reading() as session:
            return self._find(session, keys)

    def _find(self, session: Session, keys: Iterable[KVKey]) -> list[StateRow]:
        found: list[StateRow] = []
        for chunk in chunks(keys):
            found += self._rows(session, StateTable.key.in_(chunk))
        return found

    def _rows(self, session: Session, *chosen: ColumnElement[bool]) -> list[StateRow]:
        rows = session.execute(select(*COLUMNS).where(self._shared(), *chosen))
        return [state_row(row) for row in rows]

    def record(self, rows: Sequence[StateRow], last: Collection[KVKey]) -> set[KVKey]:
        """Notes that a tier that outlives processes holds states now; the claims on the `last`
        keys end. Returns the keys whose rows were written: not those whose claim others have ended,
        which they do where this process was silent for too long."""
        with self.database.transaction() as session:
            held = self.locks.held_among(session, {row.key for row in rows})
            kept = sorted((row for row in rows if row.key in held), key=lambda row: row.key)
            values = [row.values(self._place_of(row.tier)) for row in kept]
            upsert(session, StateTable, values, _RECORDED)
            self.locks.release_within(session, held & set(last))
            self._reserve(session, held - set(last), "", 0)
        return held

    def claim(
        self, keys: Sequence[KVKey], unreadable: Collection[KVKey]
    ) -> tuple[list[StateRow], list[KVKey]]:
        """The rows of the keys, and the keys without one that this session claims now. Rows of
        `unreadable` keys do not count."""
        with self.database.transaction() as session:
            # Claims first: a row is recorded in the transaction that gives the claim back.
            taken = self.locks.acquire_within(session, keys)
            rows = self._find(session, [key for key in keys if key not in unreadable])
            found = {row.key for row in rows}
            self.locks.release_within(session, [key for key in taken if key in found])
            claimed = [key for key in taken if key not in found]
        if len(taken) < len(keys):
            self.sessions.reap_dead()
        return rows, claimed

    def reclaim(self, tier: str, keys: Sequence[KVKey]) -> tuple[list[KVKey], list[KVKey]]:
        """Claims those of the keys of which a shared tier has no row, to delete what it holds.
        Returns them, and the keys that another process has claimed."""
        with self.database.transaction() as session:
            taken = self.locks.acquire_within(session, keys)
            found: set[KVKey] = set()
            for chunk in chunks(taken):
                rows = self._at(tier) & StateTable.key.in_(chunk)
                found |= set(session.scalars(select(StateTable.key).where(rows)))
            gone = [key for key in taken if key not in found]
            self.locks.release_within(session, set(taken) - set(gone))
        return gone, [key for key in keys if key not in set(taken)]

    def reserve(self, tier: str, key: KVKey, nbytes: int, budget: int) -> int:
        """Takes bytes of a shared tier for a key that is claimed. Returns by how many all that is
        held there or about to be written exceeds the budget."""
        with self.database.transaction() as session:
            self._reserve(session, [key], tier, nbytes)
            taken = session.scalar(select(func.sum(StateTable.nbytes)).where(self._at(tier))) or 0
            place = (ClaimTable.tier == tier) & (ClaimTable.place == self._place_of(tier))
            taken += session.scalar(select(func.sum(ClaimTable.nbytes)).where(place)) or 0
        return max(0, int(taken) - budget)

    def _reserve(self, session: Session, keys: Collection[KVKey], tier: str, nbytes: int) -> None:
        for chunk in chunks(sorted(keys)):
            rows = update(ClaimTable).where(ClaimTable.key.in_(chunk))
            session.execute(rows.values(tier=tier, place=self._place_of(tier), nbytes=nbytes))

    def evict_rows(self, tier: str, keys: Sequence[KVKey], reason: str) -> list[KVKey]:
        """Deletes rows of a shared tier and claims their keys, so that the blobs can be deleted
        until `locks.release`. Returns the claimed keys that have no row now: none that another
        session has claimed, nor, for pressure and time, one that it has pinned or prolonged."""
        stays = _stays(reason, time.time())
        with self.database.transaction() as session:
            taken = self.locks.acquire_within(session, keys)
            kept: set[KVKey] = set()
            for chunk in chunks(taken):
                rows = self._at(tier) & StateTable.key.in_(chunk)
                if stays is not None:
                    kept |= set(session.scalars(select(StateTable.key).where(rows, stays)))
                    rows &= ~stays
                for row in session.execute(select(StateTable.key, StateTable.nbytes).where(rows)):
                    left = {"key": row.key, "nbytes": row.nbytes, "at": time.time()}
                    session.add(EvictionTable(tier=tier, reason=reason, **left))
                session.execute(delete(StateTable).where(rows))
            gone = [key for key in taken if key not in kept]
            self.locks.release_within(session, set(taken) - set(gone))
        return gone

    def pin(self, keys: Iterable[KVKey], pinned: bool) -> None:
        """Writes whether states are pinned."""
        self._set(keys, pinned=pinned)

    def expire(self, keys: Iterable[KVKey], at: float | None) -> None:
        """Writes until when states are kept: Unix seconds, None for ever."""
        self._set(keys, expires_at=at)

    def _set(self, keys: Iterable[KVKey], **values: Any) -> None:
        with self.database.transaction() as session:
            for chunk in chunks(sorted(set(keys))):
                chosen = StateTable.key.in_(chunk)
                lock_rows(session, StateTable, chosen)
                session.execute(update(StateTable).where(chosen).values(**values))

    def expired(self, now: float) -> dict[KVKey, float]:
        """The states of shared tiers and of this session that have expired, and when."""
        statement = select(StateTable.key, StateTable.expires_at)
        with self.database.reading() as session:
            rows = session.execute(statement.where(self._visible(), StateTable.expires_at <= now))
            return {key: at for key, at in rows if at is not None}

    def flush(self) -> None:
        """Writes `usage` in one transaction; what fails is kept for the next time. What another
        thread is writing is written when this returns.

        The clock's row is locked first: sessions write one after the other, and the ticks of each
        are after those of the one before.
        """
        with self._flushing:
            if self.usage:
                self._flush()

    def _flush(self) -> None:
        pending, uses = self.usage.take(), self._uses
        try:
            with self.database.transaction() as session:
                new = ClockTable.tick + (uses - self._written)
                advanced = update(ClockTable).values(tick=new).returning(ClockTable.tick)
                tick = session.scalars(advanced).one()
                late = max(0, tick - uses - self._behind)
                _write(session, pending, self.sessions.id, late)
            self._written = uses
            self._set_clock(tick)
        except BaseException as error:
            self.usage.restore(pending)
            self.failures += 1
            if not isinstance(error, StoreError):
                raise
            logger.warning("%s; the use of states is counted later", error)

    def keys(self, tier: str) -> set[KVKey]:
        """The keys of a tier's rows."""
        with self.database.reading() as session:
            rows = select(StateTable.key).where(StateTable.tier == tier, self._visible())
            return set(session.scalars(rows))

    def totals(self) -> dict[str, TierTotals]:
        """Sums by tier."""
        sums = [func.sum(c) for c in (StateTable.nbytes, StateTable.tokens, StateTable.hits)]
        statement = select(StateTable.tier, func.count(), *sums).where(self._visible())
        with self.database.reading() as session:
            rows = session.execute(statement.group_by(StateTable.tier))
            return {tier: TierTotals(*map(int, found)) for tier, *found in rows}

    def evictions(self) -> dict[str, dict[str, int]]:
        """How many states left each tier, by reason."""
        columns = (EvictionTable.tier, EvictionTable.reason)
        counts: dict[str, dict[str, int]] = {}
        with self.database.reading() as session:
            rows = session.execute(select(*columns, func.count()).group_by(*columns))
            for tier, reason, number in rows:
                counts.setdefault(tier, {})[reason] = number
        return counts

    def _at(self, tier: str) -> ColumnElement[bool]:
        return and_(StateTable.tier == tier, StateTable.place == self._place_of(tier))

    def _place_of(self, tier: str) -> str:
        """The place of a tier's rows; an empty name stands for no reservation."""
        return "" if not tier or TIERS[tier].traits.shared else self.place

    def _shared(self) -> ColumnElement[bool]:
        return or_(*(self._at(name) for name in persistent_tiers()))

    def _visible(self) -> ColumnElement[bool]:
        return or_(self._shared(), StateTable.place == self.sessions.id)


def _stays(reason: str, now: float) -> ColumnElement[bool] | None:
    """Which states do not leave for this reason."""
    if reason == "pressure":
        return StateTable.pinned.is_(True)
    if reason == "ttl":
        limit = StateTable.expires_at
        return or_(StateTable.pinned.is_(True), limit.is_(None), limit > now)
    return None


@dataclass(slots=True)
class PendingUsage:
    """Changes that are not written to the ledger yet."""

    touches: dict[KVKey, tuple[int, int, float]] = field(default_factory=dict)  # hits, tick, time
    memory: dict[tuple[str, KVKey], StateRow | None] = field(default_factory=dict)
    evictions: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any((self.touches, self.memory, self.evictions))


class UsageBuffer:
    """Uses, entries and evictions until they are written. Thread-safe; every method is a few
    assignments."""

    def __init__(self) -> None:
        self._pending = PendingUsage()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def touch(self, keys: Iterable[KVKey], tick: int) -> None:
        """Counts a use of each key."""
        now = time.time()
        with self._lock:
            for key in keys:
                hits, *_ = self._pending.touches.get(key, (0,))
                self._pending.touches[key] = (hits + 1, tick, now)

    def add_entry(self, row: StateRow) -> None:
        """Notes that a tier in memory holds states."""
        with self._lock:
            self._pending.memory[row.tier, row.key] = row

    def remove_entry(self, tier: str, key: KVKey, nbytes: int, reason: str) -> None:
        """Notes that states left a tier in memory."""
        row = {"key": key, "tier": tier, "reason": reason, "nbytes": nbytes, "at": time.time()}
        with self._lock:
            self._pending.memory[tier, key] = None
            self._pending.evictions.append(row)

    def take(self) -> PendingUsage:
        """Everything so far: for `restore`, should the transaction that writes it fail."""
        with self._lock:
            pending, self._pending = self._pending, PendingUsage()
        return pending

    def restore(self, pending: PendingUsage) -> None:
        """Takes back what could not be written, before what was noted since."""
        with self._lock:
            later, self._pending = self._pending, pending
            for key, (hits, tick, at) in later.touches.items():
                before, *_ = pending.touches.get(key, (0,))
                pending.touches[key] = (before + hits, tick, at)
            pending.memory.update(later.memory)
            pending.evictions += later.evictions
            del pending.evictions[:-EVICTIONS_KEPT]


def _write(session: Session, pending: PendingUsage, place: str, late: int) -> None:
    """Writes everything. place: of the rows of tiers in memory, which is the session; late: by how
    many ticks the clock has run on meanwhile."""
    here = or_(StateTable.place == place, StateTable.tier.in_(persistent_tiers()))
    keys = {*pending.touches, *(key for _, key in pending.memory)}
    for chunk in chunks(sorted(keys)):
        lock_rows(session, StateTable, StateTable.key.in_(chunk), here)
    _write_memory(session, pending, place, late)
    _write_touches(session, pending, here, late)
    _write_evictions(session, pending)


def _write_memory(session: Session, pending: PendingUsage, place: str, late: int) -> None:
    gone: dict[str, list[KVKey]] = {}
    rows = []
    for (tier, key), row in pending.memory.items():
        if row is None:
            gone.setdefault(tier, []).append(key)
        else:
            rows.append(row._replace(last_use=row.last_use + late).values(place))
    for tier, keys in gone.items():
        for chunk in chunks(keys):
            here = (StateTable.place == place) & (StateTable.tier == tier)
            session.execute(delete(StateTable).where(here, StateTable.key.in_(chunk)))
    upsert(session, StateTable, rows, _IN_MEMORY)


def _write_touches(
    session: Session, pending: PendingUsage, here: ColumnElement[bool], late: int
) -> None:
    rows = Base.metadata.tables[StateTable.__tablename__]
    used: list[dict[str, int | float | str]] = [
        {"key": key, "hits": hits, "last_use": tick + late, "used_at": at}
        for key, (hits, tick, at) in pending.touches.items()
    ]
    for start in range(0, len(used), CHUNK):
        given = table_of(used[start : start + CHUNK]).c
        new = {"hits": rows.c.hits + given.hits} | {
            name: case((given[name] > rows.c[name], given[name]), else_=rows.c[name])
            for name in ("last_use", "used_at")
        }
        session.execute(update(rows).values(new).where(rows.c.key == given.key, here))


def _write_evictions(session: Session, pending: PendingUsage) -> None:
    if pending.evictions:
        session.execute(insert(EvictionTable), pending.evictions)
        newest = session.scalar(select(func.max(EvictionTable.id))) or 0
        oldest = select(EvictionTable.id).where(EvictionTable.id <= newest - EVICTIONS_KEPT)
        free = oldest.with_for_update(skip_locked=True)  # another session may delete them, too
        session.execute(delete(EvictionTable).where(EvictionTable.id.in_(free)))
