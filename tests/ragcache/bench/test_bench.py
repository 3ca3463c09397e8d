"""Benchmarks of a machine on tiny shapes: they run and add up, however fast it is."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ragcache.bench.decode import DecodeSetting, bench_decode
from ragcache.bench.harness import LlamaShape
from ragcache.bench.recurring import bench_recurring
from ragcache.bench.recurring_turns import (
    RecurringSetting,
    Turn,
    draw_agent_turns,
    draw_turns,
    read_turns,
)
from ragcache.bench.serve import LoadPoint, ServeSetting, bench_serve, knee_of
from ragcache.bench.ttft import TtftSetting, bench_ttft
from ragcache.errors import ConfigurationError
from ragcache.machine import describe_machine
from ragcache.models import LoadedModel

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


SMALL: dict[str, Any] = {"shape": TINY, "preamble_tokens": 4, "question_tokens": 5}
TTFT = TtftSetting(
    modules=3, module_tokens=8, prefill_runs=1, cached_runs=3, dtype="float32", **SMALL
)


def test_the_benchmark_reports_ratios_of_what_it_measured() -> None:
    steps: list[str] = []
    result = bench_ttft(TTFT, steps.append)
    ratios = {"ratio_to_prefill", "ratio_to_concat", "share_of_limit"}
    figures = {"seconds", "processor", "runs", "dtypes", "setting", "machine"}
    assert set(result) == ratios | figures
    assert result["dtypes"] == {"compute": "float32", "states": "bfloat16"}
    for clock in (result, result["processor"]):
        seconds = clock["seconds"]
        assert set(seconds) == {"prefill", "concat", "cached", "limit"}
        assert all(value > 0 for value in seconds.values())
        assert clock["ratio_to_prefill"] == seconds["prefill"] / seconds["cached"]
        assert clock["ratio_to_concat"] == seconds["concat"] / seconds["cached"]
        assert clock["share_of_limit"] == seconds["limit"] / seconds["cached"]
        share = TINY.flops(5, TTFT.cached_tokens) / TINY.flops(5 + TTFT.cached_tokens, 0)
        assert seconds["limit"] == pytest.approx(seconds["prefill"] * share)
    for way in ("concat", "cached"):
        assert len(result["runs"][way]) == 3
        assert statistics.median(result["runs"][way]) == result["seconds"][way]
    assert result["setting"] == asdict(TTFT)
    assert len(steps) == 4
    json.dumps(result)


SMALL = SMALL | {"shape": replace(TINY, window=256), "new_tokens": 6, "requests": 3}
DECODE = DecodeSetting(modules=2, module_tokens=24, copies_tokens=4, dtype="bfloat16", **SMALL)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return bench_decode(DECODE)


def test_ratios_are_of_the_medians_that_were_measured(result: dict[str, Any]) -> None:
    shared = result["shared"]
    assert result["ratio_to_copies"] == shared["step_s"]["copies"] / shared["step_s"]["segments"]
    assert shared["step_s"] == {way: statistics.median(run) for way, run in shared["runs"].items()}
    assert len(shared["runs"]["copies"]) == DECODE.copies_tokens - 1
    assert len(shared["runs"]["segments"]) == 2 * (DECODE.new_tokens - 1)
    assert 0 < result["scheduler_share"] < 1
    json.dumps(result)


def test_the_memory_is_one_copy_and_the_chunks_of_private_tokens(result: dict[str, Any]) -> None:
    documents = 4 + 2 * 24
    private = 3 * (5 + 6)
    chunks = 3 * 64  # one chunk a request
    expected = (documents + chunks) / (documents + private)
    assert result["kv_bytes_ratio"] == pytest.approx(expected)


SERVE = ServeSetting(
    documents=4,
    document_tokens=12,
    each=2,
    seconds=0.01,
    growth=4.0,
    most_rates=2,
    dtype="float32",
    **SMALL,
)


def load(rate: float, normalized: float) -> LoadPoint:
    return LoadPoint(rate, rate, 0.1, 0.2, normalized)


def test_every_rate_of_both_modes_is_reported() -> None:
    result = bench_serve(SERVE)
    for mode in ("exact", "cached"):
        loads = result["loads"][mode]
        assert 1 <= len(loads) <= SERVE.most_rates
        assert all(each["throughput"] > 0 for each in loads)
        assert all(0 < each["ttft_p50"] <= each["ttft_p99"] for each in loads)
    knee = result["knee"]
    assert result["knee_ratio_to_exact"] == knee["cached"] / knee["exact"]
    json.dumps(result)


def test_the_knee_is_where_the_latency_crosses_the_limit() -> None:
    assert knee_of([load(1, 0.1), load(2, 0.3)], limit=0.2) == pytest.approx(1.5)
    assert knee_of([load(1, 0.1), load(2, 0.15)], limit=0.2) == 2, "it was never crossed"
    assert knee_of([load(1, 0.4)], limit=0.2) == pytest.approx(0.5)


RECURRING = RecurringSetting(
    chunks=3, each=2, sentences=12, conversations=3, turns=4, known_spans=200
)


def test_conversations_paste_chunks_behind_their_history() -> None:
    turns = list(draw_turns(RECURRING))
    assert len(turns) == 12
    assert [len(turn.messages) for turn in turns] == [1] * 3 + [3] * 3 + [5] * 3 + [7] * 3
    for turn in turns:
        *history, last = (str(message["content"]) for message in turn.messages)
        assert all(chunk in last for chunk in turn.chunks)
        assert not any(chunk in earlier for chunk in turn.chunks for earlier in history)
    assert turns == list(draw_turns(RECURRING)), "equal seeds draw equal turns"


def test_earlier_conversations_are_over_the_same_chunks() -> None:
    setting = replace(RECURRING, earlier=2)
    turns = list(draw_turns(setting))
    assert [len(turn.messages) for turn in turns[:9]] == [1, 1, 3, 3, 5, 5, 7, 7, 1]
    assert len(turns) == 8 + 12
    chunks = {chunk for turn in draw_turns(RECURRING) for chunk in turn.chunks}
    assert {chunk for turn in turns for chunk in turn.chunks} == chunks
    agent = list(draw_agent_turns(setting))
    assert len(agent) == 8 + 12


@pytest.mark.slow
def test_what_earlier_conversations_had_is_read(tiny_reader: LoadedModel) -> None:
    setting = replace(RECURRING, earlier=3, conversations=1)
    steps: list[str] = []
    result = bench_recurring(setting, tiny_reader, steps.append)
    assert steps[0] == "earlier turn 1 of 12"
    assert result["turns"] == 4
    assert result["recurring_share"] == 1
    assert result["by_new_chunks"].keys() == {0}
    assert result["read_share"] > 0.9


def test_an_agent_keeps_the_files_that_it_has_read() -> None:
    turns = list(draw_agent_turns(RECURRING))
    assert len(turns) == 12
    for before, after in pairwise(turns[:4]):
        assert after.messages[: len(before.messages)] == before.messages
    assert all(
        chunk in str(turn.messages[-1]["content"]) for turn in turns for chunk in turn.chunks
    )
    assert len({chunk for turn in turns for chunk in turn.chunks}) > RECURRING.chunks, "edits"


def test_a_recorded_trace_is_read_line_by_line(tmp_path: Path) -> None:
    turn = Turn([{"role": "user", "content": "A text. What?"}], ("A text.",))
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(asdict(turn)) + "\n[]\n")
    turns = read_turns(file)
    assert next(turns) == turn
    with pytest.raises(ConfigurationError, match="line 2"):
        next(turns)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        list(read_turns(tmp_path / "missing.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize(("concurrent", "mode", "blocks"), [(1, "rooted", 12), (2, "primed", 7)])
def test_recurring_chunks_are_read_in_the_second_half(
    concurrent: int, mode: str, blocks: int, tiny_reader: LoadedModel
) -> None:
    steps: list[str] = []
    setting = replace(RECURRING, concurrent=concurrent, mode=mode)
    result = bench_recurring(setting, tiny_reader, steps.append)
    assert result["turns"] == 6
    assert 0.8 < result["read_share"] <= result["recurring_share"] + 0.02
    assert result["ttft_speedup"] > 0
    first = [(new, each["first_tokens"]) for new, each in result["by_new_chunks"].items()]
    assert sum(count for _, count in first) == result["first_tokens"]
    tokens = result["computed_tokens"]
    assert tokens["reading"] < tokens["computing"]
    assert result["rate_ratio"] > 0
    assert 0 <= result["equal_answers_share"] <= 1
    assert result["detect_ms_32k_100000"] > 0
    low, high = result["ttft_speedup_interval"]
    assert low <= result["ttft_speedup"] <= high
    for stages in result["stages"].values():
        assert all(seconds >= 0 for seconds in stages.values())
    assert len(steps) == blocks + 1
