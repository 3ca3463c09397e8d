"""Uses, entries and evictions that hot paths count, and how they are written to the ledger."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, case, delete, func, insert, or_, select, update
from sqlalchemy.orm import Session

from ragcache.db.sql import CHUNK, chunks, lock_rows, table_of, upsert
from ragcache.db.state_rows import StateRow
from ragcache.db.tables import Base, EvictionTable, StateTable
from ragcache.states import KVKey
from ragcache.tiers import persistent_tiers

EVICTIONS_KEPT = 1_000
"""Evictions that the ledger remembers."""

# Columns that recording an entry of a memory tier again updates.
_IN_MEMORY = ("nbytes", "pinned", "expires_at", "kv_dtype", "tokens")


@dataclass(slots=True)
class PendingUsage:
    """Changes that are not in the ledger yet."""

    touches: dict[KVKey, tuple[int, int, float]] = field(default_factory=dict)
    """Hits, tick and Unix time of uses."""
    memory: dict[tuple[str, KVKey], StateRow | None] = field(default_factory=dict)
    """Entries of memory tiers. The value of a removed entry is None."""
    evictions: list[dict[str, Any]] = field(default_factory=list)
    changed: set[KVKey] = field(default_factory=set)
    """States that are written already, whose modules' summaries are not."""

    def __bool__(self) -> bool:
        return any((self.touches, self.memory, self.evictions, self.changed))

    @property
    def keys(self) -> set[KVKey]:
        """Keys of the states that are to be written."""
        return {*self.touches, *(key for _, key in self.memory)}


class UsageBuffer:
    """Pending uses, entries and evictions. Thread-safe. Every method is a few assignments."""

    def __init__(self) -> None:
        self._pending = PendingUsage()
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._pending)

    def touch(self, keys: Iterable[KVKey], tick: int) -> None:
        """Count a use of each key."""
        now = time.time()
        with self._lock:
            for key in keys:
                hits, *_ = self._pending.touches.get(key, (0,))
                self._pending.touches[key] = (hits + 1, tick, now)

    def note(self, keys: Iterable[KVKey]) -> None:
        """Record that rows of persistent tiers have changed."""
        with self._lock:
            self._pending.changed.update(keys)

    def add_entry(self, row: StateRow) -> None:
        """Record an entry of a memory tier."""
        with self._lock:
            self._pending.memory[row.tier, row.key] = row

    def remove_entry(self, tier: str, key: KVKey, nbytes: int, reason: str) -> None:
        """Record that states have left a memory tier."""
        row = {"key": key, "tier": tier, "reason": reason, "nbytes": nbytes, "at": time.time()}
        with self._lock:
            self._pending.memory[tier, key] = None
            self._pending.evictions.append(row)

    def take(self) -> PendingUsage:
        """Remove and return all changes."""
        with self._lock:
            pending, self._pending = self._pending, PendingUsage()
        return pending

    def restore(self, pending: PendingUsage) -> None:
        """Put back changes that could not be written, before all later changes."""
        with self._lock:
            later, self._pending = self._pending, pending
            for key, (hits, tick, at) in later.touches.items():
                before, *_ = pending.touches.get(key, (0,))
                pending.touches[key] = (before + hits, tick, at)
            pending.memory.update(later.memory)
            pending.evictions += later.evictions
            pending.changed |= later.changed
            del pending.evictions[:-EVICTIONS_KEPT]


def write_usage(session: Session, pending: PendingUsage, place: str, late: int) -> None:
    """Write pending changes.

    Args:
        session: Transaction.
        pending: The changes.
        place: Place of the rows of memory tiers: the ID of the session.
        late: Ticks by which the clock has advanced since the changes.
    """
    here = or_(StateTable.place == place, StateTable.tier.in_(persistent_tiers()))
    for chunk in chunks(sorted(pending.keys)):
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
        free = oldest.with_for_update(skip_locked=True)  # another session may delete them as well
        session.execute(delete(EvictionTable).where(EvictionTable.id.in_(free)))
