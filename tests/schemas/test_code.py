"""Schemas from source code (Prompt Cache, §5.6.1)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pml_trees import count_words

from ragcache_schemas import (
    InvalidAttribute,
    Module,
    PMLError,
    SchemaIndex,
    Text,
    code_schema,
    parse_prompt,
    parse_schema,
    resolve_prompt,
    write_schema,
)

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


def test_every_file_is_a_module_in_its_order() -> None:
    schema = code_schema("s", {"b.c": "int b;\r\n", "a/b.py": "x = 1"}, preamble="Read.\n")
    assert schema.children == (
        Text("Read.\n"),
        Module("b.c", (Text("# b.c\nint b;\n"),)),
        Module("a-b.py", (Text("# a/b.py\nx = 1\n"),)),
    )
    assert parse_schema(write_schema(schema)) == schema


def test_every_top_level_class_is_a_module_in_that_of_its_file() -> None:
    [module] = code_schema("s", [("game.py", GAME)], by="class").children
    assert isinstance(module, Module)
    head, game, between, first, second = module.children
    assert head == Text('# game.py\n"""The game."""\nimport units\n\n')
    assert isinstance(game, Module)
    assert game.name == "Game"
    assert game.children[0].text.startswith("@decorated\n@twice(1)\nclass Game:\n")
    assert between == Text("\nSPEED = 3\n")
    assert [first.name, second.name] == ["Map", "Map-2"]


def test_no_text_is_lost_between_the_parts() -> None:
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
            SchemaIndex.of(schema, count_words), parse_prompt(f'<prompt schema="s">{body}</prompt>')
        )
        assert "".join(piece.text for piece in plan.pieces) == "".join(files.values())


@pytest.mark.parametrize("text", ["class A(:", "class A: pass\n\0", "", "\f\n# form feed\f"])
def test_what_is_no_python_stays_whole(text: str) -> None:
    schema = code_schema("s", {"a.py": text}, by="class")
    assert parse_schema(write_schema(schema)) == schema


def test_paths_that_come_to_one_name_stay_apart() -> None:
    files = {"a/b.md": "1", "a-b.md": "2", "a b.md": "3"}
    names = [m.name for m in code_schema("s", files).children]
    assert names[1] == "a-b.md"
    assert len(set(names)) == 3
    turned = code_schema("s", reversed(files.items())).children
    assert sorted(m.name for m in turned) == sorted(names)


def test_errors() -> None:
    with pytest.raises(InvalidAttribute, match='write "file" or "class"'):
        code_schema("s", {}, by="function")
    with pytest.raises(PMLError, match="name of a schema"):
        code_schema(" ", {})
