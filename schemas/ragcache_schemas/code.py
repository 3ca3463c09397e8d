"""Schemas generated from source code: files, or their classes, are modules (§5.6.1)."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Literal

from .characters import carried_text
from .checks import schema_problems
from .errors import InvalidAttribute
from .names import free_name, module_name, module_names
from .tree import Module, Schema, SchemaNode, Text

__all__ = ["code_schema"]


def code_schema(
    name: str,
    files: Mapping[str, str] | Iterable[tuple[str, str]],
    *,
    by: Literal["file", "class"] = "file",
    preamble: str = "",
    heading: str = "# {path}\n",
    epilogue: str = "",
) -> Schema:
    """preamble, a module for each file of `files` (path to text) in its order, epilogue.

    by="class" also makes each top-level class of a Python file a module nested in that of its
    file, whose other text is imported with it. Where two paths come to one module name, both stay
    apart (`module_names`). `heading` begins each file, so that the model can tell them apart.
    """
    if by not in ("file", "class"):
        raise InvalidAttribute(f"by={by!r}", expected='write "file" or "class"')
    texts = dict(files)
    names = module_names(texts)
    modules: list[SchemaNode] = [Text(preamble)]
    for path, text in texts.items():
        lines = _lines(text)
        parts = _classes(path, lines) if by == "class" else [Text("".join(lines))]
        title = Text(carried_text(heading.replace("{path}", path)))
        modules.append(Module(names[path], (title, *parts)))
    schema = Schema(name, (*modules, Text(epilogue)))
    for problem in schema_problems(schema):
        raise problem
    return schema


def _lines(text: str) -> list[str]:
    """The lines, the last with its line break too, so that no file runs into the next."""
    text = carried_text(text.replace("\r\n", "\n").replace("\r", "\n"))
    if text and not text.endswith("\n"):
        text += "\n"
    return [line + "\n" for line in text.split("\n")[:-1]]  # as Python counts lines


def _classes(path: str, lines: list[str]) -> list[SchemaNode]:
    """A Python file cut at its top-level classes; any other file whole."""
    try:
        tree = ast.parse("".join(lines)) if path.endswith((".py", ".pyi")) else ast.Module([], [])
    except (SyntaxError, ValueError, RecursionError):
        return [Text("".join(lines))]
    parts: list[SchemaNode] = []
    taken: set[str] = set()
    done = 0
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            decorators = [one.lineno for one in node.decorator_list]
            first = min([node.lineno, *decorators]) - 1
            parts.append(Text("".join(lines[done:first])))
            done = node.end_lineno or first
            name = free_name([module_name(node.name)], taken)
            parts.append(Module(name, (Text("".join(lines[first:done])),)))
    return [*parts, Text("".join(lines[done:]))]
