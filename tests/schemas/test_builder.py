"""Schemas generated from collections."""

from __future__ import annotations

import pytest
from pml_trees import count_words

from ragcache_schemas import (
    InvalidAttribute,
    InvalidName,
    Module,
    Parameter,
    PMLError,
    Schema,
    Slot,
    Text,
    Union,
    UnknownName,
    collection_schema,
    document_module,
    expand,
    lay_out,
    parse_schema,
    write_schema,
)

HANDBOOK = collection_schema("handbook", "Use the documents.", 2, "handbook", epilogue="Answer:")


def test_a_collection_is_preamble_slots_and_question() -> None:
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


def test_the_size_of_a_collection_does_not_matter() -> None:
    assert len(write_schema(collection_schema("h", "", 4, "c"))) < 400


def test_a_document_is_a_module_of_modules() -> None:
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


def test_document_names_must_be_names() -> None:
    with pytest.raises(InvalidName, match="module_name"):
        document_module("my leave.md", [])
    with pytest.raises(PMLError):
        document_module("leave", ["a", ("c1", "b")])


def test_slots_are_one_or_more() -> None:
    with pytest.raises(InvalidAttribute):
        collection_schema("h", "", 0, "c")


def test_expanding_writes_the_members_of_each_slot() -> None:
    documents = (document_module("a", ["x"]), document_module("b", ["y", "z"]))
    expanded = expand(HANDBOOK, {"handbook": documents})
    assert expanded.children[1:3] == (
        Module("slot-1", (Union(documents),)),
        Module("slot-2", (Union(documents),)),
    )
    assert parse_schema(write_schema(expanded)) == expanded


def test_expanding_reaches_slots_anywhere() -> None:
    schema = parse_schema(
        '<schema name="s"><user><union><module name="m"><union slot="1" collection="c"/></module>'
        "</union></user></schema>"
    )
    written = write_schema(expand(schema, {"c": [Module("a")]}))
    assert '<module name="slot-1">' in written
    assert 'collection="c"' not in written


def test_expanding_needs_every_collection() -> None:
    with pytest.raises(UnknownName, match="'handbook'; the collections given are: other"):
        expand(HANDBOOK, {"other": []})


def test_slots_and_their_written_form_have_the_same_canonical_places() -> None:
    documents = (document_module("a", ["x y"]), document_module("b", ["z"]))
    slots = lay_out(HANDBOOK, count_words, "compact")
    written = lay_out(expand(HANDBOOK, {"handbook": documents}), count_words, "compact")
    for path in ("#0", "slot-1", "slot-2", "@question", "#1"):
        assert slots[path].start == written[path].start
    assert written["slot-1/a"].start == written["slot-2/b"].start == 3
