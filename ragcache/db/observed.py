"""Recurring texts of a namespace that outlive the process, and the states that they own.

Only a folder with `observed_storage="disk"` has any.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from sqlalchemy import ColumnElement, delete, select, update
from sqlalchemy.orm import Session

from ragcache.db.database import Database
from ragcache.db.references import expire, retire
from ragcache.db.sql import chunks, insert_new, namespace_id, namespace_number
from ragcache.db.tables import (
    DEFAULT_NAMESPACE,
    ObservedModuleTable,
    ObservedStateTable,
    StateTable,
)
from ragcache.states import KVKey
from ragcache.tiers import persistent_tiers


@dataclass(frozen=True, slots=True)
class ObservedText:
    """A recurring text with its states."""

    id: str
    """Digest of the text."""
    text: str
    keys: tuple[KVKey, ...]
    """Keys of its states, under every model that has encoded it."""
    expires_at: float
    """Unix seconds."""


class ObservedTexts:
    """The recurring texts of one namespace. Every method but `delete` is one transaction."""

    def __init__(self, database: Database, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._database, self._namespace = database, namespace

    def keep(self, text: ObservedText) -> None:
        """Let a text own its states, beside states that it owns already, until it expires.

        A stored text that ends later keeps its end.
        """
        with self._database.transaction() as session:
            number = namespace_id(session, self._namespace)
            names = {"namespace_id": number, "digest": text.id}
            row = {**names, "text": text.text, "expires_at": text.expires_at}
            insert_new(session, ObservedModuleTable, row)
            self._move_end(session, [text.id], text.expires_at)
            module = session.scalars(select(ObservedModuleTable.id).filter_by(**names)).one()
            states = [{"module_id": module, "key": key} for key in text.keys]
            insert_new(session, ObservedStateTable, states)

    def refresh(self, ids: Sequence[str], expires_at: float) -> None:
        """Move the end of texts that have been read. Texts that end later keep their end."""
        with self._database.transaction() as session:
            self._move_end(session, ids, expires_at)

    def _move_end(self, session: Session, ids: Sequence[str], expires_at: float) -> None:
        earlier = self._own() & (ObservedModuleTable.expires_at < expires_at)
        for chunk in chunks(sorted(ids)):
            chosen = earlier & ObservedModuleTable.digest.in_(chunk)
            session.execute(update(ObservedModuleTable).where(chosen).values(expires_at=expires_at))

    def stored(self) -> list[ObservedText]:
        """Return the texts with states on the disk or in remote storage, the oldest first."""
        table, states = ObservedModuleTable, ObservedStateTable
        kept = select(StateTable.key).where(StateTable.tier.in_(persistent_tiers()))
        rows = (
            select(table.digest, table.text, table.expires_at, states.key)
            .join(states, states.module_id == table.id)
            .where(self._own(), table.expires_at > time.time(), states.key.in_(kept))
            .order_by(table.expires_at, table.id, states.key)
        )
        return [
            ObservedText(digest, text, tuple(row.key for row in group), expires_at)
            for (digest, text, expires_at), group in groupby(
                self._database.fetch(rows), key=lambda row: row[:3]
            )
        ]

    def delete(self, ids: Sequence[str] | None = None) -> list[KVKey]:
        """Delete texts, by default all of the namespace.

        Returns:
            Keys of states without an owner. Their rows are deleted already.
        """
        if ids is None:
            return _delete(self._database, self._own())
        named = ObservedModuleTable.digest.in_
        parts = [_delete(self._database, self._own() & named(part)) for part in chunks(ids)]
        return [key for part in parts for key in part]

    def _own(self) -> ColumnElement[bool]:
        return ObservedModuleTable.namespace_id == namespace_number(self._namespace)


def expire_observed(database: Database) -> list[KVKey]:
    """Delete the expired texts of all namespaces. Returns keys as `expire` does."""
    return expire(database, ObservedModuleTable.expires_at, _delete)


def _delete(database: Database, chosen: ColumnElement[bool]) -> list[KVKey]:
    with database.transaction() as session:
        modules = select(ObservedModuleTable.id).where(chosen)
        states = delete(ObservedStateTable).where(ObservedStateTable.module_id.in_(modules))
        keys = session.scalars(states.returning(ObservedStateTable.key)).all()
        session.execute(delete(ObservedModuleTable).where(chosen))
        return retire(session, keys)
