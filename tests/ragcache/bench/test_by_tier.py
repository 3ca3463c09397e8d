"""First tokens by tier, on a model of two layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ragcache.bench.by_tier import ByTierSetting, bench_by_tier
from ragcache.bench.shapes import LlamaShape

TIERS = ["host", "disk", "remote"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    shape = LlamaShape(
        num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, intermediate=96, vocabulary=320,
        window=512,
    )  # fmt: skip
    setting = ByTierSetting(2, 24, 8, 6, runs=2, lengths=(8, 24))
    return bench_by_tier(tmp_path_factory.mktemp("tiers"), shape, setting, lambda _: None)


def test_every_tier_of_the_machine_is_measured_beside_computing(result: dict[str, Any]) -> None:
    tiers = ["device", *TIERS] if torch.cuda.is_available() else TIERS
    assert list(result["ttft_by_tier"]) == [*tiers, "computed"]
    for tier, ready in result["by_tier"]["ready_s"].items():
        assert 0 < ready < result["ttft_by_tier"][tier]


def test_the_break_even_is_of_the_figures_beside_it(result: dict[str, Any]) -> None:
    rows = result["by_tier"]["lengths"]
    assert [row["tokens"] for row in rows] == [8, 24]
    per_token = 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, size, bytes
    for row in rows:
        assert row["nbytes"] == per_token * row["tokens"]
        assert row["break_even_bandwidth"] == row["nbytes"] / row["computed"]
    for tier, tokens in result["by_tier"]["break_even_tokens"].items():
        quicker = rows[-1][tier] < rows[-1]["computed"]
        assert (tokens is not None) == quicker


def test_states_lie_in_every_tier_that_outlives_the_process(tmp_path: Path) -> None:
    setting = ByTierSetting(1, 8, 4, 4, runs=1, lengths=(4,))
    shape = LlamaShape(1, 32, 2, 1, 32, 64, 64)
    bench_by_tier(tmp_path, shape, setting, lambda _: None)
    blobs = {file.name for file in tmp_path.glob("remote/??/*.safetensors")}
    assert len(blobs) == 3, "a root, a module and a cut of it"
