"""Commands read the same settings as the service: options, the environment, `ragcache.toml`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragcache.db import Database
from ragcache.store import KVStore
from ragcache_api.cli.main import app
from tests.ragcache.conftest import make_key, make_states

runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, with one state in `here` under a ledger that stands elsewhere."""
    database = Database.open(f"sqlite:///{tmp_path / 'elsewhere.sqlite'}")
    store = KVStore.open(tmp_path / "here", database, 1 << 20)
    store.put(make_key(1), make_states(1))
    store.close()
    database.close()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def states_told(*arguments: str) -> int:
    result = runner.invoke(app, ["verify", "--json", *arguments])
    return int(json.loads(result.stdout)["states"])


def test_the_file_says_where_state_and_ledger_are(folder: Path) -> None:
    url = f"sqlite:///{folder / 'elsewhere.sqlite'}"
    (folder / "ragcache.toml").write_text(f'state = "here"\nledger = "{url}"\n', encoding="utf-8")
    assert states_told() == 1


def test_an_option_comes_before_the_environment_and_that_before_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ragcache.toml").write_text('ledger = "sqlite:///nowhere/a"\n', encoding="utf-8")
    monkeypatch.setenv("RAGCACHE_STATE", "here")
    monkeypatch.setenv("RAGCACHE_LEDGER", f"sqlite:///{folder / 'elsewhere.sqlite'}")
    assert states_told() == 1
    empty = f"sqlite:///{folder / 'empty.sqlite'}"
    assert states_told("--ledger", empty) == 0


def test_a_setting_that_does_not_exist_is_named(folder: Path) -> None:
    (folder / "ragcache.toml").write_text("stat = 1\n", encoding="utf-8")
    result = runner.invoke(app, ["verify"])
    assert result.exit_code != 0
    assert "stat" in str(result.exception)
