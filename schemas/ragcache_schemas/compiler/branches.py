"""Branches: `if` to a module, `if/else`, `match` and `a if c else b` to a union (§3.2.4)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias

from .naming import Names, condition_name, else_name, pattern_name
from .source import Namespace
from .steps import Choice, Option

if TYPE_CHECKING:
    from .translate import Translator

__all__ = ["conditional", "expression", "matching"]

_Fits: TypeAlias = Callable[[Any], bool]


def conditional(translator: Translator, statement: ast.If, names: Names) -> Choice:
    """`if`, with its `elif` and `else`."""
    tests: list[ast.expr] = []
    options: list[Option] = []
    rest: list[ast.stmt] = [statement]
    while len(rest) == 1 and isinstance(rest[0], ast.If):
        branch = rest[0]
        tests.append(branch.test)
        name = names.module(condition_name(branch.test))
        options.append(_option(translator, name, branch.body, branch))
        rest = branch.orelse
    if any(not isinstance(one, ast.Pass) for one in rest):
        wanted = else_name(tests[0]) if len(tests) == 1 else "else-" + condition_name(tests[0])
        options.append(_option(translator, names.module(wanted), rest, rest[0]))
    return _chosen(translator, statement, tests, options)


def expression(translator: Translator, value: ast.IfExp, names: Names) -> Choice:
    """`a if c else b`."""
    where = translator.source.at(value)
    options: list[Option] = []
    branches = ((condition_name, value.body), (else_name, value.orelse))
    for name_of, branch in branches:
        name = names.module(name_of(value.test))
        options.append(Option(name, tuple(translator.content(branch, Names())), where))
    return _chosen(translator, value, [value.test], options)


def _option(translator: Translator, name: str, body: list[ast.stmt], place: ast.AST) -> Option:
    return Option(name, translator.body(body, Names()), translator.source.at(place))


def _chosen(
    translator: Translator, place: ast.AST, tests: list[ast.expr], options: list[Option]
) -> Choice:
    codes = [translator.source.code(test) for test in tests]

    def pick(names: Namespace) -> int | None:
        for number, code in enumerate(codes):
            if eval(code, names):
                return number
        return len(codes) if len(options) > len(codes) else None

    return Choice(tuple(options), len(options) > 1, pick, translator.source.at(place))


def matching(translator: Translator, statement: ast.Match, names: Names) -> Choice:
    """`match`: patterns are literals, dotted constants, alternatives of these, and `_`."""
    subject = condition_name(statement.subject)
    value = translator.source.code(statement.subject)
    cases: list[tuple[_Fits, CodeType | None]] = []
    options: list[Option] = []
    for case in statement.cases:
        cases.append((_fits(translator, case.pattern), _guard(translator, case)))
        if isinstance(case.pattern, ast.MatchAs) and case.guard is None:
            wanted = ["else-" + subject]
        else:
            name = "_" if isinstance(case.pattern, ast.MatchAs) else pattern_name(case.pattern)
            name += f"-if-{condition_name(case.guard)}" if case.guard else ""
            wanted = [name, f"{subject}-{name}"]
        options.append(_option(translator, names.module(*wanted), case.body, case.pattern))

    def pick(names: Namespace) -> int | None:
        found = eval(value, names)
        for number, (fits, guard) in enumerate(cases):
            if fits(found) and (guard is None or eval(guard, names)):
                return number
        return None

    return Choice(tuple(options), len(options) > 1, pick, translator.source.at(statement))


def _guard(translator: Translator, case: ast.match_case) -> CodeType | None:
    return None if case.guard is None else translator.source.code(case.guard)


def _fits(translator: Translator, pattern: ast.pattern) -> _Fits:
    match pattern:
        case ast.MatchValue(value=value):
            expected = translator.constant(value, pattern)
            return lambda found: bool(found == expected)
        case ast.MatchSingleton(value=single):
            return lambda found: found is single
        case ast.MatchOr(patterns=patterns):
            either = [_fits(translator, one) for one in patterns]
            return lambda found: any(fits(found) for fits in either)
        case ast.MatchAs(pattern=None, name=None):
            return lambda _: True
    raise translator.error(
        f"the pattern {ast.unparse(pattern)!r} cannot become PML",
        pattern,
        "match literals, dotted constants, alternatives of these with |, or _",
    )
