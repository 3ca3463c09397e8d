"""Documents before they are split: what metadata may hold."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.documents import load_sources
from ragcache.documents.source import DEPTH, SourceDocument, check_metadata
from ragcache.errors import UnstorableMetadata

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
def test_accepted_metadata_survives_json(metadata: dict[str, Any]) -> None:
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
def test_other_metadata_is_refused(value: Any, said: str) -> None:
    with pytest.raises(UnstorableMetadata, match=f"document 'a': .*{said}"):
        load_sources([SourceDocument("a", "Words.", metadata={"x": value})])


def test_values_unknown_to_json_become_text() -> None:
    check_metadata({"on": date(2026, 3, 1), "path": Path("a"), "some": {1}, 7: None}, "a")


def test_nesting_is_limited() -> None:
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
