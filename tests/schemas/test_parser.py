"""Parsing (Prompt Cache, §3.2): every element, both spellings, unbalanced turns, white space."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest

import ragcache_schemas as pml


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> None:
    warnings.simplefilter("error", pml.PMLWarning)


def children(body: str) -> tuple[object, ...]:
    return pml.parse_schema(f'<schema name="s">{body}</schema>').children


# §3.2.1 Schema and prompt


def test_imports_nest_and_new_text_anywhere_is_kept_3_4() -> None:
    prompt = pml.parse_prompt('<prompt schema="s">a<x>b<y/>c</x>d<z/>e</prompt>')
    inner = pml.Import("x", (), (pml.Text("b"), pml.Import("y"), pml.Text("c")))
    assert prompt.children == (pml.Text("a"), inner, pml.Text("d"), pml.Import("z"), pml.Text("e"))


# §3.2.2 Parameters


@pytest.mark.parametrize("tag", ["param", "parameter"])
@pytest.mark.parametrize("length", ["len", "length"])
def test_parameters_3_2_2_in_both_spellings(tag: str, length: str) -> None:
    body = f'<module name="m">for <{tag} name="days" {length}="5" scaffold="three"/>.</module>'
    assert children(body) == (
        pml.Module("m", (pml.Text("for "), pml.Parameter("days", 5, "three"), pml.Text("."))),
    )


def test_arguments_are_attributes() -> None:
    prompt = pml.parse_prompt(
        '<prompt schema="s" q="1 &lt; 2"><plan days="3 days" to=""/></prompt>'
    )
    assert prompt.arguments == (("q", "1 < 2"),)
    assert prompt.children == (pml.Import("plan", (("days", "3 days"), ("to", ""))),)


# §3.2.3 Unions, nesting, chat, and white space


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # parameters as buffers, §3.2.2
        ('<module name="m"><param name="a" len="2"/>x<param name="b" len="3"/></module>',
         pml.Module("m", (pml.Parameter("a", 2), pml.Text("x"), pml.Parameter("b", 3)))),
        ('<union scaffold="b"><module name="a">A</module><module name="b"/></union>',
         pml.Union((pml.Module("a", (pml.Text("A"),)), pml.Module("b")), "b")),
        ('<module name="a"><module name="a"><union><module name="a"/></union></module></module>',
         pml.Module("a", (pml.Module("a", (pml.Union((pml.Module("a"),)),)),))),
        # modules and anonymous text, §3.2.1
        ("<user>Hi<module name='m'/></user>", pml.Chat("user", (pml.Text("Hi"), pml.Module("m")))),
        ("<assistant/>", pml.Chat("assistant")),
        ('<union slot="1" collection="hand book"/>', pml.Slot("1", "hand book")),
        ('<module name="m" cache="false"/>', pml.Module("m", cache=False)),
        ("a<!-- <module> & -->b<!-- c -->", pml.Text("ab")),
        ("<![CDATA[if a<b && c: <x>]]>!", pml.Text("if a<b && c: <x>!")),
        ("请读文件。", pml.Text("请读文件。")),
        # a parameter counts as a word
        ('<module name="m">\n  of\n  <param name="p" len="1"/>. And\n  so on\n</module>',
         pml.Module("m", (pml.Text("of\n"), pml.Parameter("p", 1), pml.Text(". And\nso on\n")))),
        ('<module name="m" xml:space="preserve">\n a <module name="n"> </module></module>',
         pml.Module("m", (pml.Text("\n a "), pml.Module("n", (pml.Text(" "),))))),
        # code on the line of the tag keeps its indentation
        ('<module name="a.py">def f():\n    return 1\n</module>',
         pml.Module("a.py", (pml.Text("def f():\n    return 1\n"),))),
    ],
)  # fmt: skip
def test_elements_and_text(body: str, expected: object) -> None:
    assert children(body) == (expected,)


def test_scaffolds_3_3() -> None:
    schema = pml.parse_schema(
        '<schema name="s"><module name="a"><module name="b"/></module>'
        '<module name="c"><module name="b"/></module><scaffold modules="a a/b  c"/></schema>'
    )
    assert schema.scaffolds == (pml.Scaffold((("a",), ("a", "b"), ("c",))),)


@pytest.mark.parametrize("name", ["unit.py", "doc-en-US", "名字", "éa_1", "ሀለ", "ខ្មែរ", "a.b-c"])
def test_names_of_any_script_with_dots_and_dashes(name: str) -> None:
    assert children(f'<module name="{name}"/>') == (pml.Module(name),)
    assert pml.parse_prompt(f'<prompt schema="s"><{name}/></prompt>').children == (
        pml.Import(name),
    )


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
    assert pml.parse_schema(data) == pml.Schema("s", (pml.Text("é"),))


def test_xml_schema_attributes_are_ignored() -> None:
    text = (
        '<schema xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance" '
        'xsi:noNamespaceSchemaLocation="pml.xsd" name="s"/>'
    )
    assert pml.parse_schema(text) == pml.Schema("s")


# Places


def test_every_node_has_its_location() -> None:
    schema = pml.parse_schema(
        '<schema name="s">\n  名字 <module\n name="a">\r\n\r\n'
        '  x<param name="p" len="1"/> y</module>\n'
        "  <union><!-- <b> -->\n<module name='b'/></union> <![CDATA[<]]></schema>",
        source="trip.xml",
    )
    name, module, union, last = schema.children
    assert name.location == pml.Location(2, 3, "trip.xml")
    assert isinstance(module, pml.Module)
    assert module.location == pml.Location(2, 6, "trip.xml")
    assert [n.location for n in module.children] == [
        pml.Location(5, 3, "trip.xml"),
        pml.Location(5, 4, "trip.xml"),
        pml.Location(5, 30, "trip.xml"),
    ]
    assert isinstance(union, pml.Union)
    assert union.location == pml.Location(6, 3, "trip.xml")
    assert union.members[0].location == pml.Location(7, 1, "trip.xml")
    assert last.location == pml.Location(7, 37, "trip.xml")


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
    assert children(body) == tuple(pml.Text(text) for text in texts)


# Turns as the reference generators leave them


def test_unclosed_turn_of_a_schema() -> None:
    text = '\n<schema name="s">\n<system/>\n<user><module name="context">\nx\n</module>\n</schema>'
    with pytest.warns(pml.PMLWarning, match="<user> is never closed") as caught:
        schema = pml.parse_schema(text, source="gen.xml")
    assert schema.children == (
        pml.Chat("system"),
        pml.Chat("user", (pml.Module("context", (pml.Text("x\n"),)),), closes=False),
    )
    warning = caught[0].message
    assert isinstance(warning, pml.PMLWarning)
    assert (warning.source, warning.line, warning.column) == ("gen.xml", 4, 1)
    assert pml.parse_schema(pml.write_schema(schema)) == schema  # without a warning


def test_unopened_turn_of_a_prompt() -> None:
    text = "<prompt schema='s'>\n<context/>\nWhy?</user><assistant>Answer:</prompt>"
    with pytest.warns(pml.PMLWarning) as caught:
        prompt = pml.parse_prompt(text)
    assert prompt.children == (
        pml.Chat("user", (pml.Import("context"), pml.Text("Why?")), opens=False),
        pml.Chat("assistant", (pml.Text("Answer:"),), closes=False),
    )
    places = [(w.message.line, w.message.column) for w in caught]
    assert places == [(3, 5), (3, 12)]
    assert prompt.children[1].location == pml.Location(3, 12)


def test_turn_begun_inside_another_ends_it() -> None:
    with pytest.warns(pml.PMLWarning, match="never closed"):
        schema = pml.parse_schema('<schema name="s"><user>a<assistant>b</assistant>c</schema>')
    assert schema.children == (
        pml.Chat("user", (pml.Text("a"),), closes=False),
        pml.Chat("assistant", (pml.Text("b"),)),
        pml.Text("c"),
    )


def test_unknown_scaffold_member_warns() -> None:
    text = '<schema name="s"><union scaffold="DOC"><module name="a"/></union></schema>'
    with pytest.warns(pml.PMLWarning, match="'DOC' names no member"):
        assert pml.parse_schema(text).children == (pml.Union((pml.Module("a"),)),)


# The reference implementation's files


def test_reference_files_parse(reference_files: list[Path]) -> None:
    for file in reference_files:
        schema = pml.parse_schema(file.read_bytes(), source=file.name)
        assert pml.parse_schema(pml.write_schema(schema)) == schema
        assert pml.lay_out(schema, lambda text: len(text.split())).length > 100


# Speed


@pytest.mark.slow
@pytest.mark.parametrize("between", ["", "\n  "])
def test_parsing_ten_thousand_modules_is_fast(between: str) -> None:
    text = "words &amp; more " * 32
    modules = (f'<module name="m{n}">{text}</module>' for n in range(10_000))
    written = f'<schema name="s">{between.join(modules)}</schema>'
    assert len(written) > 5_000_000
    start = time.process_time()
    layout = pml.lay_out(pml.parse_schema(written), len)
    assert time.process_time() - start < 5
    assert len(layout.spans) == 20_000


def test_custom_limits() -> None:
    limits = pml.ScanLimits(size=18, depth=1, elements=1)
    assert pml.parse_schema('<schema name="s"/>', limits=limits) == pml.Schema("s")
    with pytest.raises(ValueError, match="depth limit"):
        pml.ScanLimits(depth=0)
