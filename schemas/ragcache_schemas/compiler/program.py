"""`@prompt_program`: what users see of the compiler.

    @prompt_program
    def trip(days: Annotated[str, MaxTokens(5)], overseas: bool) -> Content:
        yield f"Plan a trip of {days}."
        if overseas:
            yield " It goes abroad."

    trip.schema                          the schema, as a tree
    trip("three days", overseas=True)    a prompt for it, as a tree

The function itself never runs: its source is read once, and of it only the conditions and the
values in f-strings are evaluated when it is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeAlias, get_args, overload

from ragcache_schemas.compiler import steps
from ragcache_schemas.compiler.steps import FunctionSource, Namespace, read_function, visible_names
from ragcache_schemas.compiler.translate import translate
from ragcache_schemas.errors import InvalidAttribute
from ragcache_schemas.tree import Prompt, Role, Schema
from ragcache_schemas.validate import schema_problems

__all__ = ["Content", "MaxTokens", "PromptProgram", "prompt_program", "turn"]

P = ParamSpec("P")

Content: TypeAlias = Iterator[str | Prompt]
"""What a prompt program yields, for its annotation: texts, and calls of other programs."""


@dataclass(frozen=True, slots=True)
class MaxTokens:
    """`Annotated[str, MaxTokens(12)]`: a parameter of up to `length` tokens (§3.2.2).

    `scaffold` is the text that stands in while the module around it is encoded.
    """

    length: int
    scaffold: str | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InvalidAttribute(f"MaxTokens({self.length})", expected="give 1 token or more")


def turn(role: Role) -> AbstractContextManager[None]:
    """`with turn("user"):` puts what the block yields into a turn of the conversation."""
    del role
    return nullcontext()


class PromptProgram(Generic[P]):
    """A decorated function. Call it for a prompt; its schema is `schema`.

    It is compiled on first use, so that programs may call others defined further down. Raises
    ProgramError, with file, line and column, for what no schema can say.
    """

    def __init__(self, function: Callable[P, Content], name: str | None = None) -> None:
        self.function = function
        self.name = name or function.__name__
        self.signature = inspect.signature(function)
        self.compiling = False
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    def __repr__(self) -> str:
        return f"<prompt program {self.name!r}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Prompt:
        names = self.bind(args, kwargs)
        arguments, children = steps.prompt(self.steps, names)
        return Prompt(self.name, children, arguments)

    @cached_property
    def schema(self) -> Schema:
        """The schema; the same on every run."""
        where = self.source.at(self.source.tree)
        schema = Schema(self.name, steps.schema(self.steps), location=where)
        for problem in schema_problems(schema):
            raise problem
        return schema

    @cached_property
    def source(self) -> FunctionSource:
        """The parsed function."""
        return read_function(self.function)

    @cached_property
    def steps(self) -> tuple[steps.Step, ...]:
        """The compiled body."""
        self.compiling = True
        try:
            return translate(self)
        finally:
            self.compiling = False

    @cached_property
    def limits(self) -> dict[str, MaxTokens]:
        """The parameters that hold text, with their lengths."""
        found: dict[str, MaxTokens] = {}
        names = visible_names(self.function)
        for name, parameter in self.signature.parameters.items():
            annotation = parameter.annotation
            if isinstance(annotation, str):
                try:
                    annotation = eval(annotation, names)
                except NameError:  # imported for type checkers only
                    continue
            for part in get_args(annotation)[1:]:
                if isinstance(part, MaxTokens):
                    found[name] = part
        return found

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Namespace:
        """The names that the function sees when it is called with these arguments."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return visible_names(self.function) | bound.arguments


@overload
def prompt_program(function: Callable[P, Content]) -> PromptProgram[P]: ...
@overload
def prompt_program(
    *, name: str | None = None
) -> Callable[[Callable[P, Content]], PromptProgram[P]]: ...
def prompt_program(
    function: Callable[P, Content] | None = None, *, name: str | None = None
) -> PromptProgram[P] | Callable[[Callable[P, Content]], PromptProgram[P]]:
    """Makes a function that yields text a schema (§3.2.4); `name` is its, else the function's.

    `if` becomes a module; `if`/`else`, `match` and `a if c else b` a union; a call of another
    program a nested module; a parameter with `MaxTokens` a parameter.
    """
    if function is not None:
        return PromptProgram(function)
    return lambda function: PromptProgram(function, name)
