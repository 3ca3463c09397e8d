"""`ragcache bench tiers`, small: that it runs, adds up and is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ragcache.bench.by_tier import ByTierSetting
from ragcache.bench.disk import bench_disk
from ragcache.bench.plot import plot_tiers
from ragcache.bench.quantised import bench_quantised
from ragcache.bench.shapes import LlamaShape
from ragcache.bench.tiers import TiersSetting, bench_tiers
from ragcache.bench.victims import bench_victims
from ragcache.bench.workload import ZipfWorkload
from ragcache.errors import MissingExtra, NoDocuments
from ragcache.models import LoadedModel
from ragcache.store.policy import POLICIES
from ragcache_api.cli.main import app

HANDBOOK = Path(__file__).parents[3] / "examples" / "handbook"


def test_the_disk_is_read_in_every_way_and_compared_with_plain_reading(tmp_path: Path) -> None:
    result = bench_disk(tmp_path, 3, (2, 2, 64, 16), runs=1)
    header = 8 + 1024
    assert 3 * 2 * 2 * 2 * 64 * 16 * 2 < result["nbytes"] < 3 * (2 * 2 * 2 * 64 * 16 * 2 + header)
    for state in ("warm", "cold"):
        for way in ("mapped", "host"):
            share = result[state][way] / result[state]["plain"]  # of the only round
            assert result[state][f"{way}_share"] == pytest.approx(share)


def test_victims_are_timed_under_every_policy() -> None:
    assert set(bench_victims(500, runs=1)) == set(POLICIES)


def test_eight_bits_hardly_change_how_the_reader_begins(reader: LoadedModel) -> None:
    """The bounds that docs and model card state: 95 % for int8, 90 % for fp8."""
    result = bench_quantised(reader, HANDBOOK, 20)
    assert result["questions"] == 20
    assert result["int8"]["first_token_agreement"] >= 0.95
    assert result["fp8"]["first_token_agreement"] >= 0.9
    for kind, error in (("int8", 0.01), ("fp8", 0.04)):
        assert result[kind]["bytes_share"] < 0.54
        assert 0.001 < result[kind]["keys_error"] < error
        assert 0.001 < result[kind]["values_error"] < error


def test_a_folder_without_questions_is_named(reader: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(NoDocuments, match=r"questions\.jsonl"):
        bench_quantised(reader, tmp_path, 1)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    setting = TiersSetting(
        shape=LlamaShape(2, 64, 4, 2, 96, 320, 512), module_tokens=32, blobs=2, disk_runs=1,
        by_tier=ByTierSetting(2, 24, 8, 6, runs=1, lengths=(8, 24)), entries=200, questions=2,
        handbook=HANDBOOK, workload=ZipfWorkload(documents=50, prompts=50),
        folder=tmp_path_factory.mktemp("blobs"),
    )  # fmt: skip
    return bench_tiers(setting)


def test_the_keys_are_those_that_are_promised(result: dict[str, Any]) -> None:
    assert {"disk_bandwidth_share", "victims_ms", "hit_rate", "quantised"} <= set(result)
    assert {"lru", "gdsf", "lfu", "belady", "prefix"} <= set(result["hit_rate"])
    disk = result["disk"]["cold" if result["disk"]["dropped"] else "warm"]
    assert result["disk_bandwidth_share"] == disk["host_share"]
    assert result["victims_ms"] == max(result["victims"].values())
    json.dumps(result, default=str)


def test_a_plot_is_drawn_or_the_extra_is_named(result: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "tiers.svg"
    try:
        plot_tiers(result, file)
    except MissingExtra as error:
        assert "ragcache[plot]" in str(error)  # noqa: PT017
    else:
        assert "<svg" in file.read_text()


def test_the_command_prints_tables_and_writes_json(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TiersSetting] = []

    def measured(setting: TiersSetting, progress: object) -> dict[str, Any]:
        asked.append(setting)
        return result

    monkeypatch.setattr("ragcache.bench.tiers.bench_tiers", measured)
    file = tmp_path / "tiers.json"
    shown = CliRunner().invoke(app, ["bench", "tiers", "--json", str(file), "--entries", "7"])
    for word in ("belady", "no tier", "remote", "24 tokens", "a store of 200 modules"):
        assert word in shown.stdout
    assert json.loads(file.read_text())["hit_rate"] == result["hit_rate"]
    assert asked[0].entries == 7
