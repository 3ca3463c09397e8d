"""What a prompt program comes to: steps, from which both its schema and its prompts are made.

Names are given once, in the steps, so that a prompt always fits the schema.
"""

# MERGED ragcache_schemas.compiler.source: The source of a function: its syntax tree, and where
#   each part of it stands in the file.

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol, TypeAlias

from ragcache_schemas.errors import ProgramError
from ragcache_schemas.tree import (
    Arguments,
    Chat,
    Import,
    Location,
    Module,
    Parameter,
    PromptNode,
    Role,
    SchemaNode,
    Text,
    Union,
)


class Program(Protocol):
    """A compiled function, as a call of it sees it."""

    @property
    def steps(self) -> tuple[Step, ...]: ...

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Namespace:
        """The names that the function sees when it is called so."""
        ...


@dataclass(frozen=True, slots=True)
class Say:
    """Text that is known beforehand."""

    text: str
    location: Location


@dataclass(frozen=True, slots=True)
class Ask:
    """An argument's text, in a parameter of `length` tokens."""

    name: str
    length: int
    scaffold: str | None
    value: Callable[[Namespace], str]
    location: Location


@dataclass(frozen=True, slots=True)
class Option:
    """A branch, under the name of its module."""

    name: str
    body: tuple[Step, ...]
    location: Location


@dataclass(frozen=True, slots=True)
class BranchChoice:
    """Branches, and which of them is taken: its number or None."""

    options: tuple[Option, ...]
    union: bool
    pick: Callable[[Namespace], int | None]
    location: Location


@dataclass(frozen=True, slots=True)
class Call:
    """A call of another program, with its arguments as the caller computes them."""

    name: str
    program: Program
    arguments: Callable[[Namespace], tuple[list[Any], dict[str, Any]]]
    location: Location


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the conversation."""

    role: Role
    body: tuple[Step, ...]
    location: Location


Step: TypeAlias = Say | Ask | BranchChoice | Call | Turn


def schema(steps: Iterable[Step]) -> tuple[SchemaNode, ...]:
    """The content of a schema or a module."""
    nodes: list[SchemaNode] = []
    for step in steps:
        place = step.location
        match step:
            case Say():
                nodes.append(Text(step.text, location=place))
            case Ask():
                nodes.append(Parameter(step.name, step.length, step.scaffold, location=place))
            case BranchChoice():
                modules = tuple(
                    Module(option.name, schema(option.body), location=option.location)
                    for option in step.options
                )
                nodes += [Union(modules, location=place)] if step.union else modules
            case Call():
                nodes.append(Module(step.name, schema(step.program.steps), location=place))
            case Turn():
                nodes.append(Chat(step.role, schema(step.body), location=place))
    return tuple(nodes)


def prompt(steps: Iterable[Step], names: Namespace) -> tuple[Arguments, tuple[PromptNode, ...]]:
    """The arguments and the imports with which `steps` are called."""
    arguments: list[tuple[str, str]] = []
    nodes: list[PromptNode] = []
    for step in steps:
        match step:
            case Ask():
                arguments.append((step.name, step.value(names)))
            case BranchChoice():
                taken = step.pick(names)
                if taken is not None:
                    option = step.options[taken]
                    nodes.append(Import(option.name, *prompt(option.body, names)))
            case Call():
                args, kwargs = step.arguments(names)
                inner = step.program.bind(args, kwargs)
                nodes.append(Import(step.name, *prompt(step.program.steps, inner)))
            case Turn():
                given, imports = prompt(step.body, names)
                arguments += given
                nodes += imports
            case Say():
                pass
    return tuple(arguments), tuple(nodes)


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
