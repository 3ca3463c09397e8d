"""Lists of collections, documents, modules and evictions: pages join to the whole, in order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import insert

from ragcache.db import (
    Catalog,
    Database,
    Jobs,
    ModuleFilter,
    ModuleListing,
    NewDocument,
    NewModule,
    Page,
    SchemaText,
    SchemaTexts,
    collection_page,
    document_page,
    eviction_page,
    list_modules,
    module_detail,
    module_page,
)
from ragcache.db.listing import SORTS
from ragcache.db.summaries import sum_up
from ragcache.db.tables import EvictionTable, StateTable
from ragcache.errors import InvalidRequest, UnknownCollection, UnknownModule
from ragcache.states import KVKey
from tests.ragcache.conftest import make_key
from tests.ragcache.store.store_fixture import key_of

pytestmark = pytest.mark.enable_socket


@pytest.fixture
def catalog(database: Database) -> Catalog:
    return Catalog(database, "tokenizer", None)


def add(catalog: Catalog, collection: str, name: str, modules: int = 1) -> None:
    made = [NewModule(f"{name}#{n}", "text", (1, 2), make_key(n)) for n in range(modules)]
    catalog.replace_documents(collection, [NewDocument(name, "", "digest", made, {"n": modules})])


def test_documents_come_by_id_with_their_modules(catalog: Catalog, database: Database) -> None:
    names = [f"d{n}" for n in (4, 0, 3, 1, 2)]
    for number, name in enumerate(names):
        add(catalog, "notes", name, number)
    add(catalog, "others", "d9")
    page = document_page(database, "default", "notes", limit=2)
    assert page.total == 5
    found = list(page.items)
    while page.next is not None:
        page = document_page(database, "default", "notes", page.next, 2)
        assert page.total == 5
        found += page.items
    assert [row.source_id for row in found] == sorted(names)
    assert {row.source_id: row.modules for row in found} == dict(zip(names, range(5), strict=True))
    assert found[0].attributes == {"n": 1}
    with pytest.raises(UnknownCollection):
        document_page(database, "tenant", "notes")


def test_collections_are_counted_and_listed_by_name(catalog: Catalog, database: Database) -> None:
    assert collection_page(database, "default") == Page((), None, 0)
    assert catalog.add_collection("bare")
    assert not catalog.add_collection("bare")
    for name in ("a", "b"):
        add(catalog, "full", name, 2)
    Catalog(database, "tokenizer", None, "tenant").add_collection("bare")
    page = collection_page(database, "default", limit=1)
    assert page.total == 2
    rest = collection_page(database, "default", page.next, 1)
    told = [(row.name, row.documents, row.modules) for row in (*page.items, *rest.items)]
    assert told == [("bare", 0, 0), ("full", 2, 4)]
    assert rest.next is None
    assert catalog.delete_collection("bare") == (0, [])
    assert catalog.add_collection("bare"), "its row is gone"


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
QUICK = ("all", "search", "several")
PAGED = [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in MATCHES]


def state(key: KVKey, tier: str, rng: random.Random) -> dict[str, Any]:
    return {
        "key": key, "tier": tier, "place": "", "nbytes": rng.randrange(4), "tokens": 3,
        "hits": rng.choice((0, 0, 1, 2)), "last_use": 0, "used_at": rng.randrange(5) / 2,
        "pinned": rng.random() < 0.3,
    }  # fmt: skip


def fill(database: Database, namespace: str, seed: int) -> None:
    """Documents whose modules have states in no, one or two tiers; some have two kinds of states,
    and some share theirs."""
    rng = random.Random(seed)
    catalog = Catalog(database, "tokenizer", None, namespace)
    keys: list[KVKey] = []
    for collection, documents in COLLECTIONS.items():
        for name in [f"{letter}_{n}%" for n in range(documents) for letter in "ab"]:
            source = name if name[0] == "a" else name[:-1]
            texts = [f"{namespace} {collection} {source} {n}" for n in range(4)]
            shared = [key_of(f"{namespace} shared" if n == 3 else texts[n]) for n in range(4)]
            keys += shared
            modules = [NewModule(f"{source}#{n + 1}", texts[n], [n], shared[n]) for n in range(4)]
            catalog.replace_documents(collection, [NewDocument(source, "", "", modules)])
        for row in catalog.modules(collection)[::3]:
            keys.append(key_of(f"isolated {namespace} {row.id}"))
            catalog.add_key(row.id, keys[-1])
    rows = [
        state(key, tier, rng)
        for key in dict.fromkeys(keys)
        for tier in rng.choice(((), ("disk",), ("disk", "host")))
    ]
    with database.transaction() as session:
        session.execute(insert(StateTable), rows)
        sum_up(session, keys)


@pytest.fixture(scope="module")
def filled(shared_database: Database) -> Database:
    fill(shared_database, "default", 1)
    fill(shared_database, "tenant", 2)
    return shared_database


def pages(database: Database, wanted: ModuleFilter, sort: str, **options: Any) -> list[Any]:
    """All rows, page by page."""
    rows: list[ModuleListing] = []
    cursor = None
    while True:
        page = module_page(database, "default", wanted, sort, cursor=cursor, limit=5, **options)
        assert len(page.items) == 5 or page.next is None
        rows += page.items
        cursor = page.next
        if cursor is None:
            return rows


@pytest.mark.parametrize("match", PAGED)
def test_pages_are_what_sorting_all_modules_gives(filled: Database, match: str) -> None:
    wanted, matches = MATCHES[match]
    expected = {row.id: row for row in list_modules(filled) if matches(row)}
    for sort in SORTS:
        for descending in (False, True):
            found = pages(filled, wanted, sort, descending=descending)
            assert {row.id: row for row in found} == expected
            page = module_page(filled, "default", wanted, sort, descending=descending, limit=2)
            assert page.total == len(expected)
            assert len(found) == len(expected), "each module once"
            held = [row for row in found if row.tiers or sort in ("id", "name")]
            values = [getattr(row, sort) for row in held]
            assert values == sorted(values, reverse=descending)
            assert found[: len(held)] == held, "those without states come last"


def test_module_detail_has_all_states_and_the_text(filled: Database) -> None:
    for row in list_modules(filled, namespace="tenant"):
        detail = module_detail(filled, row.id, "tenant")
        assert detail.listing == row
        assert detail.text.startswith("tenant")
        assert {held.tier for held in detail.states} == set(row.tiers)
        assert max((held.hits for held in detail.states), default=0) == row.hits


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
    with pytest.raises(UnknownModule, match=f"no module {number}"):
        module_detail(filled, number, "default")


@pytest.mark.parametrize("page", [collection_page, eviction_page, document_page, Jobs.page])
def test_a_cursor_that_postgresql_cannot_hold_is_refused(
    catalog: Catalog, database: Database, page: Callable[..., object]
) -> None:
    add(catalog, "notes", "d")
    if database.engine.dialect.name == "sqlite" and page in (collection_page, document_page):
        return  # a name as others
    given = (Jobs(database, "session"),) if page is Jobs.page else (database, "default")
    with pytest.raises(InvalidRequest):
        page(*given, *["notes"] * (page is document_page), "a\0")


@pytest.mark.parametrize("cursor", ["x", "-1", "1.5", "٣", "9" * 20])
def test_invalid_arguments_are_refused(filled: Database, cursor: str) -> None:
    with pytest.raises(InvalidRequest, match="begin without a cursor"):
        module_page(filled, "default", ModuleFilter(), cursor=cursor)
    with pytest.raises(InvalidRequest, match="begin without a cursor"):
        eviction_page(filled, "default", cursor)
    with pytest.raises(InvalidRequest, match="unknown order 'size'"):
        module_page(filled, "default", ModuleFilter(), "size")
    for limit in (0, -1, 1001):
        with pytest.raises(InvalidRequest, match=f"limit is {limit}"):
            module_page(filled, "default", ModuleFilter(), limit=limit)
    assert module_page(filled, "default", ModuleFilter(), cursor="1000").items == ()


@pytest.fixture
def filled_evictions(database: Database) -> Database:
    """Evict states of a module of either namespace, of a schema of the other one, and of nobody."""
    for number, namespace in enumerate(("default", "tenant")):
        modules = [NewModule(f"{namespace}#1", "text", [1], make_key(number))]
        document = NewDocument(namespace, "", "", modules)
        Catalog(database, "t", None, namespace).replace_documents("notes", [document])
    SchemaTexts(database, "tenant").put_schema("trip", SchemaText("", "schema"), [make_key(2)])
    with database.transaction() as session:
        for number in (0, 1, 2, 3) * 3:
            row = {"key": make_key(number), "tier": "host", "reason": "ttl", "nbytes": number}
            session.add(EvictionTable(**row, at=0.0))
    return database


def found(database: Database, namespace: str) -> list[tuple[int, str | None]]:
    rows: list[tuple[int, str | None]] = []
    cursor, last = None, None
    while True:
        page = eviction_page(database, namespace, cursor, 2)
        for row in page.items:
            assert last is None or row.id < last, "the newest first"
            last = row.id
            rows.append((row.nbytes, row.module))
        cursor = page.next
        if cursor is None:
            return rows


def test_each_namespace_sees_its_own(filled_evictions: Database) -> None:
    assert found(filled_evictions, "default") == [(3, None), (0, "default#1")] * 3
    assert found(filled_evictions, "tenant") == [(2, None), (1, "tenant#1")] * 3
    assert found(filled_evictions, "nobody") == []
