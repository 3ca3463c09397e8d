"""JSON schemas as rules of a grammar, with strings that are JSON in every case.

The compiler's own rules for strings with a length let control characters through, and those for
some patterns a bare quote; where a schema leaves members open beside other keywords, they allow no
member at all. So strings with a length or a pattern get rules from here, and what is left open is
written out before the compiler reads the schema.
"""

from __future__ import annotations

import json
from typing import Any

from ragcache.structured.json_schema import LISTS, MAPS, SINGLE

# No half of a surrogate pair, which is no character.
_CHARACTER = r"""
ragcache_character ::= [^\0-\x1f"\\] | "\\" ragcache_escape
ragcache_escape ::= ["\\/bfnrt] | "u" ragcache_plane ragcache_hex ragcache_hex
ragcache_plane ::= [0-9a-ce-fA-CE-F] ragcache_hex | [dD] [0-7]
ragcache_hex ::= [0-9a-fA-F]
"""
_MEMBERS = frozenset("properties patternProperties additionalProperties propertyNames".split())


def schema_rules(schema: dict[str, Any]) -> str:
    """GBNF of the JSON that the schema allows, on one line. Raises what the compiler raises."""
    from xgrammar import Grammar

    inner: list[str] = []
    prepared = _prepared(schema, inner)
    # free white space would let a model write it for ever
    rules = str(Grammar.from_json_schema(json.dumps(prepared), any_whitespace=False))
    for number, rule in enumerate(inner):
        mark, name = _mark(number), f"ragcache_text_{number}"
        rules = rules.replace(f'Regex("^{mark}$", json_string=true)', name)
        rules = rules.replace(f'"{mark}"', name)
        rules += f"\n{name} ::= {rule}"
    return rules + _CHARACTER if inner else rules


def _mark(number: int) -> str:
    """Stands for a string's inside while the compiler reads the schema."""
    return f"RAGCACHE{number}END"


def _prepared(schema: Any, inner: list[str]) -> Any:
    """The schema for the compiler. inner: takes the rules of what is within the quotes."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in MAPS:
        if key in made:
            made[key] = {name: _prepared(each, inner) for name, each in made[key].items()}
    for key in LISTS:
        if key in made:
            made[key] = [_prepared(each, inner) for each in made[key]]
    for key in SINGLE:
        if key in made:
            made[key] = _prepared(made[key], inner)
    kinds = made.get("type")
    if kinds == "array" and not made.keys() & {"items", "prefixItems"}:
        made["items"] = True
    if kinds == "object" and not made.keys() & _MEMBERS:
        made["additionalProperties"] = True
    low, high = made.pop("minLength", 0), made.pop("maxLength", None)
    if "pattern" in made:
        # the whole string matches, which is less than the schema allows
        inner.append(f"Regex({json.dumps(made['pattern'])}, json_string=true)")
    elif low or high is not None:
        inner.append(f"ragcache_character{{{low},{'' if high is None else high}}}")
    else:
        return made
    made["pattern"] = f"^{_mark(len(inner) - 1)}$"
    return made
