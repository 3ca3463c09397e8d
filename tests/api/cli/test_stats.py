"""`ragcache stats` and `ragcache modules ls`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragcache import RagCache
from ragcache.db import Database
from ragcache.models import LoadedModel
from ragcache_api.cli.main import app

runner = CliRunner()


@pytest.fixture
def state(reader: LoadedModel, notes: Path, tmp_path: Path) -> Path:
    """Three documents of which one is pinned, and another was evicted."""
    with RagCache.open(tmp_path / "state", reader) as rag:
        rag.ingest("notes", notes)
        rag.modules.pin("notes", ["boats.md"])
        rag.modules.evict("notes", ["keys.md"])
    return tmp_path / "state"


def test_stats_sum_up_collections_tiers_and_evictions(state: Path) -> None:
    shown = runner.invoke(app, ["stats", "--state", str(state)]).output.splitlines()
    assert ["notes", "3"] in [line.split() for line in shown]
    tiers = [line.split() for line in shown if line.startswith("disk")]
    assert tiers[0][:2] == ["disk", "3"], "two modules and the preamble"
    assert tiers[1] == ["disk", "1", "0"], "evicted by hand, not fetched again"
    plain = json.loads(runner.invoke(app, ["stats", "--state", str(state), "--json"]).stdout)
    assert plain["collections"] == {"notes": 3}
    assert plain["tiers"]["disk"]["states"] == 3
    assert plain["evictions"]["disk"]["manual"] == 1


def test_modules_are_listed_with_their_pins(state: Path) -> None:
    lines = runner.invoke(app, ["modules", "ls", "--state", str(state)]).output.splitlines()
    rows = {line.split()[0]: line.split() for line in lines}
    assert rows["boats.md#1"][-1] == "pinned"
    assert rows["boats.md#1"][2] == "disk"
    assert rows["keys.md#1"][2:4] == ["none", "0"]
    assert "pinned" not in rows["leave.md#1"]


def test_an_empty_state_says_what_to_do(tmp_path: Path) -> None:
    Database.open(tmp_path / "ledger.sqlite").close()
    for command in (["stats"], ["modules", "ls"]):
        assert "ragcache ingest" in runner.invoke(app, [*command, "--state", str(tmp_path)]).output
