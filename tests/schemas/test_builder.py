"""Generated schemas of collections."""

from __future__ import annotations

import pytest

from ragcache_schemas import (
    InvalidAttribute,
    InvalidName,
    Module,
    Parameter,
    Schema,
    Slot,
    Text,
    Union,
    UnknownName,
    collection_schema,
    document_module,
    expand_slots,
    lay_out,
    parse_schema,
    write_schema,
)
from tests.schemas.pml_trees import count_words

HANDBOOK = collection_schema("handbook", "Use the documents.", 2, "handbook", epilogue="Answer:")


def test_collection_schema_children() -> None:
    slots = (Slot("1", "handbook"), Slot("2", "handbook"), Parameter("question", 512))
    children = (Text("Use the documents."), *slots, Text("Answer:"))
    assert Schema("handbook", children) == HANDBOOK
    assert parse_schema(write_schema(HANDBOOK)) == HANDBOOK


def test_document_module_nests_its_chunks() -> None:
    chunks = (Module("c1", (Text("one"),)), Module("c2", (Text("two"),)))
    assert document_module("leave.md", ["one", "two"]) == Module("leave.md", chunks)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InvalidName, match="module_name"):
        document_module("my leave.md", [])
    with pytest.raises(InvalidAttribute):
        collection_schema("h", "", 0, "c")
    with pytest.raises(UnknownName, match="'handbook'; the collections given are: other"):
        expand_slots(HANDBOOK, {"other": []})


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


def test_expanded_slots_keep_canonical_positions() -> None:
    documents = (document_module("a", ["x y"]), document_module("b", ["z"]))
    slots = lay_out(HANDBOOK, count_words, "compact")
    written = lay_out(expand_slots(HANDBOOK, {"handbook": documents}), count_words, "compact")
    for path in ("#0", "slot-1", "slot-2", "@question", "#1"):
        assert slots[path].start == written[path].start
    assert written["slot-1/a"].start == written["slot-2/b"].start == 3
