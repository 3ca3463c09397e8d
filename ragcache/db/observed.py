"""Recurring texts of a namespace that outlive the process, and the states that they own.

Only a folder with `observed_storage="disk"` has any.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, delete, select, true, update

from ragcache.db.database import Database
from ragcache.db.references import retire
from ragcache.db.sql import insert_new, namespace_id, namespace_number, upsert
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
    encodings: Mapping[KVKey, str]
    """Encoding of the states by their keys."""
    expires_at: float
    """Unix seconds."""


class ObservedTexts:
    """The recurring texts of one namespace. Every method is one transaction."""

    def __init__(self, database: Database, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._database, self._namespace = database, namespace

    def keep(self, text: ObservedText) -> None:
        """Let a text own its states until it expires."""
        with self._database.transaction() as session:
            number = namespace_id(session, self._namespace)
            names = {"namespace_id": number, "digest": text.id}
            row = {**names, "text": text.text, "expires_at": text.expires_at}
            upsert(session, ObservedModuleTable, row, ["expires_at"], list(names))
            module = session.scalars(select(ObservedModuleTable.id).filter_by(**names)).one()
            states = [
                {"module_id": module, "key": key, "encoding": encoding}
                for key, encoding in text.encodings.items()
            ]
            insert_new(session, ObservedStateTable, states)

    def refresh(self, ids: Sequence[str], expires_at: float) -> None:
        """Move the end of texts that have been read."""
        chosen = self._own() & ObservedModuleTable.digest.in_(ids)
        with self._database.transaction() as session:
            session.execute(update(ObservedModuleTable).where(chosen).values(expires_at=expires_at))

    def stored(self) -> list[ObservedText]:
        """Return the texts with states on the disk or in remote storage, the oldest first."""
        table, states = ObservedModuleTable, ObservedStateTable
        kept = select(StateTable.key).where(StateTable.tier.in_(persistent_tiers()))
        rows = (
            select(table.digest, table.text, table.expires_at, states.key, states.encoding)
            .join(states, states.module_id == table.id)
            .where(self._own(), table.expires_at > time.time(), states.key.in_(kept))
            .order_by(table.expires_at, table.id, states.key)
        )
        found: dict[str, ObservedText] = {}
        encodings: defaultdict[str, dict[KVKey, str]] = defaultdict(dict)
        for digest, text, expires_at, key, encoding in self._database.fetch(rows):
            encodings[digest][key] = encoding
            found[digest] = ObservedText(digest, text, encodings[digest], expires_at)
        return [*found.values()]

    def delete(self, ids: Sequence[str] | None = None) -> list[KVKey]:
        """Delete texts, by default all of the namespace.

        Returns:
            Keys of states without an owner. Their rows are deleted already.
        """
        named = true() if ids is None else ObservedModuleTable.digest.in_(ids)
        return _delete(self._database, and_(self._own(), named))

    def _own(self) -> ColumnElement[bool]:
        return ObservedModuleTable.namespace_id == namespace_number(self._namespace)


def expire_observed(database: Database) -> list[KVKey]:
    """Delete the expired texts of all namespaces.

    Returns:
        Keys of states without an owner. Their rows are deleted already.
    """
    ended = ObservedModuleTable.expires_at <= time.time()
    if not database.fetch(select(ObservedModuleTable.id).where(ended).limit(1)):
        return []
    return _delete(database, ended)


def _delete(database: Database, chosen: ColumnElement[bool]) -> list[KVKey]:
    with database.transaction() as session:
        modules = select(ObservedModuleTable.id).where(chosen)
        states = delete(ObservedStateTable).where(ObservedStateTable.module_id.in_(modules))
        keys = session.scalars(states.returning(ObservedStateTable.key)).all()
        session.execute(delete(ObservedModuleTable).where(chosen))
        return retire(session, keys)
