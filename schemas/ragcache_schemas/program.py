"""The decorator `@prompt_program`: a function becomes a schema, and a call of it a prompt.

    @prompt_program
    def trip(days: Annotated[str, MaxTokens(5)], overseas: bool) -> Content:
        yield f"Plan a trip of {days}."
        if overseas:
            yield " It goes abroad."

    trip.schema                          the schema, as a tree
    trip("three days", overseas=True)    a prompt for it, as a tree

The function itself never runs. Its source is read once and translated to steps. A call evaluates
only its conditions and the values in f-strings.

`if` becomes a module; `if`/`else`, `match` and `a if c else b` a union. Branches are named after
their source, so that names are the same on every run. Text between triple quotes follows the white
space rule of PML (`text.tidy`), other strings are kept as written. Both become text of the tree,
never markup.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import CodeType
from typing import Any, Generic, ParamSpec, TypeAlias, cast, get_args, overload

from ragcache_schemas.errors import ProgramError
from ragcache_schemas.program_steps import (
    Branch,
    BranchStep,
    CallStep,
    FunctionSource,
    MaxTokens,
    Namespace,
    ParameterStep,
    Step,
    TextStep,
    TurnStep,
    prompt_content,
    read_function,
    schema_children,
    turn,
    visible_names,
)
from ragcache_schemas.text import NOT_XML, PARAMETER, module_name, tidy
from ragcache_schemas.tree import Prompt, Role, Schema
from ragcache_schemas.validate import validate_schema

P = ParamSpec("P")

Content: TypeAlias = Iterator[str | Prompt]
"""Return annotation of a prompt program, which yields texts and calls of other programs."""


class PromptProgram(Generic[P]):
    """A function compiled to a schema (`schema`). Calling it makes a prompt.

    It is compiled on first use, so that programs may call others defined further down.

    Raises:
        ProgramError: The function contains something that no schema can express; with file, line
            and column.
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
        """Schema of the function, which is the same on every run."""
        where = self.source.at(self.source.tree)
        return validate_schema(Schema(self.name, schema_children(self.steps), location=where))

    @cached_property
    def source(self) -> FunctionSource:
        """Syntax tree of the function and its place in the file."""
        return read_function(self.function)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Translated body."""
        self.compiling = True
        try:
            return Translator(self).steps()
        finally:
            self.compiling = False

    @cached_property
    def limits(self) -> dict[str, MaxTokens]:
        """Lengths of the text parameters."""
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
        """Return the names that are visible to a call with these arguments."""
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
    """Compile a function that yields text to a schema (§3.2.4).

    `if` becomes a module; `if`/`else`, `match` and `a if c else b` a union; a call of another
    program a nested module; a parameter with `MaxTokens` a parameter.

    Args:
        function: The function, if the decorator has no parentheses.
        name: Name of the schema. Defaults to the function's name.

    Returns:
        The program, or the decorator that makes it.
    """
    if function is not None:
        return PromptProgram(function)
    return lambda function: PromptProgram(function, name)


_Fits: TypeAlias = Callable[[Any], bool]

_LONGEST_NAME = 60
_GATHER = "@arguments"  # no valid name in Python, so that it hides none
_FORMS = "yield text, if, match, `with turn(...)` and calls of other prompt programs"
_LOOP = ("a loop", "write its rounds out: a schema has a fixed number of modules")
_ASSIGNMENT = ("an assignment", "compute it before the call, or inside the expression")
_ADVICE: dict[type[ast.AST], tuple[str, str]] = {
    **dict.fromkeys((ast.For, ast.While), _LOOP),
    **dict.fromkeys((ast.Assign, ast.AnnAssign, ast.AugAssign), _ASSIGNMENT),
    ast.Return: ("return", "yield the text, and put what may be left out under `if`"),
    ast.Try: ("try", "do what may fail before the call"),
    ast.FunctionDef: ("a function", "define it outside, as a prompt program of its own"),
}


class Translator:
    """Translates one function to steps."""

    def __init__(self, program: PromptProgram[Any]) -> None:
        self.source = program.source
        self.limits = program.limits
        self.parameters = frozenset(program.signature.parameters)
        self.names: Namespace = visible_names(program.function)

    def steps(self) -> tuple[Step, ...]:
        """Translate the whole function."""
        body = self.source.tree.body
        if ast.get_docstring(self.source.tree, clean=False) is not None:
            body = body[1:]
        steps = self.body(body, ScopeNames())
        if not steps:
            raise self.error("it yields nothing", self.source.tree, "yield its text")
        return steps

    def error(self, problem: str, node: ast.AST, expected: str) -> ProgramError:
        """Return an error at `node`."""
        name = self.source.tree.name
        return ProgramError(f"in {name!r}: {problem}", self.source.at(node), name, expected)

    def body(self, statements: Sequence[ast.stmt], names: ScopeNames) -> tuple[Step, ...]:
        """Translate a block. `names` are the names in its module."""
        steps: list[Step] = []
        for statement in statements:
            match statement:
                case ast.Expr(value=ast.Yield(value=ast.expr() as value)):
                    steps += self.content(value, names)
                case ast.If():
                    steps.append(self._if(statement, names))
                case ast.Match():
                    steps.append(self._match(statement, names))
                case ast.With(items=[ast.withitem(context_expr=ast.Call() as call)]):
                    steps.append(self._turn(call, statement, names))
                case ast.Pass():
                    pass
                case _:
                    raise self._unsupported(statement)
        return tuple(steps)

    def content(self, value: ast.expr, names: ScopeNames) -> list[Step]:
        """Translate a yielded value."""
        match value:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return [*self.content(left, names), *self.content(right, names)]
            case ast.JoinedStr(values=parts):
                parts_steps = [step for part in parts for step in self._part(part, value, names)]
                return self._laid_out(parts_steps, value)
            case ast.Constant(value=str() as text):
                return self._laid_out([self._text(text, value)], value)
            case ast.IfExp():
                return [self._conditional(value, names)]
            case ast.Call() if (program := self._program(value)) is not None:
                return [self._call(program, value, value, names)]
        whole = ast.copy_location(ast.FormattedValue(value, -1, None), value)
        return [self._value(whole, value, names)]

    def _part(self, part: ast.expr, whole: ast.JoinedStr, names: ScopeNames) -> list[Step]:
        """Translate one part of an f-string."""
        if isinstance(part, ast.Constant):
            return [self._text(str(part.value), whole)]
        assert isinstance(part, ast.FormattedValue)
        if isinstance(part.value, ast.Call) and (program := self._program(part.value)) is not None:
            return [self._call(program, part.value, whole, names)]
        return [self._value(part, whole, names)]

    def _text(self, text: str, place: ast.expr) -> TextStep:
        if bad := NOT_XML.search(text):
            problem = f"the character U+{ord(bad[0]):04X} cannot stand in PML"
            raise self.error(problem, place, "leave it out; sanitize_text() does")
        return TextStep(text, self.source.at(place))

    def _laid_out(self, steps: list[Step], literal: ast.expr) -> list[Step]:
        """Apply PML's white space rule to the steps of a triple-quoted literal."""
        if not self.source.is_triple_quoted(literal):
            return steps
        out: list[Step] = []
        flow: list[TextStep | ParameterStep] = []
        for step in (*steps, None):
            if isinstance(step, TextStep | ParameterStep):
                flow.append(step)
                continue
            written = (s.text if isinstance(s, TextStep) else PARAMETER for s in flow)
            texts = iter(tidy("".join(written)).split(PARAMETER))
            place = self.source.at(literal)
            out += [TextStep(next(texts), place)] if flow else []
            for ask in (s for s in flow if isinstance(s, ParameterStep)):
                out += [ask, TextStep(next(texts), place)]
            flow.clear()
            out += [step] if step is not None else []
        return [step for step in out if not isinstance(step, TextStep) or step.text]

    def _value(
        self, part: ast.FormattedValue, place: ast.expr, names: ScopeNames
    ) -> TextStep | ParameterStep:
        """Translate a value in a text: a constant, or the argument of one parameter."""
        shown = ast.unparse(part.value)
        used = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)} & self.parameters
        location = self.source.at(place)
        joined = ast.copy_location(ast.JoinedStr([part]), place)
        if not used:
            found = self.constant(part.value, place)
            if not isinstance(found, str | int | float):
                problem = f"{shown!r} is a {type(found).__name__}"
                raise self.error(problem, place, "yield text, or a call of a prompt program")
            return self._text(self.constant(joined, place), place)
        limited = sorted(used & self.limits.keys())
        if not limited:
            name = min(used)
            expected = f"annotate it, as in {name}: Annotated[str, MaxTokens(12)]"
            problem = f"{shown!r} is text of unknown length"
            raise self.error(problem, place, expected)
        if len(limited) > 1:
            expected = "give each its own braces"
            raise self.error(f"{shown!r} is made of several parameters", place, expected)
        limit = self.limits[limited[0]]
        code = self.source.code(joined)
        name = names.parameter(limited[0])
        return ParameterStep(name, limit, lambda n: str(eval(code, n)), location)

    def constant(self, value: ast.expr, place: ast.AST) -> Any:
        """Evaluate an expression without parameters."""
        try:
            return eval(self.source.code(value), dict(self.names))
        except Exception as error:  # expressions raise any type
            shown, reason = ast.unparse(value), f"{type(error).__name__}: {error}"
            expected = "use a parameter, or a value that is known when the schema is made"
            problem = f"{shown!r} cannot be evaluated ({reason})"
            raise self.error(problem, place, expected) from error

    def _program(self, call: ast.Call) -> PromptProgram[Any] | None:
        """Return the prompt program that `call` calls, or None."""
        names = {node.id for node in ast.walk(call.func) if isinstance(node, ast.Name)}
        if names & self.parameters or not isinstance(call.func, ast.Name | ast.Attribute):
            return None
        found = self.constant(call.func, call)
        return found if isinstance(found, PromptProgram) else None

    def _call(
        self, program: PromptProgram[Any], call: ast.Call, place: ast.expr, names: ScopeNames
    ) -> CallStep:
        """Translate a call of another program to a nested module."""
        if program.compiling:
            problem = f"{program.name!r} calls itself"
            raise self.error(problem, place, "a schema is finite: write each level out")
        assert program.steps is not None  # compiled here, so that its errors come first
        spread = any(isinstance(arg, ast.Starred) for arg in call.args)
        keywords = [keyword.arg for keyword in call.keywords]
        if not spread and all(keywords):
            try:
                program.signature.bind(*call.args, **{str(name): None for name in keywords})
            except TypeError as error:
                expected = f"its signature is {program.signature}"
                raise self.error(f"{program.name!r}: {error}", place, expected) from error

        # Python binds the arguments: a function that returns them takes the program's place.
        gather = ast.Call(ast.Name(_GATHER, ast.Load()), call.args, call.keywords)
        code = self.source.code(ast.copy_location(gather, call))

        def arguments(names: Namespace) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given: tuple[tuple[Any, ...], dict[str, Any]]
            given = eval(code, names | {_GATHER: lambda *args, **kwargs: (args, kwargs)})
            return given

        return CallStep(names.module(program.name), program, arguments, self.source.at(place))

    def _turn(self, call: ast.Call, statement: ast.With, names: ScopeNames) -> TurnStep:
        role = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
        if role not in get_args(Role) or self.constant(call.func, call) is not turn:
            expected = 'write `with turn("system"):`, "user" or "assistant"'
            raise self.error(f"with {ast.unparse(call)}", statement, expected)
        body = self.body(statement.body, names)
        return TurnStep(cast("Role", role), body, self.source.at(statement))

    def _if(self, statement: ast.If, names: ScopeNames) -> BranchStep:
        """Translate `if`, with its `elif` and `else`."""
        tests: list[ast.expr] = []
        branches: list[Branch] = []
        rest: list[ast.stmt] = [statement]
        while len(rest) == 1 and isinstance(rest[0], ast.If):
            inner = rest[0]
            tests.append(inner.test)
            name = names.module(condition_name(inner.test))
            branches.append(self._branch(name, inner.body, inner))
            rest = inner.orelse
        if any(not isinstance(one, ast.Pass) for one in rest):
            wanted = else_name(tests[0]) if len(tests) == 1 else "else-" + condition_name(tests[0])
            branches.append(self._branch(names.module(wanted), rest, rest[0]))
        return self._branch_step(statement, tests, branches)

    def _conditional(self, value: ast.IfExp, names: ScopeNames) -> BranchStep:
        """Translate `a if c else b`."""
        where = self.source.at(value)
        branches: list[Branch] = []
        for name_of, side in ((condition_name, value.body), (else_name, value.orelse)):
            name = names.module(name_of(value.test))
            branches.append(Branch(name, tuple(self.content(side, ScopeNames())), where))
        return self._branch_step(value, [value.test], branches)

    def _branch(self, name: str, body: list[ast.stmt], place: ast.AST) -> Branch:
        return Branch(name, self.body(body, ScopeNames()), self.source.at(place))

    def _branch_step(
        self, place: ast.AST, tests: list[ast.expr], branches: list[Branch]
    ) -> BranchStep:
        codes = [self.source.code(test) for test in tests]

        def pick(names: Namespace) -> int | None:
            for number, code in enumerate(codes):
                if eval(code, names):
                    return number
            return len(codes) if len(branches) > len(codes) else None

        return BranchStep(tuple(branches), pick, self.source.at(place))

    def _match(self, statement: ast.Match, names: ScopeNames) -> BranchStep:
        """Translate `match`.

        Patterns are literals, dotted constants, alternatives of these, and `_`.
        """
        subject = condition_name(statement.subject)
        value = self.source.code(statement.subject)
        cases: list[tuple[_Fits, CodeType | None]] = []
        branches: list[Branch] = []
        for case in statement.cases:
            guard = None if case.guard is None else self.source.code(case.guard)
            cases.append((self._pattern(case.pattern), guard))
            if isinstance(case.pattern, ast.MatchAs) and case.guard is None:
                wanted = ["else-" + subject]
            else:
                name = "_" if isinstance(case.pattern, ast.MatchAs) else pattern_name(case.pattern)
                name += f"-if-{condition_name(case.guard)}" if case.guard else ""
                wanted = [name, f"{subject}-{name}"]
            branches.append(self._branch(names.module(*wanted), case.body, case.pattern))

        def pick(names: Namespace) -> int | None:
            found = eval(value, names)
            for number, (fits, guard) in enumerate(cases):
                if fits(found) and (guard is None or eval(guard, names)):
                    return number
            return None

        return BranchStep(tuple(branches), pick, self.source.at(statement))

    def _pattern(self, pattern: ast.pattern) -> _Fits:
        """Return a function that tells whether a value matches `pattern`."""
        match pattern:
            case ast.MatchValue(value=value):
                expected = self.constant(value, pattern)
                return lambda found: bool(found == expected)
            case ast.MatchSingleton(value=single):
                return lambda found: found is single
            case ast.MatchOr(patterns=patterns):
                either = [self._pattern(one) for one in patterns]
                return lambda found: any(fits(found) for fits in either)
            case ast.MatchAs(pattern=None, name=None):
                return lambda _: True
        raise self.error(
            f"the pattern {ast.unparse(pattern)!r} cannot become PML",
            pattern,
            "match literals, dotted constants, alternatives of these with |, or _",
        )

    def _unsupported(self, statement: ast.stmt) -> ProgramError:
        match statement:
            case ast.Expr(value=ast.Constant(value=str()) | ast.JoinedStr()):
                problem, expected = "a string on its own says nothing", 'write `yield "..."`'
            case ast.Expr(value=ast.Call()):
                problem = "a call whose result is not used"
                expected = "write `yield` before it, if it is a prompt program"
            case ast.Expr(value=ast.Yield() | ast.YieldFrom()):
                problem = f"`{ast.unparse(statement)}`"
                expected = "yield a text or a call of a prompt program"
            case _:
                shown = type(statement).__name__
                problem, expected = _ADVICE.get(type(statement), (shown, f"use {_FORMS}"))
        return self.error(f"{problem} cannot become PML", statement, expected)


