"""Pages of evictions, the newest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, exists, or_, select
from sqlalchemy.orm import Session

from ragcache.store.database import Database
from ragcache.store.paging import Page, after, check_limit, cursor_of, cut
from ragcache.store.tables import (
    DEFAULT_NAMESPACE,
    CollectionTable,
    DocumentTable,
    EncodingTable,
    EvictionTable,
    ModuleTable,
    NamespaceTable,
    SchemaStateTable,
    SchemaTable,
)


@dataclass(frozen=True, slots=True)
class EvictionRow:
    """States that left a tier. module: the name of one that they belong to, None where none is left
    or they are a schema's. at: Unix seconds. fetched_again: whether they came back."""

    id: int
    public_id: str
    key: str
    module: str | None
    tier: str
    reason: str
    nbytes: int
    at: float
    fetched_again: bool


def eviction_page(
    database: Database, namespace: str, cursor: str | None = None, limit: int = 100
) -> Page[EvictionRow]:
    """Evictions of states that belong to the namespace; with those of the default one come the
    states that nothing owns any more, of which a digest is all that is left. Raises
    `InvalidRequest`."""
    check_limit(limit)
    last = after(cursor, int)
    with database.reading() as session:
        rows = select(EvictionTable).where(_visible(namespace))
        if last is not None:
            rows = rows.where(EvictionTable.id < last[0])
        read = list(session.scalars(rows.order_by(EvictionTable.id.desc()).limit(limit + 1)))
        found, more = cut(read, limit)
        names = module_names(session, [row.key for row in found], namespace)
    items = tuple(
        EvictionRow(
            row.id, row.public_id, row.key, names.get(row.key), row.tier, row.reason, row.nbytes,
            row.at, row.fetched_again,
        )
        for row in found
    )  # fmt: skip
    return Page(items, cursor_of(items[-1].id) if more else None)


def module_names(session: Session, keys: list[str], namespace: str) -> dict[str, str]:
    """A module of the namespace for each of the keys that have one."""
    own = session.scalar(select(NamespaceTable.id).where(NamespaceTable.name == namespace))
    found = _owners(EncodingTable.key, ModuleTable.name, CollectionTable.namespace_id)
    statement = found.where(EncodingTable.key.in_(keys)).order_by(EncodingTable.module_id.desc())
    names: dict[str, str] = {}
    for key, name, owner in session.execute(statement):
        if owner == own:
            names[key] = name
    return names


def _owners(*columns: Any) -> Any:
    return (
        select(*columns)
        .select_from(EncodingTable)
        .join(ModuleTable, ModuleTable.id == EncodingTable.module_id)
        .join(DocumentTable, DocumentTable.id == ModuleTable.document_id)
        .join(CollectionTable, CollectionTable.id == DocumentTable.collection_id)
    )


def _visible(namespace: str) -> ColumnElement[bool]:
    """The owners of each key are read, and compared then: of the sum, unlike of the column, SQLite
    has no index by which it would rather begin with all that the namespace holds."""
    number = select(NamespaceTable.id).where(NamespaceTable.name == namespace).scalar_subquery()
    modules = _owners(CollectionTable.namespace_id + 0).where(
        EncodingTable.key == EvictionTable.key
    )
    schemas = (
        select(SchemaTable.namespace_id + 0)
        .join(SchemaStateTable, SchemaStateTable.schema_id == SchemaTable.id)
        .where(SchemaStateTable.key == EvictionTable.key)
    )
    own = or_(number.in_(modules), number.in_(schemas))
    if namespace != DEFAULT_NAMESPACE:
        return own
    owned = [exists().where(t.key == EvictionTable.key) for t in (EncodingTable, SchemaStateTable)]
    return or_(own, ~or_(*owned))
