"""`ragcache ledger`."""

from __future__ import annotations

import json
import math
import os
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text
from typer.testing import CliRunner

from ragcache.db import Database, Ledger
from ragcache.db.ledger import StateMetadata, StateRow
from ragcache.db.migrations import HEAD
from ragcache.db.sessions import Sessions
from ragcache.errors import LedgerOfOtherVersion, NoState
from ragcache_api.cli.main import app
from tests.ragcache.conftest import make_key, postgres_schema, record_row

runner = CliRunner()


def test_a_ledger_is_shown(tmp_path: Path) -> None:
    where = ["--state", str(tmp_path)]
    assert isinstance(runner.invoke(app, ["ledger", "status", *where]).exception, NoState)
    with closing(Database.open(tmp_path / "ledger.sqlite")) as database:
        unused = runner.invoke(app, ["ledger", "status", *where]).output
        assert f"revision {HEAD}" in unused
        assert "no process has it open" in unused
        Sessions(database).begin()
        assert str(os.getpid()) in runner.invoke(app, ["ledger", "status", *where]).output
        told = json.loads(runner.invoke(app, ["ledger", "status", "--json", *where]).stdout)
        assert (told["revision"], told["head"], len(told["sessions"])) == (HEAD, HEAD, 1)
        with database.transaction() as session:
            session.execute(text("UPDATE alembic_version SET version_num = '0003'"))
    assert isinstance(runner.invoke(app, ["stats", *where]).exception, LedgerOfOtherVersion)


@pytest.mark.enable_socket
def test_stats_of_a_shared_ledger_count_the_folders_disk(tmp_path: Path) -> None:
    with postgres_schema() as url, closing(Database.open(url)) as database:
        for folder, tokens in (("here", 3), ("there", 4)):
            ledger = Ledger.of_folder(database, tmp_path / folder)
            ledger.begin()
            row = (make_key(tokens), "disk", 10, 0, 0, False, math.inf, "model")
            record_row(ledger, StateRow(*row, StateMetadata(tokens)))
            ledger.end()
        where = ["--state", str(tmp_path / "here"), "--ledger", url]
        shown = json.loads(runner.invoke(app, ["stats", *where, "--json"]).stdout)
        elsewhere = ["--state", str(tmp_path / "nowhere"), "--ledger", url]
        assert json.loads(runner.invoke(app, ["stats", *elsewhere, "--json"]).stdout)["tiers"] == {}
    assert (shown["tiers"]["disk"]["states"], shown["tiers"]["disk"]["tokens"]) == (1, 3)
    assert not (tmp_path / "nowhere").exists(), "looking writes nothing"
