"""Bytes that callers keep in the ledger under names of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import delete, select

from ragcache.store.database import Database
from ragcache.store.statements import CHUNK, insert_new, namespace_id, upsert
from ragcache.store.tables import DEFAULT_NAMESPACE, NamespaceTable, ValueTable


class Values:
    """The values of one `space` in a namespace. Keys may hold any characters. Every method is one
    transaction: who reads sees all that one `put` wrote, or nothing."""

    def __init__(self, database: Database, space: str, namespace: str = DEFAULT_NAMESPACE) -> None:
        self._database = database
        self._space = space
        self._namespace = namespace

    def get(self, keys: Sequence[str]) -> list[bytes | None]:
        """The value of each key; None where there is none."""
        found: dict[bytes, bytes] = {}
        with self._database.reading() as session:
            for chunk in _portions(keys):
                chosen = self._mine(select(ValueTable.key, ValueTable.value))
                rows = session.execute(chosen.where(ValueTable.key.in_(chunk)))
                found |= {row.key: row.value for row in rows}
        return [found.get(_spelled(key)) for key in keys]

    def put(self, values: Mapping[str, bytes]) -> None:
        """Keeps values, in place of earlier ones of their keys."""
        with self._database.transaction() as session:
            row = {"namespace_id": namespace_id(session, self._namespace), "space": self._space}
            rows = [row | {"key": _spelled(k), "value": v} for k, v in values.items()]
            upsert(session, ValueTable, rows, ("value",))

    def keep(self, key: str, value: bytes) -> bytes:
        """Keeps a value unless its key has one; returns the one that it has then."""
        with self._database.transaction() as session:
            owner = namespace_id(session, self._namespace)
            place = {"namespace_id": owner, "space": self._space, "key": _spelled(key)}
            insert_new(session, ValueTable, place | {"value": value})
            kept = select(ValueTable.value).filter_by(**place)
            return session.scalars(kept).one()

    def delete(self, keys: Sequence[str]) -> None:
        """Forgets values; keys that are unknown do no harm."""
        with self._database.transaction() as session:
            number = namespace_id(session, self._namespace)
            mine = (ValueTable.namespace_id == number) & (ValueTable.space == self._space)
            for chunk in _portions(keys):
                session.execute(delete(ValueTable).where(mine, ValueTable.key.in_(chunk)))

    def keys(self, prefix: str = "") -> Iterator[str]:
        """The keys that begin so, in the order of their code points. Read in portions: nothing is
        held open meanwhile, and what is written behind the last portion is not seen."""
        start, last = _spelled(prefix), None
        while True:
            chosen = self._mine(select(ValueTable.key)).where(ValueTable.key >= (last or start))
            if last is not None:
                chosen = chosen.where(ValueTable.key > last)
            with self._database.reading() as session:
                found = list(session.scalars(chosen.order_by(ValueTable.key).limit(CHUNK)))
            for key in found:
                if not key.startswith(start):
                    return
                yield key.decode("utf-8", "surrogatepass")
            if len(found) < CHUNK:
                return
            last = found[-1]

    def _mine(self, statement: Any) -> Any:
        joined = statement.join(NamespaceTable, ValueTable.namespace_id == NamespaceTable.id)
        return joined.where(NamespaceTable.name == self._namespace, ValueTable.space == self._space)


def _portions(keys: Sequence[str]) -> Iterator[list[bytes]]:
    """Keys as they are stored, each once, as many as a statement takes."""
    spelled = list(dict.fromkeys(map(_spelled, keys)))
    return (spelled[i : i + CHUNK] for i in range(0, len(spelled), CHUNK))


def _spelled(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")
