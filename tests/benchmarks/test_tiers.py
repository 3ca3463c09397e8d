"""The store's figures on tiny shapes: they run and add up, however fast the machine is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiers
import typer
from harness import LlamaShape
from tiers import ByTierSetting, TiersSetting, bench_by_tier, bench_disk, bench_ledger, bench_tiers
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def by_tier(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    shape = LlamaShape(
        num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, intermediate=96, vocabulary=320,
        window=512,
    )  # fmt: skip
    setting = ByTierSetting(2, 24, 8, 6, runs=2, dtype="float32", lengths=(8, 24))
    return bench_by_tier(tmp_path_factory.mktemp("tiers"), shape, setting, lambda _: None)


def test_every_tier_of_the_machine_is_measured_beside_computing(by_tier: dict[str, Any]) -> None:
    assert list(by_tier["ttft_by_tier"]) == ["host", "disk", "remote", "computed"]
    for tier, ready in by_tier["by_tier"]["ready_s"].items():
        assert 0 < ready < by_tier["ttft_by_tier"][tier]


def test_the_break_even_is_of_the_figures_beside_it(by_tier: dict[str, Any]) -> None:
    rows = by_tier["by_tier"]["lengths"]
    assert [row["tokens"] for row in rows] == [8, 24]
    per_token = 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, size, bytes
    for row in rows:
        assert row["nbytes"] == per_token * row["tokens"]
        assert row["break_even_bandwidth"] == row["nbytes"] / row["computed"]
    for tier, tokens in by_tier["by_tier"]["break_even_tokens"].items():
        quicker = rows[-1][tier] < rows[-1]["computed"]
        assert (tokens is not None) == quicker


def test_states_lie_in_every_tier_that_outlives_the_process(tmp_path: Path) -> None:
    setting = ByTierSetting(1, 8, 4, 4, runs=1, lengths=(4,))
    shape = LlamaShape(1, 32, 2, 1, 32, 64, 64)
    bench_by_tier(tmp_path, shape, setting, lambda _: None)
    blobs = {file.name for file in tmp_path.glob("remote/??/*.safetensors")}
    assert len(blobs) == 3, "a root, a module and a cut of it"


def test_every_way_to_read_the_disk_is_compared(tmp_path: Path) -> None:
    figures = bench_disk(tmp_path, 3, (2, 2, 64, 16), runs=1)["disk"]
    header = 8 + 1024
    assert 3 * 2 * 2 * 2 * 64 * 16 * 2 < figures["nbytes"] < 3 * (2 * 2 * 2 * 64 * 16 * 2 + header)
    for state in ("warm", "cold"):
        for way in ("mapped", "host"):
            share = figures[state][way] / figures[state]["plain"]  # of the only round
            assert figures[state][f"{way}_share"] == pytest.approx(share)


@pytest.mark.slow
def test_the_ledger_is_measured_on_a_store_that_was_opened_again(tmp_path: Path) -> None:
    figures = bench_ledger(tmp_path, modules=150, requests=5)
    assert set(figures) == {"ledger_ms_p50", "open_s"}
    assert all(value > 0 for value in figures.values())
    assert len(list(tmp_path.glob("states/??/*.safetensors"))) == 150, "opening lost nothing"


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    setting = TiersSetting(
        shape=LlamaShape(2, 64, 4, 2, 96, 320, 512), module_tokens=32, blobs=2, disk_runs=1,
        by_tier=ByTierSetting(2, 24, 8, 6, runs=1, lengths=(8, 24)), entries=200,
        folder=tmp_path_factory.mktemp("blobs"),
    )  # fmt: skip
    return bench_tiers(setting)


@pytest.mark.slow
def test_the_keys_are_those_that_are_promised(figures: dict[str, Any]) -> None:
    assert {"disk_bandwidth_share", "ttft_by_tier", "ledger_ms_p50", "open_s"} <= set(figures)
    disk = figures["disk"]["cold" if figures["disk"]["dropped"] else "warm"]
    assert figures["disk_bandwidth_share"] == disk["host_share"]
    json.dumps(figures, default=str)


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_json(
    figures: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TiersSetting] = []

    def measured(setting: TiersSetting, progress: object) -> dict[str, Any]:
        asked.append(setting)
        return figures

    monkeypatch.setattr(tiers, "bench_tiers", measured)
    file = tmp_path / "tiers.json"
    app = typer.Typer()
    app.command()(tiers.main)
    shown = CliRunner().invoke(app, ["--json", str(file), "--entries", "7"])
    for word in ("mapped", "no tier", "remote", "24 tokens", "a store of 200 modules"):
        assert word in shown.stdout
    assert json.loads(file.read_text())["disk"] == figures["disk"]
    assert asked[0].entries == 7
