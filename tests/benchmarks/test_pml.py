"""The language at size, on a small schema."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from pml import PmlSetting, bench_pml

from tests.conftest import REPOSITORY


def test_it_measures_what_it_says() -> None:
    result = bench_pml(PmlSetting(modules=200, parse_runs=1, resolve_runs=5))
    assert result["parse_layout_s"] > 0
    assert 0 < result["resolve_ms"] <= result["resolve_worst_ms"]
    assert result["characters"] > 200 * 500
    assert "machine" in result


def test_the_script_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    file = tmp_path / "pml.json"
    command = [sys.executable, "benchmarks/pml.py", "--modules", "200", "--json", str(file)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert {"parse_layout_s", "resolve_ms"} <= json.loads(file.read_text()).keys()
    assert "200 modules" in done.stdout
