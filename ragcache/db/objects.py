"""Objects of the interfaces of others: responses, files, and what belongs to vector stores.

An object is JSON under a public id of its kind, within a namespace. It may have a content of bytes,
an owner, and a time at which it expires. Expired objects are not found, and the next stored object
removes them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_urlsafe
from typing import Any

from sqlalchemy import ColumnElement, Select, delete, or_, select, update

from ragcache.db.database import Database
from ragcache.db.sql import namespace_id, namespace_number, upsert
from ragcache.db.tables import ObjectTable


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object, without its content. Times are Unix seconds."""

    id: str
    value: Mapping[str, Any] = field(hash=False)
    created_at: float
    expires_at: float | None
    owner: str
    """Id of the object or name of the collection that it belongs to, or empty."""


class StoredObjects:
    """The objects of one namespace. Thread-safe.

    Example:
        >>> objects = StoredObjects(database, "default")
        >>> made = objects.add("response", {"text": "In the office."}, seconds=60)
        >>> objects.get("response", made.id).value["text"]
        'In the office.'
    """

    def __init__(self, database: Database, namespace: str) -> None:
        self._database, self._namespace = database, namespace

    def add(
        self,
        kind: str,
        value: Mapping[str, Any],
        *,
        id: str | None = None,
        owner: str = "",
        content: bytes | None = None,
        seconds: float | None = None,
    ) -> StoredObject:
        """Store an object, and remove expired ones of the namespace.

        Args:
            kind: Its kind, such as `file`.
            value: Its JSON.
            id: Its public id, whose object is replaced. Defaults to a random one.
            owner: The object or collection that it belongs to.
            content: Its bytes.
            seconds: Time from now at which it expires. Never by default.

        Raises:
            StoreError: The database cannot store it.
        """
        now = time.time()
        expires_at = None if seconds is None else now + seconds
        stored = StoredObject(id or token_urlsafe(18), dict(value), now, expires_at, owner)
        changed = {
            "owner": owner,
            "value": stored.value,
            "content": content,
            "created_at": now,
            "expires_at": expires_at,
        }
        with self._database.transaction() as session:
            names: dict[str, Any] = {"kind": kind, "public_id": stored.id}
            names["namespace_id"] = namespace_id(session, self._namespace)
            old = ObjectTable.expires_at <= now
            session.execute(delete(ObjectTable).where(self._own(), old))
            upsert(session, ObjectTable, names | changed, list(changed), list(names))
        return stored

    def get(self, kind: str, id: str) -> StoredObject | None:
        """Return an object, if there is one."""
        return next(iter(self._read(self._rows(kind).where(ObjectTable.public_id == id))), None)

    def content(self, kind: str, id: str) -> bytes | None:
        """Return the content of an object, if there is one."""
        rows = self._where(kind) & (ObjectTable.public_id == id)
        with self._database.reading() as session:
            return session.scalar(select(ObjectTable.content).where(rows))

    def list(self, kind: str, owner: str | None = None) -> Sequence[StoredObject]:
        """Return the objects of a kind, or those that an owner has, the oldest first."""
        rows = self._rows(kind)
        return self._read(rows if owner is None else rows.where(ObjectTable.owner == owner))

    def change(self, kind: str, id: str, value: Mapping[str, Any]) -> None:
        """Replace the JSON of an object, if there is one."""
        chosen = self._where(kind) & (ObjectTable.public_id == id)
        with self._database.transaction() as session:
            session.execute(update(ObjectTable).where(chosen).values(value=dict(value)))

    def delete(self, kind: str, id: str) -> bool:
        """Remove an object. Tells whether there was one."""
        with self._database.transaction() as session:
            chosen = self._where(kind) & (ObjectTable.public_id == id)
            removed = session.execute(delete(ObjectTable).where(chosen).returning(ObjectTable.id))
            return removed.first() is not None

    def delete_owned(self, owner: str) -> None:
        """Remove all objects of an owner."""
        with self._database.transaction() as session:
            session.execute(delete(ObjectTable).where(self._own(), ObjectTable.owner == owner))

    def _rows(self, kind: str) -> Select[Any]:
        columns: Select[Any] = select(
            ObjectTable.public_id,
            ObjectTable.value,
            ObjectTable.created_at,
            ObjectTable.expires_at,
            ObjectTable.owner,
        )
        return columns.where(self._where(kind)).order_by(ObjectTable.created_at, ObjectTable.id)

    def _read(self, rows: Select[Any]) -> Sequence[StoredObject]:
        with self._database.reading() as session:
            return [StoredObject(*row) for row in session.execute(rows)]

    def _where(self, kind: str) -> ColumnElement[bool]:
        alive = or_(ObjectTable.expires_at.is_(None), ObjectTable.expires_at > time.time())
        return self._own() & (ObjectTable.kind == kind) & alive

    def _own(self) -> ColumnElement[bool]:
        return ObjectTable.namespace_id == namespace_number(self._namespace)
