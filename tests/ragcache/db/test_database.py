"""The database: transactions, migrations, and what is said when it cannot be used."""

from __future__ import annotations

import multiprocessing
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import select, text

from ragcache.db import Database, migrations
from ragcache.db.database import LastKnown, Unchanged
from ragcache.db.migrations import HEAD
from ragcache.db.sessions import Sessions
from ragcache.db.tables import Base, NamespaceTable, StateTable
from ragcache.errors import (
    ConfigurationError,
    EngineClosed,
    LedgerOutdated,
    LedgerTooNew,
    LedgerUnavailable,
    NoState,
    StoreUnwritable,
)


@pytest.fixture(autouse=True)
def _new_ledgers_are_copies() -> None:
    """Here they are migrated."""


def test_committed_rows_outlive_the_connection(where: Path | str) -> None:
    for held in (0, 1):
        database = Database.open(where)
        with database.transaction() as session:
            assert len(list(session.scalars(select(NamespaceTable)))) == 1 + held
            session.add(NamespaceTable(name=f"tenant {held}"))
        database.close()


def test_an_error_rolls_everything_back(database: Database) -> None:
    def fail() -> None:
        with database.transaction() as session:
            session.add(StateTable(key="k", tier="disk", nbytes=1, tokens=1))
            session.flush()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with database.reading() as session:
        assert session.scalar(select(StateTable.key)) is None


def test_migrating_makes_exactly_the_tables_of_the_code(database: Database) -> None:
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, Base.metadata) == []
        assert context.get_current_revision() == HEAD


def test_the_head_is_the_last_migration() -> None:
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert scripts.get_current_head() == HEAD


def test_a_migration_that_fails_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.sqlite3"

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("alembic.op.create_index", fail)
        with pytest.raises(KeyboardInterrupt):
            Database.open(path)
    assert _tables(path) == set()
    Database.open(path).close()
    assert _tables(path) >= set(Base.metadata.tables)


@pytest.mark.slow
def test_processes_that_open_an_empty_folder_at_once_migrate_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        assert pool.map(_namespaces, [tmp_path / "ledger.sqlite3"] * 3) == [["default"]] * 3


def _namespaces(path: Path) -> list[str]:
    database = Database.open(path)
    with database.reading() as session:
        names = list(session.scalars(select(NamespaceTable.name)))
    database.close()
    return names


def _tables(path: Path) -> set[str]:
    connection = sqlite3.connect(path)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    return names


def test_a_ledger_of_a_later_version_is_refused(where: Path | str) -> None:
    database = Database.open(where)
    with database.transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    with pytest.raises(LedgerTooNew, match="has the revision 9999, this ragcache reads"):
        Database.open(where)


def test_a_later_ledger_that_only_expanded_is_used(where: Path | str) -> None:
    database = Database.open(where)
    with database.transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        noted = f"INSERT INTO ledger_facts VALUES ('revision 9999 serves from', '{HEAD}')"
        session.execute(text(noted))
        for name in ("sessions", "documents"):
            added = f"ALTER TABLE {name} ADD COLUMN later VARCHAR NOT NULL DEFAULT ''"
            session.execute(text(added))
    assert Database.status(where).condition == "newer"
    again = Database.open(where)
    Sessions(again).begin()
    again.close()
    database.close()
    assert Database.upgrade(where).revision == "9999", "it stays as it is"


def make_outdated(where: Path | str) -> Database:
    """A ledger as code of revision 0003 left it, which a process has open."""
    database = Database.open(where)
    Sessions(database).begin()
    with database.transaction() as session:
        for column in ("format", "revision"):
            session.execute(text(f"ALTER TABLE sessions DROP COLUMN {column}"))
        for index in ("states_by_used_at", "scaffolds_by_collection", "scaffolds_by_schema"):
            session.execute(text(f"DROP INDEX {index}"))
        session.execute(text("ALTER TABLE states DROP COLUMN used_at"))
        for column in ("instruction", "calibrations"):
            session.execute(text(f"ALTER TABLE collections DROP COLUMN {column}"))
        session.execute(text("UPDATE alembic_version SET version_num = '0003'"))
        session.execute(text("DELETE FROM ledger_facts"))
    return database


def test_opening_migrates_only_where_no_other_process_lives(where: Path | str) -> None:
    database = make_outdated(where)
    with pytest.raises(LedgerOutdated, match=r"revision 0003.*run `ragcache ledger upgrade`"):
        Database.open(where)
    status = Database.status(where)
    assert (status.revision, status.condition) == ("0003", "outdated")
    assert [(each.format, each.revision) for each in status.sessions] == [(2, "0003")]
    with database.transaction() as session:
        session.execute(text("UPDATE sessions SET machine = 'another', heartbeat = 0"))
    Database.open(where).close()
    assert Database.status(where).condition == "current"
    database.close()


