"""`ragcache ledger`."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from sqlalchemy import text
from typer.testing import CliRunner

from ragcache.db import Database
from ragcache.db.migrations import HEAD
from ragcache.db.sessions import Sessions
from ragcache.errors import LedgerOutdated, NoState
from ragcache_api.cli.main import app

runner = CliRunner()


def test_a_ledger_is_shown_and_upgraded_beside_a_process(tmp_path: Path) -> None:
    where = ["--state", str(tmp_path)]
    assert isinstance(runner.invoke(app, ["ledger", "status", *where]).exception, NoState)
    with closing(Database.open(tmp_path / "ledger.sqlite")) as database:
        unused = runner.invoke(app, ["ledger", "status", *where]).output
        assert "up to date" in unused
        assert "no process has it open" in unused
        Sessions(database).begin()
        with database.transaction() as session:
            for column in ("format", "revision"):
                session.execute(text(f"ALTER TABLE sessions DROP COLUMN {column}"))
            session.execute(text("UPDATE alembic_version SET version_num = '0003'"))
            session.execute(text("DELETE FROM ledger_facts"))
        told = json.loads(runner.invoke(app, ["ledger", "status", "--json", *where]).stdout)
        assert (told["condition"], told["revision"], told["head"]) == ("outdated", "0003", HEAD)
        assert isinstance(runner.invoke(app, ["stats", *where]).exception, LedgerOutdated)
        upgraded = runner.invoke(app, ["ledger", "upgrade", *where])
        assert upgraded.exit_code == 0
        assert f"revision {HEAD}" in upgraded.output
        assert "0003" in upgraded.output, "the process is of before"
        assert runner.invoke(app, ["stats", *where]).exit_code == 0
