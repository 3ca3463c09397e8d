"""Modules with what the tiers hold of them: what an operator lists."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import select

from ragcache.store.catalogue import collection_id
from ragcache.store.database import Database
from ragcache.store.tables import (
    DEFAULT_NAMESPACE,
    CollectionTable,
    DocumentTable,
    EncodingTable,
    ModuleTable,
    NamespaceTable,
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
    pinned: bool


def list_modules(
    database: Database, collection: str | None = None, namespace: str = DEFAULT_NAMESPACE
) -> list[ModuleListing]:
    """Every module with the size, tiers and hits of its states."""
    statement = (
        select(
            ModuleTable.id,
            ModuleTable.name,
            DocumentTable.source_id,
            CollectionTable.name,
            StateTable,
        )
        .join(DocumentTable, ModuleTable.document_id == DocumentTable.id)
        .join(CollectionTable, DocumentTable.collection_id == CollectionTable.id)
        .join(NamespaceTable, CollectionTable.namespace_id == NamespaceTable.id)
        .where(NamespaceTable.name == namespace)
        .outerjoin(EncodingTable, EncodingTable.module_id == ModuleTable.id)
        .outerjoin(StateTable, StateTable.key == EncodingTable.key)
        .order_by(CollectionTable.name, ModuleTable.id)
    )
    if collection is not None:
        statement = statement.where(CollectionTable.name == collection)
    with database.reading() as session:
        if collection is not None:
            collection_id(session, collection, namespace)
        rows = list(session.execute(statement))
    return [_listing(list(group)) for _, group in groupby(rows, key=itemgetter(0))]


def _listing(rows: list[Any]) -> ModuleListing:
    """Of the rows of one module, one for each of its states and tiers."""
    _, name, document, owner, _ = rows[0]
    states = [row[4] for row in rows if row[4] is not None]
    return ModuleListing(
        name, document, owner,
        tokens=max((s.tokens for s in states), default=0),
        nbytes=max((s.nbytes for s in states), default=0),
        tiers=tuple(sorted({s.tier for s in states})),
        hits=max((s.hits for s in states), default=0),
        pinned=any(s.pinned for s in states),
    )  # fmt: skip
