"""Generates schemas: from collections of documents, from tables of traits, from source code.

A collection becomes a schema of a preamble, k slots and the question. Each slot is a union whose
members are all modules of the collection, so that any k documents may be imported in any order;
the members are looked up, and only `expand_slots` writes them out. A table of traits becomes a
union for each column with a module for each value (Prompt Cache, §5.6.2), source code a module for
each file or class (§5.6.1).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ragcache_schemas.errors import InvalidAttribute, InvalidName, UnknownName
from ragcache_schemas.text import free_name, module_name, module_names, name_problem, sanitize_text
from ragcache_schemas.tree import (
    Chat,
    Import,
    Module,
    Node,
    Parameter,
    Prompt,
    Schema,
    SchemaNode,
    Slot,
    Text,
    Union,
)
from ragcache_schemas.validate import validate_schema


def collection_schema(
    name: str, preamble: str, slots: int, collection: str,
    *, question_lead: str = "", question_length: int = 512, epilogue: str = "",
) -> Schema:  # fmt: skip
    """Makes a schema of preamble, slots, question_lead, the parameter `question`, and epilogue.

    The texts are usually the model's chat template, cut inside the user turn.

    Args:
        name: The schema's name.
        preamble: The text before the slots.
        slots: The number of slots.
        collection: The collection whose modules fill the slots.
        question_lead: The text between slots and question.
        question_length: The most tokens of a question.
        epilogue: The text after the question.

    Raises:
        PMLError: There is no slot, or a name is invalid.
    """
    if slots < 1:
        raise InvalidAttribute(f"{slots} slots", expected="give 1 or more")
    between = (Slot(str(number + 1), collection) for number in range(slots))
    question = (Text(question_lead), Parameter("question", question_length))
    return validate_schema(Schema(name, (Text(preamble), *between, *question, Text(epilogue))))


def document_module(
    name: str, chunks: Iterable[str | tuple[str, str] | Module], *, heading: str = ""
) -> Module:
    """Makes a module of a document, its chunks modules nested in it.

    Args:
        name: The module's name; `module_name(title)` makes one.
        chunks: Texts (named "c1", "c2", ... by their place), pairs of name and text, or modules.
        heading: Text of the document itself, imported with any of its chunks.

    Raises:
        InvalidName: `name` is no module name.
        DuplicateName: Two chunks have the same name.
    """
    if problem := name_problem(name, "module"):
        raise InvalidName(problem.problem, expected=f"{problem.expected}; module_name() makes one")
    parts: list[SchemaNode] = [Text(heading)]
    for number, chunk in enumerate(chunks, 1):
        match chunk:
            case Module():
                parts.append(chunk)
            case str():
                parts.append(Module(f"c{number}", (Text(chunk),)))
            case (part, text):
                parts.append(Module(part, (Text(text),)))
    module = Module(name, tuple(parts))
    validate_schema(Schema("document", (module,)))
    return module


def expand_slots(schema: Schema, members: Mapping[str, Sequence[Module]]) -> Schema:
    """Writes the members of every slot out, from `members` by collection.

    A slot becomes a module of its scope's name ("slot-1") around a union, so that the same prompts
    fit both forms and several slots may hold the same document.

    Raises:
        UnknownName: `members` lacks a collection.
    """

    def expanded(nodes: Sequence[Node]) -> tuple[Any, ...]:
        return tuple(map(replaced, nodes))

    def replaced(node: Node) -> Node:
        match node:
            case Slot():
                return _filled(node, members)
            case Module() | Chat():
                return replace(node, children=expanded(node.children))
            case Union():
                return replace(node, members=expanded(node.members))
            case _:
                return node

    return replace(schema, children=expanded(schema.children))


def _filled(slot: Slot, members: Mapping[str, Sequence[Module]]) -> Module:
    if slot.collection not in members:
        known = ", ".join(sorted(members)) or "none"
        problem = f"no members given for the collection {slot.collection!r}"
        expected = f"the collections given are: {known}"
        raise UnknownName(problem, slot.location, "union", expected)
    union = Union(tuple(members[slot.collection]))
    return Module(slot.scope, (union,), location=slot.location)


_PLACE = re.compile(r"\{column\}|\{value\}")


@dataclass(frozen=True)
class TraitTable:
    """A table of traits: `columns` gives each column's values, and each value's text.

    Its schema is the preamble and a union for each column; `prompt` picks one value of each. A
    text names its column too, since modules do not see each other. Two columns may share a value.
    """

    name: str
    columns: Mapping[str, Mapping[str, str]]
    preamble: str = ""

    @classmethod
    def from_rows(
        cls, name: str, rows: Iterable[Mapping[str, str]],
        *, preamble: str = "", text: str = "{column}: {value}\n",
    ) -> TraitTable:  # fmt: skip
        """Makes the table of all values in `rows`, as csv.DictReader gives them; blank values are
        left out. `text` is that of a value's module, with {column} and {value} filled in."""
        columns: dict[str, dict[str, str]] = {}
        for row in rows:
            for column, value in row.items():
                if value and value.strip():
                    columns.setdefault(column, {})[value] = _trait_text(text, column, value)
        return cls(name, columns, preamble)

    @cached_property
    def names(self) -> dict[tuple[str, str], str]:
        """The module of each (column, value): the value, with the column's name if it is taken."""
        taken: set[str] = set()
        return {
            (column, value): free_name(
                [module_name(value), module_name(f"{column}-{value}")], taken
            )
            for column, values in self.columns.items()
            for value in values
        }

    @cached_property
    def schema(self) -> Schema:
        """The schema. Raises PMLError for an invalid name."""
        nodes: list[SchemaNode] = [Text(sanitize_text(self.preamble))]
        for column, values in self.columns.items():
            named = ((self.names[column, value], text) for value, text in values.items())
            members = (Module(name, (Text(sanitize_text(text)),)) for name, text in named)
            nodes.append(Union(tuple(members)))
        return validate_schema(Schema(self.name, tuple(nodes)))

    def prompt(self, traits: Mapping[str, str], text: str = "") -> Prompt:
        """Makes the prompt of one row of traits, with new text after them.

        A column that is missing or blank is left out.

        Raises:
            UnknownName: The table lacks a column or a value.
        """
        unknown = [column for column in traits if column not in self.columns]
        if unknown:
            raise _unknown("column", unknown[0], self.columns)
        imports: list[Import | Text] = []
        for column, values in self.columns.items():
            value = traits.get(column)
            if not value or not value.strip():
                continue
            if value not in values:
                raise _unknown(f"value in {column!r}", value, values)
            imports.append(Import(self.names[column, value]))
        return Prompt(self.name, (*imports, Text(text)))


