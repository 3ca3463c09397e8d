"""Which modules are listed: what a filter asks of each, and whether it leaves few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, literal, or_, select
from sqlalchemy.orm import Session, aliased

from ragcache.store.tables import (
    CollectionTable,
    DocumentTable,
    EncodingTable,
    ModuleTable,
    StateTable,
)

FEW = 2000  # modules, up to which they are sorted as they are found

Condition = ColumnElement[bool]


@dataclass(frozen=True, slots=True)
class ModuleFilter:
    """Which modules; None for any. tier: one that holds states of them. search: a part of their
    name or of their document's, in either case."""

    collection: str | None = None
    document: str | None = None
    tier: str | None = None
    pinned: bool | None = None
    search: str | None = None


@dataclass(frozen=True, slots=True)
class Matching:
    """A filter in a session. namespace: its id; owner: that of the collection, if one is named."""

    session: Session
    wanted: ModuleFilter
    namespace: int
    owner: int | None

    def conditions(self, module: Any) -> Iterator[Condition]:
        """All that is asked of a module, looked up by its id: so said, it gives no database a
        reason to read in another order."""
        wanted = self.wanted
        yield self._membership(module)
        if wanted.document is not None:
            yield _of(DocumentTable.source_id, module) == wanted.document
        if wanted.tier is not None:
            yield _held(module, StateTable.tier.key, wanted.tier)
        if wanted.pinned is not None:
            pinned = _held(module, StateTable.pinned.key, True)
            yield pinned if wanted.pinned else ~pinned
        if wanted.search is not None:
            name = self._contains(_of(ModuleTable.name, module))
            yield or_(name, self._contains(_of(DocumentTable.source_id, module)))

    def members(self, column: Any) -> Select[Any]:
        """A column of the modules of the collection, or of the namespace."""
        statement = (
            select(column)
            .select_from(CollectionTable)
            .join(DocumentTable, DocumentTable.collection_id == CollectionTable.id)
            .join(ModuleTable, ModuleTable.document_id == DocumentTable.id)
        )
        if self.owner is None:
            return statement.where(CollectionTable.namespace_id == self.namespace)
        return statement.where(CollectionTable.id == self.owner)

    def few(self) -> list[int] | None:
        """Modules among which are all that match, if one part of the filter leaves few."""
        for probe in self._probes():
            rows: list[int] = []
            for statement in probe:
                rows += self.session.scalars(statement.limit(FEW + 1 - len(rows)))
                if len(rows) > FEW:
                    break
            else:
                return list(dict.fromkeys(rows))
        return None

    def _probes(self) -> Iterator[list[Select[Any]]]:
        """Statements that together find all modules that match one part of the filter."""
        wanted = self.wanted
        held = select(EncodingTable.module_id).join(StateTable, StateTable.key == EncodingTable.key)
        if wanted.pinned:
            yield [held.where(StateTable.pinned)]
        if wanted.tier is not None:
            yield [held.where(StateTable.tier == wanted.tier)]
        members = self.members(ModuleTable.id)
        if wanted.document is not None:
            members = members.where(DocumentTable.source_id == wanted.document)
        yield [members]
        if wanted.search is not None:
            named = select(ModuleTable.id).where(self._contains(ModuleTable.name))
            yield [
                self.members(ModuleTable.id).where(self._contains(DocumentTable.source_id)),
                named.where(self._membership(ModuleTable.id)),
            ]

    def _membership(self, module: Any) -> Condition:
        condition: Condition = _of(CollectionTable.namespace_id, module) == self.namespace
        if self.owner is not None:
            condition = _of(CollectionTable.id, module) == self.owner
        return condition

    def _contains(self, column: Any) -> Condition:
        """SQLite's LIKE ignores the case of ASCII letters as it is."""
        search = self.wanted.search or ""
        for sign in "\\%_":
            search = search.replace(sign, f"\\{sign}")
        postgresql = self.session.get_bind().dialect.name == "postgresql"
        like = column.ilike if postgresql else column.like
        condition: Condition = like(f"%{search}%", escape="\\")
        return condition


def _of(column: Any, module: Any) -> Any:
    """A column of a module, its document or its collection."""
    inner = aliased(ModuleTable)
    if column.class_ is ModuleTable:
        found = select(getattr(inner, column.key))
    else:
        joined = select(column).select_from(inner)
        found = joined.join(DocumentTable, DocumentTable.id == inner.document_id)
    if column.class_ is CollectionTable:
        found = found.join(CollectionTable, CollectionTable.id == DocumentTable.collection_id)
    return found.where(inner.id == module).scalar_subquery()


def _held(module: Any, name: str, value: Any) -> Condition:
    """Whether some states of a module have a value. The module's are read and then compared:
    SQLite would rather look through all states that have it."""
    state, encoding = aliased(StateTable), aliased(EncodingTable)
    values = select(getattr(state, name)).join(encoding, encoding.key == state.key)
    condition: Condition = literal(value).in_(values.where(encoding.module_id == module))
    return condition
