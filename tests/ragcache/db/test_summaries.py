"""Summaries of modules: they tell of the states what computing them anew would tell."""

from __future__ import annotations

import math
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select

from ragcache.db import (
    Catalog,
    Database,
    Ledger,
    ModuleFilter,
    MovedDocument,
    NewDocument,
    NewModule,
    documents,
    list_modules,
    module_page,
)
from ragcache.db.ledger import SUM_SECONDS
from ragcache.db.listing import SORTS
from ragcache.db.state_rows import StateMetadata, StateRow
from ragcache.db.summaries import TIER_BITS
from ragcache.db.tables import ModuleSummaryTable, ModuleTable
from tests.ragcache.conftest import make_key, postgres_schema, record_row

MODULES = 12
SHARED = 3  # modules that have the states of another module, too


def row(number: int, tier: str, rng: random.Random) -> StateRow:
    facts = StateMetadata(3, "rooted", make_key(99), "model")
    nbytes = rng.randrange(1, 9)
    return StateRow(make_key(number), tier, nbytes, 0, 0, False, math.inf, "model", facts)


def document(name: str, first: int) -> NewDocument:
    modules = [
        NewModule(f"{name}#{n + 1}", "text", (1,), make_key((first + n) % (MODULES - SHARED)))
        for n in range(3)
    ]
    return NewDocument(name, "", "digest", modules)


def summaries(database: Database) -> dict[int, tuple[Any, ...]]:
    with database.reading() as session:
        rows = session.scalars(select(ModuleSummaryTable))
        return {
            row.module_id: (row.name, row.nbytes, row.hits, row.used_at, row.tiers, row.pinned)
            for row in rows
        }


def expected(database: Database) -> dict[int, tuple[Any, ...]]:
    """The same of the rows of states."""
    return {
        each.id: (
            each.name,
            each.nbytes,
            each.hits,
            each.used_at or 0.0,
            sum(TIER_BITS[tier] for tier in each.tiers),
            int(each.pinned),
        )
        for each in list_modules(database)
    }


@pytest.mark.parametrize("seed", range(3))
def test_summaries_follow_every_change(database: Database, seed: int) -> None:
    rng = random.Random(seed)
    ledger, catalog = Ledger(database), Catalog(database, "tokenizer", None)
    other = Ledger(database)
    for each in (ledger, other):
        each.begin()
    for first in range(0, MODULES, 3):
        catalog.replace_documents("notes", [document(f"d{first}", first)])

    def keys() -> list[Any]:
        return [make_key(n) for n in rng.sample(range(MODULES - SHARED), 3)]

    def encode() -> None:
        modules = catalog.modules("notes")
        catalog.add_key(rng.choice(modules).id, make_key(rng.randrange(MODULES)))

    def move() -> None:
        name = rng.choice(catalog.modules("notes")).document
        to = f"e{rng.randrange(10**6)}"
        catalog.replace_documents("notes", [], moved=[MovedDocument(name, to, "")])

    changes = [
        lambda: record_row(ledger, row(rng.randrange(MODULES), "disk", rng)),
        lambda: ledger.usage.touch(keys(), ledger.advance_clock()),
        lambda: other.usage.touch(keys(), other.advance_clock()),
        lambda: ledger.usage.add_entry(row(rng.randrange(MODULES), "host", rng)),
        lambda: other.usage.add_entry(row(rng.randrange(MODULES), "host", rng)),
        lambda: ledger.usage.remove_entry("host", rng.choice(keys()), 1, "pressure"),
        lambda: ledger.pin(keys(), rng.random() < 0.5),
        lambda: ledger.locks.release(ledger.evict_rows("disk", keys()[:1], "manual")),
        encode,
        move,
        lambda: catalog.replace_documents(
            "notes", [document(f"d{rng.randrange(5)}", rng.randrange(9))]
        ),
    ]
    for _ in range(60):
        rng.choice(changes)()
        if rng.random() < 0.3:
            ledger.flush()
            other.flush()
            assert summaries(database) == expected(database)
    other.end()
    ledger.flush()
    assert summaries(database) == expected(database), "without the memory of the other session"
    assert len(summaries(database)) == len(catalog.modules("notes")) > 0
    catalog.delete_collection("notes")
    assert summaries(database) == {}


