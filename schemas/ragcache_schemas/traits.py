"""Schemas generated from tables of traits: a union per column, a module per value (§5.6.2)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from .characters import carried_text
from .checks import schema_problems
from .errors import UnknownName
from .names import free_name, module_name
from .tree import Import, Module, Prompt, Schema, SchemaNode, Text, Union

__all__ = ["TraitTable"]

_PLACE = re.compile(r"\{column\}|\{value\}")


@dataclass(frozen=True)
class TraitTable:
    """A table of traits: `columns` gives each column's values, and each value's text.

    Its schema is the preamble and a union for each column; `prompt` picks one value of each. A
    text says its column too, since a module is encoded alone. Two columns may share a value.
    """

    name: str
    columns: Mapping[str, Mapping[str, str]]
    preamble: str = ""

    @classmethod
    def from_rows(
        cls,
        name: str,
        rows: Iterable[Mapping[str, str]],
        *,
        preamble: str = "",
        text: str = "{column}: {value}\n",
    ) -> TraitTable:
        """The table of what occurs in `rows`, as csv.DictReader gives them; blanks do not count.

        `text` is what a value's module says, with {column} and {value} put in.
        """
        columns: dict[str, dict[str, str]] = {}
        for row in rows:
            for column, value in row.items():
                if value and value.strip():
                    columns.setdefault(column, {})[value] = _filled(text, column, value)
        return cls(name, columns, preamble)

    @cached_property
    def names(self) -> dict[tuple[str, str], str]:
        """The module of each (column, value): the value, after the column's name if it is taken."""
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
        """The schema. Raises PMLError where a name is none."""
        nodes: list[SchemaNode] = [Text(carried_text(self.preamble))]
        for column, values in self.columns.items():
            members = (
                Module(self.names[column, value], (Text(carried_text(text)),))
                for value, text in values.items()
            )
            nodes.append(Union(tuple(members)))
        schema = Schema(self.name, tuple(nodes))
        for problem in schema_problems(schema):
            raise problem
        return schema

    def prompt(self, traits: Mapping[str, str], text: str = "") -> Prompt:
        """The prompt of one row of traits, and of new text after them.

        A column that is not given, or blank, is left out. Raises UnknownName for a column or a
        value that the table lacks.
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


def _filled(text: str, column: str, value: str) -> str:
    put = {"{column}": column, "{value}": value}
    return _PLACE.sub(lambda found: put[found[0]], text)


def _unknown(what: str, name: str, known: Iterable[str]) -> UnknownName:
    return UnknownName(f"no {what} {name!r}", expected=f"there are: {', '.join(list(known)[:8])}")
