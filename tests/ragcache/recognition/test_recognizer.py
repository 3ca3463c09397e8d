"""The recognizer knows what the catalogue holds now, and reads what changed alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragcache.recognition import Recognizer
from ragcache.states import KVKey
from ragcache.store import Catalogue, Database, NewDocument, NewModule

BOATS = "The survey boat Pipit is moored at the north quay.\n\n"
KEYS = "The spare key hangs in the red cupboard of the boathouse.\n\n"


def document(name: str, text: str) -> NewDocument:
    key = KVKey(f"{abs(hash((name, text))):064x}")
    return NewDocument(name, "", text, [NewModule(f"{name}#1", text, [1, 2], key, None)], {})


class Reading(Catalogue):
    """A catalogue that tells which collections were read."""

    def __init__(self, database: Database, namespace: str = "default") -> None:
        super().__init__(database, "tokens", None, namespace)
        self.read: list[str] = []

    def modules(self, collection: str):  # type: ignore[no-untyped-def]
        self.read.append(collection)
        return super().modules(collection)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


def names(recognizer: Recognizer, text: str = BOATS + KEYS) -> list[str]:
    return [found.module.name for found in recognizer.find(text)]


def test_modules_of_every_collection_are_found(database: Database) -> None:
    catalogue = Reading(database)
    recognizer = Recognizer(catalogue)
    assert names(recognizer) == []
    catalogue.replace("a", [document("boats", BOATS)])
    assert names(recognizer) == ["boats#1"]
    catalogue.replace("b", [document("keys", KEYS)])
    assert names(recognizer) == ["boats#1", "keys#1"]
    assert names(recognizer) == ["boats#1", "keys#1"]
    assert catalogue.read == ["a", "b"], "each was read once, when it had changed"


def test_what_was_deleted_or_renamed_is_not_found_by_its_old_name(database: Database) -> None:
    catalogue = Reading(database)
    recognizer = Recognizer(catalogue)
    catalogue.replace("a", [document("boats", BOATS), document("keys", KEYS)])
    assert names(recognizer) == ["boats#1", "keys#1"]
    catalogue.rename("a", "keys", "locks")
    assert names(recognizer) == ["boats#1", "locks#1"]
    catalogue.delete("a", ["boats"])
    assert names(recognizer) == ["locks#1"]


def test_another_namespace_is_not_seen(database: Database) -> None:
    mine, theirs = Reading(database, "mine"), Reading(database, "theirs")
    theirs.replace("a", [document("boats", BOATS)])
    assert names(Recognizer(mine)) == []
    assert mine.read == []
    assert names(Recognizer(theirs)) == ["boats#1"]


def test_a_collection_that_goes_while_it_is_read_is_empty(database: Database) -> None:
    catalogue = Reading(database)
    catalogue.replace("a", [document("boats", BOATS)])
    stamps = {**catalogue.stamps(), "gone": (99, 1)}
    catalogue.stamps = lambda: stamps  # type: ignore[method-assign]
    assert names(Recognizer(catalogue)) == ["boats#1"]


def test_threads_that_ask_at_once_build_one_index(database: Database) -> None:
    catalogue = Reading(database)
    catalogue.replace("a", [document("boats", BOATS), document("keys", KEYS)])
    recognizer = Recognizer(catalogue)
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda _: names(recognizer), range(24)))
    assert all(each == ["boats#1", "keys#1"] for each in found)
    assert catalogue.read == ["a"]