def test_summaries_of_a_killed_process_lose_its_memory(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, killed = Ledger(database), Ledger(database)
    for each in (ledger, killed):
        each.begin()
    Catalog(database, "tokenizer", None).replace_documents("notes", [document("d", 0)])
    killed.usage.add_entry(row(0, "host", random.Random(0)))
    killed.flush()
    held = module_page(database, "default", ModuleFilter(tier="host"))
    assert [each.name for each in held.items] == ["d#1"]
    monkeypatch.setattr("ragcache.db.sessions.ProcessIdentity.is_dead", lambda *_: True)
    ledger.sessions.reap_dead()
    assert module_page(database, "default", ModuleFilter(tier="host")).total == 0
    assert summaries(database) == expected(database)


def test_states_in_constant_use_are_summed_up_now_and_then(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, now = Ledger(database), 1000.0
    monkeypatch.setattr("ragcache.db.ledger.time.monotonic", lambda: now)
    ledger.begin()
    Catalog(database, "tokenizer", None).replace_documents("notes", [document("d", 0)])
    record_row(ledger, row(0, "disk", random.Random(0)))
    ledger.flush(lazily=True)

    def hits() -> int:
        ledger.usage.touch([make_key(0)], ledger.advance_clock())
        ledger.flush(lazily=True)
        return max(each[2] for each in summaries(database).values())

    assert [hits(), hits()] == [0, 0]
    now += SUM_SECONDS
    assert hits() == 3
    assert hits() == 3
    ledger.flush()
    assert max(each[2] for each in summaries(database).values()) == 4


def test_the_order_of_long_lists_is_read_from_an_index(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "ledger.sqlite")
    catalog = Catalog(database, "tokenizer", None)
    for first in range(4):
        catalog.replace_documents("notes", [document(f"d{first}", first)])
    asked: list[tuple[str, Any]] = []
    event.listen(database.engine, "before_cursor_execute", lambda *a: asked.append((a[2], a[3])))
    for wanted in (ModuleFilter(), ModuleFilter("notes", pinned=False, search="d")):
        for sort in SORTS:
            for cursor in ("0", "7"):
                module_page(database, "default", wanted, sort, cursor=cursor, limit=2)
    sorted_rows = [each for each in asked if "ORDER BY module_summaries" in each[0]]
    assert len(sorted_rows) == 2 * len(SORTS) * 2
    with database.engine.connect() as connection:
        for statement, values in sorted_rows:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
            assert not any("TEMP B-TREE FOR ORDER" in step[-1] for step in plan), statement
            assert not any(f" {ModuleTable.__tablename__}" in step[-1] for step in plan), plan
    database.close()


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["insert_summaries", "rename_summaries"])
def test_uses_while_documents_change_are_summed_up_after_it(
    changed: str, monkeypatch: pytest.MonkeyPatch, socket_enabled: None
) -> None:
    """A flush skips rows that a transaction locks, and does not see rows that it writes."""
    with postgres_schema() as url, closing(Database.open(url)) as database:
        ledger, other = Ledger(database), Ledger(database)
        ledger.begin()
        other.begin()
        catalog = Catalog(database, "tokenizer", None, note=ledger.usage.note)
        record_row(ledger, row(0, "disk", random.Random(0)))
        catalog.replace_documents("notes", [document("a", 0)])
        ledger.flush()
        original = getattr(documents, changed)

        def flush_meanwhile(*given: Any) -> None:
            original(*given)
            other.usage.touch([make_key(0)], other.advance_clock())
            other.flush()

        monkeypatch.setattr(documents, changed, flush_meanwhile)
        if changed == "insert_summaries":
            catalog.replace_documents("notes", [document("b", 0)])
        else:
            catalog.rename_document("notes", "a", "b")
        ledger.flush()
        assert summaries(database) == expected(database)
        assert max(hits for _, _, hits, *_ in summaries(database).values()) == 1
        other.end()
        ledger.end()


def test_another_original_leaves_the_names_of_modules(database: Database) -> None:
    catalog = Catalog(database, "tokenizer", None)
    catalog.replace_documents("notes", [document("a", 0)])
    changed: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *args: changed.append(args[2]))
    catalog.replace_documents("notes", [], moved=[MovedDocument("a", "a", "file:///a", "digest")])
    assert catalog.documents("notes", ["a"])["a"].original == "digest"
    assert not [each for each in changed if each.startswith("UPDATE module")]


@pytest.mark.slow
@pytest.mark.enable_socket
def test_postgres_reads_long_lists_in_the_order_of_an_index() -> None:
    with postgres_schema() as url, closing(Database.open(url)) as database:
        modules = [NewModule(f"m{n}", "text", (1,), make_key(n)) for n in range(2000)]
        Catalog(database, "tokenizer", None).replace_documents(
            "notes", [NewDocument("d", "", "digest", modules)]
        )
        asked: list[tuple[str, Any]] = []
        event.listen(
            database.engine, "before_cursor_execute", lambda *a: asked.append((a[2], a[3]))
        )
        with database.engine.connect() as connection:  # the server analyzes long tables by itself
            connection.exec_driver_sql("ANALYZE module_summaries")
            connection.commit()
        for sort in SORTS:
            page = module_page(database, "default", ModuleFilter(search="M"), sort, cursor="900")
            assert len(page.items) == 100
        sorted_rows = [each for each in asked if "ORDER BY module_summaries" in each[0]]
        assert len(sorted_rows) == len(SORTS)
        with database.engine.connect() as connection:
            for statement, values in sorted_rows:
                plan = connection.exec_driver_sql(f"EXPLAIN {statement}", values).scalars().all()
                assert not any("Sort" in step for step in plan), "\n".join(plan)
