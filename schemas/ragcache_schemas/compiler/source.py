"""The source of a function: its syntax tree, and where each part of it stands in the file."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeAlias

from ..errors import ProgramError
from ..tree import Location

__all__ = ["FunctionSource", "Namespace", "read_function", "visible_names"]

Namespace: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class FunctionSource:
    """A parsed function. Line numbers in `tree` are those of the file."""

    file: str
    first: int
    lines: tuple[str, ...]
    tree: ast.FunctionDef

    def at(self, node: ast.AST) -> Location:
        """Where `node` begins; columns count characters from 1."""
        line, offset = getattr(node, "lineno", self.first), getattr(node, "col_offset", 0)
        before = self.lines[line - self.first].encode()[:offset]
        return Location(line, len(before.decode(errors="replace")) + 1, self.file)

    def is_triple_quoted(self, node: ast.expr) -> bool:
        """Whether the string `node` is written between triple quotes."""
        written = self.lines[node.lineno - self.first].encode()[node.col_offset :].decode()
        return written.lstrip("rRfFuU").startswith(('"""', "'''"))

    def code(self, node: ast.expr) -> CodeType:
        """`node` as a program of its own, whose tracebacks show the line in the file."""
        whole = ast.fix_missing_locations(ast.copy_location(ast.Expression(node), node))
        return compile(whole, self.file, "eval")


def read_function(function: Callable[..., Any]) -> FunctionSource:
    """Finds and parses the source of `function`. Raises ProgramError."""
    name = getattr(function, "__name__", repr(function))
    try:
        lines, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function) or "<unknown>"
    except (OSError, TypeError) as error:
        expected = "define it with `def` in a file or a notebook cell"
        raise ProgramError(
            f"the source of {name!r} is not at hand", None, name, expected
        ) from error
    # A nested function is parsed inside a block, so that columns and texts stay as written.
    nested = lines[0][:1] in " \t"
    tree = ast.parse(("if True:\n" if nested else "") + "".join(lines))
    ast.increment_lineno(tree, first - 1 - nested)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    source = FunctionSource(file, first, tuple(lines), found[0]) if found else None
    if source is None or source.tree.name != name:
        where = Location(first, 1, file)
        expected = "decorate a plain `def` function that yields its text"
        raise ProgramError(f"{name!r} is no plain function", where, name, expected)
    return source


def visible_names(function: Callable[..., Any]) -> Namespace:
    """The global and the enclosing names that `function` sees now."""
    names: Namespace = dict(function.__globals__)
    free = function.__code__.co_freevars
    for name, cell in zip(free, function.__closure__ or (), strict=True):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return names
