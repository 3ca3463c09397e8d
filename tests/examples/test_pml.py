"""The use cases in examples/pml (Prompt Cache, §5.6): they load, resolve, and run."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from ragcache_api.cli.schema import TemplateTokenizer
from ragcache_schemas import (
    Module,
    Plan,
    SchemaIndex,
    Union,
    lint_prompt,
    lint_schema,
    parse_prompt,
    parse_schema,
    render_prompt_turns,
    render_schema_turns,
    resolve_prompt,
)

FOLDER = Path(__file__).resolve().parents[2] / "examples/pml"
PROMPTS = sorted(FOLDER.glob("*/prompt-*.xml"))


def resolved(file: Path) -> Plan:
    """The plan of a prompt file against the schema beside it."""
    template = TemplateTokenizer.load(None).template
    schema = parse_schema((file.parent / "schema.xml").read_bytes())
    index = SchemaIndex.build(render_schema_turns(schema, template.render), template.count)
    prompt = parse_prompt(file.read_bytes(), source=str(file))
    return resolve_prompt(index, render_prompt_turns(prompt, schema, template.render))


def test_there_are_three_use_cases_with_two_prompts_or_more() -> None:
    folders = {file.parent.name for file in PROMPTS}
    assert folders == {"code-generation", "personalization", "trip-plan"}
    assert len(PROMPTS) >= 2 * len(folders)


@pytest.mark.parametrize("file", PROMPTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_prompt_reuses_most_of_its_tokens(file: Path) -> None:
    plan = resolved(file)
    assert plan.cached_tokens > 5 * plan.computed_tokens
    assert not plan.crowded


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*/*.xml")), ids=lambda file: file.stem)
def test_nothing_in_them_is_doubtful(file: Path) -> None:
    lint: Any = lint_schema if file.stem == "schema" else lint_prompt
    assert lint(file.read_bytes(), source=str(file)) == []


def test_personalization_has_six_unions_of_five_traits() -> None:
    schema = parse_schema((FOLDER / "personalization/schema.xml").read_bytes())
    unions = [n for turn in schema.children for n in turn.children if isinstance(n, Union)]
    assert [len(union.members) for union in unions] == [5] * 6


def test_code_generation_is_valid_python_over_several_files() -> None:
    schema = parse_schema((FOLDER / "code-generation/schema.xml").read_bytes())
    modules = [n for turn in schema.children for n in turn.children if isinstance(n, Module)]
    assert len(modules) == 5
    for module in modules:
        compile(module.children[0].text, module.name, "exec")
    assert [len(scaffold.modules) for scaffold in schema.scaffolds] == [2]
    assert resolved(FOLDER / "code-generation/prompt-departures.xml").scaffolds == schema.scaffolds


def test_the_script_prints_cached_and_ordinary_times(capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(FOLDER / "run.py"))
    script["main"](["--runs", "1", "--json", str(FOLDER / "trip-plan")])
    rows = json.loads(capsys.readouterr().out)["trip-plan"]
    assert [row["prompt"] for row in rows] == ["hebrides", "home-with-children", "trieste"]
    assert all(row["cached_tokens"] > 300 and row["ratio"] > 0 for row in rows)
