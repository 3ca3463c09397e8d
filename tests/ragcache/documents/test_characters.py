"""Control characters in documents."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.documents import Document

from ragcache.documents.source import SourceDocument, load_sources
from ragcache.errors import UnreadableDocument


def test_control_characters_are_left_out_whatever_the_source(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ftwo\x07", encoding="utf-8")
    sources = [tmp_path, SourceDocument("b", "b\x00"), Document("c\x1b[0m", id="c")]
    loaded = load_sources(sources)
    assert [d.text for d in loaded.documents] == ["one\ntwo", "b", "c[0m"]
    clean = SourceDocument("b", "b")
    assert load_sources([clean]).documents[0] is clean


def test_a_document_of_control_characters_alone_is_unreadable() -> None:
    with pytest.raises(UnreadableDocument, match="control characters and nothing else"):
        load_sources([SourceDocument("b", "\x00\x01")])
