"""JSON schemas that no value satisfies, because each value would have to contain another one.

llguidance finds contradictions (`minimum` above `maximum`), but not recursion without an end:
`{"type": "array", "items": {"$ref": "#"}, "minItems": 1}` allows `[[[[…` and never a last bracket.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_PASSES = 32
"""The most passes over the references. Schemas that need more count as satisfiable."""

_INDEX = re.compile(r"0|[1-9]\d*")


def is_satisfiable(schema: Any) -> bool:
    """Tell whether a finite JSON value can satisfy a schema, as far as its recursion decides.

    The set of references with a finite value is a least fixed point: the set begins empty, and
    each pass adds references that need only members of the set. A schema counts as satisfiable
    wherever its recursion does not decide.

    Args:
        schema: A JSON schema.

    Example:
        >>> is_satisfiable({"type": "object", "properties": {"next": {"$ref": "#"}}})
        True
        >>> is_satisfiable({"type": "array", "items": {"$ref": "#"}, "minItems": 1})
        False
    """
    try:
        return _is_finite(schema, _finite_references(schema))
    except RecursionError:  # nested deeper than llguidance takes
        return True


def _finite_references(schema: Any) -> set[str]:
    """Return the references of a schema whose targets have values that end."""
    waiting = {each: _resolve(schema, each) for each in set(_references(schema))}
    finite: set[str] = set()
    for _ in range(_PASSES):
        found = {name for name, target in waiting.items() if _is_finite(target, finite)}
        if not found:
            break
        finite |= found
        waiting = {name: target for name, target in waiting.items() if name not in found}
    else:
        finite |= waiting.keys()
    return finite


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Tell whether a value of a schema can end, if only these references have values that end."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if isinstance(name := schema.get("$ref"), str) and name not in finite:
        return False
    alternatives = (each for key in ("anyOf", "oneOf") if (each := schema.get(key)))
    return all(_is_finite(each, finite) for each in _needed(schema)) and all(
        any(_is_finite(each, finite) for each in listed)
        for listed in alternatives
        if isinstance(listed, list)
    )


def _needed(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the schemas that every value of a schema must satisfy, or contain a value of."""
    parts = schema.get("allOf")
    yield from parts if isinstance(parts, list) else ()
    if schema.get("type") == "object" and isinstance(names := schema.get("required"), list):
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        yield from (properties[name] for name in names if name in properties)
    if schema.get("type") == "array" and isinstance(count := schema.get("minItems"), int):
        first = schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        yield from first[: max(count, 0)]
        if count > len(first):
            yield schema.get("items", True)


def _references(value: Any) -> Iterator[str]:
    """Yield every `$ref` in a schema."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            stack += value.values()
        elif isinstance(value, list):
            stack += value


def _resolve(schema: Any, reference: str) -> Any:
    """Return the target of a `$ref`, or True for one that is not a JSON pointer into the schema."""
    if not reference.startswith("#"):
        return True
    target = schema
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and key in target:
            target = target[key]
        elif isinstance(target, list) and _INDEX.fullmatch(key) and int(key) < len(target):
            target = target[int(key)]
        else:
            return True
    return target
