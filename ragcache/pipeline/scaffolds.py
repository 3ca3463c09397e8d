"""Scaffolds of collections: modules that are encoded together (Prompt Cache §3.3).

A scaffold is declared, or found: a selection that was retrieved often enough in one order. Its
modules' states override the single ones wherever all of them are selected in that order, next to
each other. It is known for as long as the process lives.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence

from ragcache.errors import ConfigurationError
from ragcache.states import KVKey
from ragcache.store import ModuleRow

REMEMBERED = 4096  # selections that are counted at most, those seen last

Names = tuple[str, ...]


class Scaffolds:
    """The scaffolds of all collections, by the names of their modules. Thread-safe.

    after: how often a selection must be retrieved to become one; None finds none.
    """

    def __init__(self, after: int | None = None) -> None:
        self._after = after
        self._known: defaultdict[str, set[Names]] = defaultdict(set)
        self._seen: OrderedDict[tuple[str, Names], int] = OrderedDict()
        self._keys: dict[KVKey, tuple[str, Names]] = {}
        self._lock = threading.Lock()

    def declare(self, collection: str, names: Sequence[str]) -> None:
        """Makes these modules a scaffold, in this order."""
        with self._lock:
            self._known[collection].add(tuple(names))

    def note(self, collection: str, names: Sequence[str]) -> None:
        """Counts a selection."""
        if self._after is None or len(names) < 2:
            return
        seen = (collection, tuple(names))
        with self._lock:
            self._seen[seen] = self._seen.pop(seen, 0) + 1
            if self._seen[seen] >= self._after:
                self._known[collection].add(seen[1])
            elif len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)

    def runs(self, collection: str, names: Sequence[str]) -> list[tuple[int, int]]:
        """Splits a selection into runs begin:end that are encoded together, the longest scaffold
        that fits first, from the front."""
        with self._lock:
            known = sorted(self._known.get(collection, ()), key=len, reverse=True)
        runs, begin = [], 0
        while begin < len(names):
            lengths = (len(s) for s in known if tuple(names[begin : begin + len(s)]) == s)
            end = begin + next(lengths, 1)
            runs.append((begin, end))
            begin = end
        return runs

    def keep(self, collection: str, names: Sequence[str], key: KVKey) -> None:
        """Notes which states a scaffold has."""
        with self._lock:
            self._keys[key] = (collection, tuple(names))

    def outdated(self, collection: str, documents: Collection[str]) -> list[KVKey]:
        """States of scaffolds that hold modules of documents that have changed; forgets them."""
        with self._lock:
            keys = [
                key for key, (owner, names) in self._keys.items()
                if owner == collection and any(_document(name) in documents for name in names)
            ]  # fmt: skip
            for key in keys:
                del self._keys[key]
        return keys


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


def _document(module: str) -> str:
    """Modules are called `DOCUMENT#NUMBER`."""
    return module.rpartition("#")[0]
