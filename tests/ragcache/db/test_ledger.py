"""The ledger: what is kept where, and how it is used."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import event, select

from ragcache.db import Database, Ledger
from ragcache.db.ledger import TierTotals
from ragcache.db.sql import CHUNK
from ragcache.db.state_rows import StateMetadata, StateRow
from ragcache.db.tables import EvictionTable, SessionTable, StateTable
from ragcache.db.usage import EVICTIONS_KEPT
from ragcache.errors import StoreFull
from ragcache.states import KVKey
from tests.ragcache.conftest import make_key, record_row


@pytest.fixture
def ledger(database: Database) -> Ledger:
    opened = Ledger(database)
    opened.begin()
    return opened


@pytest.fixture
def another(where: Path | str) -> Iterator[Callable[[], Ledger]]:
    """Opens the ledger as another process would."""
    opened: list[Database] = []

    def open_another() -> Ledger:
        opened.append(Database.open(where))
        ledger = Ledger(opened[-1])
        ledger.begin()
        return ledger

    yield open_another
    for database in opened:
        database.close()


def row(number: int, tier: str = "disk", nbytes: int = 10, **facts: object) -> StateRow:
    known = StateMetadata(3, "rooted", make_key(99), "model")._replace(**facts)
    return StateRow(make_key(number), tier, nbytes, 0, 0, False, math.inf, "model", known)


def record(ledger: Ledger, *numbers: int) -> None:
    for number in numbers:
        record_row(ledger, row(number))


def uses(database: Database, tier: str) -> dict[str, tuple[int, int]]:
    """(hits, last use) by the first two digits of the key."""
    with database.reading() as session:
        rows = session.scalars(select(StateTable).where(StateTable.tier == tier))
        return {row.key[:2]: (row.hits, row.last_use) for row in rows}


def test_a_row_comes_back_as_it_was_recorded(ledger: Ledger, another: Callable[[], Ledger]) -> None:
    recorded = row(1)._replace(pinned=True, expires_at=1e12, kv_dtype="int8")
    record_row(ledger, recorded)
    other = another()
    assert other.load() == [recorded]
    assert other.find([make_key(1), make_key(2)]) == [recorded]


def test_recording_again_takes_the_new_size_and_keeps_the_hits(ledger: Ledger) -> None:
    record(ledger, 1)
    ledger.usage.touch([make_key(1)], 1)
    ledger.flush()
    record_row(ledger, row(1, nbytes=12, tokens=4))
    assert ledger.totals() == {"disk": TierTotals(1, 12, 4, 1)}


def test_memory_tiers_belong_to_their_session(
    ledger: Ledger, another: Callable[[], Ledger]
) -> None:
    other = another()
    for each, number in ((ledger, 1), (other, 2)):
        each.usage.add_entry(row(number, "host"))
        each.flush()
    record(ledger, 3)
    assert (ledger.keys("host"), other.keys("host")) == ({make_key(1)}, {make_key(2)})
    assert other.keys("disk") == {make_key(3)}
    ledger.end()
    assert (ledger.keys("host"), other.keys("host")) == (set(), {make_key(2)})


def test_touches_are_noted_without_sql_and_written_together(
    ledger: Ledger, database: Database
) -> None:
    record(ledger, 1, 2, 3)
    ledger.usage.add_entry(row(1, "host"))
    statements: list[str] = []
    event.listen(database.engine, "before_cursor_execute", lambda *a: statements.append(a[2]))
    commits: list[object] = []
    event.listen(database.engine, "commit", commits.append)
    for tick in (1, 3):
        ledger.usage.touch([make_key(tick), make_key(2)], tick)
    assert statements == []
    ledger.flush()
    assert len(commits) == 1
    ledger.flush()
    assert len(commits) == 1, "there is nothing more to write"
    assert uses(database, "disk") == {"01": (1, 1), "02": (2, 3), "03": (1, 3)}
    assert uses(database, "host") == {"01": (1, 1)}
    with database.reading() as session:
        times = list(session.scalars(select(StateTable.used_at).where(StateTable.key.like("0%"))))
    assert len(times) == 4
    assert min(times) > 1e9


def test_the_clock_of_uses_never_runs_backwards(
    ledger: Ledger, another: Callable[[], Ledger], database: Database
) -> None:
    record(ledger, 1)
    other = another()
    for _ in range(1000):
        ledger.advance_clock()
    ledger.usage.touch([make_key(1)], ledger.advance_clock())
    ledger.flush()
    assert uses(database, "disk")["01"] == (1, 1001)
    other.usage.touch([make_key(1)], other.advance_clock())
    other.flush()
    assert uses(database, "disk")["01"] == (2, 1002), "it was used after the first one"
    assert other.advance_clock() == 1003
    ledger.read_clock()
    assert ledger.advance_clock() == 1003
    assert other.used_since(1001) == [("disk", make_key(1), 1002)]


@pytest.mark.slow
def test_sessions_that_count_the_same_uses_wait_in_no_circle(
    ledger: Ledger, another: Callable[[], Ledger], database: Database
) -> None:
    keys = [KVKey(f"{number:064x}") for number in range(60)]
    for key in keys:
        record_row(ledger, row(1)._replace(key=key))
    sessions = [ledger, another(), another()]
    ready = threading.Barrier(len(sessions))

    def count(number: int) -> None:
        rng, mine = random.Random(number), list(keys)
        for _ in range(4):
            ready.wait(60)
            rng.shuffle(mine)
            sessions[number].usage.touch(mine, sessions[number].advance_clock())
            for key in mine[:20]:
                sessions[number].usage.remove_entry("disk", key, 1, "pressure")
                sessions[number].usage.add_entry(row(1, "host")._replace(key=key))
            sessions[number].flush()

    threads = [threading.Thread(target=count, args=(n,)) for n in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each.failures for each in sessions) == 0
    assert {hits for hits, _ in uses(database, "disk").values()} == {12}


def test_usage_that_could_not_be_written_is_written_later(
    ledger: Ledger, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreFull("full")

    record(ledger, 1)
    ledger.usage.touch([make_key(1)], 1)
    with monkeypatch.context() as patched:
        patched.setattr("ragcache.db.usage._write_touches", full)
        ledger.flush()
        ledger.usage.touch([make_key(1)], 2)
        ledger.flush()
    assert (ledger.failures, uses(database, "disk")) == (2, {"01": (0, 0)})
    ledger.flush()
    assert uses(database, "disk") == {"01": (2, 2)}


def test_rows_that_left_memory_are_recorded_with_a_reason(ledger: Ledger) -> None:
    for number in (1, 2, 3):
        ledger.usage.add_entry(row(number, "host"))
    ledger.flush()
    for number, reason in ((1, "pressure"), (2, "pressure"), (3, "ttl")):
        ledger.usage.remove_entry("host", make_key(number), 10, reason)
    ledger.flush()
    assert ledger.keys("host") == set()
    assert ledger.evictions() == {"host": {"pressure": 2, "ttl": 1}}


def test_the_record_of_evictions_is_bounded(
    ledger: Ledger, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragcache.db.usage.EVICTIONS_KEPT", 3)
    for number in range(5):
        ledger.usage.remove_entry("host", make_key(number), 10, "pressure")
    ledger.flush()
    with database.reading() as session:
        kept = list(session.scalars(select(EvictionTable.key).order_by(EvictionTable.id)))
    assert [key[:2] for key in kept] == ["02", "03", "04"]
    assert EVICTIONS_KEPT > 3


def test_evicted_rows_are_claimed_until_their_blobs_are_gone(
    ledger: Ledger, another: Callable[[], Ledger]
) -> None:
    record(ledger, 1, 2)
    assert ledger.evict_rows("disk", [make_key(1), make_key(3)], "manual") == [
        make_key(1),
        make_key(3),
    ]
    assert ledger.keys("disk") == {make_key(2)}
    assert ledger.evictions() == {"disk": {"manual": 1}}
    other = another()
    assert other.claim([make_key(1)], ()) == ([], [])
    ledger.locks.release([make_key(1)])
    assert other.claim([make_key(1)], ()) == ([], [make_key(1)])


@pytest.mark.parametrize("reason", ["pressure", "ttl", "manual"])
def test_states_pinned_elsewhere_are_evicted_only_manually(
    ledger: Ledger, another: Callable[[], Ledger], reason: str
) -> None:
    record(ledger, 1)
    another().pin([make_key(1)], True)
    gone = ledger.evict_rows("disk", [make_key(1)], reason)
    assert gone == ([make_key(1)] if reason == "manual" else [])
    assert another().claim([make_key(1)], ())[1] == [], "either held, or being removed"
    assert len(ledger.keys("disk")) == 1 - len(gone)


def test_keys_claimed_elsewhere_are_not_evicted(
    ledger: Ledger, another: Callable[[], Ledger]
) -> None:
    record(ledger, 1)
    assert another().locks.acquire([make_key(1)]) == [make_key(1)]
    assert ledger.evict_rows("disk", [make_key(1)], "manual") == []
    assert ledger.keys("disk") == {make_key(1)}


def test_reservations_of_all_processes_count_against_one_budget(
    ledger: Ledger, another: Callable[[], Ledger]
) -> None:
    other = another()
    record(ledger, 1)
    ledger.locks.acquire([make_key(2)])
    other.locks.acquire([make_key(3)])
    assert ledger.reserve("disk", make_key(2), 50, 100) == 0
    assert other.reserve("disk", make_key(3), 50, 100) == 10
    assert other.reserve("disk", make_key(3), 40, 100) == 0, "in place of the first reservation"
    record_row(ledger, row(2, nbytes=20))
    assert other.reserve("disk", make_key(3), 70, 100) == 0


def test_more_keys_than_one_statement_takes(ledger: Ledger, database: Database) -> None:
    record(ledger, 1)
    many = [make_key(2)] * (2 * CHUNK) + [make_key(1)]
    assert [found.key for found in ledger.find(many)] == [make_key(1)]
    ledger.pin(many, True)
    assert ledger.load()[0].pinned


def test_a_session_writes_heartbeats(ledger: Ledger, database: Database) -> None:
    def beat() -> float:
        with database.reading() as session:
            return session.scalars(select(SessionTable.heartbeat)).one()

    first = beat()
    ledger.flush()
    assert beat() == first
    ledger.sessions.heartbeat()
    assert beat() > first
