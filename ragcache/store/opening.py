"""Opening a store: ledger and disk are made to agree, whatever the last process left."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from sqlalchemy import func, select

from ragcache.states import FORMAT_VERSION, KVKey
from ragcache.store.database import Database
from ragcache.store.ledger import Ledger
from ragcache.store.ownership import is_unowned, retire
from ragcache.store.rows import StateRow
from ragcache.store.shared import SharedTiers
from ragcache.store.tables import SessionTable, StateTable
from ragcache.store.tiers import DiskTier


def place_of(database: Database, folder: Path) -> str:
    """Which disk this is, for a ledger that several machines share: a name that lies in the folder.
    A SQLite file is beside its only one."""
    if database.engine.dialect.name == "sqlite":
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    name = folder / "place"
    try:
        with name.open("x", encoding="ascii") as file:
            file.write(uuid4().hex)
    except FileExistsError:
        pass
    return name.read_text(encoding="ascii")


@contextmanager
def without_collection() -> Iterator[None]:
    """Python looks for cycles whenever so many objects were made, through all that there are: a
    third of the time that reading 100,000 rows takes, and rows have none."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def reconcile(ledger: Ledger, shared: SharedTiers, rows: Sequence[StateRow]) -> None:
    """Removes states of an earlier format or that nothing needs (rows, then blobs), rows without a
    blob, and blobs without a row that no living process is writing."""
    retired = _retire_leftovers(ledger)
    shared.discard(retired)
    for shelf in shared.shelves:
        if not isinstance(shelf.tier, DiskTier):
            continue  # listing a remote takes its time: `verify` does
        sizes = {row.key: row.nbytes for row in rows if row.tier == shelf.name}
        for key in retired:
            sizes.pop(key, None)
        blobs = shelf.tier.scan(sizes)
        vanished = sorted(sizes.keys() - blobs.keys())
        if vanished:
            shared.expel(shelf, vanished, "corrupt")
        shared.discard(sorted(blobs.keys() - sizes.keys()))
        if _is_alone(ledger):
            shelf.tier.remove_parts(0.0)


def _retire_leftovers(ledger: Ledger) -> list[KVKey]:
    keys = select(StateTable.key).distinct()
    with ledger.database.reading() as session:
        earlier = [*session.scalars(keys.where(StateTable.format != FORMAT_VERSION))]
        unowned = [*session.scalars(keys.where(is_unowned()))]
    if not earlier and not unowned:
        return []
    with ledger.database.transaction() as session:
        return [
            *retire(session, map(KVKey, earlier), even_owned=True),
            *retire(session, map(KVKey, unowned)),
        ]


def _is_alone(ledger: Ledger) -> bool:
    with ledger.database.reading() as session:
        return session.scalar(select(func.count()).select_from(SessionTable)) == 1
