"""The experiments in `benchmarks/` on small settings: they run, add up, print and write JSON."""

from __future__ import annotations

import itertools
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eviction
import hybrid
import hybrid_gpu
import numpy as np
import plots
import pml
import pytest
import quality
import recurring_answers
import torch
import typer
import wordings
from gpu_table import GpuWorkload
from harness import LlamaShape
from hypothesis import given
from hypothesis import strategies as st
from indexes import bench_indexes
from langchain_core.embeddings import DeterministicFakeEmbedding
from laptop import LaptopSetting, bench_laptop
from llamacpp import BesideSetting, DrawnTokens, _first_tokens, _memory_of
from mode_times import TimesSetting, bench_modes
from pml import PmlSetting, bench_pml
from quality import SETS, QuestionSet, bench_quality, load_set, table_of
from quantization import bench_quantization
from quotations import GrammarsSetting, QuotationsSetting, bench_grammars, bench_quotations
from relay import RelaySetting, bench_relay, plot_relay
from retrieval import RetrievalSetting, bench_retrieval, ndcg
from typer.testing import CliRunner
from weights import WeightsSetting, bench_weights

from ragcache.documents import SourceDocument
from ragcache.errors import NoDocuments
from ragcache.evaluation import (
    Dataset,
    Evaluation,
    EvaluationReport,
    MarkedAnswer,
    Question,
)
from ragcache.models import INSTRUCTION, LoadedModel
from tests.conftest import REPOSITORY
from tests.forks import FORKS

SMALL = eviction.ZipfWorkload(documents=60, prompts=400, budget=0.2)


def test_every_policy_is_between_a_prefix_cache_and_the_optimum() -> None:
    rates = eviction.bench_hit_rate(SMALL)["hit_rate"]
    steady = rates["steady"]
    assert set(steady) == {*eviction.POLICIES, "belady", "prefix", "prefix_sorted"}
    for policy in eviction.POLICIES:
        assert 0 < steady["prefix"] < steady[policy] <= steady["belady"] < 1
    assert steady["prefix"] <= steady["prefix_sorted"]


@pytest.mark.slow
def test_two_queues_find_more_than_lru_in_every_draw() -> None:
    """A tenth less than what docs/measurements/benchmarks.md says of 10,000 prompts."""
    rates = eviction.bench_hit_rate(eviction.ZipfWorkload(prompts=2_000))["hit_rate"]
    for kind, least in (("steady", 0.60), ("drifting", 0.57), ("scan", 0.45)):
        assert rates[kind]["2q"] > max(least, rates[kind]["lru"])


@pytest.mark.slow
@pytest.mark.nightly
def test_two_queues_find_more_in_a_store_with_leases_and_pins() -> None:
    setting = eviction.StoreSetting(pinned=2, open_leases=2)
    found = eviction.bench_store(eviction.ZipfWorkload(documents=200, prompts=1_000), setting)
    assert set(found) == set(eviction.DRAWS)
    for rates in found.values():
        assert rates["2q"] > rates["lru"] > 0.1


def test_prompts_hold_different_documents_low_ranks_most_often() -> None:
    drawn = SMALL.draw()
    assert drawn.shape == (400, 4)
    assert all(len(set(row)) == 4 for row in drawn.tolist())
    counts = np.bincount(drawn.ravel(), minlength=60)
    assert counts[0] == counts.max()
    assert counts[:10].sum() > counts[10:].sum() / 2
    assert (drawn == SMALL.draw()).all()


def test_policies_by_hand() -> None:
    """LRU with two places: 0 1 | 0 2 drops 1 | 1 0 drops 2 | 2 1 drops 0. Found: 0, 0, 1."""
    prompts = np.array([[0, 1], [0, 2], [1, 0], [2, 1]])
    assert eviction.encoding_saved(prompts, eviction.LruIndex(), np.ones(3, np.int64), 2) == 3 / 8
    assert eviction.prefix(np.array([[0, 1], [0, 1], [1, 0], [0, 2], [2, 1]]), 100) == 3 / 10, (
        "in order"
    )
    leaves_first = np.array([[0, 1], [0, 2], [3, 4], [0, 1]])
    assert eviction.prefix(leaves_first, 3) == pytest.approx(2 / 8), "3 4 leaves 0 only"
    assert eviction.bench_victims(500, runs=1) > 0


