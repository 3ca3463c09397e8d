"""The ledger of states: the entries of each tier, with their sizes and uses.

Hot paths count uses, entries and evictions in a `UsageBuffer`, which is written in one transaction
every second.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.orm import Session

from ragcache.db.database import Database
from ragcache.db.sessions import KeyLocks, Sessions
from ragcache.db.sql import chunks, insert_new, lock_rows, upsert
from ragcache.db.state_rows import COLUMNS, StateRow, state_row
from ragcache.db.summaries import sum_up
from ragcache.db.tables import (
    ClaimTable,
    ClockTable,
    EvictionTable,
    FactTable,
    RetirementTable,
    StateTable,
)
from ragcache.db.usage import UsageBuffer, write_usage
from ragcache.errors import StoreError
from ragcache.states import KVKey
from ragcache.tiers import TIERS, persistent_tiers

logger = logging.getLogger(__name__)

_COMMIT_SECONDS = 30.0  # maximum duration of a transaction
SUM_SECONDS = 10.0
"""Most seconds until a change of states shows in the order of a list of modules."""

# Columns that recording states again updates in persistent tiers.
_RECORDED = (
    "nbytes",
    "kv_dtype",
    "tokens",
    "mode",
    "root",
    "model",
    "expires_at",
)


@dataclass(frozen=True, slots=True)
class TierTotals:
    """Totals of one tier."""

    states: int
    nbytes: int
    tokens: int
    hits: int


class Ledger:
    """The rows of (key, tier) that one session sees.

    Rows of memory tiers belong to the session, rows of the disk to its `place`. All other rows are
    shared.
    """

    def __init__(self, database: Database, place: str = "") -> None:
        """Create a ledger. `place` names the disk in a ledger that several machines share."""
        self.database, self.place = database, place
        self.sessions = Sessions(database)
        self.locks = KeyLocks(self.sessions)
        self.usage = UsageBuffer()
        """Uses, entries and evictions that `flush` writes."""
        self.failures = 0
        """Number of failed writes of `usage`."""
        self._uses = 0
        self._behind = 0  # ticks from `_uses` to the clock
        self._written = 0  # number of `_uses` that the clock in the ledger includes
        self._retirements: deque[tuple[float, int]] = deque()  # time, largest row number by then
        self._known_retirements: set[int] = set()
        self._clock_lock = threading.Lock()
        self._flushing = threading.Lock()
        self._unsummed: set[KVKey] = set()  # written states whose modules' summaries are not
        self._summed_at = -math.inf

    @classmethod
    def of_folder(cls, database: Database, folder: Path, *, reads: bool = False) -> Ledger:
        """Return the ledger of a state folder.

        In a ledger that several machines share, a disk needs a name, which is stored next to its
        blobs. A SQLite ledger is on its only disk.

        Args:
            database: The database with the ledger.
            folder: The state folder.
            reads: Write nothing. A disk without a name then gets none.
        """
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
        """Open a session. Returns the rows of persistent tiers."""
        self.sessions.begin()
        self.read_clock()
        with self.database.reading() as session:
            newest = session.scalar(select(func.max(RetirementTable.id)))
        self._retirements.append((time.monotonic(), newest or 0))
        return self.load()

    def end(self) -> None:
        """Flush pending uses and end the session."""
        self.flush()
        try:
            self.sessions.end()
        except StoreError as error:
            logger.warning("%s; the next process to open the ledger ends this session", error)

    @property
    def tick(self) -> int:
        """Current value of the logical clock in this session."""
        return self._uses + self._behind

    def advance_clock(self) -> int:
        """Advance the logical clock and return the new tick.

        The clock counts the uses of all sessions. Uses of other sessions are known as of the last
        `flush` or `read_clock`.
        """
        with self._clock_lock:
            self._uses += 1
            return self._uses + self._behind

    def read_clock(self) -> None:
        """Add the uses of other sessions to the clock."""
        with self.database.reading() as session:
            self._set_clock(session.scalars(select(ClockTable.tick)).one())

    def _set_clock(self, tick: int) -> None:
        with self._clock_lock:
            self._behind = max(self._behind, tick - self._uses)

    def get_fact(self, name: str) -> str | None:
        """Return a fact that all processes agree on. Unknown facts are None."""
        with self.database.reading() as session:
            return session.scalar(select(FactTable.value).where(FactTable.name == name))

    def facts(self, prefix: str) -> dict[str, str]:
        """Return all facts whose names begin with a prefix."""
        named = FactTable.name.startswith(prefix, autoescape=True)
        return dict(self.database.fetch(select(FactTable.name, FactTable.value).where(named)))

    def agree_on_fact(self, name: str, value: str) -> str:
        """Write a fact unless another process has. Returns the stored value."""
        with self.database.transaction() as session:
            insert_new(session, FactTable, {"name": name, "value": value})
            return session.scalars(select(FactTable.value).where(FactTable.name == name)).one()

    def recall_fact(self, name: str, find: Callable[[], str]) -> str:
        """Return a fact that all processes agree on. An unknown fact is found and written."""
        known = self.get_fact(name)
        return self.agree_on_fact(name, find()) if known is None else known

    def has_states(self, tier: str) -> bool:
        """Return whether a tier has any rows."""
        first = select(StateTable.key).where(StateTable.tier == tier).limit(1)
        return bool(self.database.fetch(first))

    def retired(self) -> list[KVKey]:
        """Return the keys that any process has retired since the last call.

        The first call covers the session so far. Some keys are returned twice. Row numbers are
        assigned before a transaction commits, so that a smaller number can appear after a larger
        one. Each number is therefore read again for `_COMMIT_SECONDS`.
        """
        now, seen = time.monotonic(), self._retirements
        while len(seen) > 1 and seen[1][0] < now - _COMMIT_SECONDS:
            seen.popleft()
        columns = select(RetirementTable.id, RetirementTable.key)
        rows = self.database.fetch(columns.where(RetirementTable.id > seen[0][1]))
        new = [key for number, key in rows if number not in self._known_retirements]
        self._known_retirements = {number for number, _ in rows}
        seen.append((now, max((number for number, _ in rows), default=seen[-1][1])))
        return new

    def used_since(self, tick: int) -> list[tuple[str, KVKey, int]]:
        """Return tier, key and last use of shared states used after a tick, in order of use."""
        columns = (StateTable.tier, StateTable.key, StateTable.last_use)
        used = (StateTable.last_use > tick) & (StateTable.hits > 0)
        chosen = select(*columns).where(self._shared(), used)
        rows = self.database.fetch(chosen.order_by(StateTable.last_use))
        return [(tier, key, last_use) for tier, key, last_use in rows]

    def load(self) -> list[StateRow]:
        """Return the rows of persistent tiers."""
        with self.database.reading() as session:
            return self._rows(session)

    def find(self, keys: Iterable[KVKey]) -> list[StateRow]:
        """Return the rows of persistent tiers that have one of the keys."""
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
        """Write rows of a persistent tier and end the claims on the `last` keys.

        Returns:
            Keys of the written rows. A row is not written if another process has ended the claim on
            its key, which happens when this process was silent for too long.
        """
        with self.database.transaction() as session:
            held = self.locks.held_among(session, {row.key for row in rows})
            kept = sorted((row for row in rows if row.key in held), key=lambda row: row.key)
            values = [row.values(self._place_of(row.tier)) for row in kept]
            upsert(session, StateTable, values, _RECORDED)
            self.locks.release_within(session, held & set(last))
            self._reserve(session, held - set(last), "", 0)
        self.usage.note(held)
        return held

    def claim(
        self, keys: Sequence[KVKey], unreadable: Collection[KVKey]
    ) -> tuple[list[StateRow], list[KVKey]]:
        """Return the rows of the keys, and claim the keys without a row.

        Args:
            keys: Keys to look up.
            unreadable: Keys whose rows are ignored.

        Returns:
            The rows, and the keys that this session has claimed now.
        """
        with self.database.transaction() as session:
            # Claims first: the transaction that records a row also ends its claim.
            taken = self.locks.acquire_within(session, keys)
            rows = self._find(session, [key for key in keys if key not in unreadable])
            found = {row.key for row in rows}
            self.locks.release_within(session, found)
            claimed = [key for key in taken if key not in found]
        if len(taken) < len(keys):
            self.sessions.reap_dead()
        return rows, claimed

    def reclaim(self, tier: str, keys: Sequence[KVKey]) -> tuple[list[KVKey], list[KVKey]]:
        """Claim keys without a row in a shared tier, to delete their blobs.

        Returns:
            The claimed keys, and the keys that another process has claimed.
        """
        with self.database.transaction() as session:
            taken = self.locks.acquire_within(session, keys)
            found: set[KVKey] = set()
            for chunk in chunks(taken):
                rows = self._at(tier) & StateTable.key.in_(chunk)
                found |= set(session.scalars(select(StateTable.key).where(rows)))
            self.locks.release_within(session, found)
        ours = set(taken)
        return [key for key in taken if key not in found], [key for key in keys if key not in ours]

    def reserve(self, tier: str, key: KVKey, nbytes: int, budget: int) -> int:
        """Reserve bytes of a shared tier for a claimed key.

        Returns:
            Bytes by which the stored and reserved states together exceed the budget.
        """
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
        """Delete rows of a shared tier and claim their keys, until `locks.release`.

        The caller deletes the blobs under these claims.

        Returns:
            The claimed keys. Omits keys that another session has claimed and, if the reason is
            `pressure` or `ttl`, states that another session has pinned or prolonged.
        """
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
            self.locks.release_within(session, kept)
        gone = [key for key in taken if key not in kept]
        self.usage.note(gone)
        return gone

    def pin(self, keys: Iterable[KVKey], pinned: bool) -> None:
        """Pin or unpin states."""
        self._set(keys, pinned=pinned)

    def pinned(self, keys: Iterable[KVKey]) -> set[KVKey]:
        """Return the keys whose states are pinned."""
        found: set[KVKey] = set()
        with self.database.reading() as session:
            for chunk in chunks(sorted(set(keys))):
                chosen = StateTable.key.in_(chunk) & StateTable.pinned
                found.update(session.scalars(select(StateTable.key).where(chosen)))
        return found

    def expire(self, keys: Iterable[KVKey], at: float | None) -> None:
        """Set the expiration of states in Unix seconds. None removes the limit."""
        self._set(keys, expires_at=at)

    def _set(self, keys: Iterable[KVKey], **values: Any) -> None:
        changed = sorted(set(keys))
        with self.database.transaction() as session:
            for chunk in chunks(changed):
                chosen = StateTable.key.in_(chunk)
                lock_rows(session, StateTable, chosen)
                session.execute(update(StateTable).where(chosen).values(**values))
        self.usage.note(changed)

    def expired(self, now: float) -> dict[KVKey, float]:
        """Return the expired states of shared tiers and of this session, with their limits."""
        statement = select(StateTable.key, StateTable.expires_at)
        rows = self.database.fetch(statement.where(self._visible(), StateTable.expires_at <= now))
        return {key: at for key, at in rows if at is not None}

    def flush(self, *, lazily: bool = False) -> None:
        """Write `usage` in one transaction. After a failure it is kept for the next call.

        Summaries of modules follow, with `lazily` only every `SUM_SECONDS`: states in constant use
        are then summed up once for many writes.

        Changes that another thread is writing are written when this returns. The transaction first
        locks the row of the clock: sessions write one after another, and the ticks of a session
        follow the ticks of the session before it.
        """
        with self._flushing:
            now = time.monotonic()
            due = not lazily or now - self._summed_at >= SUM_SECONDS
            if not self.usage and not (due and self._unsummed):
                return
            pending, uses = self.usage.take(), self._uses
            unsummed = self._unsummed | pending.keys | pending.changed
            try:
                with self.database.transaction() as session:
                    new = ClockTable.tick + (uses - self._written)
                    advanced = update(ClockTable).values(tick=new).returning(ClockTable.tick)
                    tick = session.scalars(advanced).one()
                    late = max(0, tick - uses - self._behind)
                    write_usage(session, pending, self.sessions.id, late)
                    if due:
                        sum_up(session, unsummed)
                self._written = uses
                self._set_clock(tick)
                self._unsummed = set() if due else unsummed
                self._summed_at = now if due else self._summed_at
            except BaseException as error:
                self.usage.restore(pending)
                self.failures += 1
                if not isinstance(error, StoreError):
                    raise
                logger.warning("%s; the use of states is counted later", error)

    def keys(self, tier: str) -> set[KVKey]:
        """Return the keys of a tier's rows."""
        rows = select(StateTable.key).where(StateTable.tier == tier, self._visible())
        return {key for (key,) in self.database.fetch(rows)}

    def totals(self) -> dict[str, TierTotals]:
        """Return the totals of each tier."""
        sums = [func.sum(c) for c in (StateTable.nbytes, StateTable.tokens, StateTable.hits)]
        statement = select(StateTable.tier, func.count(), *sums).where(self._visible())
        rows = self.database.fetch(statement.group_by(StateTable.tier))
        return {tier: TierTotals(*map(int, found)) for tier, *found in rows}

    def evictions(self) -> dict[str, dict[str, int]]:
        """Return the number of evictions by tier and reason."""
        columns = (EvictionTable.tier, EvictionTable.reason)
        counts: dict[str, dict[str, int]] = {}
        rows = self.database.fetch(select(*columns, func.count()).group_by(*columns))
        for tier, reason, number in rows:
            counts.setdefault(tier, {})[reason] = number
        return counts

    def _at(self, tier: str) -> ColumnElement[bool]:
        return and_(StateTable.tier == tier, StateTable.place == self._place_of(tier))

    def _place_of(self, tier: str) -> str:
        """Return the place of a tier's rows. An empty tier name means no reservation."""
        return "" if not tier or TIERS[tier].traits.shared else self.place

    def _shared(self) -> ColumnElement[bool]:
        return or_(*(self._at(name) for name in persistent_tiers()))

    def _visible(self) -> ColumnElement[bool]:
        return or_(self._shared(), StateTable.place == self.sessions.id)


def _stays(reason: str, now: float) -> ColumnElement[bool] | None:
    """Return the condition for states that are exempt from eviction for a reason."""
    if reason == "pressure":
        return StateTable.pinned.is_(True)
    if reason == "ttl":
        limit = StateTable.expires_at
        return or_(StateTable.pinned.is_(True), limit.is_(None), limit > now)
    return None
