"""Schemas whose recursion has no end, and the refusals of those who use them."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache.errors import InvalidRequest
from ragcache.structured import Grammar, ToolStyle, compile_constraint, tool_call_grammar
from ragcache.structured.satisfiable import is_finite_gbnf, is_satisfiable
from tests.ragcache.structured.byte_level_model import tiny

SELF: dict[str, Any] = {"$ref": "#"}
LINK = {"type": "object", "properties": {"next": {"$ref": "#/$defs/link"}}, "required": ["next"]}
OPTIONAL = {**LINK, "required": []}
PAIR = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}


def chain(length: int, last: Any) -> dict[str, Any]:
    """Return a schema whose reference leads over many others to the last."""
    links = {f"x{at}": {"$ref": f"#/$defs/x{at + 1}"} for at in range(length)}
    return {"$ref": "#/$defs/x0", "$defs": {**links, f"x{length}": last}}


@pytest.mark.parametrize(
    "schema",
    [
        False,
        SELF,
        {"allOf": [SELF]},
        {"anyOf": [SELF, SELF]},
        {"oneOf": [SELF, False]},
        {"$ref": "#/$defs/a", "$defs": PAIR},
        {"$ref": "#/$defs/link", "$defs": {"link": LINK}},
        {**LINK, "$defs": {"link": LINK}},
        {"type": "array", "items": SELF, "minItems": 1},
        {"type": "array", "prefixItems": [{"type": "integer"}, SELF], "minItems": 2},
        {"type": "object", "properties": {"a/b~c": SELF}, "required": ["a/b~c"]},
        {"$ref": "#/anyOf/0", "anyOf": [{"$ref": "#/anyOf/0"}]},
        chain(20, {"$ref": "#/$defs/x0"}),
    ],
)
def test_endless_recursion_has_no_value(schema: Any) -> None:
    assert not is_satisfiable(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"anyOf": [SELF, {"type": "integer"}]},
        {"$ref": "#/$defs/link", "$defs": {"link": OPTIONAL}},
        {"type": "array", "items": SELF},
        {"type": "array", "prefixItems": [{"type": "integer"}, SELF], "minItems": 1},
        {"type": ["object", "null"], "properties": {"a": SELF}, "required": ["a"]},
        {"type": "object", "properties": {"a": SELF}},
        {"$ref": "https://json-schema.org/draft/2020-12/schema"},
        {"$ref": "#/$defs/none"},
        chain(20, {"type": "integer"}),
        chain(100, {"type": "integer"}),
    ],
)
def test_other_schemas_have_one(schema: Any) -> None:
    assert is_satisfiable(schema)


def test_a_schema_without_a_value_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the JSON schema cannot be compiled: no text"):
        Grammar.json_schema(SELF)


@pytest.mark.parametrize(
    "text",
    [
        "root ::= root",
        'root ::= "a" root',
        'root ::= ("a" | "b") root+',
        'root ::= "a" x | y "b"\nx ::= "(" y ")"\ny ::= x{2,3}',
        'root ::= x-1\nx-1 ::= [^"] ("b" # a comment\n root) ""\nz ::= "a"',
    ],
)
def test_a_grammar_whose_texts_never_end_is_refused(text: str) -> None:
    assert not is_finite_gbnf(text)
    with pytest.raises(InvalidRequest, match="the ebnf cannot be compiled: no text satisfies it"):
        compile_constraint(Grammar.ebnf(text), tiny())


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" root | "b"',
        'root ::= "a" root?',
        'root ::= "a" root*',
        'root ::= "a" root{0,3}',
        'root ::= "(" root ")" | x\nx ::= [0-9]+\ny ::= "never used" y',
        'root ::= ""',
        "\n".join(f"root{n or ''} ::= root{n + 1}" for n in range(100)) + '\nroot100 ::= "a"',
    ],
)
def test_other_grammars_have_a_text(text: str) -> None:
    assert is_finite_gbnf(text)


def test_a_tool_without_arguments_is_refused() -> None:
    tools = [{"name": "loop", "parameters": {"type": "array", "items": SELF, "minItems": 1}}]
    with pytest.raises(
        InvalidRequest, match=r"the parameters of tool 'loop': .* no text satisfies it"
    ):
        tool_call_grammar(tools, "required", style=ToolStyle.HERMES)
