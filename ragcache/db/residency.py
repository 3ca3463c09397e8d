"""Residency: which sessions have states in memory, from the rows that they write themselves.

Each process writes what its memory gains and loses once a second, so any other one can ask for the
modules of a request when it comes: no events can be lost, and nothing is built again after a
restart.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select

from ragcache.db.database import Database
from ragcache.db.sql import chunks
from ragcache.db.tables import (
    MEMORY_TIERS,
    EncodingTable,
    NamespaceTable,
    SchemaStateTable,
    SchemaTable,
    StateTable,
)
from ragcache.errors import LedgerUnavailable
from ragcache.routing import RoutedModule

_COLUMNS = (StateTable.key, StateTable.tier, StateTable.place, StateTable.nbytes, StateTable.tokens)
_REMEMBERED = 50_000  # modules and schemas

_Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LocatedStates:
    """The modules of a request and, by their keys, the sessions that have each in memory, with its
    tier: `device`, or `host` where it is not on the device."""

    modules: tuple[RoutedModule, ...] = ()
    holds: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(slots=True)
class Residency:
    """Locates the states of requests. Thread-safe.

    Attributes:
        database: Where sessions write their rows.
        seconds: The age from which on a module's rows are read again. Where the ledger does not
            answer, older ones count, and unknown modules are nowhere.
        clock: Seconds; `time.monotonic` by default.
    """

    database: Database
    seconds: float = 1.0
    clock: Callable[[], float] = time.monotonic
    _known: dict[Hashable, tuple[float, LocatedStates]] = field(default_factory=dict)

    def locate_modules(self, module_ids: Sequence[int]) -> LocatedStates:
        """The states of modules. One that is encoded in several ways counts once, at its largest,
        and a session with any of them has it. One without states is left out."""
        ids = list(dict.fromkeys(module_ids))
        known = self._known  # `_remember` may begin a new one, also that of another thread
        found: dict[Hashable, LocatedStates] = {
            number: known[number][1] for number in ids if number in known
        }
        old = [number for number in ids if self._is_old(number)]
        with suppress(LedgerUnavailable):
            rows = self._read_modules(old) if old else {}
            read: dict[Hashable, LocatedStates] = {
                number: _one_module(rows.get(number, ())) for number in old
            }
            self._remember(read)
            found |= read
        return _joined(found[number] for number in ids if number in found)

    def locate_schema(self, name: str, namespace: str) -> LocatedStates:
        """All states of a schema: the ledger does not tell them apart by their modules' names."""
        schema = namespace, name
        if self._is_old(schema):
            with suppress(LedgerUnavailable):
                self._remember({schema: _each_state(self._read_schema(name, namespace))})
        known = self._known.get(schema)
        return LocatedStates() if known is None else known[1]

    def _read_modules(self, ids: Sequence[int]) -> Mapping[int, list[_Row]]:
        columns = select(EncodingTable.module_id, *_COLUMNS)
        joined = columns.join(StateTable, StateTable.key == EncodingTable.key)
        rows: dict[int, list[_Row]] = defaultdict(list)
        for chunk in chunks(ids):
            mine = joined.where(EncodingTable.module_id.in_(chunk))
            for number, *row in self.database.fetch(mine):
                rows[number].append(tuple(row))
        return rows

    def _read_schema(self, name: str, namespace: str) -> list[_Row]:
        joined = (
            select(*_COLUMNS)
            .join(SchemaStateTable, SchemaStateTable.key == StateTable.key)
            .join(SchemaTable, SchemaTable.id == SchemaStateTable.schema_id)
            .join(NamespaceTable, NamespaceTable.id == SchemaTable.namespace_id)
        )
        mine = joined.where(NamespaceTable.name == namespace, SchemaTable.name == name)
        return [tuple(row) for row in self.database.fetch(mine)]

    def _is_old(self, name: Hashable) -> bool:
        known = self._known.get(name)
        return known is None or self.clock() - known[0] >= self.seconds

    def _remember(self, found: Mapping[Hashable, LocatedStates]) -> None:
        if len(self._known) + len(found) > _REMEMBERED:
            self._known = {}
        now = self.clock()
        self._known.update({name: (now, each) for name, each in found.items()})


def _one_module(rows: Iterable[_Row]) -> LocatedStates:
    """The rows of one module, as one."""
    rows = list(rows)
    if not rows:
        return LocatedStates()
    key = min(row[0] for row in rows)
    nbytes, tokens = max(row[3] for row in rows), max(row[4] for row in rows)
    return LocatedStates((RoutedModule(key, nbytes, tokens),), {key: _holders(rows)})


def _each_state(rows: Iterable[_Row]) -> LocatedStates:
    """The rows of many states, each by itself."""
    by_key: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        by_key[row[0]].append(row)
    return _joined(_one_module(by_key[key]) for key in sorted(by_key))


def _joined(found: Iterable[LocatedStates]) -> LocatedStates:
    """Those of several modules as of one request; texts that several share are read once."""
    modules: dict[str, RoutedModule] = {}
    holds: dict[str, Mapping[str, str]] = {}
    for each in found:
        modules |= {module.key: module for module in each.modules}
        holds |= each.holds
    return LocatedStates(tuple(modules.values()), holds)


def _holders(rows: Iterable[_Row]) -> dict[str, str]:
    held: dict[str, str] = {}
    for _, tier, place, _, _ in rows:
        if tier in MEMORY_TIERS and held.get(place) != "device":
            held[place] = tier
    return held
