"""The texts of hand-written schemas."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select

from ragcache.store.database import Database
from ragcache.store.tables import SchemaTable


@dataclass(frozen=True, slots=True)
class SchemaText:
    """A schema as it was written, and where its prompts place its modules."""

    text: str
    placement: str


class SchemaTexts:
    """Schemas by name. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, name: str, schema: SchemaText) -> None:
        """Stores a schema in place of an earlier one of its name."""
        with self._database.transaction() as session:
            row = SchemaTable(name=name, text=schema.text, placement=schema.placement)
            session.merge(row)

    def get(self, name: str) -> SchemaText | None:
        with self._database.transaction() as session:
            row = session.get(SchemaTable, name)
            return None if row is None else SchemaText(row.text, row.placement)

    def names(self) -> list[str]:
        with self._database.transaction() as session:
            return list(session.scalars(select(SchemaTable.name).order_by(SchemaTable.name)))
