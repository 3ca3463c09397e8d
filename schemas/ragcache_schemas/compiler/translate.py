"""From the syntax tree of a function to steps (Prompt Cache, §3.2.4).

Text between triple quotes follows the white space rule of PML (`space`), every other string is
taken as it is. Strings become text of the tree, never markup.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast, get_args

from ..characters import NOT_XML
from ..errors import ProgramError
from ..space import PARAMETER, tidy
from ..tree import Role
from . import branches
from .naming import Names
from .source import Namespace, visible_names
from .steps import Ask, Call, Say, Step, Turn

if TYPE_CHECKING:
    from .program import PromptProgram

__all__ = ["Translator", "translate"]

_FORMS = "yield text, if, match, `with turn(...)` and calls of other prompt programs"
_ADVICE: dict[type[ast.AST], tuple[str, str]] = {
    ast.For: ("a loop", "write its rounds out: a schema has a fixed number of modules"),
    ast.While: ("a loop", "write its rounds out: a schema has a fixed number of modules"),
    ast.Return: ("return", "yield the text, and put what may be left out under `if`"),
    ast.Assign: ("an assignment", "compute it before the call, or inside the expression"),
    ast.AnnAssign: ("an assignment", "compute it before the call, or inside the expression"),
    ast.AugAssign: ("an assignment", "compute it before the call, or inside the expression"),
    ast.Try: ("try", "do what may fail before the call"),
    ast.FunctionDef: ("a function", "define it outside, as a prompt program of its own"),
}


def translate(program: PromptProgram[Any]) -> tuple[Step, ...]:
    """The steps of `program`. Raises ProgramError."""
    translator = Translator(program)
    body = program.source.tree.body
    if ast.get_docstring(program.source.tree, clean=False) is not None:
        body = body[1:]
    steps = translator.body(body, Names())
    if not steps:
        raise translator.error("it yields nothing", program.source.tree, "yield its text")
    return steps


class Translator:
    """Translates one function."""

    def __init__(self, program: PromptProgram[Any]) -> None:
        self.source = program.source
        self.limits = program.limits
        self.parameters = frozenset(program.signature.parameters)
        self.names: Namespace = visible_names(program.function)

    def error(self, problem: str, node: ast.AST, expected: str) -> ProgramError:
        """The error for `node`."""
        name = self.source.tree.name
        return ProgramError(f"in {name!r}: {problem}", self.source.at(node), name, expected)

    def body(self, statements: Sequence[ast.stmt], names: Names) -> tuple[Step, ...]:
        """The steps of a block; `names` are those of the module that it belongs to."""
        steps: list[Step] = []
        for statement in statements:
            match statement:
                case ast.Expr(value=ast.Yield(value=ast.expr() as value)):
                    steps += self.content(value, names)
                case ast.If():
                    steps.append(branches.conditional(self, statement, names))
                case ast.Match():
                    steps.append(branches.matching(self, statement, names))
                case ast.With(items=[ast.withitem(context_expr=ast.Call() as call)]):
                    steps.append(self._turn(call, statement, names))
                case ast.Pass():
                    pass
                case _:
                    raise self._unsupported(statement)
        return tuple(steps)

    def content(self, value: ast.expr, names: Names) -> list[Step]:
        """The steps of what is yielded."""
        match value:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return [*self.content(left, names), *self.content(right, names)]
            case ast.JoinedStr(values=parts):
                pieces = [step for part in parts for step in self._part(part, value, names)]
                return self._laid_out(pieces, value)
            case ast.Constant(value=str() as text):
                return self._laid_out([self._say(text, value)], value)
            case ast.IfExp():
                return [branches.expression(self, value, names)]
            case ast.Call() if (program := self._program(value)) is not None:
                return [self._call(program, value, value, names)]
        whole = ast.copy_location(ast.FormattedValue(value, -1, None), value)
        return [self._value(whole, value, names)]

    def _part(self, part: ast.expr, whole: ast.JoinedStr, names: Names) -> list[Step]:
        """A piece of an f-string."""
        if isinstance(part, ast.Constant):
            return [self._say(str(part.value), whole)]
        assert isinstance(part, ast.FormattedValue)
        if isinstance(part.value, ast.Call) and (program := self._program(part.value)) is not None:
            return [self._call(program, part.value, whole, names)]
        return [self._value(part, whole, names)]

    def _say(self, text: str, place: ast.expr) -> Say:
        if bad := NOT_XML.search(text):
            problem = f"the character U+{ord(bad[0]):04X} cannot stand in PML"
            raise self.error(problem, place, "leave it out; carried_text() does")
        return Say(text, self.source.at(place))

    def _laid_out(self, steps: list[Step], literal: ast.expr) -> list[Step]:
        """`steps` with the white space of a triple-quoted literal understood as PML's."""
        if not self.source.is_triple_quoted(literal):
            return steps
        out: list[Step] = []
        flow: list[Say | Ask] = []
        for step in (*steps, None):
            if isinstance(step, Say | Ask):
                flow.append(step)
                continue
            written = (s.text if isinstance(s, Say) else PARAMETER for s in flow)
            texts = iter(tidy("".join(written)).split(PARAMETER))
            place = self.source.at(literal)
            out += [Say(next(texts), place)] if flow else []
            for ask in (s for s in flow if isinstance(s, Ask)):
                out += [ask, Say(next(texts), place)]
            flow.clear()
            out += [step] if step is not None else []
        return [step for step in out if not isinstance(step, Say) or step.text]

    def _value(self, part: ast.FormattedValue, place: ast.expr, names: Names) -> Say | Ask:
        """A value in a text: known now, or the argument of one parameter."""
        shown = ast.unparse(part.value)
        used = {node.id for node in ast.walk(part) if isinstance(node, ast.Name)} & self.parameters
        location = self.source.at(place)
        if not used:
            return self._say(str(self.constant(part.value, place, part)), place)
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
        joined = ast.copy_location(ast.JoinedStr([part]), place)
        code = self.source.code(joined)
        name = names.parameter(limited[0])
        return Ask(name, limit.length, limit.scaffold, lambda n: str(eval(code, n)), location)

    def constant(
        self, value: ast.expr, place: ast.AST, part: ast.FormattedValue | None = None
    ) -> Any:
        """`value`, which does not depend on arguments, as it is now; formatted like `part`."""
        shown = ast.unparse(value)
        try:
            found = eval(self.source.code(value), dict(self.names))
            formatted = part and eval(self.source.code(_joined(part)), dict(self.names))
        except Exception as error:  # whatever the expression raises
            problem = f"{shown!r} cannot be evaluated ({type(error).__name__}: {error})"
            expected = "use a parameter, or a value that is known when the schema is made"
            raise self.error(problem, place, expected) from error
        if part is not None and not isinstance(found, str | int | float):
            problem = f"{shown!r} is a {type(found).__name__}"
            raise self.error(problem, place, "yield text, or a call of a prompt program")
        return found if part is None else formatted

    def _program(self, call: ast.Call) -> PromptProgram[Any] | None:
        """The prompt program that `call` calls, if it does."""
        from .program import PromptProgram

        names = {node.id for node in ast.walk(call.func) if isinstance(node, ast.Name)}
        if names & self.parameters or not isinstance(call.func, ast.Name | ast.Attribute):
            return None
        found = self.constant(call.func, call)
        return found if isinstance(found, PromptProgram) else None

    def _call(
        self, program: PromptProgram[Any], call: ast.Call, place: ast.expr, names: Names
    ) -> Call:
        """A call of another program: a nested module."""
        if program.compiling:
            problem = f"{program.name!r} calls itself"
            raise self.error(problem, place, "a schema is finite: write each level out")
        assert program.steps is not None  # compiled here, so that its errors come first
        args = [self.source.code(_unstarred(arg)) for arg in call.args]
        spread = [isinstance(arg, ast.Starred) for arg in call.args]
        kwargs = [(keyword.arg, self.source.code(keyword.value)) for keyword in call.keywords]
        if not any(spread) and all(name for name, _ in kwargs):
            try:
                program.signature.bind(*args, **{str(name): None for name, _ in kwargs})
            except TypeError as error:
                expected = f"its signature is {program.signature}"
                raise self.error(f"{program.name!r}: {error}", place, expected) from error

        def arguments(names: Namespace) -> tuple[list[Any], dict[str, Any]]:
            given: list[Any] = []
            for code, starred in zip(args, spread, strict=True):
                given += eval(code, names) if starred else [eval(code, names)]
            named: dict[str, Any] = {}
            for name, code in kwargs:
                named.update({name: eval(code, names)} if name else eval(code, names))
            return given, named

        return Call(names.module(program.name), program, arguments, self.source.at(place))

    def _turn(self, call: ast.Call, statement: ast.With, names: Names) -> Turn:
        from .program import turn

        role = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
        if role not in get_args(Role) or self.constant(call.func, call) is not turn:
            expected = 'write `with turn("system"):`, "user" or "assistant"'
            raise self.error(f"with {ast.unparse(call)}", statement, expected)
        body = self.body(statement.body, names)
        return Turn(cast("Role", role), body, self.source.at(statement))

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


def _joined(part: ast.FormattedValue) -> ast.JoinedStr:
    return ast.copy_location(ast.JoinedStr([part]), part)


def _unstarred(argument: ast.expr) -> ast.expr:
    return argument.value if isinstance(argument, ast.Starred) else argument
