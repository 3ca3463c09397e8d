"""The load of a GPU: requests and figures by hand, and a whole run on a tiny shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import torch
import vllm_load
from gpu_load import ON_DEVICE, LoadSession, bench_load, missed, report
from load_workload import LoadResult, LoadSetting, figures, is_saturated
from shapes import SHAPES

from ragcache.bench.harness import LlamaShape

TINY = LlamaShape(2, 32, 4, 2, 48, 64, 512, tied=False)
SETTING = LoadSetting(
    documents=12, document_tokens=8, preamble=4, each=2, question=4, new_tokens=4, seconds=0.3
)
STATES = 8 * 2 * 2 * 2 * 8 * 2  # bytes of a document


def test_requests_arrive_at_their_rate_and_prefer_few_documents() -> None:
    setting = LoadSetting(seconds=100.0)
    arrivals = setting.arrivals(20.0)
    assert len(arrivals) == pytest.approx(2000, rel=0.1)
    assert setting.arrivals(20.0) == arrivals
    drawn = [number for each in arrivals for number in each.documents]
    assert all(len(set(each.documents)) == 8 for each in arrivals)
    assert sum(number < 100 for number in drawn) / len(drawn) == pytest.approx(0.55, abs=0.08)
    ordered = replace(setting, order="sorted").arrivals(20.0)
    assert [each.documents for each in ordered] == [
        tuple(sorted(each.documents)) for each in arrivals
    ]


def test_figures_count_from_arrivals_and_between_tokens() -> None:
    setting = LoadSetting(seconds=4.0, new_tokens=2)
    served = [
        LoadResult(0.5, [0.9, 1.0], ["device", "host"]),
        LoadResult(2.0, [2.1, 2.4], ["device", "encoded"]),
        LoadResult(3.0, error="StoreBudgetExceeded"),
    ]
    run = figures(setting, 1.0, served)
    assert run["answered"] == pytest.approx(3 / 2 / 3.0), "tokens at 1.0, 2.1 and 2.4"
    assert run["ttft_ms"]["longest"] == pytest.approx(400)
    assert run["gap_ms"]["longest"] == pytest.approx(300)
    assert run["errors"] == {"StoreBudgetExceeded": 1}
    assert run["sources"] == {"device": 0.5, "encoded": 0.25, "host": 0.25}
    assert is_saturated(run)


def test_a_load_over_two_tiers_answers_every_request() -> None:
    tiers = (24 * STATES, 8 * STATES)
    session = LoadSession(TINY, SETTING, "cpu", tiers, pool_bytes=2**20)
    try:
        document = bench_load(session, [20.0], ingest_at=20.0)
    finally:
        session.close()
    for run in (*document["runs"], document["at_limits"], document["ingestion"]["beside"]):
        assert run["requests"] > 0
        assert run["errors"] == {}
        assert sum(run["sources"].values()) == pytest.approx(1)
        assert run["ttft_ms"]["p50"] > 0
    assert document["ingestion"]["tokens_s"] > 0
    document["missed"] = missed(document, ON_DEVICE)
    assert any(each.startswith("answers a second") for each in document["missed"])
    lines: list[object] = []
    report(document, lines.append)
    assert any("refused" in str(line) for line in lines)


def test_the_peer_gets_the_same_requests_as_whole_prompts() -> None:
    asked: list[tuple[list[int], int]] = []

    async def generate(tokens: Sequence[int], most: int, name: str) -> AsyncIterator[int]:
        asked.append((list(tokens), most))
        for count in range(1, most + 1):
            yield count

    runs = asyncio.run(vllm_load.bench(generate, SETTING, [20.0], TINY.vocabulary, fill=3))
    arrivals = SETTING.arrivals(20.0)
    counted = [tokens for tokens, most in asked if most == SETTING.new_tokens]
    assert counted == [vllm_load.prompt(SETTING, each, TINY.vocabulary) for each in arrivals]
    assert len(counted[0]) == 4 + 2 * 8 + 4
    first = SETTING.document(arrivals[0].documents[0], TINY.vocabulary)
    assert counted[0][4:12] == first
    assert runs[0]["requests"] == len(arrivals)
    assert runs[0]["refused"] == 0


def test_the_peer_has_the_shape_of_the_8b() -> None:
    shape = SHAPES["8b"].config(torch.bfloat16).to_dict()
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "vocab_size"):  # fmt: skip
        assert vllm_load.CONFIG[name] == shape[name]
