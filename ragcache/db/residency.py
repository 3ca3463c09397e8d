"""Residency: which sessions hold states in memory, from the rows that the sessions write.

Each process writes once a second which states its memory gained and lost. Any process can look up
the modules of a request when it arrives: no event can be lost, and a restart rebuilds nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from sqlalchemy import select

from ragcache.db.database import Database
from ragcache.db.sql import chunks
from ragcache.db.tables import (
    ConversationStateTable,
    EncodingTable,
    NamespaceTable,
    SchemaStateTable,
    SchemaTable,
    StateTable,
)
from ragcache.errors import LedgerUnavailable
from ragcache.routing import RoutedModule
from ragcache.tiers import memory_tiers

_COLUMNS = (StateTable.key, StateTable.tier, StateTable.place, StateTable.nbytes, StateTable.tokens)
_REMEMBERED = 50_000  # maximum modules, schemas and conversations in memory
_MOST_RUNS = 256  # states of a conversation that are read from the ledger

_key_of = attrgetter("key")


@dataclass(frozen=True, slots=True)
class LocatedStates:
    """The modules of a request, and the sessions that hold their states in memory."""

    modules: tuple[RoutedModule, ...] = ()
    holds: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Tier of the states, `device` or `host`, by key and session. `device` if a session has
    both."""
    away: bool = False
    """Whether the ledger does not answer, so that a session cannot fetch what it does not hold."""

    def joined_with(self, other: LocatedStates) -> LocatedStates:
        """Return the states of both, each once."""
        return replace(_joined((self, other)), away=self.away or other.away)


@dataclass(slots=True)
class Residency:
    """Locates the states of requests. Thread-safe."""

    database: Database
    seconds: float = 1.0
    """Age from which a module's rows are read again. While the ledger does not answer, older rows
    count, and modules without rows are nowhere."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic clock, in seconds."""
    _known: dict[Hashable, tuple[float, LocatedStates]] = field(default_factory=dict)

    def locate_modules(self, module_ids: Sequence[int]) -> LocatedStates:
        """Locate the states of modules. Modules without states are left out.

        A module with several encodings counts once, with the size of the largest. A session holds
        it if it holds any of them.
        """
        ids = list(dict.fromkeys(module_ids))
        known = self._known  # `_remember` may begin a new one, also in another thread
        found = {number: known[number][1] for number in ids if number in known}
        old = [number for number in ids if self._is_old(number)]
        with suppress(LedgerUnavailable):
            rows = self._read_modules(old)
            read = {number: _one_module(rows.get(number, ())) for number in old}
            self._remember(read)
            found |= read
        return _joined(found[number] for number in ids if number in found)

    def locate_schema(self, name: str, namespace: str) -> LocatedStates:
        """Locate all states of a schema.

        The ledger does not record which module each belongs to.
        """
        return self._locate(("schema", namespace, name), lambda: self._read_schema(name, namespace))

    def locate_conversation(self, name: str, namespace: str) -> LocatedStates:
        """Locate the states of a conversation that are in memory anywhere.

        Conversations that begin with equal messages may have one name. Their states count together.
        """
        of = "conversation", namespace, name
        return self._locate(of, lambda: self._read_conversation(name, namespace))

    def _locate(self, name: Hashable, read: Callable[[], Sequence[Any]]) -> LocatedStates:
        """Return the states of a name, whose rows `read` returns if they are old."""
        if self._is_old(name):
            with suppress(LedgerUnavailable):
                states = groupby(sorted(read(), key=_key_of), _key_of)
                self._remember({name: _joined(_one_module(each) for _, each in states)})
        known = self._known.get(name)
        return LocatedStates() if known is None else known[1]

    def _read_modules(self, ids: Sequence[int]) -> Mapping[int, Sequence[Any]]:
        columns = select(EncodingTable.module_id, *_COLUMNS)
        joined = columns.join(StateTable, StateTable.key == EncodingTable.key)
        rows: dict[int, list[Any]] = defaultdict(list)
        for chunk in chunks(ids):
            for row in self.database.fetch(joined.where(EncodingTable.module_id.in_(chunk))):
                rows[row.module_id].append(row)
        return rows

    def _read_schema(self, name: str, namespace: str) -> Sequence[Any]:
        joined = (
            select(*_COLUMNS)
            .join(SchemaStateTable, SchemaStateTable.key == StateTable.key)
            .join(SchemaTable, SchemaTable.id == SchemaStateTable.schema_id)
            .join(NamespaceTable, NamespaceTable.id == SchemaTable.namespace_id)
        )
        mine = joined.where(NamespaceTable.name == namespace, SchemaTable.name == name)
        return self.database.fetch(mine)

    def _read_conversation(self, name: str, namespace: str) -> Sequence[Any]:
        table = ConversationStateTable
        joined = (
            select(*_COLUMNS)
            .join(table, table.key == StateTable.key)
            .join(NamespaceTable, NamespaceTable.id == table.namespace_id)
        )
        mine = joined.where(NamespaceTable.name == namespace, table.conversation == name)
        held = mine.where(StateTable.tier.in_(memory_tiers()))
        return self.database.fetch(held.order_by(table.expires_at.desc()).limit(_MOST_RUNS))

    def _is_old(self, name: Hashable) -> bool:
        known = self._known.get(name)
        return known is None or self.clock() - known[0] >= self.seconds

    def _remember(self, found: Mapping[Any, LocatedStates]) -> None:
        if len(self._known) + len(found) > _REMEMBERED:
            self._known = {}
        now = self.clock()
        self._known.update({name: (now, each) for name, each in found.items()})


def _one_module(rows: Iterable[Any]) -> LocatedStates:
    """Join the rows of one module's states."""
    rows = list(rows)
    if not rows:
        return LocatedStates()
    key = min(row.key for row in rows)
    nbytes, tokens = max(row.nbytes for row in rows), max(row.tokens for row in rows)
    held: dict[str, str] = {}
    for tier in reversed(memory_tiers()):  # the fastest of a session's tiers counts
        held |= {row.place: tier for row in rows if row.tier == tier}
    return LocatedStates((RoutedModule(key, nbytes, tokens),), {key: held})


def _joined(found: Iterable[LocatedStates]) -> LocatedStates:
    """Join the modules of one request. Modules with the same states are read once."""
    modules: dict[str, RoutedModule] = {}
    holds: dict[str, Mapping[str, str]] = {}
    for each in found:
        modules |= {module.key: module for module in each.modules}
        holds |= each.holds
    return LocatedStates(tuple(modules.values()), holds)
