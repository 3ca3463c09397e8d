"""Alembic migrations of the ledger: the revision that this code reads and writes, and the way
there, in one transaction.

Migrations expand first and contract later: one adds what new code needs, with defaults for what
code before it does not write; a later one, of a release whose code before it no longer needs the
old, removes that, and raises `SERVES_FROM` to its own number.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from ragcache.errors import LedgerTooNew

HEAD = "0008"
SERVES_FROM = "0001"
"""The earliest revision whose code works over the tables of `HEAD`. It stands in the ledger, too:
such code, older than the ledger, reads there whether it may go on."""
_LOCK = 0x7261_6763  # of PostgreSQL's advisory locks: "ragc"


def revision_of(connection: Connection) -> str | None:
    """The revision of a ledger, or None where it is empty."""
    if "alembic_version" not in inspect(connection).get_table_names():
        return None
    stamped = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return None if stamped is None else str(stamped)


def serves_from(connection: Connection, revision: str) -> str | None:
    """The earliest revision whose code works over a ledger of this one, None where it says none."""
    if not inspect(connection).has_table("ledger_facts"):
        return None
    noted = text("SELECT value FROM ledger_facts WHERE name = :name")
    found = connection.scalar(noted, {"name": _fact(revision)})
    return None if found is None else str(found)


def lock(connection: Connection) -> None:
    """Lets one process at a time migrate; SQLite has one writer."""
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))


def upgrade(connection: Connection) -> None:
    """Migrates inside the connection's transaction: a process that dies in between leaves the
    ledger as it was. A later ledger stays, where it serves this code. Raises `LedgerTooNew`
    where it does not."""
    current = revision_of(connection)
    if current == HEAD:
        return
    if current is not None and current > HEAD:
        oldest = serves_from(connection, current)
        if oldest is not None and oldest <= HEAD:
            return
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
    fact = text("INSERT INTO ledger_facts (name, value) VALUES (:name, :value)")
    connection.execute(fact, {"name": _fact(HEAD), "value": SERVES_FROM})


def _fact(revision: str) -> str:
    return f"revision {revision} serves from"