def _trait_text(text: str, column: str, value: str) -> str:
    values = {"{column}": column, "{value}": value}
    return _PLACE.sub(lambda found: values[found[0]], text)


def _unknown(what: str, name: str, known: Iterable[str]) -> UnknownName:
    return UnknownName(f"no {what} {name!r}", expected=f"there are: {', '.join(list(known)[:8])}")


def code_schema(
    name: str, files: Mapping[str, str] | Iterable[tuple[str, str]],
    *, by: Literal["file", "class"] = "file",
    preamble: str = "", heading: str = "# {path}\n", epilogue: str = "",
) -> Schema:  # fmt: skip
    """Makes a schema of preamble, a module for each file, and epilogue.

    Args:
        name: The schema's name.
        files: Paths and texts; the modules keep their order. Two paths with the same module name
            get different ones (`module_names`).
        by: "class" makes each top-level class of a Python file a module nested in that of its
            file, whose other text is imported with it.
        preamble: The text before the files.
        heading: Begins each file, so that the model can tell them apart.
        epilogue: The text after the files.

    Raises:
        PMLError: The schema's name is invalid.
    """
    if by not in ("file", "class"):
        raise InvalidAttribute(f"by={by!r}", expected='write "file" or "class"')
    texts = dict(files)
    names = module_names(texts)
    modules: list[SchemaNode] = [Text(preamble)]
    for path, text in texts.items():
        lines = _lines(text)
        parts = _classes(path, lines) if by == "class" else [Text("".join(lines))]
        title = Text(sanitize_text(heading.replace("{path}", path)))
        modules.append(Module(names[path], (title, *parts)))
    return validate_schema(Schema(name, (*modules, Text(epilogue))))


def _lines(text: str) -> list[str]:
    """The lines, the last with its line break too, so that no file runs into the next."""
    text = sanitize_text(text.replace("\r\n", "\n").replace("\r", "\n"))
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