def test_an_upgrade_goes_beside_processes_that_the_new_tables_serve(where: Path | str) -> None:
    database = make_outdated(where)
    upgraded = Database.upgrade(where)
    assert (upgraded.condition, upgraded.serves_from) == ("current", migrations.SERVES_FROM)
    with database.transaction() as session:  # what the code before it writes
        session.execute(
            text(
                "INSERT INTO sessions (id, machine, pid, started, heartbeat, generation) "
                "SELECT 'old', machine, pid, started, heartbeat, 1 FROM sessions"
            )
        )
    sessions = Database.status(where).sessions
    assert [(each.format, each.revision) for each in sessions] == [(2, "0003")] * 2
    Database.open(where).close()
    database.close()


def test_an_upgrade_that_contracts_waits_for_the_processes_before(
    where: Path | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = make_outdated(where)
    monkeypatch.setattr("ragcache.db.database.SERVES_FROM", HEAD)
    for migrate in (Database.open, Database.upgrade):
        with pytest.raises(LedgerOutdated, match="stop these: the tables of"):
            migrate(where)
    assert Database.status(where).revision == "0003"
    database.close()


def test_an_empty_ledger_is_named_and_made(where: Path | str) -> None:
    assert Database.status(where).condition == "empty"
    assert Database.upgrade(where).condition == "current"


def test_a_folder_without_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoState, match=f"no ragcache state in {tmp_path}; make one"):
        Database.open_existing(tmp_path / "ledger")
    assert not list(tmp_path.iterdir()), "looking creates nothing"


def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(b"this is a letter, not a database" * 40)
    with pytest.raises(NoState, match="is not a ragcache ledger"):
        Database.open_existing(path)


def test_a_folder_that_does_not_exist_is_unwritable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnwritable, match="cannot write the ledger"):
        Database.open(tmp_path / "none" / "ledger")


def test_another_kind_of_database_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot be kept in mysql; use sqlite or postgre"):
        Database.open("mysql://localhost/x")


def test_readers_and_a_writer_do_not_wait_for_each_other(database: Database) -> None:
    with database.reading() as reader:
        assert len(list(reader.scalars(select(NamespaceTable)))) == 1
        with database.transaction() as writer:
            writer.add(NamespaceTable(name="new"))
        if database.engine.dialect.name == "sqlite":
            names = list(reader.scalars(select(NamespaceTable.name)))
            assert names == ["default"], "a reader sees what was there when it began"


def test_a_locked_database_is_a_named_error_after_its_time(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    database = Database.open(path, busy_seconds=0.05)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    def write() -> None:
        with database.transaction() as session:
            session.add(NamespaceTable(name="new"))

    with pytest.raises(LedgerUnavailable, match=r"does not answer .*locked"):
        write()
    with database.reading() as session:
        assert session.scalar(select(NamespaceTable.name)) == "default"
    other.execute("ROLLBACK")
    write()
    other.close()
    database.close()


def test_an_unreachable_postgresql_is_a_named_error() -> None:
    with pytest.raises(LedgerUnavailable, match="does not answer"):
        Database.open("postgresql://nobody:secret@/none?host=/nowhere")


def test_errors_contain_no_password() -> None:
    with pytest.raises(LedgerUnavailable) as caught:
        Database.open("postgresql://nobody:secret@/none?host=/nowhere")
    assert "secret" not in str(caught.value)


def test_what_was_read_last_stands_in_for_a_ledger_that_is_away() -> None:
    now, asked = 0.0, 0
    known = LastKnown[int](60, lambda: now)

    def away() -> int:
        nonlocal asked
        asked += 1
        raise LedgerUnavailable("away")

    with pytest.raises(LedgerUnavailable):
        known.read("a", away)
    assert known.read("a", lambda: 1) == 1
    now = 59.0
    assert (known.read("a", away), known.read("a", away), asked) == (1, 1, 2), "it has its rest"
    now = 60.5
    with pytest.raises(LedgerUnavailable):
        known.read("a", away)
    assert known.read("a", lambda: 2) == 2

    def unknown() -> int:
        raise KeyError("a")

    with pytest.raises(KeyError):
        known.read("a", unknown)
    with pytest.raises(LedgerUnavailable):
        known.read("a", away)


def test_changes_of_anybody_are_noticed_without_a_query(tmp_path: Path) -> None:
    asked = 0

    def count() -> int:
        nonlocal asked
        asked += 1
        return asked

    with (
        closing(Database.open(tmp_path / "ledger.sqlite")) as database,
        closing(Database.open(tmp_path / "ledger.sqlite")) as other,
    ):
        known = Unchanged(database)
        assert [known.read("a", count), known.read("a", count), known.read("b", count)] == [1, 1, 2]
        for writer in (database, other):
            with writer.transaction() as session:
                session.execute(text("CREATE TABLE IF NOT EXISTS scratch (number INTEGER)"))
                session.execute(text("INSERT INTO scratch VALUES (1)"))
            before = asked
            assert [known.read("a", count), known.read("a", count)] == [before + 1] * 2
        database.close()
        with pytest.raises(EngineClosed):
            known.read("a", count)


def test_where_changes_are_not_told_every_read_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Database.open(tmp_path / "ledger.sqlite")) as database:
        monkeypatch.setattr(database, "changes", lambda: None)
        known, answers = Unchanged(database), iter([1, 2])
        assert [known.read("a", lambda: next(answers)) for _ in range(2)] == [1, 2]
