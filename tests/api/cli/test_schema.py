"""`ragcache schema`, and schemas as trees of plain values."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from lxml import etree
from typer.testing import CliRunner

from ragcache_api.cli.main import app
from ragcache_api.schema_tree import MOST, tree_to_dict
from ragcache_schemas import Module, Schema, Text, Union, lay_out, parse_schema
from tests.api.cli.conftest import Run

GOOD = """<schema name="trip">
  <system>Plan & trips.</system>
  <user>
    <module name="days">For <param name="n" len="3"/> days.</module>
    <union>
      <module name="sea">By the sea.</module>
      <module name="hills">In the hills, far from any harbour.</module>
    </union>
  </user>
</schema>
""".replace("&", "&amp;")
BAD = """<schema name="s">
  <module name="a">x</module>
  <union>
    text
    <module name="b">for<param name="n" len="x"/></module>
    <module name="c"/>
  </union>
  <module name="a">y</module>
</schema>
"""


def run_schema(*arguments: str, status: int = 0) -> str:
    """The output of a command."""
    result = CliRunner().invoke(app, ["schema", *arguments])
    assert result.exit_code == status, result.output
    return result.stdout


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Written schemas and prompts, by name."""
    texts = {
        "good": GOOD,
        "bad": BAD,
        "prompt": '<!-- x -->\n<prompt schema="trip"><days n="2"/>\n<see/></prompt>',
        "alone": '<prompt schema="other"><see/></prompt>',
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.xml").write_text(text, encoding="utf-8")
    return {name: str(tmp_path / f"{name}.xml") for name in texts}


def test_lint_is_silent_about_what_is_right(files: dict[str, str]) -> None:
    assert run_schema("lint", files["good"]) == "1 file: nothing to report\n"
    assert json.loads(run_schema("lint", files["good"], "--json")) == []


def test_lint_shows_every_finding_with_its_line(files: dict[str, str]) -> None:
    out = run_schema("lint", files["good"], files["bad"], status=1)
    assert f"{files['bad']}:4:5: error: text directly inside <union>" in out
    assert "\n     4 │     text\n             ^\n" in out
    assert f"{files['bad']}:8:3: error: a second module 'a'" in out
    assert out.endswith("2 files: 3 findings\n")


def test_lint_as_json(files: dict[str, str]) -> None:
    found = json.loads(run_schema("lint", files["bad"], "--json", status=1))
    assert [(one["line"], one["column"], one["kind"]) for one in found] == [
        (4, 5, "MisplacedText"),
        (5, 25, "InvalidAttribute"),
        (8, 3, "DuplicateName"),
    ]
    assert set(found[0]) == {"file", "line", "column", "severity", "kind", "message"}


def test_lint_checks_a_prompt_against_the_schema_beside_it(files: dict[str, str]) -> None:
    [found] = json.loads(run_schema("lint", files["prompt"], files["good"], "--json", status=1))
    assert (found["line"], found["column"], found["kind"]) == (3, 1, "UnknownName")
    assert "did you mean 'sea'?" in found["message"]
    result = CliRunner().invoke(app, ["schema", "lint", files["alone"]])
    assert result.exit_code == 0
    assert "name the file of the schema 'other' too" in result.stderr


def test_show_draws_a_file_as_a_tree_with_positions(files: dict[str, str]) -> None:
    lines = run_schema("show", files["good"]).splitlines()
    assert lines[0].split() == ["trip", "(3", "modules)", "positions", "tokens", "text"]
    assert "<|user|>" in "\n".join(lines)  # the turns, in the words of the model's template
    rows = {re.split("   *", line.lstrip("├─│└ "))[0]: line for line in lines}
    assert "≤ 3" in rows["param n"]
    assert "By the sea." in rows["module sea"]
    starts = {_start(rows[name]) for name in ("union of 2", "module sea", "module hills")}
    assert len(starts) == 1  # §3.3: the members of a union share their start
    assert lines[-1].startswith("in all")


def _start(row: str) -> str:
    return row.split("–", maxsplit=1)[0].rsplit(maxsplit=1)[-1]


def test_show_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["schema", "show", str(tmp_path / "no.xml")])
    assert result.exit_code == 2
    assert "there is no file" in result.stderr


@pytest.mark.slow
def test_show_of_a_collection(notes: Path, tmp_path: Path) -> None:
    state = ["--state", str(tmp_path / "state")]
    done = CliRunner().invoke(app, ["ingest", "notes", str(notes), *state])
    assert done.exit_code == 0, done.output
    schema = parse_schema(run_schema("show", "notes", "-k", "2", *state))
    assert schema.name == "notes"
    whole: Schema = parse_schema(run_schema("show", "notes", "--expand", *state))
    assert len(whole.children) > len(schema.children)
    tree = run_schema("show", "notes", "--tree", "-k", "2", *state)
    assert "slot 2" in tree
    assert "of the collection notes" in tree
    assert "module boats.md" in run_schema("show", "notes", "--tree", "--expand", *state)


def test_the_xml_schema_is_printed_for_editors() -> None:
    assert etree.XMLSchema(etree.fromstring(run_schema("xsd").encode())) is not None


def test_schema_show_prints_pml(run: Run, ingested: Path) -> None:
    status, out, _ = run("schema", "show", "notes", "-k", 2)
    assert status == 0
    parse_schema(out)
    expanded = run("schema", "show", "notes", "-k", 2, "--expand")[1]
    parse_schema(expanded)
    for name in ("boats.md", "keys.md", "leave.md"):
        assert name not in out, "the members are named by their collection"
        assert expanded.count(f'<module name="{name}">') == 2, "once in either slot"
    assert "hangs in the red cupboard" in expanded


def words(text: str) -> int:
    return len(text.split())


def test_what_is_not_listed_still_counts() -> None:
    members = tuple(
        Module(f"m{n}", (Text("word " * (900 if n == MOST + 6 else 2)),)) for n in range(MOST + 7)
    )
    schema = Schema("s", (Text("one two three"), Module("slot", (Union(members),))))
    told = tree_to_dict(schema, lay_out(schema, words, "compact"))
    [text, slot] = told["children"]
    [union] = slot["children"]
    assert union["children"][-1] == {"name": "7 more", "kind": "rest", "tokens": 0, "children": []}
    assert len(union["children"]) == MOST + 1
    assert union["tokens"] == slot["tokens"] == 900
    assert told["tokens"] == text["tokens"] + 900
    assert text == {"name": "one two three", "kind": "text", "tokens": 3, "children": []}
