"""Residency: rows of memory tiers, read a second old."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragcache.db import (
    ConversationStates,
    Database,
    NewDocument,
    NewModule,
    Residency,
    SchemaText,
    SchemaTexts,
    residency,
)
from ragcache.db.catalog import Catalog
from ragcache.db.tables import StateTable
from ragcache.errors import LedgerUnavailable
from ragcache.states import KVKey
from tests.ragcache.conftest import make_key

NAMES = ("leave", "pay", "shared")


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


def hold(database: Database, key: KVKey, *places: tuple[str, str]) -> None:
    with database.transaction() as session:
        for tier, place in places:
            row = {"key": key, "tier": tier, "place": place, "nbytes": 100, "tokens": 4}
            session.add(StateTable(**row))


def ingest(database: Database, namespace: str = "default") -> dict[str, int]:
    """Modules with the keys 1, 2 and, of the last, 2 again; their ids by name."""
    catalog = Catalog(database, "tokenizer", None, namespace)
    keys = [make_key(number) for number in (1, 2, 2)]
    modules = [
        NewModule(name, f"{name} text", [1], key) for name, key in zip(NAMES, keys, strict=True)
    ]
    catalog.replace_documents("notes", [NewDocument("handbook", "", "1", modules)])
    return {row.name: row.id for row in catalog.modules("notes")}


def test_modules_are_located_in_the_memory_of_sessions(database: Database) -> None:
    ids = ingest(database)
    hold(database, make_key(1), ("device", "a"), ("host", "a"), ("host", "b"), ("disk", "d"))
    hold(database, make_key(2), ("remote", ""))
    found = Residency(database).locate_modules([ids["leave"], ids["pay"], ids["shared"]])
    one, two = make_key(1), make_key(2)
    assert [(each.key, each.nbytes, each.tokens) for each in found.modules] == [
        (one, 100, 4), (two, 100, 4),
    ]  # fmt: skip
    assert found.holds == {one: {"a": "device", "b": "host"}, two: {}}


def test_rows_are_read_again_when_they_are_a_second_old(database: Database) -> None:
    ids, clock = ingest(database), _Clock()
    located = Residency(database, clock=clock)
    hold(database, make_key(1), ("host", "a"))
    key = make_key(1)
    assert located.locate_modules([ids["leave"]]).holds == {key: {"a": "host"}}
    hold(database, make_key(1), ("host", "b"))
    clock.now = 0.9
    assert located.locate_modules([ids["leave"]]).holds == {key: {"a": "host"}}
    clock.now = 1.0
    assert located.locate_modules([ids["leave"]]).holds == {key: {"a": "host", "b": "host"}}


def test_more_modules_than_are_remembered_are_located(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_REMEMBERED", 1)
    ids, located = ingest(database), Residency(database)
    hold(database, make_key(1), ("host", "a"))
    hold(database, make_key(2), ("host", "a"))
    for names in (["leave"], ["leave", "pay"], ["pay", "leave"]):
        found = located.locate_modules([ids[name] for name in names])
        assert len(found.modules) == len(found.holds) == len(names)


def test_what_is_known_outlives_the_ledger(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, clock = ingest(database), _Clock()
    located = Residency(database, clock=clock)
    hold(database, make_key(1), ("host", "a"))
    before = located.locate_modules([ids["leave"]])

    def away(*_: object) -> None:
        raise LedgerUnavailable("away")

    monkeypatch.setattr(database, "fetch", away)
    clock.now = 60.0
    assert located.locate_modules([ids["leave"], ids["pay"]]) == before
    assert located.locate_schema("trip", "default").modules == ()


def test_a_schema_is_located_in_its_own_namespace(database: Database) -> None:
    keys = [make_key(number) for number in (7, 8)]
    SchemaTexts(database, "tenant").put_schema("trip", SchemaText("<schema/>", "schema"), keys)
    hold(database, keys[0], ("host", "a"))
    hold(database, keys[1], ("device", "b"))
    found = Residency(database).locate_schema("trip", "tenant")
    assert found.holds == {str(keys[0]): {"a": "host"}, str(keys[1]): {"b": "device"}}
    assert Residency(database).locate_schema("trip", "default").holds == {}


def test_a_conversation_is_located_by_its_name(database: Database) -> None:
    """Other namespaces' conversations of the name, and states on disk, are no part of it."""
    ends = time.time() + 60.0
    ConversationStates(database, "default").own("mine", [make_key(1), make_key(2)], ends)
    ConversationStates(database, "other").own("mine", [make_key(3)], ends)
    hold(database, make_key(1), ("host", "a"), ("disk", "d"))
    hold(database, make_key(2), ("disk", "d"))
    hold(database, make_key(3), ("host", "b"))
    located = Residency(database)
    assert located.locate_conversation("mine", "default").holds == {make_key(1): {"a": "host"}}
    assert located.locate_conversation("yours", "default").modules == ()
    both = located.locate_conversation("mine", "default").joined_with(
        located.locate_conversation("mine", "other")
    )
    assert both.holds == {make_key(1): {"a": "host"}, make_key(3): {"b": "host"}}
