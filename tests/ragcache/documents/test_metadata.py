"""Metadata is what JSON gives back as it was."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.documents import SourceDocument, load_sources
from ragcache.documents.metadata import DEPTH, check_metadata
from ragcache.errors import DocumentError, UnstorableMetadata

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | TEXTS
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(PLAIN, lambda v: st.lists(v) | st.dictionaries(TEXTS, v), max_leaves=8)


@given(st.dictionaries(TEXTS, VALUES))
def test_json_gives_back_what_is_taken(metadata: dict[str, Any]) -> None:
    check_metadata(metadata, "a")
    assert json.loads(json.dumps(metadata, allow_nan=False).encode()) == metadata


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), r"metadata\['x'\] is nan"), (-float("inf"), "is -inf"),
        ("\ud800", r"metadata\['x'\] is no text: '\\ud800'"), ({"\udfff": 1}, "the key"),
        ({(1, 2): 3}, r"the key \(1, 2\)"), (Path("\ud800"), "is no text"),
        ({"deep": [0.0, float("nan")]}, r"\['x'\]\['deep'\]\[1\] is nan"),
        (10**3000, "too many digits"),
    ],
)  # fmt: skip
def test_everything_else_is_named(value: Any, said: str) -> None:
    with pytest.raises(UnstorableMetadata, match=f"document 'a': .*{said}"):
        load_sources([SourceDocument("a", "Words.", metadata={"x": value})])


def test_what_json_does_not_know_is_kept_as_text() -> None:
    check_metadata({"on": date(2026, 3, 1), "path": Path("a"), "some": {1}, 7: None}, "a")


def test_values_within_values_end_somewhere() -> None:
    deep: Any = 1
    for _ in range(DEPTH):
        deep = {"x": deep}
    check_metadata(deep, "a")
    with pytest.raises(UnstorableMetadata, match=f"more than {DEPTH} deep"):
        check_metadata({"x": deep}, "a")
    ring: dict[str, Any] = {}
    ring["x"] = ring
    with pytest.raises(UnstorableMetadata, match="deep"):
        check_metadata(ring, "a")


def test_an_address_is_text_too() -> None:
    for uri in ("\0", "\ud800"):
        with pytest.raises(DocumentError, match="its address"):
            load_sources([SourceDocument("a", "Words.", uri)])
