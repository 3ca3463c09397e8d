"""`ragcache schema`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lxml import etree
from typer.testing import CliRunner

from ragcache_api.cli.main import app
from ragcache_schemas import parse_schema
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
