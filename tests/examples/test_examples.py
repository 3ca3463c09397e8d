"""The programs and PML files in `examples/` load, resolve and run."""

from __future__ import annotations

import json
import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import ragcache_schemas as pml
from ragcache import RagCache
from ragcache.models import LoadedModel
from ragcache_api.cli.schema import load_template
from tests.connectors.langchain.scripted_model import AFTER_TOOL, STRING, scripted_model

PML = Path(__file__).resolve().parents[2] / "examples/pml"
PROMPTS = sorted(PML.glob("*/prompt-*.xml"))


@cache
def indexed(file: Path) -> tuple[pml.Schema, pml.SchemaIndex, Any]:
    template = load_template(None)
    schema = pml.parse_schema(file.read_bytes())
    turns = pml.render_schema_turns(schema, template.render)
    return schema, pml.SchemaIndex.build(turns, template.count), template


def resolved(file: Path) -> pml.Plan:
    """The plan of a prompt file against the schema beside it."""
    schema, index, template = indexed(file.parent / "schema.xml")
    prompt = pml.parse_prompt(file.read_bytes(), source=str(file))
    return pml.resolve_prompt(index, pml.render_prompt_turns(prompt, schema, template.render))


def test_there_are_three_use_cases_with_two_prompts_or_more() -> None:
    folders = {file.parent.name for file in PROMPTS}
    assert folders == {"code-generation", "personalization", "trip-plan"}
    assert len(PROMPTS) >= 2 * len(folders)


@pytest.mark.parametrize("file", PROMPTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_prompt_reuses_most_of_its_tokens(file: Path) -> None:
    plan = resolved(file)
    assert plan.cached_tokens > 5 * plan.computed_tokens
    assert not plan.crowded


@pytest.mark.parametrize("file", sorted(PML.glob("*/*.xml")), ids=lambda file: file.stem)
def test_nothing_in_them_is_doubtful(file: Path) -> None:
    lint: Any = pml.lint_schema if file.stem == "schema" else pml.lint_prompt
    assert lint(file.read_bytes(), source=str(file)) == []


def test_personalization_has_six_unions_of_five_traits() -> None:
    schema = pml.parse_schema((PML / "personalization/schema.xml").read_bytes())
    unions = [n for turn in schema.children for n in turn.children if isinstance(n, pml.Union)]
    assert [len(union.members) for union in unions] == [5] * 6


def test_code_generation_is_valid_python_over_several_files() -> None:
    schema = pml.parse_schema((PML / "code-generation/schema.xml").read_bytes())
    modules = [n for turn in schema.children for n in turn.children if isinstance(n, pml.Module)]
    assert len(modules) == 5
    for module in modules:
        compile(module.children[0].text, module.name, "exec")
    assert [len(scaffold.modules) for scaffold in schema.scaffolds] == [2]
    assert resolved(PML / "code-generation/prompt-departures.xml").scaffolds == schema.scaffolds


@pytest.mark.slow
def test_the_script_prints_cached_and_ordinary_times(capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(PML / "run.py"))
    script["main"](["--runs", "1", "--json", str(PML / "trip-plan")])
    rows = json.loads(capsys.readouterr().out)["trip-plan"]
    assert [row["prompt"] for row in rows] == ["hebrides", "home-with-children", "trieste"]
    assert all(row["cached_tokens"] > 300 and row["ratio"] > 0 for row in rows)


LANGCHAIN = Path(__file__).resolve().parents[2] / "examples/langchain"
HANDBOOK = LANGCHAIN.parent / "handbook"


def program(name: str) -> dict[str, Any]:
    return runpy.run_path(str(LANGCHAIN / name))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Four documents of the handbook: the scripted model's tokens are bytes."""
    for name in ("cold-store.md", "key-loan.md", "dogs.md", "post.md"):
        (tmp_path / name).write_bytes((HANDBOOK / name).read_bytes())
    return tmp_path


@pytest.mark.slow
def test_the_chain_hits_the_cache_where_it_recognizes(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program("lcel_chain.py")["main"](small)
    with_cache, without = capsys.readouterr().out.splitlines()
    read, whole = map(int, re.findall(r"(\d+) of (\d+) tokens", with_cache)[0])
    assert read > 0.8 * whole
    assert "recognized:rooted" in with_cache
    assert ": 0 of" in without
    assert "exact" in without


@pytest.mark.slow
def test_a_chain_with_an_index_of_its_own_reads_what_recurs(
    tmp_path: Path, quick_reader: LoadedModel
) -> None:
    shares = []
    with RagCache.open(tmp_path, quick_reader, embedding="none", force_modes=True) as rag:
        for answer in program("own_store.py")["answers"](rag, HANDBOOK):
            read, whole = map(int, re.findall(r"(\d+) of (\d+) tokens", answer)[0])
            shares.append(read / whole)
            rag.internals.shared.observing.submit(int).result()  # the user reads the answer
        assert rag.collections.names() == []
    assert shares[0] == 0
    assert shares[-1] > 0.4


@pytest.mark.slow
def test_tokens_stream_with_usage_and_sources_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    program("streaming.py")["main"]()
    out = capsys.readouterr().out
    assert out.splitlines()[0].count("|") >= 2
    assert "['cold-store.md']" in out
    assert "[0]" in out
    assert "[1]" in out


@pytest.mark.slow
def test_answers_cite_documents_of_their_prompt(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = program("citations.py")["main"]
    main.__globals__["HANDBOOK"] = small
    main(scripted_model())
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  read from ") for line in lines) >= 1
    assert re.fullmatch(rf"'{STRING}' \[.*\.md\]", lines[-1])


@pytest.mark.slow
def test_the_agent_searches_and_answers(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = program("agent.py")["main"]
    main.__globals__["HANDBOOK"] = small
    main.__globals__["QUESTION"] = "Where is the key?"
    main(scripted_model())
    out = capsys.readouterr().out
    assert "calls search_handbook({'query':" in out
    assert f"ai: {AFTER_TOOL}" in out


def test_the_agent_asks_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["agent.py"])
    with pytest.raises(SystemExit, match="MODEL is a folder"):
        runpy.run_path(str(LANGCHAIN / "agent.py"), run_name="__main__")
