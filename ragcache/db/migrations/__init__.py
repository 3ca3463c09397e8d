"""Alembic migrations of the ledger: the revision that this code reads and writes, and the way
there, in one transaction."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from ragcache.errors import LedgerTooNew

HEAD = "0003"
_LOCK = 0x7261_6763  # of PostgreSQL's advisory locks: "ragc"


def revision_of(connection: Connection) -> str | None:
    """The revision of a ledger, or None where it is empty."""
    if "alembic_version" not in inspect(connection).get_table_names():
        return None
    stamped = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return None if stamped is None else str(stamped)


def upgrade(connection: Connection) -> None:
    """Migrates inside the connection's transaction: a process that dies in between leaves the
    ledger as it was. Raises `LedgerTooNew` for a ledger of a later ragcache."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    current = revision_of(connection)
    if current == HEAD:
        return
    if current is not None and current > HEAD:
        raise LedgerTooNew(
            f"the ledger has the revision {current}, this ragcache reads {HEAD}; it was written "
            "by a later version: upgrade ragcache"
        )
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
