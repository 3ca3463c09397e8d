"""The papers' workloads, on tiny settings: they run and add up."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from chunk_attention import PluginSetting, bench_chunk_attention, plugin_prompt
from hydragen import ConsistencySetting, NeedleSetting, bench_hydragen, needle_document
from papers import ModelSetting, print_comparisons
from prompt_cache import LengthSetting, bench_prompt_cache

from ragcache.models import LoadedModel

TINY = ModelSetting("tiny", dtype="float32")


def test_facts_are_planted_in_the_book_and_asked_for(reader: LoadedModel) -> None:
    book = "The road was long. The rain fell on it. Nobody came. " * 9
    ids, questions = needle_document(reader, 12, 600, book)
    text = reader.tokenizer.decode(ids)
    assert 540 < len(ids) <= 600
    assert "Nobody came." in text
    names = [reader.tokenizer.decode(each).rpartition(" ")[2].strip("?\n") for each in questions]
    assert len(set(names)) == 12
    for name in names:
        assert text.count(f"The dog named {name} has fur that is ") == 1


def test_the_plugin_prompt_has_the_papers_length(reader: LoadedModel) -> None:
    ids = plugin_prompt(reader, 1766)
    assert len(ids) == 1766
    text = reader.tokenizer.decode(ids)
    for name in ("timetable", "library", "weather", "kitchen", "ledger", "concerts"):
        assert f"## {name}\n" in text


@pytest.mark.slow
def test_needles_and_self_consistency_run() -> None:
    needles = NeedleSetting(document=512, questions=8, copies=4, new_tokens=2, runs=1)
    consistency = ConsistencySetting(64, 2, 16, 3, 2, runs=1)
    result = bench_hydragen(TINY, needles, consistency)
    names = [each["workload"] for each in result["comparisons"]]
    assert names == ["needles in a book", "self-consistency", "two levels against one"]
    assert all(each["ratio"] > 0 for each in result["comparisons"])


@pytest.mark.slow
def test_use_cases_and_lengths_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench_prompt_cache(TINY, LengthSetting((64, 256), runs=1))
    assert [row["tokens"] for row in result["by_length"]] == [64, 256]
    print_comparisons(result, tmp_path / "result.json")
    assert "10x sooner at 3K tokens" in capsys.readouterr().out
    kept = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert len(kept["comparisons"]) == 4


@pytest.mark.slow
def test_a_shared_plugin_prompt_takes_less_memory_once_found() -> None:
    at_once = math.inf  # else a slow machine's requests might not meet
    setting = PluginSetting(640, requests=4, question=8, new_tokens=16, rate=at_once, runs=1)
    latency, memory = bench_chunk_attention(TINY, setting)["comparisons"]
    assert latency["ratio"] > 0
    assert memory["ratio"] > 0.3
