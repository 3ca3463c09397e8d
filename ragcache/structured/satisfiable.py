"""JSON schemas and GBNF grammars that no text satisfies, because their recursion has no end.

llguidance finds contradictions (`minimum` above `maximum`), but not recursion without an end:
`{"type": "array", "items": {"$ref": "#"}, "minItems": 1}` allows `[[[[…` and never a last bracket,
and `root ::= "a" root` allows `aaaa…`.

The references, or rules, with a finite text are a least fixed point: the set begins empty, and each
pass adds references that need only members of the set.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

if TYPE_CHECKING:
    from llguidance.gbnf_to_lark import ASTNode

T = TypeVar("T")

_PASSES = 32
"""The most passes over the references. A reference that needs more counts as finite."""

_INDEX = re.compile(r"0|[1-9]\d*")


def is_satisfiable(schema: Any) -> bool:
    """Tell whether a finite JSON value can satisfy a schema, as far as its recursion decides.

    A schema counts as satisfiable wherever its recursion does not decide.

    Args:
        schema: A JSON schema.

    Example:
        >>> is_satisfiable({"type": "object", "properties": {"next": {"$ref": "#"}}})
        True
        >>> is_satisfiable({"type": "array", "items": {"$ref": "#"}, "minItems": 1})
        False
    """
    try:
        targets = {each: _resolve(schema, each) for each in set(_references(schema))}
        return _is_finite(schema, _find_endless(targets, _is_finite))
    except RecursionError:  # nested deeper than llguidance takes
        return True


def is_finite_gbnf(text: str) -> bool:
    """Tell whether a finite text can satisfy a GBNF grammar, as far as its recursion decides.

    Args:
        text: A grammar with the rule `root`.

    Raises:
        Exception: The text is not GBNF.

    Example:
        >>> is_finite_gbnf('root ::= "a" root | "b"')
        True
        >>> is_finite_gbnf('root ::= "a" root')
        False
    """
    from llguidance.gbnf_to_lark import GrammarParser

    try:
        rules = GrammarParser().parse(text)
        bodies = {name: rule.alternatives for name, rule in rules.items()}
        return "root" not in _find_endless(bodies, _is_finite_expression)
    except RecursionError:  # nested deeper than llguidance takes
        return True


def _find_endless(targets: Mapping[str, T], is_finite: Callable[[T, Set[str]], bool]) -> Set[str]:
    """Return the names whose targets need themselves.

    Args:
        targets: The targets by name.
        is_finite: Tells whether a target is finite, if these names are not.
    """
    endless = dict(targets)
    for _ in range(_PASSES):
        left = {name: each for name, each in endless.items() if not is_finite(each, endless.keys())}
        if len(left) == len(endless):
            return endless.keys()
        endless = left
    return set()


def _is_finite_expression(node: ASTNode, endless: Set[str]) -> bool:
    """Tell whether a text of a GBNF expression can end, if no text of these rules does."""
    from llguidance.gbnf_to_lark import AlternativeNode, RepetitionNode, RuleRefNode

    if isinstance(node, RuleRefNode):
        return node.name not in endless
    if isinstance(node, RepetitionNode) and node.min_times == 0:
        return True
    judge = any if isinstance(node, AlternativeNode) else all
    return judge(_is_finite_expression(each, endless) for each in node.children())


def _is_finite(schema: Any, endless: Set[str]) -> bool:
    """Tell whether a value of a schema can end, if no value of these references does."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if isinstance(name := schema.get("$ref"), str) and name in endless:
        return False
    alternatives = (each for key in ("anyOf", "oneOf") if (each := schema.get(key)))
    return all(_is_finite(each, endless) for each in _needed(schema)) and all(
        any(_is_finite(each, endless) for each in listed)
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
