"""Generated schemas: collections, tables of traits (Prompt Cache, §5.6.2), source code (§5.6.1)."""

from __future__ import annotations

import ast
import csv
import io
from pathlib import Path

import pytest

from ragcache_schemas import (
    Import,
    InvalidAttribute,
    InvalidName,
    Module,
    Parameter,
    PMLError,
    Schema,
    SchemaIndex,
    Slot,
    Text,
    TraitTable,
    Union,
    UnknownName,
    code_schema,
    collection_schema,
    document_module,
    expand_slots,
    lay_out,
    parse_prompt,
    parse_schema,
    resolve_prompt,
    write_schema,
)
from tests.schemas.pml_trees import count_words

HANDBOOK = collection_schema("handbook", "Use the documents.", 2, "handbook", epilogue="Answer:")


def test_collection_schema_children() -> None:
    assert (
        Schema(
            "handbook",
            (
                Text("Use the documents."),
                Slot("1", "handbook"),
                Slot("2", "handbook"),
                Parameter("question", 512),
                Text("Answer:"),
            ),
        )
        == HANDBOOK
    )
    assert '<union slot="1" collection="handbook"/>' in write_schema(HANDBOOK)
    assert parse_schema(write_schema(HANDBOOK)) == HANDBOOK


def test_collection_schema_text_is_short() -> None:
    assert len(write_schema(collection_schema("h", "", 4, "c"))) < 400


def test_document_module_nests_its_chunks() -> None:
    module = document_module("leave.md", ["one", ("part", "two"), Module("x")], heading="Leave\n")
    assert module == Module(
        "leave.md",
        (
            Text("Leave\n"),
            Module("c1", (Text("one"),)),
            Module("part", (Text("two"),)),
            Module("x"),
        ),
    )


def test_document_module_refuses_invalid_and_duplicate_names() -> None:
    with pytest.raises(InvalidName, match="module_name"):
        document_module("my leave.md", [])
    with pytest.raises(PMLError):
        document_module("leave", ["a", ("c1", "b")])


def test_collection_schema_needs_a_slot() -> None:
    with pytest.raises(InvalidAttribute):
        collection_schema("h", "", 0, "c")


def test_expand_slots_writes_the_members_of_each_slot() -> None:
    documents = (document_module("a", ["x"]), document_module("b", ["y", "z"]))
    expanded = expand_slots(HANDBOOK, {"handbook": documents})
    assert expanded.children[1:3] == (
        Module("slot-1", (Union(documents),)),
        Module("slot-2", (Union(documents),)),
    )
    assert parse_schema(write_schema(expanded)) == expanded


def test_expand_slots_reaches_nested_slots() -> None:
    schema = parse_schema(
        '<schema name="s"><user><union><module name="m"><union slot="1" collection="c"/></module>'
        "</union></user></schema>"
    )
    written = write_schema(expand_slots(schema, {"c": [Module("a")]}))
    assert '<module name="slot-1">' in written
    assert 'collection="c"' not in written


def test_expand_slots_needs_every_collection() -> None:
    with pytest.raises(UnknownName, match="'handbook'; the collections given are: other"):
        expand_slots(HANDBOOK, {"other": []})


def test_expanded_slots_keep_canonical_positions() -> None:
    documents = (document_module("a", ["x y"]), document_module("b", ["z"]))
    slots = lay_out(HANDBOOK, count_words, "compact")
    written = lay_out(expand_slots(HANDBOOK, {"handbook": documents}), count_words, "compact")
    for path in ("#0", "slot-1", "slot-2", "@question", "#1"):
        assert slots[path].start == written[path].start
    assert written["slot-1/a"].start == written["slot-2/b"].start == 3


CSV = "grade,level\nfirst year,low\nsecond year,high\nfirst year,\n,first year\n"
TABLE = TraitTable.from_rows("learner", csv.DictReader(io.StringIO(CSV)), preamble="Teach.\n")


def test_trait_schema_has_a_union_per_column_and_a_module_per_value() -> None:
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


