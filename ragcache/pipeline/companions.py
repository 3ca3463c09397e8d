"""Companions: the similar modules that a collection's modules are encoded behind, for `primed`.

A state behind text that prompts have near it is nearer to an ordinary prefill than one behind the
built-in priming text (docs/internals/adr, 117).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ragcache.db import Catalog, CollectionVersion, ModuleRow
from ragcache.errors import LedgerUnavailable
from ragcache.modes import AFTER_OTHER_TEXT
from ragcache.pipeline.module_states import MOST_KEYS, Companion, ModuleTokens
from ragcache.pipeline.prompt import ModuleGroup
from ragcache.retrieval.indexes import CollectionIndex, CollectionIndexes

MOST_TOKENS = 512
"""Most tokens of a companion that a module sees. Longer priming texts were worse (ADR 91)."""

_LOOKED_AT = 64
"""Most similar modules among which one of another document is looked for at first."""


class Companions:
    """Finds the companions of a namespace's modules. Thread-safe.

    The companion of a module is the other module that BM25 finds with the module's own text, of
    another document if there is one. It is chosen when a prompt or `warm` first needs it. The
    ledger keeps it with the states (`EncodingTable.behind_id`), so that all processes find these,
    until its document goes.
    """

    def __init__(self, catalog: Catalog, tokens: ModuleTokens, indexes: CollectionIndexes) -> None:
        self._catalog, self._tokens, self._indexes = catalog, tokens, indexes
        self._known: dict[str, tuple[CollectionVersion, dict[int, Companion | None]]] = {}

    def place(
        self, collection: str, version: CollectionVersion, groups: Sequence[ModuleGroup]
    ) -> tuple[ModuleGroup, ...]:
        """Return the groups of a prompt with the companions of modules in later places.

        Scaffolds, and modules of other collections, have none.
        """
        single = [
            each.modules[0] if each.encoding == AFTER_OTHER_TEXT and len(each.modules) == 1 else -1
            for each in groups
        ]
        found = self.find(collection, version, [number for number in single if number >= 0])
        pairs = zip(groups, single, strict=True)
        return tuple(replace(each, behind=found.get(number)) for each, number in pairs)

    def find(
        self, collection: str, version: CollectionVersion, modules: Sequence[int]
    ) -> dict[int, Companion | None]:
        """Return the companions of modules by id: None without one.

        Without a ledger that answers, unknown companions are left out for this time.
        """
        if not version.similar:
            self._known.pop(collection, None)
            return {}
        before, known = self._known.get(collection, (None, {}))
        if before != version:
            known = {}
        unknown = [number for number in modules if number not in known]
        if unknown:
            with suppress(LedgerUnavailable):
                known = known | self._choose(collection, version, unknown)
            kept = known if len(known) <= MOST_KEYS else {}
            self._known[collection] = version, kept
        return {number: known[number] for number in modules if number in known}

    def _choose(
        self, collection: str, version: CollectionVersion, modules: Sequence[int]
    ) -> dict[int, Companion | None]:
        index = self._indexes.index_at(collection, version)
        kept = self._catalog.companions(modules)
        chosen: dict[int, ModuleRow | None] = {}
        for number in modules:
            other = index.modules.get(kept.get(number, -1))
            chosen[number] = other or most_similar(index, number)
        rows = [row for row in chosen.values() if row is not None]
        tokens = zip(rows, self._tokens.of(rows), strict=True)
        seen = {row.id: ids[:MOST_TOKENS] for row, ids in tokens}
        return {
            number: None if row is None else Companion(row.id, seen[row.id])
            for number, row in chosen.items()
        }


def most_similar(index: CollectionIndex, module: int) -> ModuleRow | None:
    """Return the most similar other module of a collection, of another document if there is one.

    None if no other module shares a word with it, or has another text.
    """
    own = index.modules.get(module)
    if own is None:  # of another collection
        return None

    def similar(limit: int) -> Iterator[ModuleRow]:
        found = (index.modules.get(number) for number, _ in index.words.search(own.text, limit))
        return (row for row in found if row is not None and row.text != own.text)

    def of_another_document(rows: Iterator[ModuleRow]) -> ModuleRow | None:
        return next((row for row in rows if row.document != own.document), None)

    return (
        of_another_document(similar(_LOOKED_AT))
        or of_another_document(similar(len(index.modules)))
        or next(similar(_LOOKED_AT), None)
    )
