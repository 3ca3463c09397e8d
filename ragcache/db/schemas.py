"""Hand-written schemas and scaffolds: states that belong to no single module.

A scaffold is a list of modules that were encoded together (Prompt Cache §3.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, delete, func, select
from sqlalchemy.orm import Session

from ragcache.db import jobs
from ragcache.db.database import Database
from ragcache.db.jobs import RunningJob
from ragcache.db.references import retire
from ragcache.db.sql import in_collection, insert_new, namespace_id
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
    """The text of a schema and the placement of its modules in prompts."""

    text: str
    placement: str


class SchemaTexts:
    """Schemas of one namespace by name. Every method is one transaction."""

    def __init__(self, database: Database, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._database, self.namespace = database, namespace

    def put_schema(
        self,
        name: str,
        schema: SchemaText,
        keys: Iterable[KVKey] = (),
        job: RunningJob | None = None,
    ) -> list[KVKey]:
        """Store a schema with the keys of its modules' states, and replace one of the same name.

        Returns:
            Keys of states without an owner. Their rows are deleted already.
        """
        with self._database.transaction() as session:
            owner = namespace_id(session, self.namespace)  # first, as in all transactions
            freed = self._delete(session, name) or []
            row = SchemaTable(
                namespace_id=owner,
                name=name,
                text=schema.text,
                placement=schema.placement,
            )
            session.add(row)
            session.flush()
            _own(session, row.id, keys)
            if job is not None:
                freed += jobs.complete(session, job)
            return retire(session, freed)

    def add_keys(self, name: str, keys: Iterable[KVKey]) -> None:
        """Add keys of states to a schema, if it still exists."""
        with self._database.transaction() as session:
            found = session.scalar(self._named(select(SchemaTable.id), name))
            if found is not None:
                _own(session, found, keys)

    def get_schema(self, name: str) -> SchemaText | None:
        """Read a schema, or return None without one of this name."""
        with self._database.reading() as session:
            row = session.scalar(self._named(select(SchemaTable), name))
            return None if row is None else SchemaText(row.text, row.placement)

    def names(self) -> list[str]:
        """Return the names of all schemas, sorted."""
        statement = select(SchemaTable.name).join(NamespaceTable).order_by(SchemaTable.name)
        mine = statement.where(NamespaceTable.name == self.namespace)
        return [name for (name,) in self._database.fetch(mine)]

    def delete_schema(self, name: str) -> list[KVKey]:
        """Delete a schema. Returns keys as `put_schema` does. Raises `UnknownSchema`."""
        with self._database.transaction() as session:
            freed = self._delete(session, name)
            if freed is None:
                raise UnknownSchema(f"there is no schema {name!r}")
            return retire(session, freed)

    def _delete(self, session: Session, name: str) -> list[KVKey] | None:
        """Delete a schema, if it exists, and return the keys that it owned, or None."""
        found = session.scalar(self._named(select(SchemaTable.id), name))
        if found is None:
            return None
        keys: list[KVKey] = []
        for table in (SchemaStateTable, ScaffoldTable):
            keys += session.scalars(select(table.key).where(table.schema_id == found))
        session.execute(delete(SchemaTable).where(SchemaTable.id == found))
        return keys

    def _named(self, statement: Select[Any], name: str) -> Select[Any]:
        chosen = SchemaTable.name == name
        return statement.join(NamespaceTable).where(NamespaceTable.name == self.namespace, chosen)


def _own(session: Session, schema: int, keys: Iterable[KVKey]) -> None:
    owned = [{"schema_id": schema, "key": key} for key in dict.fromkeys(keys)]
    insert_new(session, SchemaStateTable, owned)


Members = tuple[int, ...]
"""Ids of modules, in the order in which they are encoded."""


class ScaffoldRows:
    """The scaffolds of a namespace's collections. Every method is one transaction."""

    def __init__(self, database: Database, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._database, self._namespace = database, namespace

    def read_scaffolds(self, collection: str) -> set[tuple[Members, KVKey]]:
        """Return the scaffolds of a collection with the keys of their states.

        An unknown collection has none.
        """
        columns = select(ScaffoldTable.members, ScaffoldTable.key).join(CollectionTable)
        rows = self._database.fetch(in_collection(columns, self._namespace, collection))
        return {(tuple(members), key) for members, key in rows}

    def add_scaffold(self, collection: str, members: Members, key: KVKey) -> None:
        """Store the key of a scaffold, unless one of its modules has been deleted."""
        chosen = in_collection(select(CollectionTable.id), self._namespace, collection)
        with self._database.transaction() as session:
            owner = session.scalar(chosen.with_for_update())
            count = select(func.count()).where(ModuleTable.id.in_(members))
            if owner is None or session.scalar(count) != len(members):
                return
            same = (ScaffoldTable.collection_id == owner) & (ScaffoldTable.key == key)
            kept = session.scalars(select(ScaffoldTable.members).where(same))
            if list(members) not in kept.all():  # other modules may have the same texts
                new = {"collection_id": owner, "key": key, "members": list(members)}
                session.add(ScaffoldTable(**new))


def scaffolds_of(session: Session, owner: int, modules: Set[int]) -> list[ScaffoldTable]:
    """Return the scaffolds of a collection that contain any of these modules."""
    rows = session.scalars(select(ScaffoldTable).where(ScaffoldTable.collection_id == owner))
    return [row for row in rows if not modules.isdisjoint(row.members)]


def delete_scaffolds(session: Session, owner: int, modules: Set[int]) -> list[KVKey]:
    """Delete the scaffolds of a collection that contain any of these modules.

    Returns their keys.
    """
    gone = scaffolds_of(session, owner, modules)
    for row in gone:
        session.delete(row)
    return [row.key for row in gone]
