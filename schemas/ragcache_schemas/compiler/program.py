"""The decorator `@prompt_program`: a function becomes a schema, and a call of it a prompt.

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
from functools import cached_property
from typing import Any, Generic, ParamSpec, TypeAlias, get_args, overload

from ragcache_schemas.compiler.steps import (
    FunctionSource,
    MaxTokens,
    Namespace,
    Step,
    prompt_content,
    read_function,
    schema_children,
    visible_names,
)
from ragcache_schemas.compiler.translate import translate
from ragcache_schemas.tree import Prompt, Schema
from ragcache_schemas.validate import validate_schema

P = ParamSpec("P")

Content: TypeAlias = Iterator[str | Prompt]
"""The return annotation of a prompt program: it yields texts and calls of other programs."""


class PromptProgram(Generic[P]):
    """A function compiled to a schema (`schema`); calling it makes a prompt.

    It is compiled on first use, so that programs may call others defined further down.

    Raises:
        ProgramError: The function has what no schema can say; with file, line and column.
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
        arguments, children = prompt_content(self.steps, names)
        return Prompt(self.name, children, arguments)

    @cached_property
    def schema(self) -> Schema:
        """The schema of the function; the same on every run."""
        where = self.source.at(self.source.tree)
        schema = Schema(self.name, schema_children(self.steps), location=where)
        return validate_schema(schema)

    @cached_property
    def source(self) -> FunctionSource:
        """The function's syntax tree and its place in the file."""
        return read_function(self.function)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The translated body."""
        self.compiling = True
        try:
            return translate(self)
        finally:
            self.compiling = False

    @cached_property
    def limits(self) -> dict[str, MaxTokens]:
        """The lengths of the parameters that hold text."""
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
        """The names that a call with these arguments sees."""
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
    """Compiles a function that yields text to a schema (§3.2.4).

    `if` becomes a module; `if`/`else`, `match` and `a if c else b` a union; a call of another
    program a nested module; a parameter with `MaxTokens` a parameter.

    Args:
        function: The function, where the decorator has no parentheses.
        name: The schema's name; by default the function's.

    Returns:
        The program, or the decorator that makes it.
    """
    if function is not None:
        return PromptProgram(function)
    return lambda function: PromptProgram(function, name)
