"""The ledger: what is kept where, and how it is used."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import select

from ragcache.errors import NoState, StoreUnwritable
from ragcache.store import Catalogue, Database, Ledger, NewDocument, NewModule
from ragcache.store.database import CHUNK
from ragcache.store.ledger import TierTotals
from ragcache.store.tables import StateTable
from tests.ragcache.store.conftest import make_key, make_states


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database)


def uses(database: Database, tier: str) -> dict[str, tuple[int, int]]:
    """(hits, last use) by the first two digits of the key."""
    with database.transaction() as session:
        rows = session.scalars(select(StateTable).where(StateTable.tier == tier))
        return {row.key[:2]: (row.hits, row.last_use) for row in rows}


def test_a_tier_holds_what_was_recorded_in_it(ledger: Ledger) -> None:
    ledger.record("disk", make_key(1), make_states(1), 10)
    assert ledger.holds("disk", make_key(1))
    assert not ledger.holds("host", make_key(1))
    assert (ledger.keys("disk"), ledger.keys("host")) == ({make_key(1)}, set())


def test_totals_are_sums_by_tier(ledger: Ledger) -> None:
    assert ledger.totals() == {}
    ledger.record("disk", make_key(1), make_states(1, 3), 10)
    ledger.record("disk", make_key(2), make_states(2, 4), 20)
    ledger.record("host", make_key(2), make_states(2, 4), 15)
    ledger.touch([make_key(1), make_key(2)])
    assert ledger.totals() == {
        "disk": TierTotals(states=2, nbytes=30, tokens=7, hits=2),
        "host": TierTotals(states=1, nbytes=15, tokens=4, hits=1),
    }


def test_recording_again_takes_the_new_size_and_keeps_the_hits(ledger: Ledger) -> None:
    ledger.record("disk", make_key(1), make_states(1, 3), 10)
    ledger.touch([make_key(1)])
    ledger.record("disk", make_key(1), make_states(1, 4), 12)
    assert ledger.totals() == {"disk": TierTotals(1, 12, 4, 1)}


def test_a_touch_is_one_tick_for_all_its_keys_and_later_than_the_last(
    ledger: Ledger, database: Database
) -> None:
    for number in (1, 2, 3):
        ledger.record("disk", make_key(number), make_states(number), 1)
    ledger.record("host", make_key(1), make_states(1), 1)
    ledger.touch([make_key(1), make_key(2)])
    ledger.touch([make_key(2), make_key(9)])
    assert uses(database, "disk") == {"01": (1, 1), "02": (2, 2), "03": (0, 0)}
    assert uses(database, "host") == {"01": (1, 1)}


def test_removing_and_clearing_leave_the_other_tier_alone(ledger: Ledger) -> None:
    for tier in ("host", "disk"):
        for number in (1, 2):
            ledger.record(tier, make_key(number), make_states(number), 1)
    ledger.remove("disk", [make_key(1), make_key(7)])
    assert (len(ledger.keys("disk")), len(ledger.keys("host"))) == (1, 2)
    ledger.clear("host")
    assert (ledger.keys("disk"), ledger.keys("host")) == ({make_key(2)}, set())


def test_more_keys_than_one_statement_takes(ledger: Ledger, database: Database) -> None:
    ledger.record("disk", make_key(1), make_states(1), 1)
    many = [make_key(2)] * (2 * CHUNK) + [make_key(1)]
    ledger.touch(iter(many))
    assert uses(database, "disk") == {"01": (1, 1)}
    assert len(ledger.unowned(many)) == len(many)
    ledger.remove("disk", many)
    assert ledger.keys("disk") == set()


def test_states_of_a_module_are_owned_until_it_is_deleted(
    ledger: Ledger, database: Database
) -> None:
    catalogue = Catalogue(database, "tokenizer", None)
    module = NewModule("m", "text", [1], make_key(1))
    catalogue.replace("notes", [NewDocument("d", "", "digest", [module])])
    assert ledger.unowned([make_key(1), make_key(2)]) == [make_key(2)]
    catalogue.delete("notes", ["d"])
    assert ledger.unowned(iter([make_key(1), make_key(2)])) == [make_key(1), make_key(2)]


class TestTheDatabase:
    def test_what_is_committed_outlives_the_connection(self, tmp_path: Path) -> None:
        for held in (False, True):
            database = Database.open(tmp_path / "ledger")
            assert Ledger(database).holds("disk", make_key(1)) is held
            Ledger(database).record("disk", make_key(1), make_states(1), 1)
            database.close()

    def test_an_error_rolls_everything_back(self, database: Database) -> None:
        def fail() -> None:
            with database.transaction() as session:
                session.add(StateTable(key="k", tier="disk", nbytes=1, tokens=1))
                session.flush()
                raise RuntimeError

        with pytest.raises(RuntimeError):
            fail()
        assert Ledger(database).keys("disk") == set()

    def test_a_folder_without_state_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(NoState, match=f"no ragcache state in {tmp_path}; make one"):
            Database.open_existing(tmp_path / "ledger")
        assert not list(tmp_path.iterdir()), "looking creates nothing"

    def test_a_file_of_something_else_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "ledger"
        path.write_bytes(b"this is a letter, not a database" * 40)
        with pytest.raises(NoState, match="is not a ragcache ledger"):
            Database.open_existing(path)

    def test_a_folder_that_does_not_exist_is_unwritable(self, tmp_path: Path) -> None:
        with pytest.raises(StoreUnwritable, match="cannot write the ledger"):
            Database.open(tmp_path / "none" / "ledger")

    def test_a_writer_does_not_wait_for_readers(self, database: Database) -> None:
        reader = sqlite3.connect(str(database.engine.url.database))
        reader.execute("BEGIN")
        read = lambda: reader.execute("SELECT count(*) FROM states").fetchone()  # noqa: E731
        assert read() == (0,)
        Ledger(database).record("disk", make_key(1), make_states(1), 1)
        assert read() == (0,), "a reader sees what was there when it began"
        reader.close()
