"""Schemas as trees of plain values."""

from __future__ import annotations

from ragcache_api.schema_tree import MOST, tree_to_dict
from ragcache_schemas import Module, Schema, Text, Union, lay_out


def words(text: str) -> int:
    return len(text.split())


def test_what_is_not_listed_still_counts() -> None:
    members = tuple(
        Module(f"m{n}", (Text("word " * (900 if n == MOST + 6 else 2)),)) for n in range(MOST + 7)
    )
    schema = Schema("s", (Text("one two three"), Module("slot", (Union(members),))))
    told = tree_to_dict(schema, lay_out(schema, words, "compact"))
    [text, slot] = told["children"]
    [union] = slot["children"]
    assert union["children"][-1] == {"name": "7 more", "kind": "rest", "tokens": 0, "children": []}
    assert len(union["children"]) == MOST + 1
    assert union["tokens"] == slot["tokens"] == 900
    assert told["tokens"] == text["tokens"] + 900
    assert text == {"name": "one two three", "kind": "text", "tokens": 3, "children": []}
