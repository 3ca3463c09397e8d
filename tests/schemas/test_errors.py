"""Every error names the source, line, column and element, and says what to do."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragcache_schemas import (
    DuplicateName,
    ForbiddenMarkup,
    InvalidAttribute,
    InvalidName,
    LimitExceeded,
    MisplacedText,
    PMLError,
    PMLSyntaxError,
    PMLWarning,
    ReservedName,
    ScanLimits,
    UnionConflict,
    UnknownElement,
    UnknownName,
    parse_prompt,
    parse_schema,
)
from tests.conftest import scaled

# Where the problem is, is marked with "¦" in the text.
SCHEMAS = [
    # not XML
    ("", PMLSyntaxError, "empty", None),
    ("¦hello", PMLSyntaxError, "not well-formed", None),
    ('<schema name="s">if a ¦< b:</schema>', PMLSyntaxError, "bare '<'", "schema"),
    ('<schema name="s">if a ¦<= b:</schema>', PMLSyntaxError, "bare '<'", "schema"),
    ('<schema name="s">\n for i¦<n; i++ </schema>', PMLSyntaxError, "bare '<'", "schema"),
    ('<schema name="s"><module name="m">a ¦&& b</module></schema>', PMLSyntaxError, "&", "module"),
    ('<schema name="s" x="¦&"/>', PMLSyntaxError, "'&'", "schema"),
    ('<schema name="s">vector<int>;¦</schema>', PMLSyntaxError, "</int> is due", "int"),
    ('<schema name="s"><module name="m">¦</schema>', PMLSyntaxError, "line 1, column 18", "module"),
    ('¦<schema name="s">', PMLSyntaxError, "never closed", "schema"),
    ("<schema name='s'></schema>¦</module>", PMLSyntaxError, "closes nothing", "module"),
    ('<schema name="s"/>¦<schema name="t"/>', PMLSyntaxError, "one schema", "schema"),
    ('<schema name="s">¦<!-- x</schema>', PMLSyntaxError, "never closed", "schema"),
    ('<schema name="s">¦<![CDATA[ x</schema>', PMLSyntaxError, "never closed", "schema"),
    ('<schema name="s">a¦]]></schema>', PMLSyntaxError, "]]>", "schema"),
    ('<schema name="s">\n\n a¦\x01</schema>', PMLSyntaxError, "U+0001", None),
    ('<schema name="s">¦\ud800</schema>', PMLSyntaxError, "U+D800", None),
    # markup that PML refuses
    ('¦<!DOCTYPE x><schema name="s"/>', ForbiddenMarkup, "document types", None),
    ('<schema name="s">é¦&nbsp;</schema>', ForbiddenMarkup, "&nbsp;", "schema"),
    ('<schema name="s">¦<?php echo 1; ?></schema>', ForbiddenMarkup, "instructions", "schema"),
    # elements
    ('¦<module name="m"/>', UnknownElement, "<module>", "module"),
    ('¦<prompt schema="s"/>', UnknownElement, "<schema name", "prompt"),
    ('<schema name="s">a ¦<b>c</b></schema>', UnknownElement, "CDATA", "b"),
    ('<schema name="s"><union>¦<union/></union></schema>', UnknownElement, "only <mod", "union"),
    ('<schema name="s"><module name="m">\n¦<scaffold modules="m"/></module></schema>',
     UnknownElement, "directly inside <schema>", "scaffold"),
    ('<schema name="s"><user><module name="m">¦<user/></module></user></schema>',
     UnknownElement, "end the <user> turn", "user"),
    ('<schema name="s"><param name="p" len="1">¦<module name="m"/></param></schema>',
     UnknownElement, "inside <param>", "module"),
    # text
    ('<schema name="s"><union>\n ¦text<module name="m"/></union></schema>',
     MisplacedText, "directly inside <union>", "union"),
    ('<schema name="s"><union><module name="m"/> ¦é</union></schema>',
     MisplacedText, "directly inside <union>", "union"),
    ('<schema name="s"><param name="p" len="1">¦x</param></schema>',
     MisplacedText, "inside <param>", "param"),
    # attributes
    ("¦<schema/>", InvalidAttribute, "without the attribute 'name'", "schema"),
    ('<schema name="s">¦<module/></schema>', InvalidAttribute, "'name'", "module"),
    ('<schema name="s">¦<module name="m" src="x"/></schema>', InvalidAttribute, "'src'", "module"),
    ('<schema name="s">¦<module name="m" cache="x"/></schema>', InvalidAttribute, "x", "module"),
    ('<schema name="s">¦<param name="p"/></schema>', InvalidAttribute, "has none", "param"),
    ('<schema name="s">¦<param name="p" len="0"/></schema>', InvalidAttribute, '"0"', "param"),
    ('<schema name="s">¦<param name="p" len="x"/></schema>', InvalidAttribute, '"x"', "param"),
    ('<schema name="s">¦<param name="p" len="1" length="2"/></schema>',
     InvalidAttribute, '"1" and "2"', "param"),
    ('<schema name="s">¦<union slot="1"/></schema>', InvalidAttribute, "'collection'", "union"),
    ('<schema name="s">¦<scaffold modules=" "/></schema>',
     InvalidAttribute, "no modules", "scaffold"),
    ('<schema name="s">¦<user opens="maybe"/></schema>', InvalidAttribute, "opens", "user"),
    ('<schema name="s">¦<module name="m" xml:space="x"/></schema>',
     InvalidAttribute, "xml:space", "module"),
    # names
    ('<schema name="s">¦<module name="a b"/></schema>', InvalidName, "'a b'", "module"),
    ('<schema name="s">¦<module name="1a"/></schema>', InvalidName, "'1a'", "module"),
    ('¦<schema name=""/>', InvalidName, "''", "schema"),
    ('<schema name="s">¦<union slot="a b" collection="c"/></schema>', InvalidName, "slot", "union"),
    ('<schema name="s">¦<module name="XMLdoc"/></schema>', ReservedName, "'XMLdoc'", "module"),
    ('<schema name="s">¦<param name="schema" len="1"/></schema>',
     ReservedName, "'schema'", "param"),
    ('<schema name="s"><module name="a"/>\n¦<module name="a"/></schema>',
     DuplicateName, "first at f.xml:1:18", "module"),
    ('<schema name="s"><module name="a"/><user><union>¦<module name="a"/></union></user></schema>',
     DuplicateName, "'a'", "module"),
    ('<schema name="s"><param name="a" len="1"/>¦<param name="a" len="1"/></schema>',
     DuplicateName, "parameter 'a'", "param"),
    ('<schema name="s"><union slot="1" collection="c"/>¦<union slot="1" collection="d"/></schema>',
     DuplicateName, "'slot-1'", "module"),
    # scaffolds
    ('<schema name="s"><module name="a"/>¦<scaffold modules="a b"/></schema>',
     UnknownName, "modules there are: a", "scaffold"),
    ('<schema name="s"><module name="a"/>¦<scaffold modules="a/x"/></schema>',
     UnknownName, "'a/x'", "scaffold"),
    ('<schema name="s"><module name="a"/>¦<scaffold modules="a a"/></schema>',
     DuplicateName, "twice", "scaffold"),
    ('<schema name="s"><union><module name="a"/><module name="b"/></union>'
     '¦<scaffold modules="a b"/></schema>', UnionConflict, "'a' and 'b'", "scaffold"),
    ('<schema name="s"><union><module name="a"/>'
     '<module name="b"><module name="c"/></module></union>¦<scaffold modules="a b/c"/></schema>',
     UnionConflict, "one union", "scaffold"),
]  # fmt: skip

PROMPTS = [
    ('¦<schema name="s"/>', UnknownElement, "<prompt schema", "schema"),
    ("¦<prompt/>", InvalidAttribute, "'schema'", "prompt"),
    ('<prompt schema="s">¦<module name="m"/></prompt>', UnknownElement, "<miami/>", "module"),
    ('<prompt schema="s">¦<a x="1" x="2"/></prompt>', DuplicateName, "'x' is given twice", "a"),
    ('<prompt schema="s"><user><m>¦<user/></m></user></prompt>', UnknownElement, "turn", "user"),
    ('<prompt schema="s">¦<xmlm/></prompt>', ReservedName, "'xmlm'", "xmlm"),
    ('<prompt schema="s"><m>¦</n></m></prompt>', PMLSyntaxError, "</m> is due", "m"),
]


@pytest.mark.parametrize(
    ("parse", "marked", "error", "match", "element"),
    [(parse_schema, *each) for each in SCHEMAS] + [(parse_prompt, *each) for each in PROMPTS],
)
def test_errors_have_their_place_and_a_remedy(
    parse: Callable[..., object], marked: str, error: type, match: str, element: str | None
) -> None:
    before, _, after = marked.partition("¦")
    with pytest.raises(PMLError) as caught:
        parse(before + after, source="f.xml")
    found = caught.value
    assert type(found) is error
    assert match in str(found)
    assert found.element == element
    assert (found.source, found.line) == ("f.xml", before.count("\n") + 1)
    exact = found.element is not None or "U+" in found.problem  # others are placed by lxml
    if exact:
        assert found.column == len(before) - (before.rfind("\n") + 1) + 1
    assert f"f.xml:{found.line}:{found.column}: " in str(found)
    assert found.expected


def test_errors_survive_pickling() -> None:
    with pytest.raises(PMLError) as caught:
        parse_schema('<schema name="s"><module/></schema>')
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.line, copy.element) == (str(caught.value), 1, "module")


# Attacks


LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
ENTITIES = '<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]><schema name="s">&x;</schema>'


@pytest.mark.parametrize(
    "attack",
    [
        f'<!DOCTYPE s [<!ENTITY l0 "ha">{LAUGHS}]><schema name="s">&l9;</schema>',
        ENTITIES,
        ENTITIES.encode("utf-16"),
    ],
)
def test_entities_are_neither_read_nor_expanded(attack: str | bytes) -> None:
    with pytest.raises(ForbiddenMarkup):
        parse_schema(attack)


def test_unknown_and_broken_encodings() -> None:
    with pytest.raises(PMLSyntaxError, match="unknown"):
        parse_schema(b'<?xml version="1.0" encoding="zlib"?><schema name="s"/>')
    with pytest.raises(PMLSyntaxError, match="UTF-8"):
        parse_schema(b'<schema name="s">\xff</schema>')


def test_depth_over_the_limit() -> None:
    deep = "".join(f'<module name="m{n}">' for n in range(10_000)) + "</module>" * 10_000
    with pytest.raises(LimitExceeded, match="101 deep") as caught:
        parse_schema(f'<schema name="s">{deep}</schema>')
    assert caught.value.column == 18 + sum(len(f'<module name="m{n}">') for n in range(99))


def test_depth_at_the_limit_parses() -> None:
    deep = '<module name="m">' * 199 + "</module>" * 199
    parse_schema(f'<schema name="s">{deep}</schema>', limits=ScanLimits(depth=200))


def test_size_over_the_limit() -> None:
    with pytest.raises(LimitExceeded, match="10,000,000"):
        parse_schema('<schema name="s">' + "x" * 10_000_000 + "</schema>")
    with pytest.raises(LimitExceeded):  # counted in bytes, not in characters
        parse_schema('<schema name="s">' + "文" * 20 + "</schema>", limits=ScanLimits(size=60))


def test_elements_over_the_limit() -> None:
    with pytest.raises(LimitExceeded, match="more than 2 elements"):
        parse_prompt('<prompt schema="s"><a/><b/></prompt>', limits=ScanLimits(elements=2))


@pytest.mark.parametrize("attack", ["<a " + " " * 200_000, "<" * 200_000, "&" * 200_000,
                                    "<!--" * 100_000, '<a x="' * 50_000, "<user>" * 90,
                                    pytest.param("</user>" * 50_000, marks=pytest.mark.slow),
                                    "<a>" * 90 + "x" * 10 ** 6])  # fmt: skip
def test_malformed_input_is_refused_in_linear_time(attack: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PMLWarning)
        for parse in (parse_schema, parse_prompt):
            with pytest.raises(PMLError):
                parse('<prompt schema="s">' + attack)


FRAGMENTS = (
    """
