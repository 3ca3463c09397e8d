"""Who needs which states. What nobody needs any more is retired in the transaction that ends it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from sqlalchemy import ColumnElement, delete, exists, select
from sqlalchemy.orm import Session

from ragcache.db.sql import chunks
from ragcache.db.tables import (
    EncodingTable,
    EvictionTable,
    JobStateTable,
    ScaffoldTable,
    SchemaStateTable,
    StateTable,
)
from ragcache.states import KVKey

ROOT_MODE = "root"
"""The mode of preambles, which belong to the store: other states stand on them."""

# Jobs come first: what one hands over to a module while the tables are read is seen in either.
_OWNERS = (JobStateTable, EncodingTable, SchemaStateTable, ScaffoldTable)
_MEMORY = ("device", "host")


def is_unowned() -> ColumnElement[bool]:
    """Of rows of `StateTable`: neither a module, a schema, a scaffold, a job nor the store itself
    needs them."""
    owned = [exists().where(table.key == StateTable.key) for table in _OWNERS]
    condition: ColumnElement[bool] = StateTable.mode != ROOT_MODE
    for owner in owned:
        condition &= ~owner
    return condition


def retire(session: Session, keys: Iterable[KVKey], *, even_owned: bool = False) -> list[KVKey]:
    """Deletes the rows of those of the keys that nobody needs any more, and returns these keys;
    `even_owned` ones too, which are encoded again when they are needed.

    Rows of memory tiers stay: each process forgets its own. Blobs are deleted after the transaction
    has ended, by `KVStore.discard`.
    """
    retired: list[KVKey] = []
    for chunk in chunks(dict.fromkeys(keys)):
        owned = set() if even_owned else _owned(session, chunk) | _roots(session, chunk)
        ended = [key for key in chunk if key not in owned]
        lasting = StateTable.key.in_(ended) & StateTable.tier.not_in(_MEMORY)
        now = time.time()
        for row in session.scalars(select(StateTable).where(lasting)):
            session.add(
                EvictionTable(
                    key=row.key, tier=row.tier, reason="superseded", nbytes=row.nbytes, at=now
                )
            )
        session.execute(delete(StateTable).where(lasting))
        retired += map(KVKey, ended)
    return retired


def owned_among(session: Session, keys: Iterable[KVKey]) -> set[KVKey]:
    """Those of the keys that a module, schema, scaffold or job needs, or the store itself."""
    owned: set[str] = set()
    for chunk in chunks(keys):
        owned |= _owned(session, chunk) | _roots(session, chunk)
    return {KVKey(key) for key in owned}


def _owned(session: Session, keys: list[str]) -> set[str]:
    owned: set[str] = set()
    for table in _OWNERS:
        owned |= set(session.scalars(select(table.key).where(table.key.in_(keys))))
    return owned


def _roots(session: Session, keys: list[str]) -> set[str]:
    roots = (StateTable.mode == ROOT_MODE) & StateTable.key.in_(keys)
    return set(session.scalars(select(StateTable.key).where(roots)))
