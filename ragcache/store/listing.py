"""Modules with what the tiers hold of them: what an operator lists."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select

from ragcache.store.catalogue import check_collection
from ragcache.store.database import Database
from ragcache.store.tables import (
    CollectionTable,
    DocumentTable,
    EncodingTable,
    ModuleTable,
    StateTable,
)


@dataclass(frozen=True, slots=True)
class ModuleListing:
    """A line of `ragcache modules ls`."""

    name: str
    document: str
    collection: str
    tokens: int
    nbytes: int
    tiers: tuple[str, ...]
    hits: int


def list_modules(database: Database, collection: str | None = None) -> list[ModuleListing]:
    """Every module with the size, tiers and hits of its states."""
    statement = (
        select(
            ModuleTable.name,
            DocumentTable.source_id,
            CollectionTable.name,
            func.coalesce(func.max(StateTable.tokens), 0),
            func.coalesce(func.max(StateTable.nbytes), 0),
            func.group_concat(StateTable.tier.distinct()),
            func.coalesce(func.max(StateTable.hits), 0),
        )
        .join(DocumentTable, ModuleTable.document_id == DocumentTable.id)
        .join(CollectionTable, DocumentTable.collection_id == CollectionTable.id)
        .outerjoin(EncodingTable, EncodingTable.module_id == ModuleTable.id)
        .outerjoin(StateTable, StateTable.key == EncodingTable.key)
        .group_by(ModuleTable.id)
        .order_by(CollectionTable.name, ModuleTable.id)
    )
    if collection is not None:
        statement = statement.where(CollectionTable.name == collection)
    with database.transaction() as session:
        if collection is not None:
            check_collection(session, collection)
        return [
            ModuleListing(name, document, owner, tokens, nbytes, _split(tiers), hits)
            for name, document, owner, tokens, nbytes, tiers, hits in session.execute(statement)
        ]


def _split(tiers: str | None) -> tuple[str, ...]:
    return tuple(sorted(tiers.split(","))) if tiers else ()
