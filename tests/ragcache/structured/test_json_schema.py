"""JSON schemas that decoding cannot enforce are refused; accepted ones are enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ragcache.errors import InvalidRequest
from ragcache.structured import Grammar
from ragcache.structured.grammar import grammar_compiler
from ragcache.structured.json_schema import DEEPEST, check_json_schema
from tests.ragcache.structured.byte_level_model import tiny


def allows(schema: dict[str, Any], text: str) -> bool:
    from xgrammar import GrammarMatcher

    matcher = GrammarMatcher(grammar_compiler(tiny()).compile_grammar(Grammar.json_schema(schema)))
    return bool(matcher.accept_string(text) and matcher.is_completed())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "uniqueItems": True}, "'uniqueItems' at #,"),
    ({"properties": {"a": {"not": {"type": "string"}}}}, "'not' at #/properties/a,"),
    ({"if": {}, "then": False}, "'if'"),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "'several schemas' beside 'allOf'"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {}}}, r"'minimum' beside '\$ref'"),
    ({"type": "integer", "anyOf": [{"minimum": 3}]}, "'type' beside 'anyOf'"),
    ({"$ref": "http://example.org/schema"}, "only places within it"),
    ({"type": "string", "pattern": "a+", "maxLength": 3}, "'maxLength' beside 'pattern'"),
    ({"type": "string", "format": "email", "maxLength": 3}, "'maxLength' beside 'format'"),
    ({"type": "number", "multipleOf": 0.5}, "'multipleOf' of what is no integer"),
    ({"type": "integer", "multipleOf": 5, "minimum": 3}, "'minimum' beside 'multipleOf'"),
    ({"items": {"minimum": 3}}, "'minimum' without 'type' at #/items,"),
    ({"properties": []}, "is no object"),
    ({"type": "string", "pattern": "(?!a)b"}, "'pattern' with look-ahead at #,"),
    ({"patternProperties": {"(?=a)": {}}}, "'pattern' with look-ahead"),
    ({"propertyNames": {"pattern": "(?=a)"}}, "look-ahead at #/propertyNames"),
    ({"type": "string", "pattern": 3}, "is no text"),
    ({"type": "string", "minLength": "1} | x"}, "'minLength' at # is no number"),
    ({"type": "string", "maxLength": -1}, "'maxLength' at # is no number"),
    ({"propertyNames": {"maxLength": 3}}, "'propertyNames' with more than a pattern"),
    ({"anyOf": {}}, "is no list"),
    ({"items": "string"}, "'string' at #/items, which is no schema"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_unenforceable_keywords_are_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_json_schema(schema)


def test_nesting_depth_is_limited() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(DEEPEST):
        schema = {"type": "array", "items": schema}
    check_json_schema(schema)
    with pytest.raises(InvalidRequest, match="deeper"):
        check_json_schema({"type": "array", "items": schema})


@pytest.mark.parametrize("text", ['"\x01b"', '"a\nb"', '"a""', '"\\x"', '"a\\"'])
@pytest.mark.parametrize(
    "schema", [{"minLength": 2}, {"maxLength": 9}, {"pattern": "^.*$"}, {"pattern": "[^x]*"}, {}]
)
def test_strings_are_valid_json(schema: dict[str, Any], text: str) -> None:
    assert not allows({"type": "string", **schema}, text)
    assert not allows({"properties": {"a": {"type": "string", **schema}}}, f'{{"a": {text}}}')


def test_escaped_characters_count_once() -> None:
    short = {"type": "string", "maxLength": 1}
    allowed = [allows(short, f'"\\u{code}"') for code in ("00e9", "D7ff", "d800", "DFFF", "12g4")]
    assert allowed == [True, True, False, False, False]


def test_properties_named_like_keywords_are_allowed() -> None:
    schema = {"type": "object", "properties": {"not": {"type": "string"}, "if": True}}
    check_json_schema(schema)
    assert allows(schema, '{"not": "a", "if": 3}')
    assert not allows(schema, '{"not": 3}')


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
HELD: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "object"}, [{}, {"a": 1}], [3, []]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, [{}, {"a": 1}], [{"b": 1}]),
    ({"properties": {"a": {"const": 1}}, "required": ["a"]}, [{"a": 1}], [{}, {"a": 2}]),
    ({"type": "integer", "multipleOf": 5}, [10, 15, 0], [6, 1.5]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1], [0, 1.5]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é☕x", '"\\', "\n\x01"],
     ["a", "abcd"]),
    ({"type": "string", "pattern": "^a+$"}, ["aa"], ["", "ab"]),
    ({"type": "string", "pattern": r"\d\.\S[^b]é?"}, ["1.xyé", "1.xy"], ["1.xb", "1-xy", 'a"']),
    ({"type": ["string", "null"], "minLength": 1}, ["a" * 99, None], [""]),
    ({"type": "array", "minItems": 2}, [[1, "a"]], [[1], []]),
    ({"type": "object", "minProperties": 1, "title": "x"}, [{"a": {}}], [{}, []]),
    ({"type": "object", "properties": {"a": {"type": "object", "title": "x"}}}, [{"a": {"b": 1}}],
     [{"a": 1}]),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, [{"a": 1}], [{"b": 1}]),
    ({"propertyNames": {"pattern": "^a$"}, "type": "object"}, [{"a": "x"}], [{"b": 1}]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["monday"]),
    ({"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2}, [["a", 1], [None]],
     [["b"], ["a", "a", "a"]]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "x"}, [3, None], ["a"]),
    ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, [{"next": {"next": {}}}], [{"next": 3}]),
    ({"type": "array", "uniqueItems": False}, [[1, 1]], [{}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), HELD)
def test_accepted_schemas_are_enforced(
    schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    texts = [json.dumps(value, ensure_ascii=False) for value in (*right, *wrong)]
    allowed = [allows(schema, text) for text in texts]
    assert allowed == [True] * len(right) + [False] * len(wrong), texts
