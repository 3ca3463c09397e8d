"""Processes of two versions over one ledger."""

from __future__ import annotations

import time
from itertools import count

import pytest
from sqlalchemy import func, select, text

from ragcache.db import Database, sessions
from ragcache.db.migrations import HEAD
from ragcache.db.processes import DEAD_SECONDS
from ragcache.db.tables import StateTable
from ragcache.states import FORMAT_VERSION
from tests.cluster.conftest import Measured
from tests.cluster.machines import Machines, Report, wait_until
from tests.ragcache.store.library import Library

LATER = FORMAT_VERSION + 1


def expand(database: Database) -> None:
    """What a migration of a later version does that this code goes on over: it only adds."""
    with database.transaction() as session:
        for table in ("sessions", "states", "documents"):
            added = f"ALTER TABLE {table} ADD COLUMN later VARCHAR NOT NULL DEFAULT ''"
            session.execute(text(added))
        noted = f"INSERT INTO ledger_facts VALUES ('revision 9999 serves from', '{HEAD}')"
        session.execute(text(noted))
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))


def test_d10_states_of_a_version_that_lives_stay(
    machines: Machines, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def live(library: Library, report: Report) -> None:
        library.put("ash", 2)
        report("stored")
        while not (library.folder / "go").exists():
            time.sleep(0.05)
        report(library.read("ash"))
        time.sleep(600)

    def open_later() -> list[object]:
        """A machine of a version with another format, which opens the ledger and ends."""
        with monkeypatch.context() as later:
            later.setattr(sessions, "FORMAT_VERSION", LATER)
            return machines.start("new", lambda _, report: report("opened")).read_all()

    database = machines.database()

    def rows() -> int:
        lasting = StateTable.tier == "disk"
        with database.reading() as session:
            return session.scalar(select(func.count()).select_from(StateTable).where(lasting)) or 0

    old = machines.start("old", live)
    assert old.read_line() == "stored"
    before = rows()
    assert open_later() == ["opened"]
    measured("D10 states before and after a later version opened the ledger", (before, rows()))
    assert rows() == before > 0
    (machines.disk("old") / "go").touch()
    assert "encoded" not in old.read_line()
    old.end()
    time.sleep(DEAD_SECONDS + 1)
    assert open_later() == ["opened"]
    measured("D10 states when nobody is left who uses them", rows())
    assert rows() == 0
    database.close()


def test_d10_a_ledger_is_expanded_under_living_processes(
    machines: Machines, measured: Measured
) -> None:
    def work(library: Library, report: Report) -> None:
        for number in count():
            library.put("ash", number % 5)
            library.read("ash")
            library.store.sweep()
            report(library.store.ledger.failures)

    def restart(library: Library, report: Report) -> None:
        library.put("elm", 1)
        report(library.read("ash") and library.read("elm"))

    old = machines.start("old", work)
    database = machines.database()
    assert old.read_line() == 0
    expand(database)
    assert Database.status(machines.url).condition == "newer"
    after = [old.read_line() for _ in range(5)]
    measured("D10 failed writes of a process in five rounds after the migration", sum(after))
    assert after == [0] * 5
    [found] = machines.start("again", restart).read_all()
    assert len(found) > 0, "a process of the version before may start again"
    old.end()
    wait_until(5, lambda: Database.status(machines.url).revision == "9999")
    database.close()
