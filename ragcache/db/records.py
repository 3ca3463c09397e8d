"""Records of an indexing: which keys it has written and when, to skip or clean up later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, select, text

from ragcache.db.database import Database
from ragcache.db.sql import chunks, namespace_id, rows_of, upsert
from ragcache.db.tables import DEFAULT_NAMESPACE, NamespaceTable, RecordTable
from ragcache.errors import ConfigurationError, LedgerUnavailable


class Records:
    """The records of one indexing in a namespace. Every method is one transaction."""

    def __init__(self, database: Database, space: str, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._database, self._space, self._namespace = database, space, namespace

    def now(self) -> float:
        """Return Unix seconds by the clock that all writers of the ledger share."""
        if self._database.engine.dialect.name != "postgresql":
            return time.time()
        with self._database.reading() as session:
            return float(session.scalar(text("SELECT extract(epoch FROM clock_timestamp())")) or 0)

    def update(
        self,
        keys: Sequence[str],
        group_ids: Sequence[str | None] | None = None,
        time_at_least: float | None = None,
    ) -> None:
        """Record that keys were written now, with their groups.

        Raises:
            ConfigurationError: There are not as many groups as keys.
            LedgerUnavailable: The clock was set back: its time is before `time_at_least`.
        """
        groups = group_ids if group_ids is not None else [None] * len(keys)
        if len(groups) != len(keys):
            raise ConfigurationError(f"{len(keys)} keys have {len(groups)} group_ids")
        now = self.now()
        if time_at_least is not None and now < time_at_least:
            raise LedgerUnavailable(
                f"the ledger's clock says {now}, before {time_at_least}; it was set back, and what "
                "is outdated is not known: index again"
            )
        last = dict(zip(keys, groups, strict=True))
        with self._database.transaction() as session:
            row = {"namespace_id": namespace_id(session, self._namespace), "space": self._space}
            rows = [row | {"key": k, "group_id": g, "updated_at": now} for k, g in last.items()]
            upsert(session, RecordTable, rows, ("group_id", "updated_at"))

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether it has a record."""
        with self._database.reading() as session:
            mine = self._mine(select(RecordTable.key))
            found = {key for (key,) in rows_of(session, mine, RecordTable.key, keys)}
        return [key in found for key in keys]

    def keys(
        self,
        *,
        before: float | None = None,
        after: float | None = None,
        group_ids: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> list[str]:
        """Return keys by the time of their last writing, the oldest first.

        Args:
            before: Only keys written before this time, in Unix seconds.
            after: Only keys written after this time.
            group_ids: Only keys of these groups.
            limit: Maximum number of keys.
        """
        chosen = self._mine(select(RecordTable.key))
        if before is not None:
            chosen = chosen.where(RecordTable.updated_at < before)
        if after is not None:
            chosen = chosen.where(RecordTable.updated_at > after)
        chosen = chosen.order_by(RecordTable.updated_at, RecordTable.key)
        found: list[str] = []
        with self._database.reading() as session:
            if group_ids is None:
                return list(session.scalars(chosen.limit(limit)))
            for chunk in chunks(dict.fromkeys(group_ids)):
                left = None if limit is None else limit - len(found)
                found += session.scalars(chosen.where(RecordTable.group_id.in_(chunk)).limit(left))
        return found

    def delete(self, keys: Sequence[str]) -> None:
        """Delete the records of keys. Unknown keys are ignored."""
        with self._database.transaction() as session:
            number = namespace_id(session, self._namespace)
            mine = (RecordTable.namespace_id == number) & (RecordTable.space == self._space)
            for chunk in chunks(keys):
                session.execute(delete(RecordTable).where(mine, RecordTable.key.in_(chunk)))

    def _mine(self, statement: Any) -> Any:
        joined = statement.join(NamespaceTable, RecordTable.namespace_id == NamespaceTable.id)
        mine = (NamespaceTable.name == self._namespace) & (RecordTable.space == self._space)
        return joined.where(mine)
