"""What XML cannot carry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache_schemas import Module, Schema, Text, carried_text, parse_schema, write_schema


@pytest.mark.parametrize(
    ("text", "carried"),
    [
        ("plain\ttext\r\n", "plain\ttext\r\n"),
        ("page one\fpage two", "page one\npage two"),
        ("page one\n\f\npage two\v", "page one\npage two\n"),
        ("\x1b[1mbold\x1b[0m\x00", "[1mbold[0m"),
        ("a\ud800b\ufffe", "a\ufffdb"),
    ],
)
def test_what_becomes_of_it(text: str, carried: str) -> None:
    assert carried_text(text) == carried


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_can_then_be_written_and_read(text: str) -> None:
    schema = Schema("s", (Module("m", (Text(carried_text(text)),)),))
    assert parse_schema(write_schema(schema)) == schema
    assert carried_text(carried_text(text)) == carried_text(text)
