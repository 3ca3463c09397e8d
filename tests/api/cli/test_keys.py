"""`ragcache keys`."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from ragcache.db import ApiKeys, Database
from ragcache.errors import ConfigurationError, NoState, UnknownKey
from ragcache_api.cli.main import app

runner = CliRunner()


def test_a_key_is_made_listed_and_revoked(tmp_path: Path) -> None:
    where = ["--state", str(tmp_path / "state")]
    made = runner.invoke(app, ["keys", "create", "page", "--role", "admin", "--json", *where])
    secret = json.loads(made.stdout)["secret"]
    plain = runner.invoke(app, ["keys", "create", "lab", "--namespace", "lab-1", *where])
    assert plain.stdout.splitlines()[0].startswith("rc-")
    database = Database.open(tmp_path / "state" / "ledger.sqlite")
    assert ApiKeys(database).check(secret) is not None
    listed = runner.invoke(app, ["keys", "ls", *where]).output
    assert secret not in listed
    assert ["1", "page", "admin", "default"] in [line.split()[:4] for line in listed.splitlines()]
    assert runner.invoke(app, ["keys", "revoke", "1", *where]).exit_code == 0
    assert ApiKeys(database).check(secret) is None
    rows = json.loads(runner.invoke(app, ["keys", "ls", "--json", *where]).stdout)
    assert [bool(row["revoked_at"]) for row in rows] == [True, False]
    assert rows[1]["namespace"] == "lab-1"
    database.close()


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    where = ["--state", str(tmp_path / "state")]
    assert isinstance(runner.invoke(app, ["keys", "ls", *where]).exception, NoState)
    wrong = runner.invoke(app, ["keys", "create", "page", "--role", "root", *where])
    assert isinstance(wrong.exception, ConfigurationError)
    assert "no keys yet" in runner.invoke(app, ["keys", "ls", *where]).output
    assert isinstance(runner.invoke(app, ["keys", "revoke", "7", *where]).exception, UnknownKey)
