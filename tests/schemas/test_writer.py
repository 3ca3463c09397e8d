"""Writing: parse(write(tree)) == tree, and writing again gives the same text."""

from __future__ import annotations

import pytest
from hypothesis import given
from pml_trees import prompts, schemas

from ragcache_schemas import (
    Chat,
    DuplicateName,
    Import,
    InvalidName,
    Module,
    Parameter,
    PMLSyntaxError,
    Prompt,
    ReservedName,
    Scaffold,
    Schema,
    Slot,
    Text,
    Union,
    parse_prompt,
    parse_schema,
    write_prompt,
    write_schema,
)


@given(schemas())
def test_writing_and_parsing_a_schema_gives_the_same_tree(schema: Schema) -> None:
    written = write_schema(schema)
    assert parse_schema(written) == schema
    assert write_schema(parse_schema(written)) == written


@given(prompts())
def test_writing_and_parsing_a_prompt_gives_the_same_tree(prompt: Prompt) -> None:
    written = write_prompt(prompt)
    assert parse_prompt(written) == prompt
    assert write_prompt(parse_prompt(written)) == written


def test_the_written_form_is_laid_out() -> None:
    schema = Schema(
        "trip",
        (
            Text("Plan a trip.\n"),
            Module("plan", (Text("for "), Parameter("days", 5, "three"), Text("."))),
            Union((Module("miami", (Text("Miami\n"),)), Module("paris")), "paris"),
            Chat("user", (Slot("1", "handbook"),), closes=False),
        ),
        (Scaffold((("plan",), ("miami",))),),
    )
    assert write_schema(schema) == (
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
    schema = Schema("s", (Module("m", (Text(hostile),)),))
    assert parse_schema(write_schema(schema)) == schema
    prompt = Prompt("s", (Import("m", (("q", '"/><evil a="'),)), Text("</prompt>")))
    assert parse_prompt(write_prompt(prompt)) == prompt


def test_text_that_the_white_space_rule_would_change_is_kept_with_xml_space() -> None:
    schema = Schema("s", (Module("m", (Text("\n  x\n\n"), Module("n", (Text(" "),)))),))
    written = write_schema(schema)
    assert '<module name="m" xml:space="preserve">' in written
    assert parse_schema(written) == schema


def test_what_xml_cannot_carry_is_refused() -> None:
    with pytest.raises(PMLSyntaxError, match=r"U\+0000 cannot be written"):
        write_schema(Schema("s", (Text("a\0b"),)))


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        (Schema("s", (Module("a b"),)), InvalidName),
        (Schema("s", (Module("union"),)), ReservedName),
        (Schema("s", (Module("a"), Module("a"))), DuplicateName),
        (Schema(""), InvalidName),
    ],
)
def test_a_tree_that_would_not_parse_is_not_written(schema: Schema, error: type) -> None:
    with pytest.raises(error):
        write_schema(schema)


def test_a_prompt_that_would_not_parse_is_not_written() -> None:
    with pytest.raises(InvalidName):
        write_prompt(Prompt("s", (Import("1a"),)))
    with pytest.raises(ReservedName):
        write_prompt(Prompt("s", (), (("schema", "x"),)))
