"""The texts of hand-written schemas, and which states belong to them."""

# MERGED ragcache.store.scaffolds: Scaffolds of collections: modules whose joint states the
#   ledger knows (Prompt Cache §3.3).

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, delete, func, select
from sqlalchemy.orm import Session

from ragcache.db import jobs
from ragcache.db.database import Database
from ragcache.db.references import retire
from ragcache.db.sql import insert_new, namespace_id
from ragcache.db.tables import (
    DEFAULT_NAMESPACE,
    CollectionTable,
    ModuleTable,
    NamespaceTable,
    ScaffoldTable,
    SchemaStateTable,
    SchemaTable,
)
from ragcache.errors import UnknownSchema
from ragcache.states import KVKey


@dataclass(frozen=True, slots=True)
class SchemaText:
    """A schema as it was written, and where its prompts place its modules."""

    text: str
    placement: str


class SchemaTexts:
    """Schemas of one namespace by name. Every method is one transaction."""

    def __init__(self, database: Database, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._database = database
        self.namespace = namespace

    def put_schema(
        self, name: str, schema: SchemaText, keys: Iterable[KVKey] = (), job: int | None = None
    ) -> list[KVKey]:
        """Stores a schema with the keys of its modules' states in place of an earlier one of its
        name. Returns the keys of states that nobody needs any more; their rows are gone already."""
        with self._database.transaction() as session:
            freed = self._delete(session, name)
            row = SchemaTable(
                namespace_id=namespace_id(session, self.namespace), name=name, text=schema.text,
                placement=schema.placement,
            )  # fmt: skip
            session.add(row)
            session.flush()
            owned = [{"schema_id": row.id, "key": str(key)} for key in dict.fromkeys(keys)]
            insert_new(session, SchemaStateTable, owned)
            if job is not None:
                freed += jobs.complete(session, job)
            return retire(session, freed)

    def add_keys(self, name: str, keys: Iterable[KVKey]) -> None:
        """Notes that more states belong to a schema, if it is still there."""
        with self._database.transaction() as session:
            row = session.scalar(self._named(select(SchemaTable), name))
            if row is not None:
                owned = [{"schema_id": row.id, "key": str(key)} for key in dict.fromkeys(keys)]
                insert_new(session, SchemaStateTable, owned)

    def get_schema(self, name: str) -> SchemaText | None:
        with self._database.reading() as session:
            row = session.scalar(self._named(select(SchemaTable), name))
            return None if row is None else SchemaText(row.text, row.placement)

    def names(self) -> list[str]:
        statement = select(SchemaTable.name).join(NamespaceTable).order_by(SchemaTable.name)
        with self._database.reading() as session:
            mine = statement.where(NamespaceTable.name == self.namespace)
            return list(session.scalars(mine))

    def delete_schema(self, name: str) -> list[KVKey]:
        """Deletes a schema; returns as `put_schema`. Raises `UnknownSchema`."""
        with self._database.transaction() as session:
            if session.scalar(self._named(select(SchemaTable.id), name)) is None:
                raise UnknownSchema(f"there is no schema {name!r}")
            return retire(session, self._delete(session, name))

    def _delete(self, session: Session, name: str) -> list[KVKey]:
        found = session.scalar(self._named(select(SchemaTable.id), name))
        if found is None:
            return []
        keys: list[str] = []
        for table in (SchemaStateTable, ScaffoldTable):
            keys += session.scalars(select(table.key).where(table.schema_id == found))
        session.execute(delete(SchemaTable).where(SchemaTable.id == found))
        return [KVKey(key) for key in keys]

    def _named(self, statement: Select[Any], name: str) -> Select[Any]:
        joined = statement.join(NamespaceTable, SchemaTable.namespace_id == NamespaceTable.id)
        return joined.where(NamespaceTable.name == self.namespace, SchemaTable.name == name)


Members = tuple[int, ...]
"""Ids of modules, in the order in which they are encoded."""


class ScaffoldRows:
    """The scaffolds of a namespace's collections. Every method is one transaction."""

    def __init__(self, database: Database, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._database = database
        self._namespace = namespace

    def read_scaffolds(self, collection: str) -> set[Members]:
        """All scaffolds of a collection; none where it does not exist."""
        statement = self._within(select(ScaffoldTable.members), collection)
        with self._database.reading() as session:
            return {tuple(members) for members in session.scalars(statement)}

    def add_scaffold(self, collection: str, members: Members, key: KVKey) -> None:
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
