"""Which JSON schemas decoding can hold to.

The compiler passes over keywords that it does not know, so an answer would be accepted that the
schema refuses. Those are refused here, with the place where they stand.
"""

from __future__ import annotations

from collections.abc import Iterator

from ragcache.errors import InvalidRequest

DEEPEST = 64
"""Levels of nested schemas."""

_NOT_HELD = frozenset(
    "contains dependencies dependentRequired dependentSchemas if not then else uniqueItems "
    "unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef".split()
)
_ANNOTATIONS = frozenset("title description default examples deprecated readOnly writeOnly".split())
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "propertyNames")


def check_schema(schema: object) -> None:
    """Raises `InvalidRequest` for what is no schema or asks for what decoding cannot hold to."""
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
    # `"uniqueItems": false` asks for nothing
    if found := sorted(key for key in schema if key in _NOT_HELD and schema[key] is not False):
        raise InvalidRequest(
            f"the JSON schema uses {found[0]!r} at {place}, which constrained decoding cannot "
            "hold to; leave it out and check the answer"
        )
    _check_references(schema, place)
    for name, inner in _inner(schema, place):
        _check(inner, f"{place}/{name}", depth + 1)


def _check_references(schema: dict[str, object], place: str) -> None:
    reference = schema.get("$ref")
    if reference is not None and not (isinstance(reference, str) and reference.startswith("#")):
        raise InvalidRequest(
            f"the JSON schema refers to {reference!r:.80} at {place}; only references within it, "
            "which begin with #, can be followed"
        )
    every = schema.get("allOf")
    beside = schema.keys() - _ANNOTATIONS - {"allOf", "$defs", "definitions", "$schema", "$id"}
    if isinstance(every, list) and (len(every) > 1 or beside):
        raise InvalidRequest(
            f"the JSON schema joins several schemas with 'allOf' at {place}, which constrained "
            "decoding cannot hold to; write them as one"
        )


def _inner(schema: dict[str, object], place: str) -> Iterator[tuple[str, object]]:
    """The schemas within a schema, with their paths."""
    for key in _MAPS:
        named = schema.get(key, {})
        if not isinstance(named, dict):
            raise InvalidRequest(f"the JSON schema's {key!r} at {place} is no object")
        for name, inner in named.items():
            yield f"{key}/{name}", inner
    for key in _LISTS:
        listed = schema.get(key, [])
        if not isinstance(listed, list):
            raise InvalidRequest(f"the JSON schema's {key!r} at {place} is no list")
        for place_in_list, inner in enumerate(listed):
            yield f"{key}/{place_in_list}", inner
    for key in _SINGLE:
        if key in schema:
            yield key, schema[key]
