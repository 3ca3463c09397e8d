"""Evictions page by page, each namespace its own."""

from __future__ import annotations

import pytest

from ragcache.errors import InvalidRequest
from ragcache.store import (
    Catalogue,
    Database,
    NewDocument,
    NewModule,
    SchemaText,
    SchemaTexts,
    eviction_page,
)
from ragcache.store.tables import EvictionTable
from tests.ragcache.store.conftest import make_key


@pytest.fixture
def filled(database: Database) -> Database:
    """Of states of a module of either namespace, of a schema of the other one, of nobody's."""
    for number, namespace in enumerate(("default", "tenant")):
        modules = [NewModule(f"{namespace}#1", "text", [1], make_key(number))]
        document = NewDocument(namespace, "", "", modules)
        Catalogue(database, "t", None, namespace).replace("notes", [document])
    SchemaTexts(database, "tenant").put("trip", SchemaText("", "schema"), [make_key(2)])
    with database.transaction() as session:
        for number in (0, 1, 2, 3) * 3:
            row = {"key": str(make_key(number)), "tier": "host", "reason": "ttl", "nbytes": number}
            session.add(EvictionTable(**row, at=0.0, fetched_again=False))
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


def test_each_namespace_sees_its_own(filled: Database) -> None:
    assert found(filled, "default") == [(3, None), (0, "default#1")] * 3
    assert found(filled, "tenant") == [(2, None), (1, "tenant#1")] * 3
    assert found(filled, "nobody") == []


def test_a_wrong_cursor_is_refused(filled: Database) -> None:
    with pytest.raises(InvalidRequest):
        eviction_page(filled, "default", "x")
