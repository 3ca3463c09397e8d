"""The benchmark of serving: that it runs and adds up, not how fast it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragcache.bench.harness import LlamaShape
from ragcache.bench.serve import LoadPoint, ServeSetting, bench_serve, knee_of, plot_serve

TINY = LlamaShape(
    num_layers=1, hidden=16, num_heads=2, num_kv_heads=1, intermediate=24, vocabulary=64, window=256
)
SETTING = ServeSetting(
    TINY,
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
)


def load(rate: float, normalized: float) -> LoadPoint:
    return LoadPoint(rate, rate, 0.1, 0.2, normalized)


def test_every_rate_of_both_modes_is_reported(tmp_path: Path) -> None:
    result = bench_serve(SETTING)
    for mode in ("exact", "cached"):
        loads = result["loads"][mode]
        assert 1 <= len(loads) <= SETTING.most_rates
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
