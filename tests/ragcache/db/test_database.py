"""The database: transactions, migrations, and what is said when it cannot be used."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import select, text

from ragcache.db import Database, ledger_status, migrations
from ragcache.db import database as database_module
from ragcache.db.database import APPLICATION_NAME, CONNECTIONS_KEPT, StaleCache, Unchanged
from ragcache.db.migrations import HEAD
from ragcache.db.sessions import Sessions, end_sessions
from ragcache.db.tables import Base, NamespaceTable, SessionTable, StateTable
from ragcache.errors import (
    ConfigurationError,
    EngineClosed,
    LedgerOfOtherVersion,
    LedgerUnavailable,
    NoState,
    StoreUnwritable,
)
from ragcache.states import FORMAT_VERSION
from tests.forks import FORKS
from tests.ragcache.conftest import postgres_schema


@pytest.fixture(autouse=True)
def _new_ledgers_are_copies() -> None:
    """Here they are migrated."""


@pytest.fixture
def postgres_ledger(socket_enabled: None) -> Iterator[str]:
    """Here the schema is empty."""
    with postgres_schema() as url:
        yield url


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
    scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
    assert scripts.get_current_head() == HEAD


def test_a_migration_that_fails_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.sqlite3"

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("alembic.op.execute", fail)
        with pytest.raises(KeyboardInterrupt):
            Database.open(path)
    assert _tables(path) == set()
    Database.open(path).close()
    assert _tables(path) >= set(Base.metadata.tables)


@pytest.mark.slow
def test_processes_that_open_an_empty_folder_migrate_it_once(tmp_path: Path) -> None:
    with FORKS.Pool(3) as pool:
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


NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "next", "0.1.0"

def upgrade():
    op.add_column("namespaces", sa.Column("color", sa.String, server_default="red"))
"""


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the code in this process one of a release with one more migration."""
    scripts = tmp_path / "migrations"
    shutil.copytree(Path(migrations.__file__).parent, scripts)
    (scripts / "versions" / "next.py").write_text(NEXT, encoding="utf-8")

    def release() -> None:
        monkeypatch.setattr(migrations, "_SCRIPTS", scripts)
        for module in (migrations, database_module):
            monkeypatch.setattr(module, "HEAD", "next")

    return release


def test_a_later_release_upgrades_a_closed_ledger(
    where: Path | str, next_release: Callable[[], None]
) -> None:
    with closing(Database.open(where)) as database, database.transaction() as session:
        session.add(NamespaceTable(name="tenant"))
    next_release()
    for _ in range(2):
        with closing(Database.open(where)) as database, database.reading() as session:
            rows = session.execute(text("SELECT name, color FROM namespaces ORDER BY name"))
            assert rows.all() == [("default", "red"), ("tenant", "red")]
            assert migrations.revision_of(session.connection()) == "next"


def test_a_ledger_is_not_upgraded_while_it_is_open(
    where: Path | str, next_release: Callable[[], None]
) -> None:
    with closing(Database.open(where)) as earlier:
        sessions = Sessions(earlier)
        sessions.begin()
        next_release()
        with pytest.raises(LedgerOfOtherVersion, match="a process of the earlier version has it"):
            Database.open(where)
        with earlier.transaction() as session:
            end_sessions(session, [sessions.id])
        Database.open(where).close()


def test_a_session_does_not_begin_in_a_ledger_that_was_upgraded(
    where: Path | str, next_release: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Database.open(where)) as earlier:
        silent = Sessions(earlier)
        silent.begin()
        with earlier.transaction() as session:
            end_sessions(session, [silent.id])
        next_release()
        Database.open(where).close()
        monkeypatch.undo()  # this process is of the earlier release again
        for start in (Sessions(earlier).begin, silent.heartbeat):
            with pytest.raises(LedgerOfOtherVersion, match="has the revision next"):
                start()


@pytest.mark.parametrize("revision", ["0008", "0.2.0", "of nobody"])
def test_a_ledger_of_another_version_is_refused_and_stays(where: Path | str, revision: str) -> None:
    with closing(Database.open(where)) as database, database.transaction() as session:
        session.execute(text("UPDATE alembic_version SET version_num = :it"), {"it": revision})
    said = rf"the revision {revision}, this ragcache reads and writes {HEAD}.*another version"
    with pytest.raises(LedgerOfOtherVersion, match=said):
        Database.open(where)
    status = ledger_status(where)
    assert (status.revision, status.head, status.sessions) == (revision, HEAD, ())


def test_the_status_names_the_processes_that_live(where: Path | str) -> None:
    assert ledger_status(where).revision is None
    with closing(Database.open(where)) as database:
        Sessions(database).begin()
        Sessions(database).begin()
        with database.transaction() as session:
            silent = session.scalars(select(SessionTable).limit(1)).one()
            silent.machine, silent.heartbeat = "another", 0.0
        [living] = ledger_status(where).sessions
        assert (living.pid, ledger_status(where).revision) == (os.getpid(), HEAD)


def test_a_format_of_states_has_a_revision_of_its_own() -> None:
    assert (HEAD, FORMAT_VERSION) == ("0.1.0", 3), "raise both: a ledger holds one format"


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


def test_an_unreachable_postgresql_error_hides_the_password() -> None:
    with pytest.raises(LedgerUnavailable, match="does not answer") as caught:
        Database.open("postgresql://nobody:secret@/none?host=/nowhere")
    assert "secret" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.usefixtures("socket_enabled")
def test_a_process_keeps_few_connections_to_postgresql() -> None:
    """A peak takes more, which are closed after it."""
    mine = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'of this test'")
    with (
        postgres_schema() as url,
        closing(Database.open(f"{url}&application_name=of this test")) as d,
    ):
        with ExitStack() as peak:
            readers = [peak.enter_context(d.reading()) for _ in range(CONNECTIONS_KEPT + 2)]
            assert {reader.scalar(mine) for reader in readers} >= {CONNECTIONS_KEPT + 2}
        with d.reading() as session:
            assert session.scalar(mine) == CONNECTIONS_KEPT


@pytest.mark.slow
@pytest.mark.usefixtures("socket_enabled")
def test_connections_to_postgresql_have_a_name() -> None:
    shown = text("SHOW application_name")
    with postgres_schema() as url, closing(Database.open(url)) as d, d.reading() as session:
        assert session.scalar(shown) == APPLICATION_NAME


def test_places_without_a_ledger_are_named(tmp_path: Path) -> None:
    with pytest.raises(NoState, match=f"no ragcache state in {tmp_path}; make one"):
        Database.open_existing(tmp_path / "ledger")
    assert not list(tmp_path.iterdir()), "looking creates nothing"
    with pytest.raises(StoreUnwritable, match="cannot write the ledger"):
        Database.open(tmp_path / "none" / "ledger")
    with pytest.raises(ConfigurationError, match="cannot be kept in mysql; use sqlite or postgre"):
        Database.open("mysql://localhost/x")
    (tmp_path / "letter").write_bytes(b"this is a letter, not a database" * 40)
    with pytest.raises(NoState, match="is not a ragcache ledger"):
        Database.open_existing(tmp_path / "letter")


def test_what_was_read_last_stands_in_for_a_ledger_that_is_away() -> None:
    now, asked = 0.0, 0
    known = StaleCache[int](60, lambda: now)

    def away() -> int:
        nonlocal asked
        asked += 1
        raise LedgerUnavailable("away")

    with pytest.raises(LedgerUnavailable):
        known.read("a", away)
    assert known.read("a", lambda: 1) == 1
    now = 59.0
    assert (known.read("a", away), known.read("a", away), asked) == (1, 1, 2), "it has its rest"
    assert known.failed > known.answered
    now = 60.2
    assert known.failed > known.answered, "a second later, too, until it answers"
    now = 60.5
    with pytest.raises(LedgerUnavailable):
        known.read("a", away)
    assert known.read("a", lambda: 2) == 2
    assert known.failed < known.answered

    def unknown() -> int:
        raise KeyError("a")

    with pytest.raises(KeyError):
        known.read("a", unknown)
    with pytest.raises(LedgerUnavailable):
        known.read("a", away)


def test_changes_of_anybody_are_noticed_without_a_query(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        with monkeypatch.context() as patched:
            patched.setattr(database, "changes", lambda: None)  # as PostgreSQL
            before = asked
            assert [known.read("a", count), known.read("a", count)] == [before + 1, before + 2]
        database.close()
        with pytest.raises(EngineClosed):
            known.read("a", count)
