"""JSON schemas for decoding: checked for keywords that it cannot enforce, and turned into rules.

The compiler passes over keywords that it does not know, so an answer might break its schema;
`check_json_schema` refuses those, with their place. Its own rules for strings with a length let
control characters through, those for some patterns a bare quote, and where a schema leaves members
open beside other keywords it allows no member at all. So `schema_rules` gives strings with a length
or a pattern rules of its own, and writes open members out before the compiler reads the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from ragcache.errors import InvalidRequest

DEEPEST = 64  # levels of nested schemas

_UNENFORCED = frozenset(
    "contains dependencies dependentRequired dependentSchemas if not then else uniqueItems "
    "additionalItems $dynamicRef $recursiveRef".split()
)
_LENGTHS = frozenset(("minLength", "maxLength"))
_NUMBERS = frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split())
_ASSERTING = (
    frozenset(
        "type enum const properties patternProperties additionalProperties propertyNames required "
        "minProperties maxProperties items prefixItems minItems maxItems pattern format".split()
    )
    | _LENGTHS
    | _NUMBERS
)
# The compiler reads the first of these and passes over all other keywords beside it.
_JOINING = ("$ref", "anyOf", "oneOf", "allOf")
# Keywords whose value is an object of schemas, a list of schemas, or one schema.
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties")


def check_json_schema(schema: object) -> None:
    """Raises `InvalidRequest` unless `schema` is a JSON schema that decoding can enforce."""
    if not isinstance(schema, dict):
        raise InvalidRequest(f"a JSON schema is an object, not {type(schema).__name__}")
    _check(schema, "#", 0)


def _check(schema: object, place: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the JSON schema has {schema!r:.60} at {place}, which is no schema")
    if depth > DEEPEST:
        raise InvalidRequest(f"the JSON schema nests deeper than {DEEPEST} levels at {place:.80}")
    found = sorted(schema.keys() & _UNENFORCED)
    if found and (found != ["uniqueItems"] or schema["uniqueItems"]):
        _refuse(found[0], "", place)
    _check_joined(schema, place)
    _check_combined(schema, place)
    _check_patterns(schema, place)
    for name, inner in _inner(schema, place):
        _check(inner, f"{place}/{name}", depth + 1)


def _check_joined(schema: dict[str, object], place: str) -> None:
    """References and choices have no other keyword beside them to narrow them."""
    joining = [key for key in _JOINING if key in schema]
    if not joining:
        return
    reference = schema.get("$ref", "#")
    if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
        raise InvalidRequest(
            f"the JSON schema refers to {reference!r:.80} at {place}; only places within it can "
            "be referred to, as in '#/$defs/name'"
        )
    branches = schema[joining[0]] if joining[0] != "$ref" else []
    if not isinstance(branches, list):
        raise InvalidRequest(f"the JSON schema's {joining[0]!r} at {place} is no list")
    beside = [*joining[1:], *sorted(schema.keys() & _ASSERTING)]
    if beside == ["type"] and all(_type(each) == schema["type"] for each in branches) and branches:
        beside = []  # says what each of them says
    if beside or (joining[0] == "allOf" and len(branches) > 1):
        _refuse(beside[0] if beside else "several schemas", f" beside {joining[0]!r}", place)


def _type(schema: object) -> object:
    return schema.get("type") if isinstance(schema, dict) else None


def _check_combined(schema: dict[str, object], place: str) -> None:
    """Keywords that are enforced only with a type, or only without each other."""
    kinds = schema.keys()
    untyped = sorted(kinds & (_LENGTHS | _NUMBERS | {"pattern"}))
    if untyped and not kinds & {"type", "enum", "const"}:
        _refuse(untyped[0], " without 'type'", place)
    if "multipleOf" in kinds and schema.get("type") != "integer":
        _refuse("multipleOf", " of what is no integer", place)
    if "multipleOf" in kinds and (ranged := sorted(kinds & _NUMBERS - {"multipleOf"})):
        _refuse(ranged[0], " beside 'multipleOf'", place)
    for key in sorted(kinds & _LENGTHS):
        length = schema[key]
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise InvalidRequest(f"the JSON schema's {key!r} at {place} is no number of characters")
    names = schema.get("propertyNames", {})
    if not isinstance(names, dict) or names.keys() - {"type", "pattern"}:
        _refuse("propertyNames", " with more than a pattern", place)
    _check_patterns(names, f"{place}/propertyNames")
    texts = [key for key in ("pattern", "format", "minLength", "maxLength") if key in kinds]
    if len(texts) > 1 and texts[0] in ("pattern", "format"):
        _refuse(texts[1], f" beside {texts[0]!r}", place)


def _check_patterns(schema: dict[str, object], place: str) -> None:
    """Patterns have no look-ahead: the one thing in them that the compiler passes over."""
    named = schema.get("patternProperties")
    for pattern in (schema.get("pattern", ""), *(named if isinstance(named, dict) else ())):
        if not isinstance(pattern, str):
            raise InvalidRequest(f"the JSON schema's 'pattern' at {place} is no text")
        if "(?=" in pattern or "(?!" in pattern:
            _refuse("pattern", " with look-ahead", place)


def _refuse(keyword: str, where: str, place: str) -> NoReturn:
    raise InvalidRequest(
        f"the JSON schema uses {keyword!r}{where} at {place:.200}, which constrained decoding "
        "cannot hold to; leave it out and check the answer"
    )


def _inner(schema: dict[str, object], place: str) -> Iterator[tuple[str, object]]:
    """The schemas within a schema, with their paths."""
    for key in MAPS:
        named = schema.get(key, {})
        if not isinstance(named, dict):
            raise InvalidRequest(f"the JSON schema's {key!r} at {place} is no object")
        for name, inner in named.items():
            yield f"{key}/{name}", inner
    for key in LISTS:
        listed = schema.get(key, [])
        if not isinstance(listed, list):
            raise InvalidRequest(f"the JSON schema's {key!r} at {place} is no list")
        for place_in_list, inner in enumerate(listed):
            yield f"{key}/{place_in_list}", inner
    for key in SINGLE:
        if key in schema:
            yield key, schema[key]


# A JSON string's character; \uD800 to \uDFFF are halves of pairs and no characters.
_CHARACTER = r"""
ragcache_character ::= [^\0-\x1f"\\] | "\\" ragcache_escape
ragcache_escape ::= ["\\/bfnrt] | "u" ragcache_plane ragcache_hex ragcache_hex
ragcache_plane ::= [0-9a-ce-fA-CE-F] ragcache_hex | [dD] [0-7]
ragcache_hex ::= [0-9a-fA-F]
"""
_MEMBERS = frozenset("properties patternProperties additionalProperties propertyNames".split())


def schema_rules(schema: dict[str, Any]) -> str:
    """The GBNF rules of the JSON that a schema allows, on one line. Errors are the compiler's."""
    from xgrammar import Grammar

    inner: list[str] = []
    prepared = _prepared(schema, inner)
    # with free white space a model may write it without end
    rules = str(Grammar.from_json_schema(json.dumps(prepared), any_whitespace=False))
    for number, rule in enumerate(inner):
        name = f"ragcache_text_{number}"
        for placeholder in (f'Regex("^{_mark(number)}$", json_string=true)', f'"{_mark(number)}"'):
            rules = rules.replace(placeholder, name)
        rules += f"\n{name} ::= {rule}"
    return rules + _CHARACTER if inner else rules


def _mark(number: int) -> str:
    """A placeholder for the inside of a string while the compiler reads the schema."""
    return f"RAGCACHE{number}END"


def _prepared(schema: Any, inner: list[str]) -> Any:
    """The schema for the compiler; rules for the inside of strings are added to `inner`."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in filter(made.__contains__, MAPS):
        made[key] = {name: _prepared(each, inner) for name, each in made[key].items()}
    for key in filter(made.__contains__, LISTS):
        made[key] = [_prepared(each, inner) for each in made[key]]
    for key in filter(made.__contains__, SINGLE):
        made[key] = _prepared(made[key], inner)
    kinds = made.get("type")
    if kinds == "array" and not made.keys() & {"items", "prefixItems"}:
        made["items"] = True
    if kinds == "object" and not made.keys() & _MEMBERS:
        made["additionalProperties"] = True
    low, high = made.pop("minLength", 0), made.pop("maxLength", None)
    if "pattern" in made:
        # the pattern holds for the whole string, which is stricter than JSON Schema
        inner.append(f"Regex({json.dumps(made['pattern'])}, json_string=true)")
    elif low or high is not None:
        inner.append(f"ragcache_character{{{low},{'' if high is None else high}}}")
    else:
        return made
    made["pattern"] = f"^{_mark(len(inner) - 1)}$"
    return made
