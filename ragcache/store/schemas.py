"""The texts of hand-written schemas."""

from __future__ import annotations

from sqlalchemy import select

from ragcache.store.database import Database
from ragcache.store.tables import SchemaTable


class SchemaTexts:
    """Schemas by name. Every method is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, name: str, text: str) -> None:
        """Stores a schema in place of an earlier one of its name."""
        with self._database.transaction() as session:
            session.merge(SchemaTable(name=name, text=text))

    def get(self, name: str) -> str | None:
        with self._database.transaction() as session:
            row = session.get(SchemaTable, name)
            return None if row is None else row.text

    def names(self) -> list[str]:
        with self._database.transaction() as session:
            return list(session.scalars(select(SchemaTable.name).order_by(SchemaTable.name)))
