"""Generated schemas of collections."""

from __future__ import annotations

import pytest

import ragcache_schemas as pml

HANDBOOK = pml.collection_schema(
    "handbook", "Use the documents.", 2, "handbook", epilogue="Answer:"
)


def test_collection_schema_children() -> None:
    slots = (pml.Slot("1", "handbook"), pml.Slot("2", "handbook"), pml.Parameter("question", 512))
    children = (pml.Text("Use the documents."), *slots, pml.Text("Answer:"))
    assert pml.Schema("handbook", children) == HANDBOOK
    assert pml.parse_schema(pml.write_schema(HANDBOOK)) == HANDBOOK


def test_document_module_nests_its_chunks() -> None:
    chunks = (pml.Module("c1", (pml.Text("one"),)), pml.Module("c2", (pml.Text("two"),)))
    assert pml.document_module("leave.md", ["one", "two"]) == pml.Module("leave.md", chunks)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(pml.InvalidName, match="module_name"):
        pml.document_module("my leave.md", [])
    with pytest.raises(pml.InvalidAttribute):
        pml.collection_schema("h", "", 0, "c")
    with pytest.raises(pml.UnknownName, match="'handbook'; the collections given are: other"):
        pml.expand_slots(HANDBOOK, {"other": []})


def test_expand_slots_writes_the_members_of_each_slot() -> None:
    documents = (pml.document_module("a", ["x"]), pml.document_module("b", ["y", "z"]))
    expanded = pml.expand_slots(HANDBOOK, {"handbook": documents})
    assert expanded.children[1:3] == (
        pml.Module("slot-1", (pml.Union(documents),)),
        pml.Module("slot-2", (pml.Union(documents),)),
    )
    assert pml.parse_schema(pml.write_schema(expanded)) == expanded


def test_expand_slots_reaches_nested_slots() -> None:
    schema = pml.parse_schema(
        '<schema name="s"><user><union><module name="m"><union slot="1" collection="c"/></module>'
        "</union></user></schema>"
    )
    written = pml.write_schema(pml.expand_slots(schema, {"c": [pml.Module("a")]}))
    assert '<module name="slot-1">' in written
    assert 'collection="c"' not in written
