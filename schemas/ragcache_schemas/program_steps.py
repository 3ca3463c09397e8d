"""Steps of a prompt program, from which both its schema and its prompts are made.

A program's source is read once (`read_function`) and becomes a tuple of steps (`Translator`). The
steps hold all names, so a prompt always fits the schema.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol, TypeAlias

from ragcache_schemas.errors import InvalidAttribute, ProgramError
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

Namespace: TypeAlias = dict[str, Any]
"""Names that a function sees, with their values."""


class Program(Protocol):
    """A prompt program that another one calls."""

    @property
    def steps(self) -> tuple[Step, ...]: ...

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Namespace: ...


@dataclass(frozen=True, slots=True)
class MaxTokens:
    """The length of a text parameter (§3.2.2): `Annotated[str, MaxTokens(12)]`.

    Raises:
        InvalidAttribute: `length` is less than 1.
    """

    length: int
    """Maximum number of tokens of an argument."""
    scaffold: str | None = None
    """Text that takes the argument's place while the module around it is encoded."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InvalidAttribute(f"MaxTokens({self.length})", expected="give 1 token or more")


def turn(role: Role) -> AbstractContextManager[None]:
    """Put the texts of the `with` block into a turn of the conversation.

    Example:
        with turn("user"):
            yield "Name the tides of today."
    """
    del role
    return nullcontext()


@dataclass(frozen=True, slots=True)
class TextStep:
    """A text that is known when the schema is made."""

    text: str
    location: Location


@dataclass(frozen=True, slots=True)
class ParameterStep:
    """A parameter. `value` computes its argument from the names of a call."""

    name: str
    limit: MaxTokens
    value: Callable[[Namespace], str]
    location: Location


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch, with the name of its module."""

    name: str
    body: tuple[Step, ...]
    location: Location


@dataclass(frozen=True, slots=True)
class BranchStep:
    """Branches. `pick` returns the number of the branch that is taken, or None."""

    branches: tuple[Branch, ...]
    pick: Callable[[Namespace], int | None]
    location: Location


@dataclass(frozen=True, slots=True)
class CallStep:
    """A call of another program, which becomes a nested module."""

    name: str
    program: Program
    arguments: Callable[[Namespace], tuple[tuple[Any, ...], dict[str, Any]]]
    location: Location


@dataclass(frozen=True, slots=True)
class TurnStep:
    """A turn of the conversation."""

    role: Role
    body: tuple[Step, ...]
    location: Location


Step: TypeAlias = TextStep | ParameterStep | BranchStep | CallStep | TurnStep


def schema_children(steps: Iterable[Step]) -> tuple[SchemaNode, ...]:
    """Return the nodes of the schema or module that `steps` make."""
    nodes: list[SchemaNode] = []
    for step in steps:
        place = step.location
        match step:
            case TextStep():
                nodes.append(Text(step.text, location=place))
            case ParameterStep():
                limit = step.limit
                nodes.append(Parameter(step.name, limit.length, limit.scaffold, location=place))
            case BranchStep():
                modules = tuple(
                    Module(branch.name, schema_children(branch.body), location=branch.location)
                    for branch in step.branches
                )
                nodes += [Union(modules, location=place)] if len(modules) > 1 else modules
            case CallStep():
                nodes.append(Module(step.name, schema_children(step.program.steps), location=place))
            case TurnStep():
                nodes.append(Chat(step.role, schema_children(step.body), location=place))
    return tuple(nodes)


def prompt_content(
    steps: Iterable[Step], names: Namespace
) -> tuple[Arguments, tuple[PromptNode, ...]]:
    """Return the arguments and imports of a call of `steps` with `names`."""
    arguments: list[tuple[str, str]] = []
    nodes: list[PromptNode] = []
    for step in steps:
        match step:
            case ParameterStep():
                arguments.append((step.name, step.value(names)))
            case BranchStep():
                taken = step.pick(names)
                if taken is not None:
                    branch = step.branches[taken]
                    nodes.append(Import(branch.name, *prompt_content(branch.body, names)))
            case CallStep():
                args, kwargs = step.arguments(names)
                inner = step.program.bind(args, kwargs)
                nodes.append(Import(step.name, *prompt_content(step.program.steps, inner)))
            case TurnStep():
                given, imports = prompt_content(step.body, names)
                arguments += given
                nodes += imports
            case TextStep():
                pass
    return tuple(arguments), tuple(nodes)


@dataclass(frozen=True, slots=True, eq=False)
class FunctionSource:
    """Source and syntax tree of a function. Line numbers count in the file."""

    file: str
    first: int
    lines: tuple[str, ...]
    tree: ast.FunctionDef

    def at(self, node: ast.AST) -> Location:
        """Return the place where `node` begins. Columns count characters from 1."""
        line, offset = getattr(node, "lineno", self.first), getattr(node, "col_offset", 0)
        before = self.lines[line - self.first].encode()[:offset]
        return Location(line, len(before.decode(errors="replace")) + 1, self.file)

    def is_triple_quoted(self, node: ast.expr) -> bool:
        """Whether the string `node` is written between triple quotes."""
        written = self.lines[node.lineno - self.first].encode()[node.col_offset :].decode()
        return written.lstrip("rRfFuU").startswith(('"""', "'''"))

    def code(self, node: ast.expr) -> CodeType:
        """Compile `node`. Tracebacks show its line in the file."""
        whole = ast.fix_missing_locations(ast.copy_location(ast.Expression(node), node))
        return compile(whole, self.file, "eval")


def read_function(function: Callable[..., Any]) -> FunctionSource:
    """Parse the source of `function`. Raises ProgramError."""
    name = getattr(function, "__name__", repr(function))
    try:
        lines, first = inspect.getsourcelines(function)
        file = inspect.getsourcefile(function) or "<unknown>"
    except (OSError, TypeError) as error:
        expected = "define it with `def` in a file or a notebook cell"
        problem = f"the source of {name!r} is not at hand"
        raise ProgramError(problem, None, name, expected) from error
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
    """Return the global and enclosing names that `function` sees now."""
    names: Namespace = dict(function.__globals__)
    free = function.__code__.co_freevars
    for name, cell in zip(free, function.__closure__ or (), strict=True):
        try:
            names[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return names
