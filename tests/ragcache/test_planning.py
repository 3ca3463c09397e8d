"""Plans of small corpora: sizes, break-even, advice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragcache import RagCache, SourceDocument
from ragcache.db import Catalog, Database
from ragcache.engine import LLMEngine
from ragcache.errors import ConfigurationError, NoDocuments, UnknownCollection
from ragcache.models import CausalLM, LoadedModel, wrap_causal
from ragcache.modes import PRIMED, ROOTED
from ragcache.params import OpenConfig
from ragcache.pipeline.gate_measurement import GateResult, measure_int8, measure_modes
from ragcache.planning import (
    Budgets,
    CachePlan,
    Corpus,
    Cut,
    SampleTimes,
    TierSize,
    advise,
    break_even_tokens,
    bytes_per_token,
    choose_sample,
    corpus_of_collection,
    corpus_of_sources,
    format_bandwidth,
    format_seconds,
    make_plan,
    shape_of,
    tier_sizes,
)
from ragcache.states import KVKey, KVStates
from ragcache.states.quantization import KV_DTYPES, check_kv_dtype, quantize, quantized_nbytes
from ragcache.store import DiskTier, HostTier
from tests.tiny_models import LATENT, tiny_model

LENGTHS = [10, 20, 40]


def test_corpus_is_split_as_ingestion_splits_it(
    quick_reader: LoadedModel, notes: Path, tmp_path: Path
) -> None:
    done: list[tuple[int, int]] = []
    planned = corpus_of_sources(quick_reader, notes, 32, lambda *now: done.append(now))
    assert done[-1] == (3, 3)
    with RagCache.open(tmp_path / "state", quick_reader, module_tokens=32) as rag:
        ingestion = rag.ingest("notes", notes)
    assert (planned.documents, len(planned.modules), planned.tokens) == (
        3, ingestion.modules, ingestion.tokens
    )  # fmt: skip
    database = Database.open_existing(tmp_path / "state" / "ledger.sqlite")
    catalog = Catalog(database, quick_reader.tokenizer_fingerprint, None)
    try:
        stored = corpus_of_collection(quick_reader, catalog, "notes")
        with pytest.raises(UnknownCollection):
            corpus_of_collection(quick_reader, catalog, "other")
    finally:
        database.close()
    assert sorted(map(tuple, stored.modules)) == sorted(map(tuple, planned.modules))
    assert stored.documents == 3


def test_plan_separates_measured_and_extrapolated(
    quick_reader: LoadedModel, tmp_path: Path
) -> None:
    corpus = Corpus(2, tuple([7] * n for n in (8, 16, 24, 40)))
    folder = tmp_path / "not" / "there"
    said: list[str] = []
    plan = make_plan(
        quick_reader, corpus, Budgets(10**9, disk_bytes=10), folder, sample=2, progress=said.append
    )
    assert (plan.documents, plan.modules, plan.tokens, plan.longest) == (2, 4, 88, 40)
    assert (plan.measured.modules, plan.measured.tokens) == (2, 16 + 40)
    assert [cut.tokens for cut in plan.measured.cuts] == [5, 10, 20, 40]
    assert plan.encode_s == pytest.approx(plan.measured.encode_s * 88 / 56)
    assert not folder.exists()
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert said
    facts = json.loads(json.dumps(plan.to_dict()))
    assert facts["extrapolated"] == {"encode_s": plan.encode_s}
    assert "encode_s" not in facts
    assert facts["measured"]["encode_s"] == plan.measured.encode_s
    longest = plan.measured.cuts[-1]
    assert plan.break_even_bandwidth == longest.nbytes["model"] / longest.compute_s
    assert 0 < plan.sizes("disk")["model"].share < 0.01
    assert not plan.sizes("device")
    assert plan.states_per_module == len(quick_reader.default_mode.encodings)


@pytest.mark.parametrize("given", [0, -3, "x", "1k"])
def test_a_length_of_modules_is_a_number_or_auto(given: int | str) -> None:
    with pytest.raises(ConfigurationError, match="it must be 1 token or more, or 'auto'"):
        OpenConfig(module_tokens=given)
    assert [OpenConfig(module_tokens=each).module_tokens for each in ("96", "auto")] == [96, "auto"]


def test_empty_corpus_and_long_modules_are_refused(
    quick_reader: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(NoDocuments):
        make_plan(quick_reader, Corpus(1, ()), Budgets(1), tmp_path)
    long = Corpus(1, ([7] * quick_reader.causal.window,))
    with pytest.raises(ConfigurationError, match="module_tokens"):
        make_plan(quick_reader, long, Budgets(1), tmp_path)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [("Be brief. " * 2000, "but the model's window holds"), ("<|end|>", "holds a control token")],
)
def test_the_instruction_is_part_of_the_plan(
    instruction: str, message: str, quick_reader: LoadedModel, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_plan(
            quick_reader, Corpus(1, ([7] * 8,)), Budgets(1), tmp_path, instruction=instruction
        )


def test_parts_of_a_document_are_split_separately(quick_reader: LoadedModel) -> None:
    whole = SourceDocument("pages", "One page. Another page.")
    pages = replace(whole, parts=("One page.", "Another page."))
    assert len(corpus_of_sources(quick_reader, whole, 32).modules) == 1
    assert len(corpus_of_sources(quick_reader, pages, 32).modules) == 2


def drawn(causal: CausalLM, tokens: int) -> KVStates:
    generator = torch.Generator().manual_seed(tokens)
    shape = shape_of(causal, tokens)
    both = (
        torch.randn(each.shape, generator=generator, dtype=causal.dtype)
        for each in (shape.keys, shape.values)
    )
    return KVStates(*both, 0)


@pytest.mark.parametrize("family", ["llama", LATENT])
@pytest.mark.parametrize("kind", KV_DTYPES)
def test_bytes_per_token_equal_the_size_of_one_more_token(family: str, kind: str) -> None:
    kv_dtype, causal = check_kv_dtype(kind), wrap_causal(tiny_model(family))
    one, two = (quantize(drawn(causal, n), kv_dtype).nbytes for n in (40, 41))
    assert bytes_per_token(causal)[kind] == two - one


@pytest.mark.parametrize("kind", KV_DTYPES)
def test_tiers_allocate_at_most_the_planned_bytes(
    causal: CausalLM, kind: str, tmp_path: Path
) -> None:
    lengths, kv_dtype = [7, 7, 33], check_kv_dtype(kind)
    planned = {
        (size.tier, size.kv_dtype): size.nbytes
        for size in tier_sizes(causal, lengths, {"host": 1, "disk": 1})
    }
    host, disk = HostTier(1 << 20, kv_dtype=kv_dtype), DiskTier(tmp_path, kv_dtype=kv_dtype)
    for number, tokens in enumerate(lengths):
        for tier in (host, disk):
            tier.put(KVKey(f"{number:064x}"), drawn(causal, tokens))
    assert host.used_bytes == planned["host", kind]
    needed = sum(quantized_nbytes(drawn(causal, n), kv_dtype) for n in lengths)
    assert needed < disk.used_bytes <= planned["disk", kind]


def test_only_tiers_with_a_budget_are_planned(causal: CausalLM) -> None:
    sizes = tier_sizes(causal, [10], {"host": 10**9, "device": 10**9})
    assert [(s.tier, s.kv_dtype) for s in sizes] == [
        ("device", "model"), *(("host", kind) for kind in KV_DTYPES)
    ]  # fmt: skip


def test_share_is_budget_over_bytes() -> None:
    assert TierSize("host", "model", 100, 25).share == 0.25
    assert TierSize("host", "model", 100, 100).share == 1.0
    assert TierSize("disk", "model", 100, None).share == 1.0
    assert TierSize("host", "model", 100, 0).share == 0.0


@pytest.mark.parametrize(
    ("compute", "load", "tokens"),
    [
        ([1.0, 2.0, 4.0], [0.5, 0.5, 0.5], 10.0),  # quicker at all: the shortest
        ([1.0, 2.0, 4.0], [1.5, 1.5, 1.5], 15.0),  # half-way between -0.5 and +0.5
        ([1.0, 2.0, 4.0], [3.0, 3.0, 3.0], pytest.approx(20 + 20 / 2)),
        ([1.0, 2.0, 4.0], [2.0, 4.0, 8.0], None),
        ([1.0, 2.0, 4.0], [0.5, 3.0, 3.0], 30.0),  # an early win does not count
        ([1.0, 2.0, 4.0], [1.0, 1.0, 1.0], 10.0),
        ([], [], None),
    ],
)
def test_break_even_is_found_from_the_longest_module_down(
    compute: list[float], load: list[float], tokens: float | None
) -> None:
    assert break_even_tokens(LENGTHS[: len(load)], compute, load) == tokens


def known_plan(load: float, even: float | None, *, cold: bool) -> CachePlan:
    def cut(tokens: int, compute: float) -> Cut:
        return Cut(tokens, compute, {"model": 10**6}, {"model": load})

    return CachePlan(
        "m", "bfloat16", {}, 1, 1000, 400_000, 400, 28, (),
        SampleTimes(6, 2400, 6.0, (cut(50, 0.05), cut(400, 0.4)), cold=cold),
        1000.0, {"model": even}, 2.5e6,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("load", "even", "cold", "said"),
    [(0.1, 50.0, True, "from this disk in 100.0 ms and computed in 400.0 ms, 4.0 times as long. "
      "A module that is used 2 times"),
     (0.31, 50.0, False, "from the page cache .* used 5 times"),
     (0.5, None, True, "does not pay.* must reach 2.5 MB/s"),
     (0.1, 120.0, True, "less than about 120 tokens"),
     (0.1, 50.0, True, "encode for about 17 min, once: 400 tokens a second, as 6 of 1,000")],
)  # fmt: skip
def test_advice_says_whether_caching_pays(
    load: float, even: float | None, cold: bool, said: str
) -> None:
    plan = known_plan(load, even, cold=cold)
    advice = " ".join(advise(plan))
    assert re.search(said, advice)
    assert ("Modules of less than" in advice) == (even == 120.0)


def test_advice_counts_the_states_of_the_default_mode() -> None:
    plan = known_plan(0.1, 50.0, cold=True)
    assert "states in this model's mode" not in " ".join(advise(plan))
    both = replace(plan, states_per_module=len(PRIMED.encodings))
    assert re.search("keeps 2 states in this model's mode: .* 2 times these", advise(both)[-1])


@pytest.mark.parametrize(
    ("distance", "said"),
    [
        (0.02, "kv_dtype=int8 takes 52% of the disk, and serves: .* 0.02 nats from exact"),
        (0.9, "kv_dtype=int8 would be refused: .* 0.90 nats from exact, where 0.50 are the limit"),
    ],
)
def test_advice_proposes_eight_bits_within_the_limit_of_the_gate(
    distance: float, said: str
) -> None:
    sizes = (TierSize("disk", "model", 100, None), TierSize("disk", "int8", 52, None))
    result = GateResult("rooted", 24, distance, 1.0, 0.5, 1.0, 3.0, 1.0)
    plan = replace(known_plan(0.1, 50.0, cold=True), tiers=sizes, int8=result)
    assert re.search(said, " ".join(advise(plan)))
    unknown = replace(plan, int8=None)
    assert "int8" not in " ".join(advise(unknown))
    assert plan.to_dict()["int8"]["passes"] == (distance == 0.02)


def test_eight_bits_are_measured_with_states_that_lost_bits(tiny_reader: LoadedModel) -> None:
    with LLMEngine(tiny_reader.causal) as engine:
        lossy = measure_int8(tiny_reader, engine)
        exact = measure_modes(tiny_reader, engine, [ROOTED])
    assert lossy is not None
    assert exact is not None
    assert (lossy.prompts, lossy.limit) == (exact[0].prompts, exact[0].limit)
    assert 0 < abs(lossy.kl_divergence - exact[0].kl_divergence) < 0.1


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(2e-5, "20 µs"), (0.0123, "12.3 ms"), (5, "5.0 s"), (600, "10 min"), (9000, "2.5 h")],
)
def test_format_seconds_chooses_the_unit(seconds: float, said: str) -> None:
    assert format_seconds(seconds) == said


def test_format_of_bandwidths() -> None:
    said = [format_bandwidth(rate) for rate in (1.234e9, 1.2e7, 7.2e5)]
    assert said == ["1,234 MB/s", "12 MB/s", "0.72 MB/s"]


def test_sample_is_spread_over_the_lengths() -> None:
    assert choose_sample([30, 10, 20], 3) == [1, 2, 0]
    assert choose_sample([30, 10, 20], 9) == [1, 2, 0]
    assert choose_sample([5, 1, 4, 2, 3, 6], 2) == [3, 0]
    assert choose_sample(list(range(100)), 4) == [12, 37, 62, 87]
