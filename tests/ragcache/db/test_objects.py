"""Objects of the interfaces of others, in both databases and for several processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from ragcache.db import Database, StoredObjects

pytestmark = pytest.mark.enable_socket


def test_objects_are_of_a_namespace_and_a_kind(database: Database) -> None:
    mine, others = StoredObjects(database, "red"), StoredObjects(database, "blue")
    file = mine.add("file", {"name": "é.md"}, content=b"# Boats", owner="store")
    assert mine.get("file", file.id) == file
    assert mine.content("file", file.id) == b"# Boats"
    assert mine.get("response", file.id) is None
    assert others.get("file", file.id) is None
    assert not others.delete("file", file.id)
    second = mine.add("file", {"name": "b.md"})
    assert [each.id for each in mine.list("file")] == [file.id, second.id]
    assert [each.id for each in mine.list("file", "store")] == [file.id]
    mine.change("file", second.id, {"name": "c.md"})
    assert mine.get("file", second.id).value == {"name": "c.md"}  # type: ignore[union-attr]
    mine.delete_owned("store")
    assert [each.id for each in mine.list("file")] == [second.id]
    assert mine.delete("file", second.id)


def test_an_object_of_the_same_id_is_replaced(database: Database) -> None:
    objects = StoredObjects(database, "default")
    objects.add("file", {"n": 1}, id="a", owner="x", content=b"1")
    objects.add("file", {"n": 2}, id="b")
    again = objects.add("file", {"n": 3}, id="a", owner="y")
    assert objects.get("file", "a") == again
    assert objects.content("file", "a") is None
    assert [each.id for each in objects.list("file")] == ["b", "a"]


def test_expired_objects_are_removed(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    objects, now = StoredObjects(database, "default"), [1000.0]
    monkeypatch.setattr("ragcache.db.objects.time.time", lambda: now[0])
    objects.add("response", {}, id="short", seconds=10)
    objects.add("response", {}, id="long", seconds=100)
    now[0] += 50
    assert [each.id for each in objects.list("response")] == ["long"]
    objects.add("response", {}, id="next")
    now[0] = 1001.0
    assert objects.get("response", "short") is None


def test_processes_store_the_same_object(database: Database, where: Path | str) -> None:
    with closing(Database.open(where)) as other, ThreadPoolExecutor(4) as threads:
        views = [StoredObjects(each, "default") for each in (database, other)]
        turns = [(views[n % 2], n) for n in range(24)]
        stored = threads.map(lambda turn: turn[0].add("file", {"n": turn[1]}, id="same"), turns)
        assert len(list(stored)) == 24
    [kept] = StoredObjects(database, "default").list("file")
    assert kept.value["n"] in range(24)
