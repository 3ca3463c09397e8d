"""Metadata filters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.errors import InvalidRequest
from ragcache.retrieval import compile_filters

PLAN = {"year": 2024, "team": "ops", "tags": ["quay", "boat"], "draft": True, "note": None}


def holds(filters: Any, attributes: dict[str, Any] = PLAN) -> bool:
    return compile_filters(filters)(attributes)


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"year": 2024},
        {"year": 2024.0},
        {"year": 2024, "team": "ops"},
        {"tags": "boat"},
        {"tags": ["quay", "boat"]},
        {"note": None},
        {"year": {"$eq": 2024}},
        {"year": {"$ne": 2023}},
        {"missing": {"$ne": 1}},
        {"team": {"$in": ["ops", "lab"]}},
        {"tags": {"$in": ["boat"]}},
        {"team": {"$nin": ["lab"]}},
        {"missing": {"$nin": ["lab"]}},
        {"year": {"$gt": 2023.5, "$lte": 2024}},
        {"year": {"$gte": 2024, "$lt": 2025}},
        {"team": {"$gt": "lab"}},
        {"year": {"$exists": True}, "missing": {"$exists": False}},
        {"note": {"$exists": True}},
        {"$and": [{"year": 2024}, {"draft": True}]},
        {"$or": [{"year": 1}, {"team": "ops"}]},
        {"$not": {"year": 1}},
        {"year": {"$not": {"$gt": 2024}}},
        {"missing": {"$not": {"$gt": 2024}}},
        {"$not": {"$or": [{"year": 1}, {"team": "lab"}]}},
    ],
)
def test_matching_filters(filters: dict[str, Any]) -> None:
    assert holds(filters)
    assert filters == {} or not holds({"$not": filters})


@pytest.mark.parametrize(
    "filters",
    [
        {"year": 2023},
        {"year": "2024"},
        {"draft": 1},
        {"missing": None},
        {"tags": "qua"},
        {"tags": ["boat", "quay"]},
        {"tags": {"$ne": "boat"}},
        {"tags": {"$nin": ["boat"]}},
        {"year": {"$in": []}},
        {"year": {"$gt": "2000"}},
        {"draft": {"$gte": 0}},
        {"missing": {"$lt": 5}},
        {"note": {"$lt": 5}},
        {"year": 2024, "team": "lab"},
        {"$and": [{"year": 2024}, {"team": "lab"}]},
        {"$or": [{"year": 1}, {"team": "lab"}]},
        {"year": {"$gte": 2024, "$lt": 2024}},
    ],
)
def test_filters_that_do_not_match(filters: dict[str, Any]) -> None:
    assert not holds(filters)


def nested(depth: int) -> dict[str, Any]:
    filters: dict[str, Any] = {"year": 2024}
    for _ in range(depth):
        filters = {"$not": filters}
    return filters


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ([], "a filter is a mapping"),
        ("year", "a filter is a mapping"),
        ({1: 2}, "keys are texts"),
        ({"year": {"$near": 1}}, r"unknown operator '\$near' in the filter of 'year'"),
        ({"year": {"value": 1}}, "unknown operator 'value'"),
        ({"$xor": []}, r"unknown operator '\$xor'"),
        ({"$and": []}, r"\$and takes a list of filters"),
        ({"$or": {"year": 1}}, r"\$or takes a list of filters"),
        ({"$or": [1]}, "a filter is a mapping"),
        ({"year": {}}, "the filter of 'year' is empty"),
        ({"year": {"$in": "2024"}}, r"\$in of 'year' takes a list"),
        ({"year": {"$gt": None}}, "takes a number or a text"),
        ({"year": {"$gt": True}}, "takes a number or a text"),
        ({"year": {"$exists": 1}}, "takes true or false"),
        ({"year": {"$not": 1}}, r"\$not of 'year' takes operators"),
        ({"year": {"$eq": object()}}, "metadata is kept as JSON"),
        ({"year": {"$in": [{}]}}, "metadata is kept as JSON"),
        (nested(40), "more than 32 deep"),
    ],
)
def test_invalid_filters_are_refused(filters: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        compile_filters(filters)


values = st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2)
attributes = st.dictionaries(st.sampled_from("xyz"), values | st.lists(values, max_size=3))


@given(attributes, st.sampled_from("xyz"), st.lists(values, max_size=3))
def test_in_is_an_or_of_equalities_and_nin_its_opposite(
    held: dict[str, Any], key: str, choices: list[Any]
) -> None:
    either = any(holds({key: {"$eq": choice}}, held) for choice in choices)
    assert holds({key: {"$in": choices}}, held) is either
    assert holds({key: {"$nin": choices}}, held) is not either