<schema name="s">¦</schema>¦<module name="a">¦<module name="b"/>¦</module>¦<union>¦</union>
<union scaffold="a">¦<param name="p" len="3"/>¦<param>¦<user>¦</user>¦<system/>¦<assistant>
</assistant>¦text¦ ¦<!-- c -->¦<!--¦-->¦<![CDATA[x]]>¦<![CDATA[¦]]>¦&amp;¦&¦&#0;¦&#65;¦<¦>¦"¦'
<?x?>¦<!DOCTYPE a>¦<prompt schema="s">¦</prompt>¦<a/>¦<a q="1">¦</a>¦<scaffold modules="a b"/>
é¦<名字/>¦<a:b/>¦<module name="a" xml:space="preserve">¦<1/>¦xmlns='x'¦<ª/>¦<a x="1" x="2">
""".replace("\n", "¦")
    .strip("¦")
    .split("¦")
)
SOUP = st.lists(st.sampled_from([*FRAGMENTS, "\n", "\r", "\0", "\ufffe"]), max_size=25)


@settings(max_examples=scaled(400))
@given(SOUP.map("".join) | st.text() | st.binary())
def test_any_input_raises_only_named_errors(text: str | bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PMLWarning)
        for parse in (parse_schema, parse_prompt):
            with contextlib.suppress(PMLError):
                parse(text)
