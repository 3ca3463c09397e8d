"""The benchmark of the time to first token: that it runs and adds up, not how fast it is."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict

import pytest

from ragcache.bench.harness import LlamaShape
from ragcache.bench.ttft import TtftSetting, bench_ttft

TINY = LlamaShape(
    num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, intermediate=48, vocabulary=64, window=128
)
SETTING = TtftSetting(
    shape=TINY,
    preamble_tokens=4,
    modules=3,
    module_tokens=8,
    question_tokens=5,
    prefill_runs=1,
    cached_runs=3,
)


def test_the_benchmark_reports_ratios_of_what_it_measured() -> None:
    steps: list[str] = []
    result = bench_ttft(SETTING, steps.append)
    assert set(result) == {
        "ratio_to_prefill",
        "ratio_to_concat",
        "share_of_limit",
        "seconds",
        "runs",
        "setting",
        "machine",
    }
    seconds = result["seconds"]
    assert set(seconds) == {"prefill", "concat", "cached", "limit"}
    assert all(value > 0 for value in seconds.values())
    assert result["ratio_to_prefill"] == seconds["prefill"] / seconds["cached"]
    assert result["ratio_to_concat"] == seconds["concat"] / seconds["cached"]
    assert result["share_of_limit"] == seconds["limit"] / seconds["cached"]
    for way in ("concat", "cached"):
        assert len(result["runs"][way]) == 3
        assert statistics.median(result["runs"][way]) == seconds[way]
    assert result["setting"] == asdict(SETTING)
    assert len(steps) == 4
    json.dumps(result)


def test_the_limit_is_the_share_of_arithmetic_that_remains() -> None:
    seconds = bench_ttft(SETTING)["seconds"]
    assert SETTING.cached_tokens == 4 + 3 * 8
    share = TINY.flops(5, 28) / TINY.flops(33, 0)
    assert 0 < share < 1
    assert seconds["limit"] == pytest.approx(seconds["prefill"] * share)
