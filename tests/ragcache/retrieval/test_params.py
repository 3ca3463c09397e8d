"""What a search is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache.errors import ConfigurationError, InvalidRequest
from ragcache.retrieval import SearchParams


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"search": "fuzzy"}, "unknown search 'fuzzy'; searches: hybrid, sparse, dense"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"mmr": 1.5}, "between 0 and 1"),
        ({"mmr": -0.1}, "between 0 and 1"),
        ({"candidates": 0}, "candidates is 0"),
        ({"filters": {"$xor": []}}, "unknown operator"),
    ],
)
def test_params_that_cannot_be_used_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        SearchParams(3, **wrong)


def test_at_least_one_module_is_asked_for() -> None:
    with pytest.raises(ConfigurationError, match="k is 0"):
        SearchParams(0)


def test_a_ranking_names_as_many_as_are_asked_for() -> None:
    assert SearchParams(80).depth == 80
    assert SearchParams(3, candidates=20).depth == 20
