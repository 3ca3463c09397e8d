"""The texts of hand-written schemas, and which states belong to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Select, delete, select
from sqlalchemy.orm import Session

from ragcache.errors import UnknownSchema
from ragcache.states import KVKey
from ragcache.store import jobs
from ragcache.store.database import Database
from ragcache.store.ownership import retire
from ragcache.store.statements import insert_new, namespace_id
from ragcache.store.tables import (
    DEFAULT_NAMESPACE,
    NamespaceTable,
    ScaffoldTable,
    SchemaStateTable,
    SchemaTable,
)


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

    def put(
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

    def own(self, name: str, keys: Iterable[KVKey]) -> None:
        """Notes that more states belong to a schema, if it is still there."""
        with self._database.transaction() as session:
            row = session.scalar(self._named(select(SchemaTable), name))
            if row is not None:
                owned = [{"schema_id": row.id, "key": str(key)} for key in dict.fromkeys(keys)]
                insert_new(session, SchemaStateTable, owned)

    def get(self, name: str) -> SchemaText | None:
        with self._database.reading() as session:
            row = session.scalar(self._named(select(SchemaTable), name))
            return None if row is None else SchemaText(row.text, row.placement)

    def names(self) -> list[str]:
        statement = select(SchemaTable.name).join(NamespaceTable).order_by(SchemaTable.name)
        with self._database.reading() as session:
            mine = statement.where(NamespaceTable.name == self.namespace)
            return list(session.scalars(mine))

    def delete(self, name: str) -> list[KVKey]:
        """Deletes a schema; returns as `put`. Raises `UnknownSchema`."""
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
