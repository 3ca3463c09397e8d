"""What hot paths have to tell the ledger, kept in memory until it is written in one transaction."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import bindparam, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session

from ragcache.states import KVKey
from ragcache.store.rows import StateRow
from ragcache.store.statements import chunks, upsert
from ragcache.store.tables import Base, EvictionTable, StateTable

EVICTIONS_KEPT = 100_000  # rows; older ones are forgotten

_CHANGED = ("nbytes", "pinned", "expires_at", "kv_dtype", "tokens", "encode_seconds")


@dataclass(slots=True)
class Pending:
    """Changes that no row tells of yet."""

    touches: dict[KVKey, tuple[int, int]] = field(default_factory=dict)  # hits, last tick
    memory: dict[tuple[str, KVKey], StateRow | None] = field(default_factory=dict)
    evictions: list[dict[str, Any]] = field(default_factory=list)
    costs: dict[KVKey, float] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)  # once written: fetched again, by tier

    def __bool__(self) -> bool:
        return any((self.touches, self.memory, self.evictions, self.costs))


class Notes:
    """Thread-safe; every method but `write` is a few assignments."""

    def __init__(self, place: str) -> None:
        """place: of the rows of tiers in memory, which is the session."""
        self._place = place
        self._pending = Pending()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def touch(self, keys: Iterable[KVKey], tick: int) -> None:
        """Counts a use of each key."""
        with self._lock:
            for key in keys:
                hits, _ = self._pending.touches.get(key, (0, 0))
                self._pending.touches[key] = (hits + 1, tick)

    def admitted(self, row: StateRow) -> None:
        """A tier in memory holds states now."""
        with self._lock:
            self._pending.memory[row.tier, row.key] = row

    def left(self, tier: str, key: KVKey, nbytes: int, reason: str | None) -> None:
        """A tier in memory holds states no longer; reason: of an eviction."""
        with self._lock:
            self._pending.memory[tier, key] = None
            if reason is not None:
                self._pending.evictions.append(
                    {"key": str(key), "tier": tier, "reason": reason, "nbytes": nbytes,
                     "at": time.time(), "fetched_again": False}
                )  # fmt: skip

    def cost(self, key: KVKey, seconds: float) -> None:
        """What encoding states took, measured after they were stored."""
        with self._lock:
            self._pending.costs[key] = seconds

    def write(self, session: Session) -> Pending:
        """Writes everything; what was written is returned, for `restore` should the transaction
        fail."""
        with self._lock:
            pending, self._pending = self._pending, Pending()
        try:
            pending.again = _write_memory(session, pending, self._place)
            _write_touches(session, pending, self._place)
            _write_evictions(session, pending)
        except BaseException:
            self.restore(pending)
            raise
        return pending

    def restore(self, pending: Pending) -> None:
        """Takes back what could not be written; what was noted since comes after it."""
        with self._lock:
            later, self._pending = self._pending, pending
            for key, (hits, tick) in later.touches.items():
                before, _ = pending.touches.get(key, (0, 0))
                pending.touches[key] = (before + hits, tick)
            pending.memory.update(later.memory)
            pending.evictions += later.evictions
            del pending.evictions[:-EVICTIONS_KEPT]
            pending.costs.update(later.costs)


def _write_memory(session: Session, pending: Pending, place: str) -> Counter[str]:
    gone: dict[str, list[KVKey]] = {}
    rows = []
    for (tier, key), row in pending.memory.items():
        if row is None:
            gone.setdefault(tier, []).append(key)
        else:
            rows.append(row.values(place))
    for tier, keys in gone.items():
        for chunk in chunks(keys):
            session.execute(
                delete(StateTable).where(
                    StateTable.place == place, StateTable.tier == tier, StateTable.key.in_(chunk)
                )
            )
    upsert(session, StateTable, rows, _CHANGED)
    return note_fetched_again(session, [(row["key"], row["tier"]) for row in rows])


def _write_touches(session: Session, pending: Pending, place: str) -> None:
    table = Base.metadata.tables[StateTable.__tablename__]
    lasting = or_(table.c.tier == "disk", table.c.tier == "remote")
    chosen = update(table).where(
        table.c.key == bindparam("k"), or_(table.c.place == place, lasting)
    )
    if pending.touches:
        session.execute(
            chosen.values(hits=table.c.hits + bindparam("n"), last_use=bindparam("t")),
            [{"k": str(key), "n": n, "t": tick} for key, (n, tick) in pending.touches.items()],
        )
    if pending.costs:
        session.execute(
            chosen.values(encode_seconds=bindparam("s")),
            [{"k": str(key), "s": seconds} for key, seconds in pending.costs.items()],
        )


def _write_evictions(session: Session, pending: Pending) -> None:
    if pending.evictions:
        session.execute(insert(EvictionTable), pending.evictions)
        newest = session.scalar(select(func.max(EvictionTable.id))) or 0
        session.execute(delete(EvictionTable).where(EvictionTable.id <= newest - EVICTIONS_KEPT))


def note_fetched_again(session: Session, places: list[tuple[str, str]]) -> Counter[str]:
    """Marks the evictions of (key, tier) that hold states once more; tells how many, by tier."""
    table = Base.metadata.tables[EvictionTable.__tablename__]
    statement = update(table).where(
        table.c.key == bindparam("k"), table.c.tier == bindparam("t"), ~table.c.fetched_again
    )
    marked: Counter[str] = Counter()
    for tier in {tier for _, tier in places}:
        rows = [{"k": key, "t": tier} for key, at in places if at == tier]
        done = session.connection().execute(statement.values(fetched_again=True), rows)
        marked[tier] = max(0, done.rowcount)  # -1 where a driver does not count
    return marked
