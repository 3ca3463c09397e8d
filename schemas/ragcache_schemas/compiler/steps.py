"""What a prompt program comes to: steps, from which both its schema and its prompts are made.

Names are given once, in the steps, so that a prompt always fits the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ..tree import (
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
from .source import Namespace

__all__ = ["Ask", "Call", "Choice", "Option", "Program", "Say", "Step", "Turn", "prompt", "schema"]


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
class Choice:
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


Step: TypeAlias = Say | Ask | Choice | Call | Turn


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
            case Choice():
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
            case Choice():
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
