"""Trees survive writing and parsing; pml.xsd accepts what the parser accepts."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from lxml import etree

import ragcache_schemas as pml
from tests.conftest import scaled
from tests.schemas.pml_trees import prompts, schemas
from tests.schemas.test_errors import PROMPTS, SCHEMAS


@given(schemas())
def test_schema_survives_writing_and_parsing(schema: pml.Schema) -> None:
    written = pml.write_schema(schema)
    assert pml.parse_schema(written) == schema
    assert pml.write_schema(pml.parse_schema(written)) == written


@given(prompts())
def test_prompt_survives_writing_and_parsing(prompt: pml.Prompt) -> None:
    written = pml.write_prompt(prompt)
    assert pml.parse_prompt(written) == prompt
    assert pml.write_prompt(pml.parse_prompt(written)) == written


def test_written_form_is_indented() -> None:
    schema = pml.Schema(
        "trip",
        (
            pml.Text("Plan a trip.\n"),
            pml.Module(
                "plan", (pml.Text("for "), pml.Parameter("days", 5, "three"), pml.Text("."))
            ),
            pml.Union((pml.Module("miami", (pml.Text("Miami\n"),)), pml.Module("paris")), "paris"),
            pml.Chat("user", (pml.Slot("1", "handbook"),), closes=False),
        ),
        (pml.Scaffold((("plan",), ("miami",))),),
    )
    assert pml.write_schema(schema) == (
        '<schema name="trip">Plan a trip.\n'
        '  <module name="plan">for <param name="days" len="5" scaffold="three"/>.</module>\n'
        '  <union scaffold="paris">\n'
        '    <module name="miami">Miami\n'
        "    </module>\n"
        '    <module name="paris"/>\n'
        "  </union>\n"
        '  <user closes="no">\n'
        '    <union slot="1" collection="handbook"/>\n'
        "  </user>\n"
        '  <scaffold modules="plan miami"/>\n'
        "</schema>\n"
    )


def test_text_never_becomes_markup() -> None:
    hostile = '</module><module name="x">&lt;![CDATA[ ]]> <!-- "\' -->'
    schema = pml.Schema("s", (pml.Module("m", (pml.Text(hostile),)),))
    assert pml.parse_schema(pml.write_schema(schema)) == schema
    prompt = pml.Prompt("s", (pml.Import("m", (("q", '"/><evil a="'),)), pml.Text("</prompt>")))
    assert pml.parse_prompt(pml.write_prompt(prompt)) == prompt


def test_text_with_layout_white_space_gets_xml_space() -> None:
    schema = pml.Schema(
        "s", (pml.Module("m", (pml.Text("\n  x\n\n"), pml.Module("n", (pml.Text(" "),)))),)
    )
    written = pml.write_schema(schema)
    assert '<module name="m" xml:space="preserve">' in written
    assert pml.parse_schema(written) == schema


def test_characters_that_xml_cannot_carry_are_refused() -> None:
    with pytest.raises(pml.PMLSyntaxError, match=r"U\+0000 cannot be written"):
        pml.write_schema(pml.Schema("s", (pml.Text("a\0b"),)))


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        (pml.Schema("s", (pml.Module("a b"),)), pml.InvalidName),
        (pml.Schema("s", (pml.Module("union"),)), pml.ReservedName),
        (pml.Schema("s", (pml.Module("a"), pml.Module("a"))), pml.DuplicateName),
        (pml.Schema(""), pml.InvalidName),
        (pml.Prompt("s", (pml.Import("1a"),)), pml.InvalidName),
        (pml.Prompt("s", (), (("schema", "x"),)), pml.ReservedName),
    ],
)
def test_invalid_trees_are_not_written(tree: pml.Schema | pml.Prompt, error: type) -> None:
    with pytest.raises(error):
        _ = pml.write_schema(tree) if isinstance(tree, pml.Schema) else pml.write_prompt(tree)


XSD = etree.XMLSchema(etree.fromstring((files("ragcache_schemas") / "pml.xsd").read_bytes()))
ROOT = Path(__file__).resolve().parents[2]


def problem(text: str) -> str | None:
    """Return the schema's objection to `text`, if it has one."""
    tree = etree.fromstring(text.encode(), etree.XMLParser(huge_tree=True))
    return None if XSD.validate(tree) else str(XSD.error_log.last_error)


@settings(max_examples=scaled(60))
@given(schemas(), prompts())
def test_what_is_written_fits_the_xsd(schema: pml.Schema, prompt: pml.Prompt) -> None:
    assert problem(pml.write_schema(schema)) is None
    assert problem(pml.write_prompt(prompt)) is None


def test_reference_files_fit_the_xsd(reference_files: list[Path]) -> None:
    assert [problem(file.read_text(encoding="utf-8")) for file in reference_files] == [None] * 3


@pytest.mark.parametrize(
    "file", sorted((ROOT / "examples/pml").rglob("*.xml")), ids=lambda f: f.name
)
def test_example_files_fit_the_xsd(file: Path) -> None:
    assert problem(file.read_text(encoding="utf-8")) is None


CHECKED = {
    pml.DuplicateName,
    pml.InvalidAttribute,
    pml.InvalidName,
    pml.MisplacedText,
    pml.UnknownElement,
}
# What pml.xsd leaves to the parser, and what is no XML or is fine for the other parser.
LEFT = (
    'xml:space="x"', '<union slot="1"/>', 'modules="a a"', "<m>¦<user/></m>", 'x="2"',
    '¦<prompt schema="s"/>', '¦<schema name="s"/>',
)  # fmt: skip
REFUSED = [
    marked.replace("¦", "")
    for marked, error, *_ in [*SCHEMAS, *PROMPTS]
    if error in CHECKED and not any(left in marked for left in LEFT)
]


@pytest.mark.parametrize(
    "text",
    [
        *REFUSED,
        "<schema name=' s'/>",
        "<schema name='s' x='1'/>",
        "<schema name='s'><union><param name='p' len='1'/></union></schema>",
        "<schema name='s'><user closes='maybe'/></schema>",
        "<prompt schema='s'><a><b><param name='p' len='1'/></b></a></prompt>",
        "<prompt schema='s'><user opens='1'/></prompt>",
    ],
)
@pytest.mark.filterwarnings("error")
def test_xsd_and_parser_refuse_the_same_text(text: str) -> None:
    assert problem(text) is not None
    parse = pml.parse_prompt if text.startswith("<prompt") else pml.parse_schema
    with pytest.raises((pml.PMLError, pml.PMLWarning)):
        parse(text)


def test_xsd_allows_names_again_in_other_scopes() -> None:
    text = (
        "<schema name='s'><module name='m'><module name='m'/><param name='m' len='1'/></module>"
        "<union><module name='n'><module name='m'/></module></union></schema>"
    )
    assert problem(text) is None
