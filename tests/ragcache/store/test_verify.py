"""Verifying: what disagrees is named, and repaired on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import update

from ragcache.db import Catalog, Database, NewDocument, NewModule, RunningJob
from ragcache.db.tables import StateTable, VectorTable
from ragcache.store import KVStore, LeaseRequest
from ragcache.store.verify import verify
from tests.ragcache.conftest import full_lease, make_key, make_states


@pytest.fixture
def store(tmp_path: Path, database: Database) -> Iterator[KVStore]:
    opened = KVStore.open(tmp_path, database, 1 << 20)
    yield opened
    opened.close()


@pytest.fixture
def catalog(store: KVStore) -> Catalog:
    """Two documents of two modules with their states."""
    catalog = Catalog(store.ledger.database, "tokenizer", "embedder")
    documents = []
    with store.jobs.running("collection notes", 4) as job:
        for first in (1, 3):
            numbers = (first, first + 1)
            store.jobs.expect(job, map(make_key, numbers))
            for number in numbers:
                store.put_states(make_key(number), make_states(number))
            modules = [NewModule(f"m{n}", "text", [n], make_key(n), np.ones(2)) for n in numbers]
            documents.append(NewDocument(f"d{first}", "", "digest", modules))
        assert (
            catalog.replace_documents("notes", documents, job=RunningJob(job, store.jobs.session))
            == []
        )
    return catalog


def change(store: KVStore, number: int, changed: Callable[[bytes], bytes]) -> None:
    path = store.disk.path(make_key(number))
    path.write_bytes(changed(path.read_bytes()))


def set_size(store: KVStore, number: int) -> None:
    with store.ledger.database.transaction() as session:
        row = update(StateTable).where(StateTable.key == make_key(number))
        session.execute(row.values(nbytes=10**9))


FAULTS: dict[str, tuple[Callable[[KVStore], object], str, int, int]] = {
    "flipped bit": (
        lambda s: change(s, 2, lambda b: b[:-5] + bytes([b[-5] ^ 4]) + b[-4:]),
        "corrupt",
        2,
        3,
    ),
    "truncated": (lambda s: change(s, 2, lambda b: b[:-8]), "corrupt", 2, 3),
    "of other states": (
        lambda s: change(s, 1, lambda _: s.disk.path(make_key(2)).read_bytes()),
        "corrupt",
        1,
        3,
    ),
    "vanished": (lambda s: s.disk.path(make_key(3)).unlink(), "missing", 3, 3),
    "without a row": (lambda s: s.disk.put(make_key(9), make_states(9)), "orphan", 9, 4),
    "needed by nothing": (lambda s: s.put_states(make_key(9), make_states(9)), "unowned", 9, 4),
    "of another size": (lambda s: set_size(s, 4), "size", 4, 3),
}
"""The fault, the kind and the key of the disagreement, and the states that are left."""


@pytest.mark.usefixtures("catalog")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_repaired_and_not_found_again(store: KVStore, fault: str) -> None:
    """The rest of the store is left alone."""
    damage, kind, number, left = FAULTS[fault]
    damage(store)
    expected = [(kind, f"disk {make_key(number)}")]
    for repair in (False, False, True):
        report = verify(store, repair=repair)
        found = [(each.kind, each.subject) for each in report.found]
        assert (found, report.clean) == (expected, repair)
    again = verify(store)
    assert (again.found, again.states) == ((), left)
    assert set(store.disk.keys()) == store.ledger.keys("disk")


def test_a_store_that_is_right_is_clean(store: KVStore, catalog: Catalog) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(store, progress=lambda *at: seen.append(at))
    assert (report.clean, report.states, report.modules, report.found) == (True, 4, 4, ())
    assert seen == [(n, 4) for n in range(1, 5)]


def test_what_another_process_is_writing_is_passed_over(
    store: KVStore, catalog: Catalog, tmp_path: Path, where: Path | str
) -> None:
    elsewhere = Database.open(where)
    other = KVStore.inspect(tmp_path, elsewhere)
    store.ledger.locks.acquire([make_key(9)])
    store.disk.put(make_key(9), make_states(9))
    assert verify(other, repair=True).found == ()
    assert make_key(9) in set(store.disk.keys())
    other.close()
    elsewhere.close()


def test_an_interrupted_ingestion_keeps_its_states_for_repair(
    store: KVStore, catalog: Catalog
) -> None:
    def interrupt() -> None:
        with store.jobs.running("collection plans", 2) as job:
            store.jobs.expect(job, [make_key(1), make_key(8)])
            with full_lease(
                store, [make_key(8)], lambda _: [make_states(8)], LeaseRequest("ingest")
            ):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    report = verify(store)
    assert (report.clean, report.found) == (True, ())
    assert report.interrupted == {"collection plans": 2}
    repaired = verify(store, repair=True)
    assert (repaired.clean, repaired.interrupted) == (True, {})
    assert set(store.disk.keys()) == {make_key(n) for n in (1, 2, 3, 4)}


def test_vectors_of_different_lengths_disagree(store: KVStore, catalog: Catalog) -> None:
    with store.ledger.database.transaction() as session:
        first = update(VectorTable).where(VectorTable.module_id == 1)
        session.execute(first.values(vector=np.ones(3, "<f4").tobytes()))
    [found] = verify(store).found
    assert (found.kind, found.subject) == ("vector", "notes")
    assert "vectors of embedder have 2 to 3 numbers; ingest the collection again" in found.detail


def test_a_document_that_no_question_finds_is_named(store: KVStore, catalog: Catalog) -> None:
    catalog.replace_documents("notes", [NewDocument("empty", "", "digest", [])])
    [found] = verify(store).found
    assert (found.kind, found.subject) == ("module", "notes empty")
