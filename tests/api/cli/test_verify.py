"""`ragcache verify`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragcache.db import Database
from ragcache.store import KVStore, RemoteTier, admin
from ragcache_api.cli.main import app
from tests.ragcache.conftest import make_key, make_states

runner = CliRunner()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A store with one state that nothing needs."""
    database = Database.open(tmp_path / "ledger.sqlite")
    store = KVStore.open(tmp_path, database, 1 << 20)
    store.put(make_key(1), make_states(1))
    store.close()
    database.close()
    return tmp_path


def test_what_disagrees_is_printed_and_mended_on_request(state: Path) -> None:
    found = runner.invoke(app, ["verify", "--state", str(state)])
    assert found.exit_code == 1
    assert "unowned" in found.output
    assert "1 states, 0 modules: 1 disagreement, 0 mended" in found.output
    assert f"{str(make_key(1))[:12]}…" in found.output
    assert "--repair" in found.output
    mended = runner.invoke(app, ["verify", "--state", str(state), "--repair"])
    assert (mended.exit_code, "1 disagreement, 1 mended" in mended.output) == (0, True)
    clean = runner.invoke(app, ["verify", "--state", str(state)])
    assert (clean.exit_code, "0 states, 0 modules: nothing disagrees" in clean.output) == (0, True)


def test_a_program_reads_json(state: Path) -> None:
    result = runner.invoke(app, ["verify", "--state", str(state), "--json"])
    report = json.loads(result.stdout)
    assert (report["clean"], report["states"], report["found"][0]["kind"]) == (False, 1, "unowned")


def test_the_remote_and_a_ledger_elsewhere_are_verified(tmp_path: Path) -> None:
    url, far = f"sqlite:///{tmp_path / 'elsewhere.sqlite'}", f"file://{tmp_path / 'far'}"
    database = Database.open(url)
    store = KVStore.open(tmp_path, database, 1 << 20, remote=RemoteTier.open(far))
    store.put(make_key(1), make_states(1))
    admin.move(store, [make_key(1)], "remote")
    store.close()
    database.close()
    command = ["verify", "--state", str(tmp_path), "--ledger", url, "--json"]
    without = json.loads(runner.invoke(app, command).stdout)
    with_remote = json.loads(runner.invoke(app, [*command, "--remote", far]).stdout)
    assert (without["states"], with_remote["states"]) == (0, 1)
    assert {each["kind"] for each in with_remote["found"]} == {"unowned"}
    [blob] = (tmp_path / "far").rglob("*.safetensors")
    blob.write_bytes(blob.read_bytes()[:-1])
    broken = json.loads(runner.invoke(app, [*command, "--remote", far]).stdout)
    assert "corrupt" in {each["kind"] for each in broken["found"]}
