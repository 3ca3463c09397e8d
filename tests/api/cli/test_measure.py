"""`ragcache plan` and `ragcache bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragcache.errors import ConfigurationError, NoState
from ragcache_api.cli.main import app
from tests.conftest import REPOSITORY

runner = CliRunner()


@pytest.mark.slow
def test_a_plan_of_files_is_printed(notes: Path, tmp_path: Path) -> None:
    (notes / "scan.pdf").write_bytes(b"no PDF")
    where = ["--state", str(tmp_path / "state"), "--sample", "2", "--device-bytes", "1KiB"]
    shown = runner.invoke(app, ["plan", str(notes), *where])
    assert shown.exit_code == 0
    assert "scan.pdf: it is damaged, or no PDF" in shown.output
    for word in ("3 documents", "device", "int8", "computed in", "bytes per token", "Ingestion"):
        assert word in shown.output
    assert not (tmp_path / "state").exists(), "a plan changes nothing"


@pytest.mark.slow
def test_a_plan_of_a_collection_as_json(notes: Path, tmp_path: Path) -> None:
    state = ["--state", str(tmp_path / "state")]
    runner.invoke(app, ["ingest", "notes", str(notes), *state])
    result = runner.invoke(app, ["plan", "-c", "notes", *state, "--json", "--sample", "1"])
    plan = json.loads(result.stdout)
    assert (plan["documents"], plan["measured"]["modules"]) == (3, 1)
    assert plan["extrapolated"]["encode_s"] > 0
    assert plan["advice"]
    assert {size["tier"] for size in plan["tiers"]} == {"host", "disk"}


def test_a_plan_needs_either_files_or_a_collection(notes: Path, tmp_path: Path) -> None:
    for arguments in ([], [str(notes), "-c", "notes"]):
        assert isinstance(runner.invoke(app, ["plan", *arguments]).exception, ConfigurationError)
    missing = runner.invoke(app, ["plan", "-c", "notes", "--state", str(tmp_path)])
    assert isinstance(missing.exception, NoState)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("ttft", "states concatenated"), ("decode", "KV bytes over one copy"),
        ("serve", "knee: 2.95 requests a second"),
    ],
)  # fmt: skip
def test_a_benchmark_prints_its_figures_and_writes_them(
    name: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures that are published, as they would be measured."""
    result = json.loads((REPOSITORY / f"benchmarks/results/{name}-cpu.json").read_text())
    result |= {"processor": dict(result)} if name == "ttft" else {}  # measured later
    monkeypatch.setattr(f"ragcache.bench.{name}.bench_{name}", lambda *_: result)
    file = tmp_path / "figures.json"
    done = runner.invoke(app, ["bench", name, "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert shown in " ".join(done.stdout.split())
    assert json.loads(file.read_text())["machine"] == result["machine"]


def test_a_load_runs_on_a_cpu_and_checks_its_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "load.json"
    arguments = ["bench", "load", "--reduced", "--seconds", "0.3", "--rates", "20", "--check"]
    done = runner.invoke(app, [*arguments, "--json", str(file)])
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert result["missed"] == []
    assert result["load"]["rates"] == [20.0]
    assert f"most answers a second: {result['most_answered']:.1f}" in done.stdout
    slow = result | {"missed": ["answers a second: 1.0, must be at least 28"]}
    monkeypatch.setattr("ragcache.bench.load.bench_load", lambda *_: slow)
    missed = runner.invoke(app, arguments)
    assert missed.exit_code == 1
    assert "missed: answers a second" in missed.stdout


@pytest.mark.parametrize(
    "given",
    [
        ("--rates", "20,10"), ("--rates", "fast"), ("--shape", "9b"), ("--host-bytes", "x"),
        ("--device-kv-dtype", "int5"), ("--quantization", "int8"),
    ],
)  # fmt: skip
def test_a_load_names_an_unusable_option(given: tuple[str, str]) -> None:
    error = runner.invoke(app, ["bench", "load", "--reduced", *given]).exception
    assert isinstance(error, ConfigurationError)
    assert given[1] in str(error)
