"""Changes of one collection by two processes at once, in PostgreSQL, which locks rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import func, select, text

from ragcache.db import Catalog, Database, catalog, documents
from ragcache.db.jobs import collection_target
from ragcache.db.sessions import end_sessions
from ragcache.db.tables import EncodingTable, JobTable, SessionTable
from tests.ragcache.conftest import make_key
from tests.ragcache.db.test_catalog import document

pytestmark = pytest.mark.slow

Meanwhile = Callable[[object, str, Callable[[], object]], Future[object]]


@pytest.fixture
def database(postgres_ledger: str) -> Iterator[Database]:
    with closing(Database.open(postgres_ledger)) as database:
        yield database


@pytest.fixture
def notes(database: Database) -> Catalog:
    """A collection of documents `a`, `b` and `c`; states of `b` were encoded behind `a`."""
    notes = Catalog(database, "tokenizer", None)
    notes.replace_documents("notes", [document(name, n) for n, name in enumerate("abc")])
    notes.settings.set_priming("notes", None, similar=True)
    a, b, _ = (row.id for row in notes.modules("notes"))
    notes.add_key(b, make_key(7), a)
    return notes


@pytest.fixture
def meanwhile(database: Database, monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    """Run something before the first call of a function, in a thread, until it ends or waits."""

    def waits() -> bool:
        locks = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        with database.reading() as session:
            return bool(session.scalar(text(locks)))

    def run_before(owner: object, name: str, other: Callable[[], object]) -> Future[object]:
        done, original = Future[object](), getattr(owner, name)

        def run() -> None:
            try:
                done.set_result(other())
            except BaseException as error:
                done.set_exception(error)

        def patched(*given: Any) -> Any:
            monkeypatch.setattr(owner, name, original)
            threading.Thread(target=run).start()
            while not done.done() and not waits():
                time.sleep(0.01)
            return original(*given)

        monkeypatch.setattr(owner, name, patched)
        return done

    return run_before


def recorded(database: Database) -> int:
    """Return the number of states that were encoded behind any module."""
    behind = select(func.count()).where(EncodingTable.behind_id.is_not(None))
    with database.reading() as session:
        return session.scalars(behind).one()


@pytest.mark.parametrize("name", ["modules_of", "delete_scaffolds"])
def test_a_collection_is_deleted_and_ingested_at_once(
    notes: Catalog, meanwhile: Meanwhile, name: str
) -> None:
    ingested = meanwhile(
        documents, name, lambda: notes.replace_documents("notes", [document("d", 9)])
    )
    assert notes.delete_collection("notes")[0] == 3
    ingested.result(10)
    assert list(notes.documents("notes")) == ["d"]


@pytest.mark.parametrize("name", ["delete_rows", "retire"])
def test_documents_go_while_a_dead_session_ends(
    database: Database, notes: Catalog, meanwhile: Meanwhile, name: str
) -> None:
    """Its job would store documents of the same collection."""
    target = collection_target("notes")
    with database.transaction() as session:
        session.add(SessionTable(id="dead", machine="m", pid=1, started="", heartbeat=0.0))
        facts = {"namespace": notes.namespace, "created_at": 0.0, "modules": 1}
        session.add(JobTable(target=target, session="dead", status="running", **facts))

    def end() -> None:
        with database.transaction() as session:
            end_sessions(session, ["dead"])

    ended = meanwhile(catalog, name, end)
    notes.delete_documents("notes", ["a"])
    ended.result(10)
    assert recorded(database) == 0


@pytest.mark.parametrize("name", ["states_behind", "delete_scaffolds"])
def test_states_behind_a_leaving_module_have_no_owner(
    database: Database, notes: Catalog, meanwhile: Meanwhile, name: str
) -> None:
    a, _, c = (row.id for row in notes.modules("notes"))
    added = meanwhile(documents, name, lambda: notes.add_key(c, make_key(8), a))
    notes.delete_documents("notes", ["a"])
    added.result(10)
    assert recorded(database) == 0


@pytest.mark.parametrize("similar", [False, True])
def test_writes_for_a_leaving_module_are_ignored(
    notes: Catalog, meanwhile: Meanwhile, similar: bool
) -> None:
    notes.settings.set_priming("notes", None, similar=similar)
    a = notes.modules("notes")[0].id
    added = meanwhile(catalog, "retire", lambda: notes.add_key(a, make_key(9)))
    notes.delete_documents("notes", ["a"])
    added.result(10)
    assert make_key(9) not in notes.keys("notes")


def test_new_documents_let_others_record_states(notes: Catalog, meanwhile: Meanwhile) -> None:
    c, order = notes.modules("notes")[2].id, list[str]()

    def add() -> None:
        notes.add_key(c, make_key(8))
        order.append("added")

    added = meanwhile(catalog, "insert_rows", add)
    notes.replace_documents("notes", [document("d", 4)])
    order.append("stored")
    added.result(10)
    assert order == ["added", "stored"]
