"""The schema that a collection stands for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ragcache.pipeline import members


def test_documents_whose_names_are_alike_get_modules_of_their_own() -> None:
    rows: list[Any] = [
        SimpleNamespace(document=document, text=text)
        for document, text in (("a/b.md", "1"), ("a-b.md", "2"), ("a/b.md", "3"))
    ]
    first, second = members(rows)
    assert second.name == "a-b.md"
    assert first.name.startswith("a-b.md-")
    assert [len(first.children), len(second.children)] == [2, 1]
    assert members(rows) == members(rows)
