"""Sessions that requests should not wait for."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import update

from ragcache.db import Database, SessionWatch
from ragcache.db.sessions import DEAD_SECONDS, KeyLocks, Sessions, end_sessions
from ragcache.db.tables import SessionTable
from ragcache.errors import LedgerUnavailable
from tests.ragcache.conftest import make_key


def test_silent_and_ended_sessions_are_found(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "ledger.sqlite")
    watch, sessions = SessionWatch(database), [Sessions(database) for _ in range(3)]
    for each in sessions:
        each.begin()
    assert watch.find_silent() == set()
    living, silent, ended = (each.id for each in sessions)
    with database.transaction() as session:
        row = update(SessionTable).where(SessionTable.id == silent)
        session.execute(row.values(heartbeat=SessionTable.heartbeat - DEAD_SECONDS - 1))
        end_sessions(session, [ended])
    assert watch.find_silent() == {silent, ended}
    assert living not in watch.find_silent()
    sessions[1].heartbeat()
    sessions[2].heartbeat()
    assert watch.find_silent() == set()
    database.close()


def refuse(_: Database) -> None:
    raise LedgerUnavailable("the server does not answer")


def test_claims_that_were_not_released_end_with_a_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database.open(tmp_path / "ledger.sqlite")
    mine, other = (KeyLocks(Sessions(database)) for _ in range(2))
    for each in (mine, other):
        each.sessions.begin()
    left, again = make_key(1), make_key(2)
    assert mine.acquire([left, again]) == [left, again]
    with monkeypatch.context() as away:
        away.setattr(Database, "transaction", refuse)
        with pytest.raises(LedgerUnavailable):
            mine.release([left, again])
    assert mine.acquire([again]) == [again]
    assert other.acquire([left, again]) == []
    mine.sessions.heartbeat()
    assert other.acquire([left, again]) == [left], "a key that was claimed again stays claimed"
    database.close()


def test_no_session_is_silent_just_after_the_ledger_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them could write its heartbeat."""
    database = Database.open(tmp_path / "ledger.sqlite")
    now = 0.0
    watch, sessions = SessionWatch(database, now=lambda: now), Sessions(database)
    sessions.begin()
    with database.transaction() as session:
        silent = SessionTable.heartbeat - DEAD_SECONDS - 1
        session.execute(update(SessionTable).values(heartbeat=silent))
    assert watch.find_silent() == {sessions.id}
    with monkeypatch.context() as away:
        away.setattr(Database, "reading", refuse)
        assert watch.find_silent() == set()
    now = DEAD_SECONDS - 1
    assert watch.find_silent() == set()
    now = DEAD_SECONDS + 1
    assert watch.find_silent() == {sessions.id}
    database.close()
