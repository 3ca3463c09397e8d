"""`ragcache modules`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ragcache import RagCache, SourceDocument
from ragcache.models import LoadedModel
from ragcache_api.cli.main import app

runner = CliRunner()


@pytest.fixture
def state(tmp_path: Path, reader: LoadedModel) -> Path:
    with RagCache.open(tmp_path / "state", reader) as rag:
        rag.ingest("notes", [SourceDocument("kiln", "The kiln is in the yard.")])
    return tmp_path / "state"


def listed(state: Path) -> dict[str, Any]:
    [row] = json.loads(
        runner.invoke(app, ["modules", "ls", "--state", str(state), "--json"]).stdout
    )
    return dict(row)


def expire(state: Path, *words: str) -> Any:
    return runner.invoke(app, ["modules", "expire", *words, "--state", str(state)])


def test_a_limit_is_set_and_lifted(state: Path) -> None:
    number = str(listed(state)["id"])
    dry = expire(state, number, "--after", "60", "--dry-run")
    assert "1 states would be kept for 60 s, unless they are pinned" in dry.output
    assert listed(state)["expires_at"] is None
    assert "1 states are kept for 60 s" in expire(state, number, "--after", "60").output
    assert listed(state)["expires_at"] == pytest.approx(time.time() + 60, abs=30)
    done = json.loads(expire(state, number, "--never", "--json").stdout)
    assert [(each["action"], each["tier"]) for each in done] == [("keep", "disk")]
    assert listed(state)["expires_at"] is None


@pytest.mark.parametrize("words", [["1"], ["1", "--after", "1", "--never"], ["--never"]])
def test_what_is_wanted_must_be_said(state: Path, words: list[str]) -> None:
    assert expire(state, *words).exit_code == 2


def test_an_unknown_module_is_named(state: Path) -> None:
    failed = expire(state, "999", "--never")
    assert failed.exit_code != 0
    assert "there is no module 999" in str(failed.exception)
