"""Schemas from tables of traits (Prompt Cache, §5.6.2)."""

from __future__ import annotations

import csv
import io

import pytest
from pml_trees import count_words

from ragcache_schemas import (
    Import,
    Module,
    PMLError,
    Schema,
    SchemaIndex,
    Text,
    TraitTable,
    Union,
    UnknownName,
    parse_schema,
    resolve_prompt,
    write_schema,
)

CSV = "grade,level\nfirst year,low\nsecond year,high\nfirst year,\n,first year\n"
TABLE = TraitTable.from_rows("learner", csv.DictReader(io.StringIO(CSV)), preamble="Teach.\n")


def test_a_union_per_column_and_a_module_per_value() -> None:
    assert TABLE.schema == Schema(
        "learner",
        (
            Text("Teach.\n"),
            Union(
                (
                    Module("first-year", (Text("grade: first year\n"),)),
                    Module("second-year", (Text("grade: second year\n"),)),
                )
            ),
            Union(
                (
                    Module("low", (Text("level: low\n"),)),
                    Module("high", (Text("level: high\n"),)),
                    Module("level-first-year", (Text("level: first year\n"),)),
                )
            ),
        ),
    )
    assert parse_schema(write_schema(TABLE.schema)) == TABLE.schema


def test_a_row_is_a_prompt() -> None:
    prompt = TABLE.prompt({"level": "first year", "grade": "second year"}, "What next?")
    assert prompt.children == (
        Import("second-year"),
        Import("level-first-year"),
        Text("What next?"),
    )
    plan = resolve_prompt(SchemaIndex.of(TABLE.schema, count_words), prompt)
    said = "".join(piece.text for piece in plan.pieces)
    assert said == "Teach.\ngrade: second year\nlevel: first year\nWhat next?"
    assert TABLE.prompt({"grade": " ", "level": "low"}).children == (Import("low"),)


def test_texts_may_be_given_and_are_never_markup() -> None:
    table = TraitTable("t", {"mood & <state>": {"</union>": "Glad <b>\f", "x": "Sad"}})
    assert table.schema.children == (
        Union((Module("_union", (Text("Glad <b>\n"),)), Module("x", (Text("Sad"),)))),
    )
    assert parse_schema(write_schema(table.schema)) == table.schema
    odd = TraitTable.from_rows("t", [{"{value}": "{column}"}])
    assert odd.columns == {"{value}": {"{column}": "{value}: {column}\n"}}


def test_errors() -> None:
    with pytest.raises(UnknownName, match="no column 'age'; there are: grade, level"):
        TABLE.prompt({"age": "1"})
    with pytest.raises(UnknownName, match="no value in 'level' 'mid'; there are: low, high"):
        TABLE.prompt({"level": "mid"})
    with pytest.raises(PMLError, match="name of a schema"):
        _ = TraitTable("", {}).schema
