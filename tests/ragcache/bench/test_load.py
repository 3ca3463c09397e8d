"""A service under load: requests and figures by hand, and whole runs on a tiny shape."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
import torch
import vllm_load

from ragcache.bench.harness import SHAPES
from ragcache.bench.load import (
    ON_DEVICE,
    TIERED,
    LoadLimits,
    LoadSession,
    ServiceLoad,
    bench_load,
    missed_limits,
)
from ragcache.bench.load_workload import LoadResult, LoadSetting, figures, is_saturated
from ragcache.store import KVStore, Lease, Origin
from tests.conftest import REPOSITORY

LOAD = ServiceLoad.reduced()
SETTING = replace(LOAD.setting, seconds=0.3)
VOCABULARY = LOAD.shape.vocabulary


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
    load = replace(LOAD, setting=SETTING, rates=(20.0,), ingest_at=20.0)
    document = bench_load(load, "cpu")
    for run in (*document["runs"], document["at_limits"], document["ingestion"]["beside"]):
        assert run["requests"] > 0
        assert run["errors"] == {}
        assert sum(run["sources"].values()) == pytest.approx(1)
        assert run["ttft_ms"]["p50"] > 0
    assert document["ingestion"]["tokens_s"] > 0
    assert document["missed"] == []
    assert document["load"]["setting"]["documents"] == 12


def test_an_error_of_the_ingestion_is_the_error_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetch = LoadSession.fetch

    def fetch_questions(
        session: LoadSession, store: KVStore, numbers: Sequence[int], origin: Origin
    ) -> Lease:
        if origin == "ingest":
            raise RuntimeError("no room for another document")
        return fetch(session, store, numbers, origin)

    monkeypatch.setattr(LoadSession, "fetch", fetch_questions)
    load = replace(LOAD, setting=SETTING, rates=(20.0,), ingest_at=20.0)
    with pytest.raises(RuntimeError, match="no room for another document"):
        bench_load(load, "cpu")


def test_missed_limits_are_named() -> None:
    run = {"refused": 0, "ttft_ms": {"p99": 90.0}, "gap_ms": {"longest": 20.0}}
    document = {"most_answered": 40.0, "runs": [run, run | {"refused": 2}], "at_limits": run}
    assert missed_limits(document, ON_DEVICE) == [
        "TTFT p99, ms: 90.0, must be at most 80",
        "refused requests: 2.0, must be at most 0",
        "answers a second: 40.0, must be at least 50",
    ]
    assert missed_limits(document | {"runs": [run]}, TIERED) == []
    refused = run | {"refused": 3}
    alone = document | {"runs": [run, refused], "at_limits": refused}
    assert missed_limits(alone, ON_DEVICE)[1] == "refused requests: 3.0, must be at most 0"
    unanswered = document | {"at_limits": run | {"ttft_ms": {}, "gap_ms": {}}}
    assert "TTFT p99, ms: inf, must be at most 250" in missed_limits(unanswered, TIERED)


def test_limits_depend_on_where_the_documents_of_the_8b_fit() -> None:
    nbytes = 131072  # of a token
    assert ServiceLoad().limits(nbytes) is TIERED
    few = replace(LoadSetting(), documents=300)
    assert ServiceLoad(setting=few).limits(nbytes) is ON_DEVICE
    assert LOAD.limits(nbytes) == LoadLimits()


def test_the_peer_gets_the_same_requests_as_whole_prompts() -> None:
    asked: list[tuple[list[int], int]] = []

    async def generate(tokens: Sequence[int], most: int, name: str) -> AsyncIterator[int]:
        asked.append((list(tokens), most))
        for count in range(1, most + 1):
            yield count

    runs = asyncio.run(vllm_load.bench(generate, SETTING, [20.0], VOCABULARY, fill=3))
    arrivals = SETTING.arrivals(20.0)
    counted = [tokens for tokens, most in asked if most == SETTING.new_tokens]
    assert counted == [vllm_load.prompt(SETTING, each, VOCABULARY) for each in arrivals]
    assert len(counted[0]) == 4 + 2 * 8 + 4
    first = SETTING.document(arrivals[0].documents[0], VOCABULARY)
    assert counted[0][4:12] == first
    assert runs[0]["requests"] == len(arrivals)
    assert runs[0]["refused"] == 0


def test_the_peer_has_the_shape_of_the_8b() -> None:
    shape = SHAPES["8b"].config(torch.bfloat16).to_dict()
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "vocab_size"):  # fmt: skip
        assert vllm_load.CONFIG[name] == shape[name]


def test_the_peer_needs_none_of_the_libraries() -> None:
    """vLLM's environment has its own torch, and no library of ragcache."""
    blocked = ("torch", "transformers", "numpy", "pydantic", "sqlalchemy")
    script = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import vllm_load"
    folders = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "benchmarks")])
    environment = os.environ | {"PYTHONPATH": folders}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
