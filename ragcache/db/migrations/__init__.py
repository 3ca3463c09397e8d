"""Alembic migrations of the ledger, and the revision that this code reads and writes.

Raise `HEAD` with every change of a table, and with `ragcache.states.FORMAT_VERSION`: processes of
one revision share a ledger, and one format of states.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, text

from ragcache.errors import LedgerOfOtherVersion

HEAD = "0.1.0"
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


def check_revision(name: str, revision: str | None) -> None:
    """Refuse the ledger `name` of another version.

    Raises:
        LedgerOfOtherVersion: The revision is neither None nor `HEAD`.
    """
    if revision not in (None, HEAD):
        raise LedgerOfOtherVersion(
            f"the ledger {name} has the revision {revision}, this ragcache reads and writes "
            f"{HEAD}: it was made by another version. Open it with that version, or choose another "
            "state folder or database and ingest the documents again"
        )


def create_tables(name: str, connection: Connection) -> None:
    """Create the tables of an empty ledger inside the connection's transaction.

    Raises:
        LedgerOfOtherVersion: Another process has created tables of another version meanwhile.
    """
    if connection.dialect.name == "postgresql":  # SQLite has one writer
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    revision = revision_of(connection)
    check_revision(name, revision)
    if revision == HEAD:
        return
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
