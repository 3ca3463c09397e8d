"""Benchmarks of a machine on tiny shapes: they run and add up, however fast it is."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ragcache.bench.decode import DecodeSetting, bench_decode, plot_decode
from ragcache.bench.harness import LlamaShape, describe_machine
from ragcache.bench.serve import LoadPoint, ServeSetting, bench_serve, knee_of, plot_serve
from ragcache.bench.tiers import (
    ByTierSetting,
    TiersSetting,
    bench_by_tier,
    bench_disk,
    bench_ledger,
    bench_tiers,
    plot_tiers,
)
from ragcache.bench.ttft import TtftSetting, bench_ttft
from ragcache.errors import MissingExtra
from ragcache_api.cli.main import app

TINY = LlamaShape(
    num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, intermediate=48, vocabulary=64, window=128
)


def test_the_weights_of_a_layer_are_those_of_the_model() -> None:
    layer = TINY.build(torch.float32).model.layers[0]
    products = sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    assert TINY.layer_weights == products


def test_flops_equal_a_count_by_hand() -> None:
    """q and o: 32x32, k and v: 32x16, three products 32x48; a multiply-add counts two."""
    weights = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    products = 2 * 3 * 2 * weights  # three tokens, two layers
    pairs = (10 + 1) + (10 + 2) + (10 + 3)  # each token sees the past, those before, and itself
    attention = pairs * 2 * 4 * (2 * 8 + 2 * 8)  # two layers, four heads, scores and values
    logits = 2 * 32 * 64
    assert TINY.flops(new_tokens=3, past_tokens=10) == products + attention + logits


def test_a_prompt_costs_the_same_in_one_part_or_two_but_for_the_logits() -> None:
    parts = TINY.flops(20, 0) + TINY.flops(13, 20)
    assert parts == TINY.flops(33, 0) + 2 * TINY.hidden * TINY.vocabulary


def test_a_shape_builds_the_same_model_every_time() -> None:
    one, other = TINY.build(torch.bfloat16), TINY.build(torch.bfloat16)
    assert one.dtype == torch.bfloat16
    assert one.config.num_key_value_heads == 2
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name])
    seeded = TINY.build(torch.bfloat16, seed=1).lm_head.weight
    assert not torch.equal(one.lm_head.weight, seeded)


def test_the_machine_is_described_for_the_file_beside_a_figure() -> None:
    facts = describe_machine()
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["processor"]
    assert json.loads(json.dumps(facts)) == facts


TTFT = TtftSetting(
    shape=TINY,
    preamble_tokens=4,
    modules=3,
    module_tokens=8,
    question_tokens=5,
    prefill_runs=1,
    cached_runs=3,
    dtype="float32",
)


def test_the_benchmark_reports_ratios_of_what_it_measured() -> None:
    steps: list[str] = []
    result = bench_ttft(TTFT, steps.append)
    assert set(result) == {
        "ratio_to_prefill",
        "ratio_to_concat",
        "share_of_limit",
        "seconds",
        "processor",
        "runs",
        "dtypes",
        "setting",
        "machine",
    }
    assert result["dtypes"] == {"compute": "float32", "states": "bfloat16"}
    for clock in (result, result["processor"]):
        seconds = clock["seconds"]
        assert set(seconds) == {"prefill", "concat", "cached", "limit"}
        assert all(value > 0 for value in seconds.values())
        assert clock["ratio_to_prefill"] == seconds["prefill"] / seconds["cached"]
        assert clock["ratio_to_concat"] == seconds["concat"] / seconds["cached"]
        assert clock["share_of_limit"] == seconds["limit"] / seconds["cached"]
    for way in ("concat", "cached"):
        assert len(result["runs"][way]) == 3
        assert statistics.median(result["runs"][way]) == result["seconds"][way]
    assert result["setting"] == asdict(TTFT)
    assert len(steps) == 4
    json.dumps(result)


def test_the_limit_is_the_share_of_arithmetic_that_remains() -> None:
    seconds = bench_ttft(TTFT)["seconds"]
    assert TTFT.cached_tokens == 4 + 3 * 8
    share = TINY.flops(5, 28) / TINY.flops(33, 0)
    assert 0 < share < 1
    assert seconds["limit"] == pytest.approx(seconds["prefill"] * share)


DECODE_SHAPE = LlamaShape(
    num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, intermediate=48, vocabulary=64, window=256
)
DECODE = DecodeSetting(
    shape=DECODE_SHAPE,
    requests=3,
    preamble_tokens=4,
    modules=2,
    module_tokens=24,
    question_tokens=5,
    new_tokens=6,
    copies_tokens=4,
    unshared_tokens=10,
    dtype="bfloat16",
)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return bench_decode(DECODE)


def test_ratios_are_of_the_medians_that_were_measured(result: dict[str, Any]) -> None:
    for side, name in (("shared", "ratio_to_copies"), ("shared_mha", "ratio_to_copies_mha")):
        shared = result[side]
        assert result[name] == shared["step_s"]["copies"] / shared["step_s"]["segments"]
        for way, steps in shared["runs"].items():
            assert shared["step_s"][way] == statistics.median(steps)
        assert len(shared["runs"]["copies"]) == DECODE.copies_tokens - 1
        assert len(shared["runs"]["segments"]) == 2 * (DECODE.new_tokens - 1)
    steps = result["shared"]["step_s"]
    assert result["share_of_ceiling"] == steps["ceiling"] / steps["segments"]
    unshared = result["unshared"]["step_s"]
    assert result["ratio_unshared"] == unshared["generate"] / unshared["segments"]
    assert 0 < result["scheduler_share"] < 1


def test_the_memory_is_one_copy_and_the_chunks_of_private_tokens(result: dict[str, Any]) -> None:
    documents = 4 + 2 * 24
    private = 3 * (5 + 6)
    chunks = 3 * 64  # one chunk a request
    expected = (documents + chunks) / (documents + private)
    assert result["kv_bytes_ratio"] == pytest.approx(expected)


def test_the_result_is_json_and_is_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    json.dumps(result)
    plot_decode(result, tmp_path / "decode.png")
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")


SERVE_SHAPE = LlamaShape(
    num_layers=1, hidden=16, num_heads=2, num_kv_heads=1, intermediate=24, vocabulary=64, window=256
)
SERVE = ServeSetting(
    SERVE_SHAPE,
    documents=4,
    document_tokens=12,
    each=2,
    preamble_tokens=4,
    question_tokens=3,
    new_tokens=2,
    requests=4,
    seconds=0.01,
    growth=4.0,
    most_rates=2,
    dtype="float32",
)


def load(rate: float, normalized: float) -> LoadPoint:
    return LoadPoint(rate, rate, 0.1, 0.2, normalized)


def test_every_rate_of_both_modes_is_reported(tmp_path: Path) -> None:
    result = bench_serve(SERVE)
    for mode in ("exact", "cached"):
        loads = result["loads"][mode]
        assert 1 <= len(loads) <= SERVE.most_rates
        assert all(each["throughput"] > 0 for each in loads)
        assert all(0 < each["ttft_p50"] <= each["ttft_p99"] for each in loads)
    knee = result["knee"]
    assert result["knee_ratio_to_exact"] == knee["cached"] / knee["exact"]
    json.dumps(result)
    plot_serve(result, tmp_path / "serve.png")
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_the_knee_is_where_the_latency_crosses_the_limit() -> None:
    assert knee_of([load(1, 0.1), load(2, 0.3)], limit=0.2) == pytest.approx(1.5)
    assert knee_of([load(1, 0.1), load(2, 0.15)], limit=0.2) == 2, "it was never crossed"
    assert knee_of([load(1, 0.4)], limit=0.2) == pytest.approx(0.5)


TIERS = ["host", "disk", "remote"]


@pytest.fixture(scope="module")
def by_tier(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    shape = LlamaShape(
        num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, intermediate=96, vocabulary=320,
        window=512,
    )  # fmt: skip
    setting = ByTierSetting(2, 24, 8, 6, runs=2, dtype="float32", lengths=(8, 24))
    return bench_by_tier(tmp_path_factory.mktemp("tiers"), shape, setting, lambda _: None)


def test_every_tier_of_the_machine_is_measured_beside_computing(by_tier: dict[str, Any]) -> None:
    tiers = ["device", *TIERS] if torch.cuda.is_available() else TIERS
    assert list(by_tier["ttft_by_tier"]) == [*tiers, "computed"]
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


def test_the_disk_is_read_in_every_way_and_compared_with_plain_reading(tmp_path: Path) -> None:
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
def test_a_plot_is_drawn_or_the_extra_is_named(figures: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "tiers.svg"
    try:
        plot_tiers(figures, file)
    except MissingExtra as error:
        assert "ragcache[plot]" in str(error)  # noqa: PT017
    else:
        assert "<svg" in file.read_text()


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_json(
    figures: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[TiersSetting] = []

    def measured(setting: TiersSetting, progress: object) -> dict[str, Any]:
        asked.append(setting)
        return figures

    monkeypatch.setattr("ragcache.bench.tiers.bench_tiers", measured)
    file = tmp_path / "tiers.json"
    shown = CliRunner().invoke(app, ["bench", "tiers", "--json", str(file), "--entries", "7"])
    for word in ("mapped", "no tier", "remote", "24 tokens", "a store of 200 modules"):
        assert word in shown.stdout
    assert json.loads(file.read_text())["disk"] == figures["disk"]
    assert asked[0].entries == 7
