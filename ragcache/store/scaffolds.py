"""Scaffolds of collections: modules whose joint states the ledger knows (Prompt Cache §3.3)."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from ragcache.states import KVKey
from ragcache.store.database import Database
from ragcache.store.tables import (
    DEFAULT_NAMESPACE,
    CollectionTable,
    ModuleTable,
    NamespaceTable,
    ScaffoldTable,
)

Members = tuple[int, ...]
"""Ids of modules, in the order in which they are encoded."""


class ScaffoldRows:
    """The scaffolds of a namespace's collections. Every method is one transaction."""

    def __init__(self, database: Database, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._database = database
        self._namespace = namespace

    def of(self, collection: str) -> set[Members]:
        """All scaffolds of a collection; none where it does not exist."""
        statement = self._within(select(ScaffoldTable.members), collection)
        with self._database.reading() as session:
            return {tuple(members) for members in session.scalars(statement)}

    def keep(self, collection: str, members: Members, key: KVKey) -> None:
        """Notes which states a scaffold has, unless a module of it was deleted meanwhile."""
        with self._database.transaction() as session:
            owner = session.scalar(
                self._named(select(CollectionTable.id), collection).with_for_update()
            )
            count = select(func.count()).where(ModuleTable.id.in_(members))
            if owner is None or session.scalar(count) != len(members):
                return
            kept = (ScaffoldTable.collection_id == owner) & (ScaffoldTable.key == str(key))
            if session.scalar(select(ScaffoldTable.id).where(kept)) is None:
                row = ScaffoldTable(collection_id=owner, key=str(key), members=list(members))
                session.add(row)

    def _within(self, statement: Select[Any], collection: str) -> Select[Any]:
        joined = statement.join(CollectionTable, CollectionTable.id == ScaffoldTable.collection_id)
        return self._named(joined, collection)

    def _named(self, statement: Select[Any], collection: str) -> Select[Any]:
        joined = statement.join(NamespaceTable, NamespaceTable.id == CollectionTable.namespace_id)
        return joined.where(
            NamespaceTable.name == self._namespace, CollectionTable.name == collection
        )


def delete_scaffolds(session: Session, owner: int, modules: Set[int]) -> list[KVKey]:
    """Deletes those scaffolds of a collection that hold any of these modules; their keys."""
    rows = session.scalars(select(ScaffoldTable).where(ScaffoldTable.collection_id == owner))
    gone = [row for row in rows if not modules.isdisjoint(row.members)]
    for row in gone:
        session.delete(row)
    return [KVKey(row.key) for row in gone]
