"""Findings of the linter: all of them, in order, without stopping at the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragcache_schemas import SchemaIndex, lint_prompt, lint_schema, parse_schema
from tests.schemas.pml_trees import count_words

BAD = """<schema name="s">
 <module/>
 <module name="a"><b>x</b><param name="p"/></module>
 <module name="a" foo="1"/>
 <union scaffold="q">text<module name="u"/></union>
 <scaffold modules="zz"/>
</schema>"""


@pytest.mark.filterwarnings("error")
def test_every_problem_of_a_schema_is_found() -> None:
    findings = lint_schema(BAD, source="bad.xml")
    assert [(str(f.location), f.severity, f.kind) for f in findings] == [
        ("bad.xml:2:2", "error", "InvalidAttribute"),
        ("bad.xml:3:19", "error", "UnknownElement"),
        ("bad.xml:3:27", "error", "InvalidAttribute"),
        ("bad.xml:4:2", "error", "InvalidAttribute"),
        ("bad.xml:4:2", "error", "DuplicateName"),
        ("bad.xml:5:2", "warning", "PMLWarning"),
        ("bad.xml:5:22", "error", "MisplacedText"),
        ("bad.xml:6:2", "error", "UnknownName"),
    ]
    [malformed] = lint_schema('<schema name="s">a < b</schema>')
    assert str(malformed).startswith("<string>:1:20: error: a bare '<'")


def test_correct_schema_has_no_findings() -> None:
    good = (
        '<schema name="s"><module name="m">for <param name="days" len="3"/> days</module></schema>'
    )
    assert lint_schema(good, count_tokens=count_words) == []


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('<module name="m"/>', "empty-module"),
        ('<module name="m">for<param name="p" len="1"/></module>', "glued-parameter"),
        ('<module name="m"><param name="p" len="1"/>days</module>', "glued-parameter"),
        ('<user><union><module name="m">x</module></union></user>', "small-union"),
        ('<module name="m">x</module><scaffold modules="m"/>', "single-scaffold"),
        (
            '<union><module name="m">x</module><module name="n">x</module>'
            '<module name="o">a b c d e</module></union>',
            "uneven-union",
        ),
    ],
)
def test_advice(body: str, kind: str) -> None:
    (finding,) = lint_schema(f'<schema name="s">{body}</schema>', count_tokens=count_words)
    assert (finding.severity, finding.kind) == ("advice", kind)


def test_scaffold_that_does_not_fit_is_found_by_counting() -> None:
    text = '<schema name="s"><param name="p" len="1" scaffold="a b"/></schema>'
    assert lint_schema(text) == []
    [found] = lint_schema(text, count_tokens=count_words)
    assert (found.severity, found.kind) == ("warning", "PMLWarning")
    assert "the rest of it is not encoded" in found.message


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        ("<a/><b/>Go.", []),
        ("<c/>", ["UnknownName"]),
        ("<user/><module/>", ["UnknownElement"]),
        ("<a/>in between<b/>", ["crowded-text"]),
    ],
)
def test_findings_of_prompts(body: str, kinds: list[str]) -> None:
    schema = '<schema name="s"><module name="a">x</module><module name="b">y</module></schema>'
    index = SchemaIndex.build(parse_schema(schema), count_words)
    prompt = f'<prompt schema="s">{body}</prompt>'
    found = lint_prompt(prompt, index)
    assert [finding.kind for finding in found] == kinds
    if kinds == ["crowded-text"]:
        assert (found[0].severity, str(found[0].location)) == ("advice", "<string>:1:24")
    if kinds == ["UnknownName"]:
        assert lint_prompt(prompt) == [], "without its schema"


def test_reference_files_have_no_errors(reference_files: list[Path]) -> None:
    for file in reference_files:
        findings = lint_schema(file.read_bytes(), count_tokens=count_words)
        assert {finding.severity for finding in findings} <= {"advice"}
