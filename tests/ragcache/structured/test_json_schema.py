"""JSON schemas that decoding cannot enforce are refused; accepted ones are enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ragcache.errors import InvalidRequest
from ragcache.structured import Grammar
from tests.ragcache.structured.byte_level_model import allows

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"properties": {"a": {"not": {"type": "string"}}}}, "not"),
    ({"if": {}, "then": False}, '"if"'),
    ({"contains": {"type": "integer"}}, "contains"),
    ({"$ref": "http://example.org/schema"}, "example.org"),
    ({"$ref": "#/$defs/a"}, "does not exist"),
    ({"type": "string", "pattern": "(?!a)b"}, "look-around"),
    ({"properties": []}, "must be an object"),
    ({"type": "string", "pattern": 3}, "Expected string for .pattern."),
    ({"type": "string", "maxLength": -1}, "maxLength"),
    ({"anyOf": {}}, "must be an array"),
    ({"type": "array", "items": "string"}, "must be an object or boolean"),
    ({"type": "thing"}, "Invalid type: thing"),
    ({"type": "string", "format": "smoke"}, "Unknown format"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum .3. is greater than maximum"),
    ({"allOf": [{"type": "integer"}, {"type": "string"}]}, "Unsatisfiable"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED)
def test_schemas_that_cannot_be_enforced_are_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the JSON schema cannot be compiled: .*{reason}"):
        Grammar.json_schema(schema)


def test_deep_schemas_are_refused_without_a_crash() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="recursion limit"):
        Grammar.json_schema(schema)
    with pytest.raises(InvalidRequest, match="JSON schema"):
        Grammar.json_schema('{"items":' * 9_999 + "{}" + "}" * 9_999)


@pytest.mark.parametrize("text", ['"\x01b"', '"a\nb"', '"a""', '"\\x"', '"a\\"', '"\\ud800"'])
@pytest.mark.parametrize(
    "schema", [{"minLength": 2}, {"maxLength": 9}, {"pattern": "^.*$"}, {"pattern": "[^x]*"}, {}]
)
def test_strings_are_valid_json(schema: dict[str, Any], text: str) -> None:
    string = {"type": "string", **schema}
    assert not allows(Grammar.json_schema(string), text)
    member = {"type": "object", "properties": {"a": string}}
    assert not allows(Grammar.json_schema(member), f'{{"a": {text}}}')


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
HELD: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "object"}, [{}, {"a": 1}], [3, []]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, [{}, {"a": 1}], [{"b": 1}]),
    ({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, [{"a": 1}],
     [{}, {"a": 2}]),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, [{"a": 1, "b": 2}],
     [3]),
    ({"type": "object", "properties": {"not": {"type": "string"}, "if": True}},
     [{"not": "a", "if": 3}], [{"not": 3}]),
    ({"type": "object", "properties": {"properties": {"type": "object"}}},
     [{"properties": {"a": 1}}], [{"a": 1}]),
    ({"type": "integer", "multipleOf": 5, "minimum": 3}, [10, 15], [6, 0]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, [0.5, 1], [0, 1.5]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é☕x", '"\\', "\n\b"],
     ["a", "abcd"]),
    ({"type": "string", "pattern": "^a+$"}, ["aa"], ["", "ab"]),
    ({"type": "string", "pattern": "a+", "maxLength": 3}, ["aa", "xax"], ["", "xaxa"]),
    ({"type": "string", "pattern": r"^\d\.\S[^b]é?$"}, ["1.xyé", "1.xy"], ["1.xb", "1-xy", 'a"']),
    ({"type": ["string", "null"], "minLength": 1}, ["a" * 99, None], [""]),
    ({"type": "array", "minItems": 2}, [[1, "a"]], [[1], []]),
    ({"type": "object", "minProperties": 1, "title": "x"}, [{"a": {}}], [{}, []]),
    ({"type": "object", "properties": {"a": {"type": "object", "title": "x"}}}, [{"a": {"b": 1}}],
     [{"a": 1}]),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, [{"a": 1}], [{"b": 1}]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["monday"]),
    ({"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2}, [["a", 1], [None]],
     [["b"], ["a", "a", "a"]]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "x"}, [3, None], ["a"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, [3, 1.5], ["a"]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3], [2, "a"]),
    ({"$ref": "#/$defs/node", "$defs": {"node": NODE}}, [{"next": {"next": {}}}], [{"next": 3}]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "wrong"), HELD)
def test_accepted_schemas_are_enforced(
    schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    grammar = Grammar.json_schema(schema)
    texts = [json.dumps(value, ensure_ascii=False) for value in (*right, *wrong)]
    allowed = [allows(grammar, text) for text in texts]
    assert allowed == [True] * len(right) + [False] * len(wrong), texts
