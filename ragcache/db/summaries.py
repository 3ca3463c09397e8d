"""Summaries of modules: the figures of their states, by which long lists are sorted.

A module's states have a row for each encoding and tier, so that a sorted list would join and group
every row of the ledger. `module_summaries` has one narrow row for each module instead, written with
the module and updated by `Ledger.flush`.

Each update computes the figures anew from the states, so that no update can add to an error, and
updates lost with a process are made up for by the next use of the states. In PostgreSQL, the row of
the clock serializes the updates: a caller of `sum_up` holds it.

A transaction that stores or renames documents need not hold the clock, and `sum_up` neither sees
nor waits for its rows. `Catalog` notes the keys of the documents after the commit, so that the next
`Ledger.flush` computes their figures again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import bindparam, case, func, insert, literal, select, update
from sqlalchemy.orm import Session

from ragcache.db.sql import chunks
from ragcache.db.tables import (
    Base,
    ClockTable,
    EncodingTable,
    ModuleSummaryTable,
    ModuleTable,
    StateTable,
)
from ragcache.states import KVKey
from ragcache.tiers import TIERS

TIER_BITS = {name: 1 << number for number, name in enumerate(TIERS)}
"""A bit for each tier. Raise the revision of the ledger if the order of `TIERS` changes."""

_FIGURES: dict[str, Any] = {
    "held": func.max(case((StateTable.key.is_(None), 0), else_=1)),
    "nbytes": func.coalesce(func.max(StateTable.nbytes), 0),
    "hits": func.coalesce(func.max(StateTable.hits), 0),
    "used_at": func.coalesce(func.max(StateTable.used_at), 0.0),
    "tiers": func.sum(case(TIER_BITS, value=StateTable.tier, else_=0).distinct()),
    "pinned": func.max(case((StateTable.pinned, 1), else_=0)),
}

_OWNERS = (
    select(ModuleSummaryTable.module_id)
    .where(
        ModuleSummaryTable.module_id.in_(
            select(EncodingTable.module_id).where(
                EncodingTable.key.in_(bindparam("keys", expanding=True))
            )
        )
    )
    .with_for_update(skip_locked=True)
)
_SUMS = (
    select(EncodingTable.module_id, *(sums.label(name) for name, sums in _FIGURES.items()))
    .outerjoin(StateTable, StateTable.key == EncodingTable.key)
    .where(EncodingTable.module_id.in_(bindparam("modules", expanding=True)))
    .group_by(EncodingTable.module_id)
    .subquery()
)
_SUM_UP = (
    update(Base.metadata.tables[ModuleSummaryTable.__tablename__])
    .where(ModuleSummaryTable.module_id == _SUMS.c.module_id)
    .values({name: _SUMS.c[name] for name in _FIGURES})
)
"""The statements of `sum_up`, built once."""


def insert_summaries(session: Session, collection: int, document: int) -> None:
    """Write the summaries of a new document's modules, whose states may exist already."""
    placed = (literal(document), literal(collection))
    rows = (
        select(ModuleTable.id, *placed, ModuleTable.name, *_FIGURES.values())
        .outerjoin(EncodingTable, EncodingTable.module_id == ModuleTable.id)
        .outerjoin(StateTable, StateTable.key == EncodingTable.key)
        .where(ModuleTable.document_id == document)
        .group_by(ModuleTable.id)
    )
    columns = ["module_id", "document_id", "collection_id", "name", *_FIGURES]
    session.execute(insert(ModuleSummaryTable).from_select(columns, rows))


def rename_summaries(session: Session, document: int) -> None:
    """Copy the names of a document's modules."""
    named = select(ModuleTable.name).where(ModuleTable.id == ModuleSummaryTable.module_id)
    own = update(ModuleSummaryTable).where(ModuleSummaryTable.document_id == document)
    session.execute(own.values(name=named.scalar_subquery()))


def lock_summaries(session: Session) -> None:
    """Wait for other updates of summaries, and keep them waiting until the transaction ends."""
    session.execute(select(ClockTable.tick).with_for_update())


def sum_up(session: Session, keys: Iterable[KVKey]) -> None:
    """Compute the summaries of the modules that have states of these keys.

    The caller holds the lock of `lock_summaries`. A row that another transaction locks is skipped:
    its module is being deleted or renamed.
    """
    for chunk in chunks(sorted(set(keys))):
        for modules in chunks(session.scalars(_OWNERS, {"keys": chunk})):
            session.execute(_SUM_UP, {"modules": modules})
