"""Parsing (Prompt Cache, §3.2): every element, both spellings, unbalanced turns, white space."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest

from ragcache_schemas import (
    Chat,
    Import,
    Location,
    Module,
    Parameter,
    PMLWarning,
    Scaffold,
    ScanLimits,
    Schema,
    Slot,
    Text,
    Union,
    lay_out,
    parse_prompt,
    parse_schema,
    write_schema,
)


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> None:
    warnings.simplefilter("error", PMLWarning)


def children(body: str) -> tuple[object, ...]:
    return parse_schema(f'<schema name="s">{body}</schema>').children


# §3.2.1 Schema and prompt


def test_schema_3_2_1_modules_and_anonymous_text() -> None:
    schema = parse_schema('<schema name="cities">Plan.<module name="miami">Sun.</module></schema>')
    assert schema == Schema("cities", (Text("Plan."), Module("miami", (Text("Sun."),))))


def test_imports_nest_and_new_text_anywhere_is_kept_3_4() -> None:
    prompt = parse_prompt('<prompt schema="s">a<x>b<y/>c</x>d<z/>e</prompt>')
    inner = Import("x", (), (Text("b"), Import("y"), Text("c")))
    assert prompt.children == (Text("a"), inner, Text("d"), Import("z"), Text("e"))


# §3.2.2 Parameters


@pytest.mark.parametrize("tag", ["param", "parameter"])
@pytest.mark.parametrize("length", ["len", "length"])
def test_parameters_3_2_2_in_both_spellings(tag: str, length: str) -> None:
    body = f'<module name="m">for <{tag} name="days" {length}="5" scaffold="three"/>.</module>'
    assert children(body) == (
        Module("m", (Text("for "), Parameter("days", 5, "three"), Text("."))),
    )


def test_arguments_are_attributes() -> None:
    prompt = parse_prompt('<prompt schema="s" q="1 &lt; 2"><plan days="3 days" to=""/></prompt>')
    assert prompt.arguments == (("q", "1 < 2"),)
    assert prompt.children == (Import("plan", (("days", "3 days"), ("to", ""))),)


# §3.2.3 Unions, nesting, chat, and white space


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # parameters as buffers, §3.2.2
        ('<module name="m"><param name="a" len="2"/>x<param name="b" len="3"/></module>',
         Module("m", (Parameter("a", 2), Text("x"), Parameter("b", 3)))),
        ('<union scaffold="b"><module name="a">A</module><module name="b"/></union>',
         Union((Module("a", (Text("A"),)), Module("b")), "b")),
        ('<module name="a"><module name="a"><union><module name="a"/></union></module></module>',
         Module("a", (Module("a", (Union((Module("a"),)),)),))),
        ("<user>Hi<module name='m'/></user>", Chat("user", (Text("Hi"), Module("m")))),
        ("<assistant/>", Chat("assistant")),
        ('<union slot="1" collection="hand book"/>', Slot("1", "hand book")),
        ('<module name="m" cache="false"/>', Module("m", cache=False)),
        ("a<!-- <module> & -->b<!-- c -->", Text("ab")),
        ("<![CDATA[if a<b && c: <x>]]>!", Text("if a<b && c: <x>!")),
        ("请读文件。", Text("请读文件。")),
        # a parameter counts as a word
        ('<module name="m">\n  of\n  <param name="p" len="1"/>. And\n  so on\n</module>',
         Module("m", (Text("of\n"), Parameter("p", 1), Text(". And\nso on\n")))),
        ('<module name="m" xml:space="preserve">\n a <module name="n"> </module></module>',
         Module("m", (Text("\n a "), Module("n", (Text(" "),))))),
        # code on the line of the tag keeps its indentation
        ('<module name="a.py">def f():\n    return 1\n</module>',
         Module("a.py", (Text("def f():\n    return 1\n"),))),
    ],
)  # fmt: skip
def test_elements_and_text(body: str, expected: object) -> None:
    assert children(body) == (expected,)


def test_scaffolds_3_3() -> None:
    schema = parse_schema(
        '<schema name="s"><module name="a"><module name="b"/></module>'
        '<module name="c"><module name="b"/></module><scaffold modules="a a/b  c"/></schema>'
    )
    assert schema.scaffolds == (Scaffold((("a",), ("a", "b"), ("c",))),)


@pytest.mark.parametrize("name", ["unit.py", "doc-en-US", "名字", "éa_1", "ሀለ", "ខ្មែរ", "a.b-c"])
def test_names_of_any_script_with_dots_and_dashes(name: str) -> None:
    assert children(f'<module name="{name}"/>') == (Module(name),)
    assert parse_prompt(f'<prompt schema="s"><{name}/></prompt>').children == (Import(name),)


# XML


@pytest.mark.parametrize(
    "data",
    [
        '<schema name="s">é</schema>'.encode(),
        '\ufeff<schema name="s">é</schema>'.encode(),
        '<?xml version="1.0" encoding="iso-8859-1"?><schema name="s">é</schema>'.encode("latin-1"),
        '<?xml version="1.0"?>\n<schema name="s">é</schema>'.encode(),
        '<schema name="s">é</schema>'.encode("utf-16"),
        '<?xml version="1.0" encoding="latin-1"?><schema name="s">é</schema>',  # decoded already
    ],
)
def test_bytes_in_their_encoding(data: str | bytes) -> None:
    assert parse_schema(data) == Schema("s", (Text("é"),))


def test_xml_schema_attributes_are_ignored() -> None:
    text = (
        '<schema xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" '
        'xsi:noNamespaceSchemaLocation="pml.xsd" name="s"/>'
    )
    assert parse_schema(text) == Schema("s")


# Places


def test_every_node_has_its_location() -> None:
    schema = parse_schema(
        '<schema name="s">\n  名字 <module\n name="a">\r\n\r\n'
        '  x<param name="p" len="1"/> y</module>\n'
        "  <union><!-- <b> -->\n<module name='b'/></union> <![CDATA[<]]></schema>",
        source="trip.xml",
    )
    name, module, union, last = schema.children
    assert name.location == Location(2, 3, "trip.xml")
    assert isinstance(module, Module)
    assert module.location == Location(2, 6, "trip.xml")
    assert [n.location for n in module.children] == [
        Location(5, 3, "trip.xml"),
        Location(5, 4, "trip.xml"),
        Location(5, 30, "trip.xml"),
    ]
    assert isinstance(union, Union)
    assert union.location == Location(6, 3, "trip.xml")
    assert union.members[0].location == Location(7, 1, "trip.xml")
    assert last.location == Location(7, 37, "trip.xml")


# White space


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ("\n   \n", []),
        (" ", []),
        ("\n    a\n      b\n\n    c\n  ", ["a\n  b\n\nc\n"]),
        ("a\n    b\n  ", ["a\n    b\n"]),
        (" a ", [" a "]),
        ("\n\n  a", ["a"]),
        ("\n  a\n    \n  b", ["a\n\nb"]),
        ("\n\ta\n\t\tb", ["a\n\tb"]),
        ("\n  <![CDATA[a]]>\n  ", ["a\n"]),
        ("\u3000a\u00a0", ["\u3000a\u00a0"]),
    ],
)
def test_layout_white_space_is_dropped(body: str, texts: list[str]) -> None:
    assert children(body) == tuple(Text(text) for text in texts)


# Turns as the reference generators leave them


def test_unclosed_turn_of_a_schema() -> None:
    text = '\n<schema name="s">\n<system/>\n<user><module name="context">\nx\n</module>\n</schema>'
    with pytest.warns(PMLWarning, match="<user> is never closed") as caught:
        schema = parse_schema(text, source="gen.xml")
    assert schema.children == (
        Chat("system"),
        Chat("user", (Module("context", (Text("x\n"),)),), closes=False),
    )
    warning = caught[0].message
    assert isinstance(warning, PMLWarning)
    assert (warning.source, warning.line, warning.column) == ("gen.xml", 4, 1)
    assert parse_schema(write_schema(schema)) == schema  # without a warning


def test_unopened_turn_of_a_prompt() -> None:
    text = "<prompt schema='s'>\n<context/>\nWhy?</user><assistant>Answer:</prompt>"
    with pytest.warns(PMLWarning) as caught:
        prompt = parse_prompt(text)
    assert prompt.children == (
        Chat("user", (Import("context"), Text("Why?")), opens=False),
        Chat("assistant", (Text("Answer:"),), closes=False),
    )
    places = [(w.message.line, w.message.column) for w in caught]
    assert places == [(3, 5), (3, 12)]
    assert prompt.children[1].location == Location(3, 12)


def test_turn_begun_inside_another_ends_it() -> None:
    with pytest.warns(PMLWarning, match="never closed"):
        schema = parse_schema('<schema name="s"><user>a<assistant>b</assistant>c</schema>')
    assert schema.children == (
        Chat("user", (Text("a"),), closes=False),
        Chat("assistant", (Text("b"),)),
        Text("c"),
    )


def test_unknown_scaffold_member_warns() -> None:
    text = '<schema name="s"><union scaffold="DOC"><module name="a"/></union></schema>'
    with pytest.warns(PMLWarning, match="'DOC' names no member"):
        assert parse_schema(text).children == (Union((Module("a"),)),)


# The reference implementation's files


def test_reference_files_parse(reference_files: list[Path]) -> None:
    for file in reference_files:
        schema = parse_schema(file.read_bytes(), source=file.name)
        assert parse_schema(write_schema(schema)) == schema
        assert lay_out(schema, lambda text: len(text.split())).length > 100


# Speed


@pytest.mark.slow
@pytest.mark.parametrize("between", ["", "\n  "])
def test_parsing_ten_thousand_modules_is_fast(between: str) -> None:
    text = "words &amp; more " * 32
    modules = (f'<module name="m{n}">{text}</module>' for n in range(10_000))
    pml = f'<schema name="s">{between.join(modules)}</schema>'
    assert len(pml) > 5_000_000
    start = time.process_time()
    layout = lay_out(parse_schema(pml), len)
    assert time.process_time() - start < 5
    assert len(layout.spans) == 20_000


def test_custom_limits() -> None:
    limits = ScanLimits(size=18, depth=1, elements=1)
    assert parse_schema('<schema name="s"/>', limits=limits) == Schema("s")
    with pytest.raises(ValueError, match="depth limit"):
        ScanLimits(depth=0)
