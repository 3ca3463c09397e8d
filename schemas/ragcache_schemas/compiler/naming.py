"""Names for branches: made from the source, so that they are the same on every run."""

from __future__ import annotations

import ast
import hashlib

from ..names import free_name, module_name

__all__ = ["Names", "condition_name", "else_name", "pattern_name"]

_LONGEST = 60


class Names:
    """The names that one scope has given: modules and parameters apart."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.parameters: set[str] = set()

    def module(self, *wanted: str) -> str:
        """The first of `wanted` that is free, else the last with a number."""
        return free_name(map(module_name, wanted), self.modules)

    def parameter(self, wanted: str) -> str:
        """`wanted`, with a number from its second use on."""
        return free_name([wanted], self.parameters)


def condition_name(test: ast.expr) -> str:
    """`overseas` is "overseas", `days > 3` "days-3", `city == "Rome"` "city-Rome"."""
    return _short(ast.unparse(test))


def else_name(test: ast.expr) -> str:
    """The name of what happens where `test` does not hold."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return condition_name(test.operand)
    return "not-" + condition_name(test)


def pattern_name(pattern: ast.pattern) -> str:
    """`case "miami"` is "miami", `case Season.DRY` "DRY", `case "a" | "b"` "a-b"."""
    return _short(_spelled(pattern))


def _spelled(pattern: ast.pattern) -> str:
    match pattern:
        case ast.MatchValue(value=ast.Constant(value=value)) | ast.MatchSingleton(value=value):
            return str(value)
        case ast.MatchValue(value=ast.Attribute(attr=name)):
            return name
        case ast.MatchOr(patterns=patterns):
            return "-".join(map(_spelled, patterns))
        case _:
            return ast.unparse(pattern)


def _short(text: str) -> str:
    name = module_name(text)
    if len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST].rstrip('-.')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