def test_trait_prompt_imports_one_module_per_column() -> None:
    prompt = TABLE.prompt({"level": "first year", "grade": "second year"}, "What next?")
    assert prompt.children == (
        Import("second-year"),
        Import("level-first-year"),
        Text("What next?"),
    )
    plan = resolve_prompt(SchemaIndex.build(TABLE.schema, count_words), prompt)
    said = "".join(piece.text for piece in plan.pieces)
    assert said == "Teach.\ngrade: second year\nlevel: first year\nWhat next?"
    assert TABLE.prompt({"grade": " ", "level": "low"}).children == (Import("low"),)


def test_trait_texts_never_become_markup() -> None:
    table = TraitTable("t", {"mood & <state>": {"</union>": "Glad <b>\f", "x": "Sad"}})
    assert table.schema.children == (
        Union((Module("_union", (Text("Glad <b>\n"),)), Module("x", (Text("Sad"),)))),
    )
    assert parse_schema(write_schema(table.schema)) == table.schema
    odd = TraitTable.from_rows("t", [{"{value}": "{column}"}])
    assert odd.columns == {"{value}": {"{column}": "{value}: {column}\n"}}


def test_trait_table_errors() -> None:
    with pytest.raises(UnknownName, match="no column 'age'; there are: grade, level"):
        TABLE.prompt({"age": "1"})
    with pytest.raises(UnknownName, match="no value in 'level' 'mid'; there are: low, high"):
        TABLE.prompt({"level": "mid"})
    with pytest.raises(PMLError, match="name of a schema"):
        _ = TraitTable("", {}).schema


GAME = '''"""The game."""
import units

@decorated
@twice(1)
class Game:
    size = 1 < 2

    class Inner: ...

SPEED = 3
class Map: pass
class Map: again = "]]>"'''


def test_code_schema_has_a_module_per_file() -> None:
    schema = code_schema("s", {"b.c": "int b;\r\n", "a/b.py": "x = 1"}, preamble="Read.\n")
    assert schema.children == (
        Text("Read.\n"),
        Module("b.c", (Text("# b.c\nint b;\n"),)),
        Module("a-b.py", (Text("# a/b.py\nx = 1\n"),)),
    )
    assert parse_schema(write_schema(schema)) == schema


def test_code_schema_nests_top_level_classes() -> None:
    [module] = code_schema("s", [("game.py", GAME)], by="class").children
    assert isinstance(module, Module)
    head, game, between, first, second = module.children
    assert head == Text('# game.py\n"""The game."""\nimport units\n\n')
    assert isinstance(game, Module)
    assert game.name == "Game"
    assert game.children[0].text.startswith("@decorated\n@twice(1)\nclass Game:\n")
    assert between == Text("\nSPEED = 3\n")
    assert [first.name, second.name] == ["Map", "Map-2"]


def test_code_schema_keeps_all_text() -> None:
    folder = Path(ast.__file__).parent
    files = {name: (folder / name).read_text(encoding="utf-8") for name in ("ast.py", "enum.py")}
    for by in ("file", "class"):
        schema = code_schema("s", files, by=by, heading="")
        inner = {
            m.name: "".join(f"<{c.name}/>" for c in m.children if isinstance(c, Module))
            for m in schema.children
            if isinstance(m, Module)
        }
        body = "".join(f"<{name}>{parts}</{name}>" for name, parts in inner.items())
        plan = resolve_prompt(
            SchemaIndex.build(schema, count_words),
            parse_prompt(f'<prompt schema="s">{body}</prompt>'),
        )
        assert "".join(piece.text for piece in plan.pieces) == "".join(files.values())


@pytest.mark.parametrize("text", ["class A(:", "class A: pass\n\0", "", "\f\n# form feed\f"])
def test_files_that_do_not_parse_stay_whole(text: str) -> None:
    schema = code_schema("s", {"a.py": text}, by="class")
    assert parse_schema(write_schema(schema)) == schema


def test_paths_with_the_same_module_name_get_different_names() -> None:
    files = {"a/b.md": "1", "a-b.md": "2", "a b.md": "3"}
    names = [m.name for m in code_schema("s", files).children]
    assert names[1] == "a-b.md"
    assert len(set(names)) == 3
    turned = code_schema("s", reversed(files.items())).children
    assert sorted(m.name for m in turned) == sorted(names)


def test_code_schema_errors() -> None:
    with pytest.raises(InvalidAttribute, match='write "file" or "class"'):
        code_schema("s", {}, by="function")
    with pytest.raises(PMLError, match="name of a schema"):
        code_schema(" ", {})
