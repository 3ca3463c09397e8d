"""Grammars as values."""

from __future__ import annotations

import json

import pytest

from ragcache.errors import InvalidRequest
from ragcache.structured import Grammar


def test_equal_texts_are_equal_grammars() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": "é"}}}
    made = Grammar.json_schema(schema)
    assert made == Grammar.json_schema(json.dumps(schema))
    assert len({made, Grammar.json_schema(schema), Grammar.regex("a"), Grammar.ebnf("a")}) == 3
    assert made.text.index('"b"') < made.text.index('"a"')  # answers keep the schema's order
    assert json.loads(Grammar.json_object().text) == {"type": "object"}


@pytest.mark.parametrize("schema", ["{", "[]", "3", {"type": {1, 2}}, {"enum": [object()]}])
def test_what_is_no_schema_is_refused(schema: object) -> None:
    with pytest.raises(InvalidRequest, match="JSON schema"):
        Grammar.json_schema(schema)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "  ", None])
def test_a_grammar_needs_a_text(text: str) -> None:
    for make in (Grammar.regex, Grammar.ebnf):
        with pytest.raises(InvalidRequest, match="needs a text"):
            make(text)


def test_openais_response_format_becomes_a_grammar() -> None:
    schema = {"type": "object", "properties": {"a": {"const": None}}}
    described = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert Grammar.response_format(described) == Grammar.json_schema(schema)
    assert Grammar.response_format({"type": "json_object"}) == Grammar.json_object()
    assert Grammar.response_format(None) is Grammar.response_format({"type": "text"}) is None


@pytest.mark.parametrize(
    "wanted", ["json_object", {}, {"type": "xml"}, {"type": "json_schema", "json_schema": {}}]
)
def test_another_response_format_is_refused(wanted: object) -> None:
    with pytest.raises(InvalidRequest, match="response_format"):
        Grammar.response_format(wanted)  # type: ignore[arg-type]
