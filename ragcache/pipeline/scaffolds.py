"""Scaffolds of collections: modules that are encoded together (Prompt Cache §3.3).

A scaffold is declared, or found: a selection that was retrieved often enough in one order. Its
modules' states override the single ones wherever all of them are selected in that order, next to
each other. The ledger keeps scaffolds until a document of theirs changes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from ragcache.errors import ConfigurationError
from ragcache.states import KVKey
from ragcache.store import Members, ModuleRow, ScaffoldRows

REMEMBERED = 4096  # selections that are counted at most, those seen last


class Scaffolds:
    """The scaffolds of all collections of a namespace, by the ids of their modules. Thread-safe.

    after: how often a selection must be retrieved to become one; None finds none. Those that
    another process declares are known here when the folder is opened again.
    """

    def __init__(self, rows: ScaffoldRows, after: int | None = None) -> None:
        self._rows = rows
        self._after = after
        self._known: dict[str, set[Members]] = {}
        self._kept: set[KVKey] = set()
        self._seen: OrderedDict[tuple[str, Members], int] = OrderedDict()
        self._lock = threading.Lock()

    def declare(self, collection: str, modules: Sequence[int], key: KVKey) -> None:
        """Makes these modules a scaffold, in this order, with the states of this key."""
        self.keep(collection, modules, key)
        known = self._of(collection)
        with self._lock:
            known.add(tuple(modules))

    def note(self, collection: str, modules: Sequence[int]) -> None:
        """Counts a selection."""
        if self._after is None or len(modules) < 2:
            return
        known, seen = self._of(collection), (collection, tuple(modules))
        with self._lock:
            self._seen[seen] = self._seen.pop(seen, 0) + 1
            if self._seen[seen] >= self._after:
                known.add(seen[1])
            elif len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)

    def runs(self, collection: str, modules: Sequence[int]) -> list[tuple[int, int]]:
        """Splits a selection into runs begin:end that are encoded together, the longest scaffold
        that fits first, from the front."""
        known = self._of(collection)
        with self._lock:
            longest = sorted(known, key=len, reverse=True)
        runs, begin = [], 0
        while begin < len(modules):
            lengths = (len(s) for s in longest if tuple(modules[begin : begin + len(s)]) == s)
            end = begin + next(lengths, 1)
            runs.append((begin, end))
            begin = end
        return runs

    def keep(self, collection: str, modules: Sequence[int], key: KVKey) -> None:
        """Notes which states a scaffold has, so that they end with its documents."""
        if key not in self._kept:
            self._rows.keep(collection, tuple(modules), key)
            self._kept.add(key)

    def _of(self, collection: str) -> set[Members]:
        known = self._known.get(collection)
        if known is None:
            stored = self._rows.of(collection)
            with self._lock:
                known = self._known.setdefault(collection, stored)
        return known


def scaffold_modules(modules: Sequence[ModuleRow], ids: Sequence[str]) -> list[ModuleRow]:
    """The modules that ids of documents (all modules of one) or of modules name, in order.

    Raises `ConfigurationError` for an unknown id, a module that comes twice, or fewer than two.
    """
    found: list[ModuleRow] = []
    for wanted in ids:
        named = [module for module in modules if wanted in (module.name, module.document)]
        if not named:
            raise ConfigurationError(
                f"the collection has no document or module {wanted!r}; `ragcache modules ls` "
                "lists them"
            )
        found += named
    if len({module.id for module in found}) != len(found) or len(found) < 2:
        raise ConfigurationError("a scaffold needs two modules or more, and each of them once")
    return found
