"""The ledger of states: what is kept in which tier, how large it is and when it was last used."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, update
from sqlalchemy.orm import Session

from ragcache.errors import StoreError
from ragcache.states import KVKey
from ragcache.store.claims import Claims
from ragcache.store.database import Database
from ragcache.store.notes import Notes, note_fetched_again
from ragcache.store.rows import COLUMNS, StateRow, state_row
from ragcache.store.sessions import BEAT_SECONDS, Sessions
from ragcache.store.statements import chunks, upsert
from ragcache.store.tables import ClaimTable, EvictionTable, StateTable

logger = logging.getLogger(__name__)

_CHANGED = (
    "nbytes", "kv_dtype", "tokens", "encode_seconds", "mode", "root", "model", "format",
    "expires_at",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TierTotals:
    """What one tier holds."""

    states: int
    nbytes: int
    tokens: int
    hits: int


class Ledger:
    """Rows of (key, tier), as one session sees them: tiers in memory are its own, the disk is
    that of its `place`, everything else is everybody's. Uses are noted in memory; `flush` writes
    them. refetched: by tier, evicted states that this session fetched again."""

    def __init__(self, database: Database, place: str = "") -> None:
        self.database = database
        self.place = place
        self.sessions = Sessions(database)
        self.claims = Claims(self.sessions)
        self.notes = Notes(self.sessions.id)
        self.failures = 0
        self.refetched: Counter[str] = Counter()
        self._clock = 0
        self._ticking = threading.Lock()
        self._flushing = threading.Lock()
        self._beaten = time.monotonic()

    def begin(self) -> list[StateRow]:
        """Opens a session; returns the rows of tiers that outlive processes."""
        self.sessions.begin()
        rows = self.load()
        self._clock = max((row.last_use for row in rows), default=0)
        return rows

    def end(self) -> None:
        """Writes what is pending and ends the session."""
        self.flush(force=True)
        try:
            self.sessions.end()
        except StoreError as error:
            logger.warning("%s; the next process to open the ledger ends this session", error)

    def tick(self) -> int:
        """The next tick of the logical clock."""
        with self._ticking:
            self._clock += 1
            return self._clock

    def load(self) -> list[StateRow]:
        """The rows of tiers that outlive processes."""
        with self.database.reading() as session:
            rows = session.execute(select(*COLUMNS).where(self._shared()))
            return [state_row(row) for row in rows]

    def find(self, keys: Iterable[KVKey]) -> list[StateRow]:
        """Those of the rows that are of these keys."""
        found = []
        with self.database.reading() as session:
            for chunk in chunks(keys):
                statement = select(*COLUMNS).where(self._shared(), StateTable.key.in_(chunk))
                found += [state_row(row) for row in session.execute(statement)]
        return found

    def record(self, row: StateRow, *, last: bool) -> None:
        """Notes that a tier that outlives processes holds states now; with the last such tier
        their claim ends."""
        values = [row.values(self._place_of(row.tier))]
        with self.database.transaction() as session:
            upsert(session, StateTable, values, _CHANGED)
            again = note_fetched_again(session, [(str(row.key), row.tier)])
            if last:
                self.claims.drop_within(session, [row.key])
            else:
                self._reserve(session, row.key, "", 0)
        self._count_again(again)

    def claim(
        self, keys: Sequence[KVKey], unreadable: Collection[KVKey]
    ) -> tuple[list[StateRow], list[KVKey]]:
        """Rows of the keys that a tier holds, and those of the others that are claimed now. Rows of
        states that turned out to be unreadable do not count."""
        rows = []
        with self.database.transaction() as session:
            # Claims first: who has just recorded a row gave its claim back in the same transaction.
            taken = self.claims.take_within(session, keys)
            for chunk in chunks(key for key in keys if key not in unreadable):
                statement = select(*COLUMNS).where(self._shared(), StateTable.key.in_(chunk))
                rows += [state_row(row) for row in session.execute(statement)]
            found = {row.key for row in rows}
            self.claims.drop_within(session, [key for key in taken if key in found])
            claimed = [key for key in taken if key not in found]
        if len(taken) < len(keys):
            self.sessions.bury()
        return rows, claimed

    def reclaim(self, tier: str, keys: Sequence[KVKey]) -> list[KVKey]:
        """Claims those of the keys of which a shared tier has no row, to delete what it holds."""
        with self.database.transaction() as session:
            taken = self.claims.take_within(session, keys)
            found: set[str] = set()
            for chunk in chunks(taken):
                rows = self._at(tier) & StateTable.key.in_(chunk)
                found |= set(session.scalars(select(StateTable.key).where(rows)))
            gone = [key for key in taken if str(key) not in found]
            self.claims.drop_within(session, set(taken) - set(gone))
        return gone

    def reserve(self, tier: str, key: KVKey, nbytes: int, budget: int) -> int:
        """Takes bytes of a shared tier for a key that is claimed. Returns by how many all that is
        held there or about to be written exceeds the budget."""
        with self.database.transaction() as session:
            self._reserve(session, key, tier, nbytes)
            taken = session.scalar(select(func.sum(StateTable.nbytes)).where(self._at(tier))) or 0
            place = (ClaimTable.tier == tier) & (ClaimTable.place == self._place_of(tier))
            taken += session.scalar(select(func.sum(ClaimTable.nbytes)).where(place)) or 0
        return max(0, int(taken) - budget)

    def _reserve(self, session: Session, key: KVKey, tier: str, nbytes: int) -> None:
        row = update(ClaimTable).where(ClaimTable.key == str(key))
        session.execute(row.values(tier=tier, place=self._place_of(tier), nbytes=nbytes))

    def expel(self, tier: str, keys: Sequence[KVKey], reason: str) -> list[KVKey]:
        """Deletes rows of a shared tier and claims their keys, so that the blobs can be deleted
        until `claims.drop`. Returns the keys that were claimed and have no row now: none that
        another session is working at, nor, for pressure and time, one that it has pinned or
        whose limit it has lifted."""
        stays = _stays(reason, time.time())
        with self.database.transaction() as session:
            taken = self.claims.take_within(session, keys)
            kept: set[str] = set()
            for chunk in chunks(taken):
                rows = self._at(tier) & StateTable.key.in_(chunk)
                if stays is not None:
                    kept |= set(session.scalars(select(StateTable.key).where(rows, stays)))
                    rows &= ~stays
                for key, nbytes in session.execute(
                    select(StateTable.key, StateTable.nbytes).where(rows)
                ):
                    session.add(EvictionTable(
                        key=key, tier=tier, reason=reason, nbytes=nbytes, at=time.time()
                    ))  # fmt: skip
                session.execute(delete(StateTable).where(rows))
            gone = [key for key in taken if str(key) not in kept]
            self.claims.drop_within(session, set(taken) - set(gone))
        return gone

    def pin(self, keys: Iterable[KVKey], pinned: bool) -> None:
        """Writes whether eviction must leave states alone."""
        with self.database.transaction() as session:
            for chunk in chunks(keys):
                rows = update(StateTable).where(StateTable.key.in_(chunk))
                session.execute(rows.values(pinned=pinned))

    def expire(self, keys: Iterable[KVKey], at: float | None) -> None:
        """Writes until when states are kept: Unix seconds, None for ever."""
        with self.database.transaction() as session:
            for chunk in chunks(keys):
                rows = update(StateTable).where(StateTable.key.in_(chunk))
                session.execute(rows.values(expires_at=at))

    def overdue(self, now: float) -> dict[KVKey, float]:
        """The states of shared tiers and of this session whose time is over, with its end."""
        statement = select(StateTable.key, StateTable.expires_at)
        with self.database.reading() as session:
            rows = session.execute(statement.where(self._visible(), StateTable.expires_at <= now))
            return {KVKey(key): at for key, at in rows if at is not None}

    def flush(self, *, force: bool = False) -> None:
        """Writes what was noted, in one transaction, and that this session lives. Where that fails
        it is kept for the next time: uses are statistics, and stop no request. What another thread
        is writing is written when this returns."""
        with self._flushing:
            self._flush(force)

    def _flush(self, force: bool) -> None:
        now = time.monotonic()
        if not (self.notes or force or now - self._beaten > BEAT_SECONDS):
            return
        pending = None
        try:
            with self.database.transaction() as session:
                pending = self.notes.write(session)
                self.sessions.beat(session)
            self._beaten = now
            self._count_again(pending.again)
        except StoreError as error:
            if pending is not None:
                self.notes.restore(pending)
            self.failures += 1
            logger.warning("%s; the use of states is counted later", error)

    def keys(self, tier: str) -> set[KVKey]:
        with self.database.reading() as session:
            rows = select(StateTable.key).where(StateTable.tier == tier, self._visible())
            return {KVKey(key) for key in session.scalars(rows)}

    def totals(self) -> dict[str, TierTotals]:
        """Sums by tier."""
        sums = [func.sum(c) for c in (StateTable.nbytes, StateTable.tokens, StateTable.hits)]
        statement = select(StateTable.tier, func.count(), *sums).where(self._visible())
        with self.database.reading() as session:
            rows = session.execute(statement.group_by(StateTable.tier))
            return {tier: TierTotals(*map(int, found)) for tier, *found in rows}

    def evictions(self) -> dict[str, dict[str, int]]:
        """How many states left each tier, by reason, and how many of them were fetched again."""
        columns = (EvictionTable.tier, EvictionTable.reason, EvictionTable.fetched_again)
        counts: dict[str, dict[str, int]] = {}
        with self.database.reading() as session:
            rows = session.execute(select(*columns, func.count()).group_by(*columns))
            for tier, reason, again, number in rows:
                of = counts.setdefault(tier, {})
                of[reason] = of.get(reason, 0) + number
                of["fetched_again"] = of.get("fetched_again", 0) + (number if again else 0)
        return counts

    def _count_again(self, again: Counter[str]) -> None:
        with self._ticking:
            self.refetched.update(again)

    def _at(self, tier: str) -> ColumnElement[bool]:
        return and_(StateTable.tier == tier, StateTable.place == self._place_of(tier))

    def _place_of(self, tier: str) -> str:
        return self.place if tier == "disk" else ""

    def _shared(self) -> ColumnElement[bool]:
        disk = and_(StateTable.tier == "disk", StateTable.place == self.place)
        return or_(disk, and_(StateTable.tier == "remote", StateTable.place == ""))

    def _visible(self) -> ColumnElement[bool]:
        return or_(self._shared(), StateTable.place == self.sessions.id)


def _stays(reason: str, now: float) -> ColumnElement[bool] | None:
    """Which states do not leave for this reason, as the ledger says."""
    if reason == "pressure":
        return StateTable.pinned.is_(True)
    if reason == "ttl":
        limit = StateTable.expires_at
        return or_(StateTable.pinned.is_(True), limit.is_(None), limit > now)
    return None
