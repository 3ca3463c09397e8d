"""`ragcache bench pml` on a small schema."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from ragcache.bench.pml import PmlSetting, bench_pml
from ragcache_api.cli.main import app


def test_it_measures_what_it_says() -> None:
    result = bench_pml(PmlSetting(modules=200, parse_runs=1, resolve_runs=5))
    assert result["parse_layout_s"] > 0
    assert 0 < result["resolve_ms"] <= result["resolve_worst_ms"]
    assert result["characters"] > 200 * 500
    assert "machine" in result


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "pml.json"
    done = CliRunner().invoke(app, ["bench", "pml", "--modules", "200", "--json", str(file)])
    assert {"parse_layout_s", "resolve_ms"} <= json.loads(file.read_text()).keys()

    assert "200 modules" in done.stdout
