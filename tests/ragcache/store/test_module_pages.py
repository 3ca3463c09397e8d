"""Pages of modules: every order and filter gives what sorting all of them would."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from ragcache.errors import InvalidRequest, UnknownCollection, UnknownModule
from ragcache.states import KVKey
from ragcache.store import (
    Catalogue,
    Database,
    ModuleFilter,
    ModuleListing,
    NewDocument,
    NewModule,
    list_modules,
    module_detail,
    module_filters,
    module_page,
)
from ragcache.store.module_pages import SORTS
from ragcache.store.tables import StateTable
from tests.ragcache.store.library import key_of

COLLECTIONS = {"notes": 3, "plans": 2}
MATCHES: dict[str, tuple[ModuleFilter, Callable[[ModuleListing], bool]]] = {
    "all": (ModuleFilter(), lambda _: True),
    "collection": (ModuleFilter("plans"), lambda row: row.collection == "plans"),
    "document": (ModuleFilter(document="b_1"), lambda row: row.document == "b_1"),
    "tier": (ModuleFilter(tier="host"), lambda row: "host" in row.tiers),
    "pinned": (ModuleFilter(pinned=True), lambda row: row.pinned),
    "not pinned": (ModuleFilter(pinned=False), lambda row: not row.pinned),
    "search": (ModuleFilter(search="B_"), lambda row: "b_" in row.name),
    "a sign": (ModuleFilter(search="%"), lambda row: "%" in row.name),
    "nothing": (ModuleFilter(search="\\"), lambda _: False),
    "several": (
        ModuleFilter("notes", tier="disk", pinned=False, search="#2"),
        lambda row: row.collection == "notes" and "disk" in row.tiers and not row.pinned
        and "#2" in row.name,
    ),
}  # fmt: skip


def state(key: KVKey, tier: str, rng: random.Random) -> dict[str, Any]:
    return {
        "key": str(key), "tier": tier, "place": "", "nbytes": rng.randrange(4), "tokens": 3,
        "hits": rng.choice((0, 0, 1, 2)), "last_use": rng.randrange(5),
        "pinned": rng.random() < 0.3,
    }  # fmt: skip


def fill(database: Database, namespace: str, seed: int) -> None:
    """Documents whose modules have states in no, one or two tiers; some have two kinds of states,
    and some share theirs."""
    rng = random.Random(seed)
    catalogue = Catalogue(database, "tokenizer", None, namespace)
    keys: list[KVKey] = []
    for collection, documents in COLLECTIONS.items():
        for name in [f"{letter}_{n}%" for n in range(documents) for letter in "ab"]:
            source = name if name[0] == "a" else name[:-1]
            texts = [f"{namespace} {collection} {source} {n}" for n in range(4)]
            shared = [key_of(f"{namespace} shared" if n == 3 else texts[n]) for n in range(4)]
            keys += shared
            modules = [NewModule(f"{source}#{n + 1}", texts[n], [n], shared[n]) for n in range(4)]
            catalogue.replace(collection, [NewDocument(source, "", "", modules)])
        for row in catalogue.modules(collection)[::3]:
            keys.append(key_of(f"isolated {namespace} {row.id}"))
            catalogue.claim(row.id, keys[-1])
    rows = [
        state(key, tier, rng)
        for key in dict.fromkeys(keys)
        for tier in rng.choice(((), ("disk",), ("disk", "host")))
    ]
    with database.transaction() as session:
        session.execute(insert(StateTable), rows)


@pytest.fixture
def filled(database: Database) -> Database:
    fill(database, "default", 1)
    fill(database, "tenant", 2)
    return database


def pages(database: Database, wanted: ModuleFilter, sort: str, **options: Any) -> list[Any]:
    """All rows, page by page."""
    rows: list[ModuleListing] = []
    cursor = None
    while True:
        page = module_page(database, "default", wanted, sort, cursor=cursor, limit=3, **options)
        assert len(page.items) == 3 or page.next is None
        rows += page.items
        cursor = page.next
        if cursor is None:
            return rows


@pytest.mark.parametrize("few", [0, 10, 1000])
@pytest.mark.parametrize("match", MATCHES)
def test_pages_are_what_sorting_all_modules_gives(
    filled: Database, match: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_filters, "FEW", few)
    wanted, matches = MATCHES[match]
    expected = {row.id: row for row in list_modules(filled) if matches(row)}
    for sort in SORTS:
        for descending in (False, True):
            found = pages(filled, wanted, sort, descending=descending)
            assert {row.id: row for row in found} == expected
            assert len(found) == len(expected), "each module once"
            held = [row for row in found if row.tiers or sort in ("id", "name")]
            values = [getattr(row, sort) for row in held]
            assert values == sorted(values, reverse=descending)
            assert found[: len(held)] == held, "those without states come last"


def test_the_total_is_told_where_counting_is_cheap(
    filled: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def total(wanted: ModuleFilter) -> int | None:
        return module_page(filled, "default", wanted, limit=2).total

    everything = len(list_modules(filled))
    assert total(ModuleFilter()) == everything
    hosted = total(ModuleFilter(tier="host"))
    assert hosted == sum("host" in row.tiers for row in list_modules(filled))
    monkeypatch.setattr(module_filters, "FEW", 0)
    assert total(ModuleFilter()) == everything
    assert total(ModuleFilter("plans")) == len(list_modules(filled, "plans"))
    assert total(ModuleFilter(tier="host")) is None


def test_nothing_of_another_namespace_is_found(filled: Database) -> None:
    mine, theirs = (
        {row.id for row in module_page(filled, name, ModuleFilter()).items}
        for name in ("default", "tenant")
    )
    assert mine.isdisjoint(theirs)
    assert module_page(filled, "nobody", ModuleFilter()).items == ()
    with pytest.raises(UnknownCollection, match="known: none yet"):
        module_page(filled, "nobody", ModuleFilter("notes"))
    number = min(theirs)
    assert module_detail(filled, number, "tenant").text.startswith("tenant")
    with pytest.raises(UnknownModule, match=f"no module {number}"):
        module_detail(filled, number, "default")


def test_a_module_tells_all_its_states(filled: Database) -> None:
    for row in list_modules(filled):
        detail = module_detail(filled, row.id, "default")
        assert detail.listing == row
        assert {held.tier for held in detail.states} == set(row.tiers)
        assert max((held.hits for held in detail.states), default=0) == row.hits


def test_what_cannot_be_used_is_refused(filled: Database) -> None:
    first = module_page(filled, "default", ModuleFilter(), "hits", limit=2)
    for sort, descending, cursor in (
        ("size", False, None),
        ("hits", False, "x"),
        ("hits", True, first.next),
        ("nbytes", False, first.next),
        ("name", False, first.next),
    ):
        with pytest.raises(InvalidRequest):
            module_page(
                filled, "default", ModuleFilter(), sort, descending=descending, cursor=cursor
            )
    with pytest.raises(InvalidRequest, match="limit is 0"):
        module_page(filled, "default", ModuleFilter(), limit=0)


def test_no_page_looks_through_all_states(tmp_path: Path) -> None:
    """SQLite reads along an index wherever nothing is chosen: else its plan would sort."""
    database = Database.open(tmp_path / "ledger.sqlite")
    plans = {
        "states_by_size": "SELECT key FROM states ORDER BY nbytes DESC, key DESC",
        "states_by_hits": "SELECT key FROM states ORDER BY hits, key",
        "states_by_last_use": "SELECT key FROM states ORDER BY last_use, key",
        "modules_by_name": "SELECT id FROM modules ORDER BY name, id",
        "states_pinned": "SELECT key FROM states WHERE pinned = 1",
    }
    with database.engine.connect() as connection:
        for index, statement in plans.items():
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}").all()
            assert [index in row[3] for row in plan] == [True]
    database.close()
