"""Verify a store: every row and blob, every owner, and every vector.

The result is a list of `Disagreement`s. `repair` fixes most of them. Wrong states are never served
in the meantime, because every read verifies its blob.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from sqlalchemy import func, select

from ragcache.db.references import is_unowned, retire
from ragcache.db.sql import from_modules
from ragcache.db.state_rows import StateRow
from ragcache.db.tables import (
    CollectionTable,
    DocumentTable,
    EncodingTable,
    JobStateTable,
    JobTable,
    ModuleTable,
    StateTable,
    VectorTable,
)
from ragcache.errors import RemoteUnavailable, StateCorrupt, StateMissing, StoreUnreadable
from ragcache.states import KVKey
from ragcache.store.memory_tiers import TierIndex
from ragcache.store.store import KVStore
from ragcache.tiers import persistent_tiers

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Two records that differ, or one wrong record."""

    kind: str
    """One of:

    * `corrupt`: a blob fails its checksum
    * `missing`: a row has no blob
    * `orphan`: a blob has no row
    * `size`: a row records more bytes than the blob occupies
    * `unowned`: states have no owner
    * `vector`: embeddings of one collection differ in length
    * `module`: a document has no modules, or a module has no states
    * `unreadable`: a tier cannot be read now
    """
    subject: str
    """Tier and key, collection, or document."""
    detail: str
    repaired: bool = False
    """Whether `repair` fixed it."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification."""

    states: int
    """Number of verified states."""
    modules: int
    """Number of modules."""
    found: tuple[Disagreement, ...]
    interrupted: dict[str, int]
    """Number of states kept for each interrupted ingestion, by target. Not a disagreement: the next
    ingestion of the target uses them.
    """

    @property
    def clean(self) -> bool:
        """Whether all disagreements are repaired."""
        return all(each.repaired for each in self.found)


def verify(
    store: KVStore, *, repair: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Read every blob of every persistent tier, and compare all records.

    States that other processes are writing are skipped.

    Args:
        store: Store to verify, ideally from `KVStore.inspect`.
        repair: Remove wrong rows and blobs, whose states are encoded again on demand, and forget
            interrupted ingestions.
        progress: Called with the number of verified blobs and of all blobs of a tier.
    """
    if repair:
        _forget_interrupted(store)
    found, total = list(_owners(store, repair)), 0
    for index in store.persistent.indexes:
        try:
            rows = {row.key: row for row in store.ledger.load() if row.tier == index.name}
            total += len(rows)
            found += _blobs(store, index, rows, repair, progress)
        except RemoteUnavailable as error:
            found.append(Disagreement("unreadable", index.name, str(error)))
    found += _index(store)
    with store.ledger.database.reading() as session:
        modules = session.scalar(select(func.count()).select_from(ModuleTable)) or 0
    return VerifyReport(total, modules, tuple(found), _interrupted(store))


def _blobs(
    store: KVStore,
    index: TierIndex,
    rows: dict[KVKey, StateRow],
    repair: bool,
    progress: Progress | None,
) -> Iterator[Disagreement]:
    blobs = set(index.tier.keys())
    for done, (key, row) in enumerate(sorted(rows.items())):
        fault = _fault(index, key, row.nbytes)
        if fault is not None and store.ledger.find([key]):  # no other process has just removed it
            kind, detail = fault
            remove = repair and kind != "unreadable"
            gone = store.persistent.evict(index, [key], "corrupt") if remove else []
            yield Disagreement(kind, f"{index.name} {key}", detail, bool(gone))
        if progress is not None:
            progress(done + 1, len(rows))
    for key in sorted(blobs - rows.keys()):
        if store.persistent.is_orphan(index, key, remove=repair):
            yield Disagreement("orphan", f"{index.name} {key}", "a blob without a row", repair)


def _fault(index: TierIndex, key: KVKey, nbytes: int) -> tuple[str, str] | None:
    try:
        states = index.tier.get(key)
    except StateMissing:
        return "missing", "a row without a blob"
    except StateCorrupt as error:
        return "corrupt", str(error)
    except StoreUnreadable as error:
        return "unreadable", str(error)
    most = index.tier.size_of(states)
    if not 0 < nbytes <= most:
        return "size", f"the row records {nbytes:,} bytes, the blob takes at most {most:,}"
    return None


def _owners(store: KVStore, repair: bool) -> Iterator[Disagreement]:
    statement = select(StateTable.key, StateTable.tier).order_by(StateTable.key, StateTable.tier)
    lasting = StateTable.tier.in_(persistent_tiers())
    with store.ledger.database.reading() as session:
        unowned = list(session.execute(statement.where(lasting, is_unowned())))
    if repair and unowned:
        with store.ledger.database.transaction() as session:
            gone = retire(session, [key for key, _ in unowned])
        store.discard(gone)
    for key, tier in unowned:
        detail = "neither a module, a schema nor an ingestion needs these states"
        yield Disagreement("unowned", f"{tier} {key}", detail, repair)


def _index(store: KVStore) -> Iterator[Disagreement]:
    """Find vectors that do not fit into one index, and documents that no question can find."""
    with store.ledger.database.reading() as session:
        size, group = func.length(VectorTable.vector), (CollectionTable.name, VectorTable.embedder)
        columns = from_modules(*group, func.min(size), func.max(size)).join(VectorTable)
        lengths = list(session.execute(columns.group_by(CollectionTable.id, *group)))
        empty = list(
            session.execute(
                select(CollectionTable.name, DocumentTable.source_id)
                .join(CollectionTable, CollectionTable.id == DocumentTable.collection_id)
                .outerjoin(ModuleTable, ModuleTable.document_id == DocumentTable.id)
                .outerjoin(EncodingTable, EncodingTable.module_id == ModuleTable.id)
                .where(EncodingTable.key.is_(None))
            )
        )
    width = np.dtype("<f4").itemsize
    for name, embedder, least, most in lengths:
        if least != most or most % width:
            detail = f"vectors of {embedder} have {least // width} to {most // width} numbers"
            yield Disagreement("vector", name, f"{detail}; ingest the collection again")
    for name, document in empty:
        detail = "the document has a module without states, or no module; ingest it again"
        yield Disagreement("module", f"{name} {document}", detail)


def _interrupted(store: KVStore) -> dict[str, int]:
    counts = Counter[str]()
    for job in store.jobs.listed():
        if job.states and job.status != "running":
            counts[job.target] += job.states
    return dict(counts)


def _forget_interrupted(store: KVStore) -> None:
    """Retire the states of interrupted ingestions that no module needs."""
    ended = select(JobTable.id).where(JobTable.status != "running")
    with store.ledger.database.transaction() as session:
        rows = list(session.scalars(select(JobStateTable).where(JobStateTable.job_id.in_(ended))))
        for row in rows:
            session.delete(row)
        session.flush()
        gone = retire(session, [row.key for row in rows])
    store.discard(gone)
