"""Records of indexings."""

from __future__ import annotations

import pytest

from ragcache.db import Database, Records
from ragcache.errors import ConfigurationError, LedgerUnavailable


class Clocked(Records):
    """A clock that the test sets."""

    at = 0.0

    def now(self) -> float:
        return self.at


@pytest.fixture
def records(database: Database) -> Clocked:
    return Clocked(database, "docs")


def write(records: Clocked, at: float, keys: list[str], groups: list[str | None]) -> None:
    records.at = at
    records.update(keys, groups)


def test_written_keys_exist(records: Clocked) -> None:
    write(records, 1.0, ["a", "b"], [None, "g"])
    assert records.exists(["b", "nothing", "a", "b"]) == [True, False, True, True]
    assert records.exists([]) == []


def test_keys_by_time_and_group_the_oldest_first(records: Clocked) -> None:
    write(records, 2.0, ["a", "b"], ["g", "h"])
    write(records, 1.0, ["c"], ["g"])
    write(records, 3.0, ["d"], [None])
    assert records.keys() == ["c", "a", "b", "d"]
    assert records.keys(before=2.0) == ["c"]
    assert records.keys(after=2.0) == ["d"]
    assert records.keys(after=1.0, before=3.0) == ["a", "b"]
    assert records.keys(group_ids=["g"]) == ["c", "a"]
    assert records.keys(group_ids=["h", "g"], limit=2) == ["c", "a"]
    assert records.keys(limit=1) == ["c"]
    assert records.keys(group_ids=[]) == [], "no group is not every group"


def test_writing_again_renews_time_and_group(records: Clocked) -> None:
    write(records, 1.0, ["a", "a"], ["g", "h"])
    assert records.keys(group_ids=["h"]) == ["a"]
    write(records, 5.0, ["a"], ["i"])
    assert records.keys(before=5.0) == []
    assert records.keys(group_ids=["i"]) == ["a"]


def test_many_keys_at_once(records: Clocked) -> None:
    keys = [f"k{n:05}" for n in range(1200)]
    write(records, 1.0, keys, list(keys))
    assert records.keys() == keys
    assert len(records.keys(group_ids=keys, limit=900)) == 900
    records.delete([*keys[1:], "unknown"])
    assert records.keys() == keys[:1]


def test_spaces_and_namespaces_do_not_see_each_other(records: Clocked, database: Database) -> None:
    write(records, 1.0, ["a"], [None])
    for other in (Records(database, "plans"), Records(database, "docs", "tenant")):
        assert other.keys() == []
        other.delete(["a"])
        other.update(["b"])
        assert other.keys() == ["b"]
    assert records.keys() == ["a"]


def test_the_clock_of_the_ledger_runs(database: Database) -> None:
    records = Records(database, "docs")
    before = records.now()
    records.update(["a"], time_at_least=before)
    assert records.keys(after=before - 1e-6) == ["a"]
    assert records.now() >= before > 1.7e9


def test_invalid_records_are_refused_and_nothing_is_written(records: Clocked) -> None:
    with pytest.raises(ConfigurationError, match="2 keys have 1 group_ids"):
        records.update(["a", "b"], ["g"])
    with pytest.raises(LedgerUnavailable, match="set back"):
        records.update(["a"], time_at_least=1.0)
    assert records.keys() == []
