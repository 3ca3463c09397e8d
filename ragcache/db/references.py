"""Owners of states: modules, schemas, scaffolds, conversations, recurring texts and jobs.

States that lose their last owner are retired in the same transaction.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set

from sqlalchemy import ColumnElement, and_, delete, exists, func, insert, literal, select
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from ragcache.db.database import Database
from ragcache.db.sql import chunks, clock, lock_rows, rows_of
from ragcache.db.tables import (
    ConversationStateTable,
    EncodingTable,
    EvictionTable,
    JobStateTable,
    ObservedStateTable,
    RetirementTable,
    ScaffoldTable,
    SchemaStateTable,
    StateTable,
)
from ragcache.states import KVKey
from ragcache.tiers import memory_tiers

RETIREMENTS_KEPT = 3600.0  # seconds
ROOT_MODE = "root"
"""Mode of preambles, which belong to the store: other states are encoded after them."""
CONVERSATION_MODE = "conversation"
"""Mode of conversations' own tokens. A folder's `conversation_storage` says where they are kept."""

# Jobs come first: states that move from a job to a module during the reads are then not missed.
OWNERS = (
    JobStateTable,
    EncodingTable,
    SchemaStateTable,
    ScaffoldTable,
    ConversationStateTable,
    ObservedStateTable,
)


def is_unowned() -> ColumnElement[bool]:
    """Return the condition that rows of `StateTable` have no owner, nor belong to the store."""
    owned = [exists().where(table.key == StateTable.key) for table in OWNERS]
    return and_(StateTable.mode != ROOT_MODE, *(~owner for owner in owned))


def retire(session: Session, keys: Iterable[KVKey], roots: Set[KVKey] = frozenset()) -> list[KVKey]:
    """Delete the rows of keys without an owner, and return these keys.

    Rows of memory tiers stay: each process removes its own copies, in memory and on its disk, when
    it reads of the retirement. `KVStore.discard` deletes the blobs after the transaction.

    Args:
        session: Transaction.
        keys: The keys.
        roots: Keys of preambles that nobody needs any more. All of their rows go, since a row of a
            preamble makes its states the store's own.
    """
    for chunk in chunks(sorted(roots)):
        session.execute(delete(StateTable).where(StateTable.key.in_(chunk)))
    retired: list[KVKey] = []
    for chunk in chunks(sorted({*keys, *roots})):
        owned = _owned(session, chunk)
        ended = [key for key in chunk if key not in owned]
        lasting = StateTable.key.in_(ended) & StateTable.tier.not_in(memory_tiers())
        lock_rows(session, StateTable, lasting)
        now = time.time()
        for row in session.scalars(select(StateTable).where(lasting)):
            left = {"key": row.key, "tier": row.tier, "nbytes": row.nbytes, "at": now}
            session.add(EvictionTable(reason="superseded", **left))
        session.execute(delete(StateTable).where(lasting))
        retired += ended
    _announce(session, retired)
    return retired


def expire(
    database: Database,
    expires_at: InstrumentedAttribute[float],
    delete_owners: Callable[[Database, ColumnElement[bool]], list[KVKey]],
) -> list[KVKey]:
    """Delete the expired owners of states in all namespaces, of one kind.

    Args:
        database: The ledger.
        expires_at: Column of the owners' ends, in Unix seconds.
        delete_owners: Deletes the owners for which a condition holds, and returns keys as this
            function does.

    Returns:
        Keys of states without an owner. Their rows are deleted already.
    """
    ended = expires_at <= time.time()
    if not database.fetch(select(expires_at).where(ended).limit(1)):
        return []
    return delete_owners(database, ended)


def _announce(session: Session, keys: Sequence[KVKey]) -> None:
    """Announce retired keys to all processes.

    Announcements are kept for an hour: a process that was silent for longer searches the ledger.
    """
    if keys:
        now = session.scalars(select(clock(session))).one()
        rows = [{"key": key, "at": now} for key in keys]
        session.execute(insert(RetirementTable), rows)
        old = select(RetirementTable.id).where(RetirementTable.at < now - RETIREMENTS_KEPT)
        free = old.with_for_update(skip_locked=True)  # another session may delete them, too
        session.execute(delete(RetirementTable).where(RetirementTable.id.in_(free)))


def freed_states(
    session: Session, keys: Iterable[KVKey], modules: Set[int], scaffolds: Set[int]
) -> tuple[int, dict[str, int]]:
    """Count the states that only these modules and scaffolds own.

    Returns:
        The number of keys with such states, and their bytes by tier, on all machines.
    """
    number, sizes = 0, Counter[str]()
    for chunk in chunks(sorted(set(keys))):
        kept = _owned(session, chunk, modules, scaffolds)
        gone = StateTable.key.in_([key for key in chunk if key not in kept])
        number += session.scalar(select(func.count(StateTable.key.distinct())).where(gone)) or 0
        columns = select(StateTable.tier, func.sum(StateTable.nbytes)).where(gone)
        for tier, nbytes in session.execute(columns.group_by(StateTable.tier)):
            sizes[tier] += int(nbytes)
    return number, dict(sizes)


def owned_among(session: Session, keys: Iterable[KVKey]) -> set[KVKey]:
    """Return the keys that a module, schema, scaffold or job owns, or the store itself."""
    return {key for chunk in chunks(keys) for key in _owned(session, chunk)}


def needless_roots(session: Session, keys: Iterable[KVKey]) -> frozenset[KVKey]:
    """Return the keys of preambles among the keys that no states follow any more."""
    followers = aliased(StateTable)
    followed = exists().where(followers.root == StateTable.key)
    roots = select(StateTable.key).where(StateTable.mode == ROOT_MODE, ~followed)
    found = rows_of(session, roots, StateTable.key, list(keys))
    return frozenset(key for (key,) in found)


def _owned(
    session: Session,
    keys: list[KVKey],
    modules: Set[int] = frozenset(),
    scaffolds: Set[int] = frozenset(),
) -> set[KVKey]:
    """Return the keys that have an owner besides these modules and scaffolds.

    A module does not own states that go with another one of the modules (`behind_id`).
    """
    owned: set[KVKey] = set()
    leaving = {
        EncodingTable: (EncodingTable.module_id, EncodingTable.behind_id, modules),
        ScaffoldTable: (ScaffoldTable.id, literal(-1), scaffolds),
    }
    for table in OWNERS:
        *columns, gone = leaving.get(table, (literal(-1), literal(-1), frozenset()))
        rows = session.execute(select(table.key, *columns).where(table.key.in_(keys)))
        owned |= {key for key, *numbers in rows if gone.isdisjoint(numbers)}
    roots = (StateTable.mode == ROOT_MODE) & StateTable.key.in_(keys)
    return owned | set(session.scalars(select(StateTable.key).where(roots)))
