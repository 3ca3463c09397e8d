"""Values that callers keep."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragcache.store import Database, Values

KEYS = ["", "a", "a/b", "../x", "a\0b", "é", "\ud800", "😀", "a" * 5000, "%_'\"\n"]


@pytest.fixture
def values(database: Database) -> Values:
    return Values(database, "kept")


def test_values_come_back_under_any_key(values: Values) -> None:
    kept = {key: f"{number}".encode() * number for number, key in enumerate(KEYS)}
    values.put(kept)
    assert values.get([*KEYS, "unknown"]) == [*kept.values(), None]
    assert sorted(values.keys()) == sorted(KEYS)
    assert list(values.keys("a")) == ["a", "a\0b", "a/b", "a" * 5000]
    assert list(values.keys("%")) == ["%_'\"\n"]


def test_a_value_is_replaced_and_deleted(values: Values) -> None:
    values.put({"a": b"1", "b": b"\0\xff"})
    values.put({"a": b""})
    assert values.get(["a", "b", "a"]) == [b"", b"\0\xff", b""]
    values.delete(["a", "unknown"])
    assert values.get(["a", "b"]) == [None, b"\0\xff"]
    values.put({})
    values.delete([])


def test_the_first_value_of_a_key_is_kept(values: Values) -> None:
    assert values.keep("a", b"1") == b"1"
    assert values.keep("a", b"2") == b"1"
    values.put({"a": b"3"})
    assert values.keep("a", b"4") == b"3"


def test_many_keys_are_read_in_portions(values: Values) -> None:
    kept = {f"k{number:05}": bytes([number % 256]) for number in range(1300)}
    values.put(kept)
    assert list(values.keys()) == list(kept)
    assert list(values.keys("k009")) == [f"k{number:05}" for number in range(900, 1000)]
    assert values.get(list(kept)) == list(kept.values())


def test_spaces_and_namespaces_do_not_see_each_other(values: Values, database: Database) -> None:
    values.put({"a": b"1"})
    for other in (Values(database, "more"), Values(database, "kept", "tenant")):
        assert (list(other.keys()), other.get(["a"])) == ([], [None])
        other.put({"a": b"2"})
        other.delete(["a"])
    assert values.get(["a"]) == [b"1"]


def test_what_is_not_bytes_writes_nothing_of_its_batch(values: Values) -> None:
    with pytest.raises(Exception, match=r"bytes|unsupported"):
        values.put({"a": b"1", "b": object()})  # type: ignore[dict-item]
    assert list(values.keys()) == []


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(), st.binary(max_size=8), max_size=6), st.text(max_size=1))
def test_keys_that_begin_so(tmp_path: Path, kept: dict[str, bytes], prefix: str) -> None:
    database = Database.open(tmp_path / "ledger.sqlite")
    values = Values(database, "kept")
    values.delete(list(values.keys()))
    values.put(kept)
    assert list(values.keys(prefix)) == sorted(key for key in kept if key.startswith(prefix))
    database.close()