def optimum(prompts: list[int], places: int) -> int:
    """The most hits of any policy, by trying all of them."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for number in prompts:
        following: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            found = hits + (number in held)
            everything = held | {number}
            size = min(places, len(everything))
            for kept in itertools.combinations(sorted(everything), size):
                name = frozenset(kept)
                following[name] = max(following.get(name, 0), found)
        states = following
    return max(states.values())


@given(prompts=st.lists(st.integers(0, 4), min_size=1, max_size=9), places=st.integers(1, 3))
def test_belady_is_the_optimum(prompts: list[int], places: int) -> None:
    found = eviction.belady(np.array(prompts)[:, None], places)
    assert round(found * len(prompts)) == optimum(prompts, places)


def test_the_drifting_draw_moves_and_a_scan_is_never_repeated() -> None:
    steady, drifting, scan = map(SMALL.draw, eviction.DRAWS)
    assert (drifting[:16] == steady[:16]).all()
    assert (drifting[160:176] == (steady[160:176] + 10) % 60).all()
    fresh = scan[scan.min(axis=1) >= 60]
    assert len(fresh) == len(scan) - len(steady) == 400 // 3
    assert len(set(fresh.ravel().tolist())) == fresh.size


def test_the_pml_script_measures_and_writes_json(tmp_path: Path) -> None:
    result = bench_pml(PmlSetting(modules=200, parse_runs=1, resolve_runs=5))
    assert result["parse_layout_s"] > 0
    assert 0 < result["resolve_ms"] <= result["resolve_worst_ms"]
    assert result["characters"] > 200 * 500
    file = tmp_path / "pml.json"
    script = typer.Typer()
    script.command()(pml.main)
    done = CliRunner().invoke(script, ["--modules", "200", "--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "200 modules" in done.stdout
    assert json.loads(file.read_text()).keys() == result.keys()


@pytest.mark.slow
def test_questions_after_changes_are_timed_beside_a_build() -> None:
    waits = bench_indexes(500)["waits"]
    assert next(iter(waits)) == "the whole index is built"
    assert list(waits)[1:] == [
        "the first question, which builds it",
        "another question",
        "after 10 new modules (median of 15 changes)",
        "after 100 new modules",
        "after 100 modules were replaced",
        "after a document was deleted",
    ]
    assert all(wait["wall_s"] > 0 for wait in waits.values())


def test_the_costs_of_quotations_are_measured(tiny_reader: LoadedModel) -> None:
    setting = QuotationsSetting((1, 2), tokens=64, answers=2, answer_tokens=3)
    result = bench_quotations(setting, model=tiny_reader)
    assert [row["modules"] for row in result["by_modules"]] == [1, 2]
    assert all(0 < row["token_ms"] <= row["token_p99_ms"] for row in result["by_modules"])
    assert result["module_ms"] > 0
    json.dumps(result)


@pytest.mark.slow
def test_the_costs_of_grammars_are_measured(tiny_reader: LoadedModel) -> None:
    setting = GrammarsSetting(1_000, masks=4, answers=1, answer_tokens=4, strings=20)
    result = bench_grammars(setting, model=tiny_reader)
    assert len(result["by_grammar"]) == 4
    assert all(0 < row["mask_ms"] <= row["mask_p99_ms"] for row in result["by_grammar"])
    assert min(result["beside"].values()) > 0
    json.dumps(result)


HANDBOOK = REPOSITORY / "examples" / "handbook"


@pytest.mark.slow
@pytest.mark.nightly
def test_eight_bits_hardly_change_how_the_reader_begins(reader: LoadedModel) -> None:
    """The bound that docs and model card state: 95 %."""
    with pytest.raises(NoDocuments, match=r"questions\.jsonl"):
        bench_quantization(reader, REPOSITORY / "docs", 1)
    result = bench_quantization(reader, HANDBOOK, 20)
    assert result["questions"] == 20
    assert result["int8"]["first_token_agreement"] >= 0.95
    assert result["int8"]["bytes_share"] < 0.54
    assert 0.001 < result["int8"]["keys_error"] < 0.01
    assert 0.001 < result["int8"]["values_error"] < 0.01


SETTING = RelaySetting((2,), (16, 32), own=8, num_heads=4, num_kv_heads=2, head_dim=8, runs=2)


@pytest.mark.slow
def test_plots_are_drawn_from_the_figures_that_are_published(tmp_path: Path) -> None:
    for kind in ("decode", "serve"):
        image = tmp_path / f"{kind}.png"
        plots.main(kind, str(REPOSITORY / f"benchmarks/results/{kind}-cpu.json"), str(image))
        assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_theory_is_relay_attentions(tmp_path: Path) -> None:
    result = {"relay": bench_relay(SETTING)}
    assert [(row["batch"], row["shared"]) for row in result["relay"]] == [(2, 16), (2, 32)]
    row = result["relay"][1]
    assert row["theory"] == pytest.approx((32 + 8 + 2) / (32 / 2 + 8 + 7))
    assert row["measured_over_theory"] == pytest.approx(row["speedup"] / row["theory"])
    json.dumps(result)
    plot_relay(result, tmp_path / "relay.png")
    assert (tmp_path / "relay.png").read_bytes().startswith(b"\x89PNG")


def test_composition_is_timed_beside_its_products() -> None:
    sizes = {
        **hybrid.SIZES, "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    setting = hybrid.HybridSetting(sizes, composed=2, modules=2, module_tokens=24, runs=1)
    result = hybrid.bench_hybrid(setting, lambda _: None)
    composed, first = result["composition"], result["first_token"]
    for way, ratio in result["composition_over_products"].items():
        assert ratio == composed[way] / composed["products"] > 0
    assert result["speedup"]["both"] == first["prefill"] / first["both"] > 0
    json.dumps(result)


def test_ndcg_by_hand() -> None:
    assert ndcg([True, False], 1, 4) == 1.0
    assert ndcg([False, True], 1, 4) == pytest.approx(1 / np.log2(3))
    assert ndcg([True, False, True], 2, 4) == pytest.approx(1.5 / (1 + 1 / np.log2(3)))
    assert ndcg([], 1, 4) == 0.0


CMRC = {"context_id": "D0", "context_text": "船是平的。", "title": "船", "qas": [
    {"query_id": "D0_Q0", "query_text": "什么？", "answers": ["船", "船", "船平"]}]}  # fmt: skip
QED = {"example_id": 9, "title_text": "Punt", "question": "what is flat",
       "paragraph_text": "A punt is flat .", "sentence_starts": [0], "annotation": {},
       "original_nq_answers": [{"start": 0, "end": 6, "string": "A punt"}]}  # fmt: skip
MUSIQUE = {"question": "What is flat?", "answers": ["a punt"], "ctxs": [
    {"title": "", "text": "A punt is flat."},
    {"title": "Oar", "text": "An oar is long."}]}  # fmt: skip
QMSUM = {"topic_list": [], "general_query_list": [{"query": "Sum it up.", "answer": "Boats."}],
         "specific_query_list": [{"query": "What did Ines say?", "answer": "Hello.",
                                  "relevant_text_span": [["0", "0"]]}],
         "meeting_transcripts": [{"speaker": "Ines", "content": "Hello."},
                                 {"speaker": "Bo", "content": "Boats."}]}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "name", "documents", "questions"),
    [
        ([CMRC], "CMRC", ["# 船\n\n船是平的。"], [("D0_Q0", ("船", "船平"), 0)]),
        ([QED], "QED", ["# Punt\n\nA punt is flat ."], [("9", ("A punt",), 0)]),
        ([MUSIQUE], "MuSiQue", ["A punt is flat.", "# Oar\n\nAn oar is long."],
         [("1", ("a punt",), None)]),
        ([QMSUM, QMSUM], "QMSum", ["Ines: Hello.\n\nBo: Boats."],
         [("1-0", ("Boats.",), 0), ("1-1", ("Hello.",), 0),
          ("2-0", ("Boats.",), 0), ("2-1", ("Hello.",), 0)]),
        ([{"question": "Who?", "answers": []}], "lines", [], [("1", (), None)]),
    ],
)  # fmt: skip
def test_published_sets_are_read(
    tmp_path: Path, rows: list[Any], name: str, documents: list[str], questions: list[Any]
) -> None:
    """questions: id, answers, and the document that answers."""
    file = tmp_path / "set.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    found = load_set(file)
    assert found.format == name
    assert [each.text for each in found.documents] == documents
    ids = [each.id for each in found.documents]
    assert [(q.id, q.answers, q.document) for q in found.questions] == [
        (id, answers, "" if place is None else ids[place]) for id, answers, place in questions
    ]
    if ids:
        assert all(question.own == tuple(ids) for question in load_set(file, "own").questions)


@pytest.mark.slow
def test_sets_of_questions_are_asked_in_every_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "PORTION", 1)
    texts = {"red": "It is red.", "on the roof": "The boat is blue.", "blue": "The key is blue."}
    rows = [
        {"question": "Where hangs the key?", "answers": [answer], "context": text}
        for answer, text in texts.items()
    ]
    (tmp_path / "tiny.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    sets = [QuestionSet("Tiny", "tiny.jsonl", over="own"), QuestionSet("Absent", "absent.jsonl")]
    kept: list[int] = []

    def keep(figures: dict[str, Any]) -> None:
        kept.append(figures["sets"][0]["reports"][0]["questions"])

    told = bench_quality(tmp_path, sets, questions=2, keep=keep)
    assert kept == [1, 2], "figures are written after each portion"
    [found] = told["sets"]
    assert [report["mode"] for report in found["reports"]] == [
        "exact", "rooted", "primed:16", "isolated"]  # fmt: skip
    assert found["setting"]["asked"] == "2 of 3, drawn with seed 0"
    assert found["held"] == 0.5, "of two paragraphs, one holds its answer"
    assert "key is" not in json.dumps(told), "texts are left out"
    heads, rule, first, *others = table_of(told["sets"]).splitlines()
    assert heads.count("|") == rule.count("|") == first.count("|") == others[0].count("|")
    assert first.startswith("| Tiny, 2, 50 % | `exact` |")
    assert len(others) == 3
    assert len({each.name for each in SETS}) == len(SETS)


def test_f1_of_held_answers_is_of_these_alone() -> None:
    marked = tuple(
        MarkedAnswer(Question(str(n), "?", ("a",)), "a", mark == 1, mark, mark, True, 1, 0.1, 4, 3,
                     1, "stop")
        for n, mark in enumerate((1.0, 0.0, 0.5))
    )  # fmt: skip
    parts = [Evaluation({}, (EvaluationReport.of("exact", part),), ()) for part in
             (marked[:1], marked[1:])]  # fmt: skip
    joined = quality._joined(parts, {"k": 4}, 0)
    [report] = quality._figures(joined, [True, False, True])["reports"]
    assert (report["questions"], report["f1"], report["f1_held"]) == (3, 0.5, 0.75)
    assert quality._figures(joined, [False] * 3)["reports"][0]["f1_held"] is None


@pytest.mark.slow
@pytest.mark.nightly
def test_wordings_are_asked_the_same_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordings, "WORDINGS", (INSTRUCTION, "Documents:"))
    told = wordings.bench_wordings(None, None, 3)
    first, second = told["wordings"]
    assert first["wording"] == INSTRUCTION
    assert len(first["f1"]) == len(second["f1"]) == len(second["exact_match"]) == 3
    assert first["refused_right"] is None, "three questions fit no calibration"
    heads, rule, *rows = wordings.lines_of(told["wordings"])
    assert len({line.count("|") for line in (heads, rule, *rows)}) == 1
    assert "| +0.0 (+0.0 to +0.0) |" in rows[0]


@pytest.mark.slow
def test_retrieval_is_measured_by_search_and_threshold() -> None:
    texts = {
        "keys": "The spare key hangs in the red cupboard of the key room.",
        "boats": "The boat is moored at the quay.",
        "leave": "There are 26 days of leave.",
    }
    documents = [SourceDocument(id, text) for id, text in texts.items()]
    question = Question("1", "In which cupboard of the room hangs the key?", ("red",), "keys")
    small = RetrievalSetting(k=3, shares=(0.0, 1.0), answered=(1.0,))
    told = bench_retrieval(
        [Dataset("notes", "lines", (question,), tuple(documents))],
        DeterministicFakeEmbedding(size=4), small,
    )  # fmt: skip
    rows = {(row["search"], row["relative_threshold"]): row for row in told["found"]}
    assert set(rows) == {(s, share) for s in ("sparse", "dense", "hybrid") for share in (0.0, 1.0)}
    assert rows["sparse", 1.0]["ndcg"] == rows["sparse", 1.0]["recalled"] == 1.0
    assert rows["sparse", 1.0]["modules"] == 1 < rows["dense", 0.0]["modules"] == 3
    assert [row["search"] for row in told["answered"]] == ["sparse", "hybrid"]
    assert json.dumps(told)


def ones(_file: Path, _setting: BesideSetting) -> torch.Tensor:
    return torch.ones(2**24)


def test_the_memory_of_a_process_is_beyond_what_it_had() -> None:
    setting = BesideSetting(threads=1)
    with FORKS.Pool(1) as pool:  # memory of this process may be freed meanwhile
        told = pool.apply(_memory_of, (ones, Path("model.gguf"), setting))
    assert told["peak_bytes"] >= 2**26
    assert 2**26 <= told["anonymous_bytes"] < 2**27


def test_models_are_measured_by_their_size() -> None:
    shape = LlamaShape(2, 128, 4, 2, 256, 512, 4096)
    setting = LaptopSetting(documents=2, tokens=16, answer=3, runs=1, threads=1)
    told = bench_laptop({"tiny": shape}, "int8", setting)
    [row] = told["rows"]
    packed = shape.num_layers * shape.layer_weights + shape.head_weights
    assert packed < row["weight_bytes"] < 1.5 * packed + 2 * shape.head_weights
    assert row["token_bytes"] == 2 * shape.num_layers * shape.pair_elements
    assert min(row["first_token_seconds"], *row["tokens_per_second"].values()) > 0
    assert set(row["tokens_per_second"]) == {"1", "8"}


def test_llama_cpp_computes_a_new_order_and_keeps_a_prefix() -> None:
    prompts: list[list[int]] = []
    ours: Any = SimpleNamespace(first_token=lambda states, _: float(len(states)))
    theirs: Any = SimpleNamespace(first_token=prompts.append)
    documents: list[list[int]] = [[n, n] for n in range(4)]
    states: Any = [object()] * 4
    setting = BesideSetting(question=1, runs=3)
    told = _first_tokens(
        ours,
        theirs,
        states,
        documents,
        4,
        DrawnTokens(50),
        setting,
        lambda _: None,
    )
    assert {name: row["ours"] for name, row in told.items()} == {
        "4 documents, new order": 4.0, "4 documents, whole prefix": 4.0,
    }  # fmt: skip
    bodies = [prompt[:-1] for prompt in prompts]
    assert all(sorted(each) == [0, 0, 1, 1, 2, 2, 3, 3] for each in bodies)
    assert bodies[0::2] == bodies[1::2]
    assert all(one[0] != other[0] for one, other in pairwise(bodies[0::2]))


@pytest.mark.slow
@pytest.mark.nightly
def test_small_weights_are_measured_beside_those_in_bfloat16() -> None:
    told = bench_weights(WeightsSetting(256, 256, 1, rows=(1, 4), runs=1, questions=2))
    own, eight, four = (told["weights"][kind] for kind in ("None", "int8", "int4"))
    assert own["bytes_share"] == 1 > eight["bytes_share"] > four["bytes_share"]
    assert own["error"] == 0 < eight["error"] < four["error"] < 0.5
    assert set(four["time_ratio"]) == {1, 4}
    assert 0 <= four["exact_match"] <= four["f1"] <= 1
    assert json.dumps(told)


@pytest.mark.slow
def test_what_modes_take_is_measured_side_by_side() -> None:
    shape = LlamaShape(3, 32, 4, 2, 48, 64, 1024, tied=False)
    load = GpuWorkload(preamble=4, documents=4, document_tokens=32, question=4, placed=(2, 4))
    setting = TimesSetting(("rooted", "primed:8", "exact"), warm=1, runs=1, new_tokens=3)
    rows = bench_modes({"tiny": shape}, "cpu", load, setting)["rows"]
    assert [(row["documents"], row["mode"]) for row in rows] == [
        (count, mode) for count in (2, 4) for mode in setting.modes
    ]
    assert [row["computed"] for row in rows] == [4, 12, 72, 4, 28, 136]
    assert all(row["first_token_ms"] > 0 for row in rows)
    assert [row["segments"] for row in rows] == [3, 3, 0, 5, 5, 0]


def test_pauses_between_kernels_are_told_from_idle_time() -> None:
    found = hybrid_gpu.kernel_times([(0, 2, "a"), (2.5, 4, "b"), (20, 21, "a")], steps=2)
    assert (found["span"], found["between"], found["idle"]) == (10.5, 0.25, 8.0)
    assert found["by kernel"][0] == {"name": "a", "us": 1.5, "count": 1.0}


@pytest.mark.slow
@pytest.mark.nightly
def test_recurring_texts_are_read_in_answers(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    given = ["--questions", "2", "--modes", "rooted,primed:16", "--json", str(file)]
    run = CliRunner().invoke(recurring_answers.app, given, catch_exceptions=False)
    assert run.exit_code == 0
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert set(figures["modes"]) == {"rooted", "primed:16"}
    assert figures["chunks"] == recurring_answers.CHUNKS
    assert figures["reversed"]["answer_modes"] == {"exact": 2}
    for mode, each in figures["modes"].items():
        assert mode in run.output
        assert each["answer_modes"] == {f"recognized:{mode}": 2}
        assert each["cached_share"] > 0.8, "four chunks beside a short question"
        assert each["equal_interval"]["low"] <= each["equal"] <= each["equal_interval"]["high"]
