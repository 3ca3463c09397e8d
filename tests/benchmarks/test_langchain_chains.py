"""Chains of LangChain with recognition and without, on a small corpus."""

from __future__ import annotations

import json
from pathlib import Path

import langchain_chains
import pytest
import typer
from langchain_chains import (
    HEADER,
    LangChainSetting,
    bench_langchain,
    headed,
    prompt_of,
    subjects,
    text_of,
)
from typer.testing import CliRunner

from ragcache.bench.harness import LlamaShape
from ragcache.db import ModuleRow

KEYS = {
    "ratio_recognized_to_plain",
    "recognize_ms_32k_10000",
    "recognize_ms_32k_10000_common_header",
    "batch_ratio",
}


def small(handbook: Path) -> LangChainSetting:
    shape = LlamaShape(1, 64, 4, 2, 96, 32_000, 2048)
    return LangChainSetting(
        handbook=handbook, shape=shape, modules=40, module_words=60, questions=1, runs=1, batch=2,
        new_tokens=2, lengths=(1_000, 32_768), sizes=(20, 40, 10_000), finds=2,
    )  # fmt: skip


@pytest.mark.slow
def test_it_measures_what_it_says(notes: Path) -> None:
    result = bench_langchain(small(notes))
    assert result.keys() >= KEYS
    for name in ("handbook", "synthetic"):
        chain = result[name]
        assert 0 < chain["cached_tokens"] < chain["prompt_tokens"]
        assert chain["ratio"] == chain["seconds"]["plain"] / chain["seconds"]["recognized"]
    assert result["recognize_ms_32k_10000"] is None  # there are 40 modules
    for name in ("recognition", "recognition_common_header"):
        rows = result[name]
        assert [(row["modules"], row["characters"]) for row in rows] == [
            (20, 1_000), (20, 32_768), (40, 1_000), (40, 32_768),
        ]  # fmt: skip
        assert all(row["found"] == row["standing"] > 0 for row in rows)
    assert result["batch_ratio"] > 0


@pytest.mark.slow
def test_the_command_prints_tables_and_writes_json(
    tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = bench_langchain(small(notes))
    monkeypatch.setattr(langchain_chains, "bench_langchain", lambda *_: measured)
    file = tmp_path / "figures.json"
    app = typer.Typer()
    app.command()(langchain_chains.main)
    done = CliRunner().invoke(app, ["--json", str(file)])
    assert done.exit_code == 0, done.output
    assert "tokens a second" in done.stdout
    assert "40 modules under one header" in done.stdout
    assert json.loads(file.read_text()).keys() >= KEYS


def test_every_module_has_a_subject_of_its_own() -> None:
    names = subjects(10_000)
    assert len(set(names)) == 10_000
    assert text_of(names[0], names[1:4], 60).lower().split().count(names[0]) == 2


def test_modules_of_one_header_differ_below_it() -> None:
    names = subjects(100)
    rows = [ModuleRow(n, f"{name}#1", name, "", "long ago") for n, name in enumerate(names)]
    texts = [row.text for row in headed(rows, 20)]
    assert all(text.startswith(HEADER) for text in texts)
    assert len({text[len(HEADER) :] for text in texts}) == 100


def test_prompts_have_the_length_that_is_asked_for() -> None:
    assert len(prompt_of(["some text"], 5_000)) == 5_000
