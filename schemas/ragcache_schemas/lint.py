"""Linting of schemas and prompts: errors, warnings and advice in one list."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from ragcache_schemas.chat_template import Render, render_schema_turns
from ragcache_schemas.errors import PMLError, PMLWarning
from ragcache_schemas.layout import CountTokens, lay_out
from ragcache_schemas.parser import Report, Warn, read_prompt, read_schema
from ragcache_schemas.resolve import SchemaIndex, resolve_prompt
from ragcache_schemas.scanner import ScanLimits
from ragcache_schemas.tree import (
    Chat,
    Location,
    Module,
    Node,
    Parameter,
    Prompt,
    Schema,
    Text,
    Union,
)
from ragcache_schemas.validate import scope_members

_PROMPT = re.compile(
    r"\ufeff?\s*(?:<\?xml[^>]*\?>\s*)?(?:<!--(?:(?!-->).)*-->\s*)*<prompt[\s/>]", re.DOTALL
)

Severity: TypeAlias = Literal["error", "warning", "advice"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in a schema or a prompt."""

    severity: Severity
    """`error` (refused), `warning` (accepted with `PMLWarning`) or `advice` (allowed but
    doubtful)."""
    kind: str
    """Name of the error's class or of the rule."""
    message: str
    location: Location | None = None

    def __str__(self) -> str:
        where = f"{self.location}: " if self.location else ""
        return f"{where}{self.severity}: {self.message} [{self.kind}]"


def is_prompt(text: str | bytes) -> bool:
    """Whether a PML text is a prompt. Any other text is a schema, or should be."""
    start = text if isinstance(text, str) else text.decode("utf-8", "replace")
    return _PROMPT.match(start) is not None


def lint_schema(
    text: str | bytes,
    *,
    source: str = "<string>",
    count_tokens: CountTokens | None = None,
    render: Render | None = None,
) -> list[Finding]:
    """List the findings in a schema. Continues after errors, unless it is not well-formed.

    Args:
        text: PML.
        source: Name of the file, for places.
        count_tokens: Function that counts tokens. Finds texts that do not fit and unions that waste
            positions.
        render: Chat template. Finds turns that it cannot write.

    Returns:
        The findings in the order of the text.
    """
    findings: list[Finding] = []

    def read(report: Report, warn: Warn) -> None:
        schema = read_schema(text, source, ScanLimits(), report, warn)
        if any(f.severity == "error" for f in findings):
            return  # the tree lacks the refused nodes, which would be reported again
        findings.extend(_advice(schema, count_tokens))
        rendered = render_schema_turns(schema, render) if render else schema
        if count_tokens:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", PMLWarning)
                lay_out(rendered, count_tokens)
            for each in caught:
                if isinstance(each.message, PMLWarning):
                    warn(each.message)

    return _collected(findings, read)


def lint_prompt(
    text: str | bytes, index: SchemaIndex | None = None, *, source: str = "<string>"
) -> list[Finding]:
    """List the findings in a prompt. With `index`, checks it against its schema."""
    findings: list[Finding] = []

    def read(report: Report, warn: Warn) -> None:
        prompt: Prompt = read_prompt(text, source, ScanLimits(), report, warn)
        if index is None or any(f.severity == "error" for f in findings):
            return
        for piece in resolve_prompt(index, prompt).crowded:
            message = (
                f"new text of {piece.length} tokens shares positions with the module after it; "
                "leave a parameter there as a buffer, or use the placement 'compact'"
            )
            findings.append(Finding("advice", "crowded-text", message, piece.location))

    return _collected(findings, read)


def _collected(findings: list[Finding], read: Callable[[Report, Warn], None]) -> list[Finding]:
    def report(error: PMLError) -> None:
        advice = f"; {error.expected}" if error.expected else ""
        kind = type(error).__name__
        findings.append(Finding("error", kind, error.problem + advice, error.location))

    def warn(warning: PMLWarning) -> None:
        findings.append(Finding("warning", "PMLWarning", warning.problem, warning.location))

    try:
        read(report, warn)
    except PMLError as error:
        report(error)
    return sorted(
        findings, key=lambda f: (f.location.line, f.location.column) if f.location else (0, 0)
    )


def _advice(schema: Schema, count_tokens: CountTokens | None) -> Iterator[Finding]:
    scopes: list[Sequence[Node]] = [schema.children]
    while scopes:
        children = scopes.pop()
        yield from _content(children, count_tokens)
        for node, _ in scope_members(children):
            if isinstance(node, Module):
                if not node.children:
                    message = f"the module {node.name!r} is empty"
                    yield Finding("advice", "empty-module", message, node.location)
                scopes.append(node.children)
    for scaffold in schema.scaffolds:
        if len(scaffold.modules) == 1:
            message = "a scaffold of one module changes nothing; name two or more"
            yield Finding("advice", "single-scaffold", message, scaffold.location)


def _content(children: Sequence[Node], count_tokens: CountTokens | None) -> Iterator[Finding]:
    """Find problems of unions, and words that touch a parameter.

    "for<param .../>" becomes "for3 days".
    """
    for node in children:
        if isinstance(node, Chat):
            yield from _content(node.children, count_tokens)
        elif isinstance(node, Union):
            yield from _union(node, count_tokens)
    for left, right in pairwise(children):
        for text, edge, parameter in ((left, -1, right), (right, 0, left)):
            if not isinstance(text, Text) or not isinstance(parameter, Parameter):
                continue
            if text.text[edge].isalnum() and text.text[edge].isascii():
                message = f"no space between the text and the parameter {parameter.name!r}"
                yield Finding("advice", "glued-parameter", message, parameter.location)


def _union(node: Union, count_tokens: CountTokens | None) -> Iterator[Finding]:
    if len(node.members) < 2:
        message = f"a union of {len(node.members)} members; a module alone says the same"
        yield Finding("advice", "small-union", message, node.location)
    elif count_tokens:
        lengths = [_length(member, count_tokens) for member in node.members]
        longest, middle = max(lengths), sorted(lengths)[len(lengths) // 2]
        if longest > 4 * middle:
            name = node.members[lengths.index(longest)].name
            message = (
                f"the member {name!r} is {longest} tokens long and the median {middle}: "
                "every other choice leaves that gap in the placement 'schema'"
            )
            yield Finding("advice", "uneven-union", message, node.location)


def _length(node: Node, count_tokens: CountTokens) -> int:
    match node:
        case Text():
            return count_tokens(node.text)
        case Parameter():
            return node.length
        case Module() | Chat():
            return sum(_length(child, count_tokens) for child in node.children)
        case Union():
            return max((_length(member, count_tokens) for member in node.members), default=0)
        case _:
            return 0
