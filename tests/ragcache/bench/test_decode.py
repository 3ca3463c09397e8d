"""The benchmark of decoding: that it runs and adds up, not how fast it is."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from ragcache.bench.decode import DecodeSetting, bench_decode, plot_decode
from ragcache.bench.harness import LlamaShape

TINY = LlamaShape(
    num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, intermediate=48, vocabulary=64, window=256
)
SETTING = DecodeSetting(
    shape=TINY,
    requests=3,
    preamble_tokens=4,
    modules=2,
    module_tokens=24,
    question_tokens=5,
    new_tokens=6,
    copies_tokens=4,
    unshared_tokens=10,
)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return bench_decode(SETTING)


def test_ratios_are_of_the_medians_that_were_measured(result: dict[str, Any]) -> None:
    for side, name in (("shared", "ratio_to_copies"), ("shared_mha", "ratio_to_copies_mha")):
        shared = result[side]
        assert result[name] == shared["step_s"]["copies"] / shared["step_s"]["segments"]
        for way, steps in shared["runs"].items():
            assert shared["step_s"][way] == statistics.median(steps)
        assert len(shared["runs"]["copies"]) == SETTING.copies_tokens - 1
        assert len(shared["runs"]["segments"]) == 2 * (SETTING.new_tokens - 1)
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
