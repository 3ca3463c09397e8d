"""Alembic migrations of the ledger, and the revision that this code reads and writes.

Raise `HEAD` with every change of a table, and with `ragcache.states.FORMAT_VERSION`: processes of
one revision share a ledger, and one format of states. The first process of a later release upgrades
the ledger, when all processes of the earlier one have ended. Until the first release `HEAD` stays
"0.1.0", and a ledger that an earlier commit made has to be made anew.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, select, text
from sqlalchemy.orm import Session

from ragcache.db.sql import clock
from ragcache.db.tables import DEAD_SECONDS, SessionTable
from ragcache.errors import LedgerOfOtherVersion

HEAD = "0.1.0"
_SCRIPTS = Path(__file__).parent
_LOCK = 0x7261_6763  # number of the advisory lock in PostgreSQL: "ragc"


def revision_of(connection: Connection) -> str | None:
    """Return the revision of a ledger, unless it is empty. Does not import Alembic: it is slow."""
    if connection.dialect.name == "sqlite":
        known = "SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'"
    else:
        known = "SELECT to_regclass('alembic_version')"
    if connection.scalar(text(known)) is None:
        return None
    return str(connection.scalar(text("SELECT version_num FROM alembic_version")))


def check_revision(name: str, connection: Connection) -> None:
    """Check that a ledger has the revision of this code, and keep that until the transaction ends.

    Raises:
        LedgerOfOtherVersion: The ledger `name` has another revision.
    """
    _lock(connection, "_shared")
    revision = revision_of(connection)
    if revision != HEAD:
        raise _other_version(name, revision)


def migrate(name: str, connection: Connection) -> None:
    """Create the tables of an empty ledger, or upgrade the tables of an earlier release.

    Everything happens inside the connection's transaction.

    Raises:
        LedgerOfOtherVersion: No release before this one made the ledger `name`, or a process of
            that release has it open.
    """
    _lock(connection)
    revision = revision_of(connection)
    if revision == HEAD:  # another process was first
        return
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    if revision is not None:
        earlier = {each.revision for each in ScriptDirectory.from_config(config).walk_revisions()}
        if revision not in earlier:
            raise _other_version(name, revision)
        _check_closed(name, revision, connection)
    command.upgrade(config, "head")


def _check_closed(name: str, revision: str, connection: Connection) -> None:
    """Refuse an upgrade beside a process that may still use the tables as they were."""
    with Session(connection) as session:
        recent = clock(session) - SessionTable.heartbeat < DEAD_SECONDS
        is_open = session.scalar(select(SessionTable.id).where(recent)) is not None
    if is_open:
        raise LedgerOfOtherVersion(
            f"the ledger {name} has the revision {revision}, which this ragcache upgrades to "
            f"{HEAD}, and a process of the earlier version has it open, or ended less than "
            f"{DEAD_SECONDS:g} s ago: end all of them, and open it again"
        )


def _lock(connection: Connection, kind: str = "") -> None:
    if connection.dialect.name == "postgresql":  # SQLite has one writer
        connection.execute(text(f"SELECT pg_advisory_xact_lock{kind}({_LOCK})"))


def _other_version(name: str, revision: str | None) -> LedgerOfOtherVersion:
    return LedgerOfOtherVersion(
        f"the ledger {name} has the revision {revision}, this ragcache reads and writes {HEAD}: it "
        "was made by another version. Open it with that version, or choose another state folder or "
        "database and ingest the documents again"
    )