class ScopeNames:
    """The names of modules and parameters given so far in one scope."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.parameters: set[str] = set()

    def module(self, *wanted: str) -> str:
        """Take the first free name of `wanted`, or else the last one with a number."""
        return _free_name(map(module_name, wanted), self.modules)

    def parameter(self, wanted: str) -> str:
        """Take `wanted`, with a number from its second use on."""
        return _free_name([wanted], self.parameters)


def _free_name(wanted: Iterable[str], taken: set[str]) -> str:
    """Take the first free name of `wanted`, or else the last one with a number."""
    name = ""
    for name in wanted:
        if name not in taken:
            break
    base, number = name, 2
    while name in taken:
        name = f"{base}-{number}"
        number += 1
    taken.add(name)
    return name


def condition_name(test: ast.expr) -> str:
    """Name a branch by its condition.

    `overseas` is "overseas", `days > 3` "days-3", `city == "Rome"` "city-Rome".
    """
    return _short(ast.unparse(test))


def else_name(test: ast.expr) -> str:
    """Name the branch taken if `test` is false."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return condition_name(test.operand)
    return "not-" + condition_name(test)


def pattern_name(pattern: ast.pattern) -> str:
    """Name a case by its pattern.

    `case "miami"` is "miami", `case Season.DRY` "DRY", `case "a" | "b"` "a-b".
    """
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
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME].rstrip('-.')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
