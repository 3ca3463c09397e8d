"""Pages of collections and documents, in both databases: they join to the whole, in order."""

from __future__ import annotations

import pytest

from ragcache.errors import InvalidRequest, UnknownCollection
from ragcache.store import (
    Catalogue,
    Database,
    NewDocument,
    NewModule,
    Page,
    collection_page,
    document_page,
)
from tests.ragcache.store.conftest import make_key


@pytest.fixture
def catalogue(database: Database) -> Catalogue:
    return Catalogue(database, "tokenizer", None)


def add(catalogue: Catalogue, collection: str, name: str, modules: int = 1) -> None:
    made = [NewModule(f"{name}#{n}", "text", (1, 2), make_key(n)) for n in range(modules)]
    catalogue.replace(collection, [NewDocument(name, "", "digest", made, {"n": modules})])


def test_documents_come_by_id_with_their_modules(catalogue: Catalogue, database: Database) -> None:
    names = [f"d{n}" for n in (4, 0, 3, 1, 2)]
    for number, name in enumerate(names):
        add(catalogue, "notes", name, number)
    add(catalogue, "others", "d9")
    page = document_page(database, "default", "notes", limit=2)
    assert page.total == 5
    found = list(page.items)
    while page.next is not None:
        page = document_page(database, "default", "notes", page.next, 2)
        assert page.total is None
        found += page.items
    assert [row.source_id for row in found] == sorted(names)
    assert {row.source_id: row.modules for row in found} == dict(zip(names, range(5), strict=True))
    assert found[0].attributes == {"n": 1}
    for cursor in ("!", "WzFd"):
        with pytest.raises(InvalidRequest):
            document_page(database, "default", "notes", cursor)
    with pytest.raises(UnknownCollection):
        document_page(database, "tenant", "notes")


def test_collections_are_made_counted_and_told_by_name(
    catalogue: Catalogue, database: Database
) -> None:
    assert collection_page(database, "default") == Page((), None, 0)
    assert catalogue.add_collection("bare")
    assert not catalogue.add_collection("bare")
    for name in ("a", "b"):
        add(catalogue, "full", name, 2)
    Catalogue(database, "tokenizer", None, "tenant").add_collection("bare")
    page = collection_page(database, "default", limit=1)
    assert page.total == 2
    rest = collection_page(database, "default", page.next, 1)
    told = [(row.name, row.documents, row.modules) for row in (*page.items, *rest.items)]
    assert told == [("bare", 0, 0), ("full", 2, 4)]
    assert rest.next is None
    assert catalogue.delete_collection("bare") == (0, [])
    assert catalogue.add_collection("bare"), "its row is gone"
