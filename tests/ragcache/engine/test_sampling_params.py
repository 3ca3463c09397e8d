"""Settings of a sequence: what is refused, and how."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ragcache.engine.sampling_params import SamplingParams
from ragcache.errors import InvalidRequest, RequestError

ALLOWED: dict[str, list[Any]] = {
    "temperature": [0, 0.7, 100],
    "top_k": [0, 1, 10**6],
    "top_p": [1e-9, 1, 1.0],
    "min_p": [0, 0.05, 1],
    "repetition_penalty": [0.01, 1, 1.3, 100],
    "frequency_penalty": [-2, 0.0, 2],
    "presence_penalty": [-2.0, 2],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "logprobs": [None, 0, 20],
}
REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, 101, math.nan, math.inf, True, "1", None, 10**400],
    "top_k": [-1, 1.0, True, 2**31],
    "top_p": [0, 1.01, math.nan, False],
    "min_p": [-1e-9, 1.5, math.nan],
    "repetition_penalty": [0, -1, math.inf, True],
    "frequency_penalty": [-2.1, 2.1, math.nan],
    "presence_penalty": [3, -math.inf],
    "seed": [2**63, 0.5, True, "7"],
    "logprobs": [-1, 21, True, 1.0],
}


def pairs(values: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, each in values.items() for value in each]


@pytest.mark.parametrize(("name", "value"), pairs(ALLOWED))
def test_values_within_the_range_are_kept(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), pairs(REFUSED))
def test_values_outside_the_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{name} is ") as raised:
        SamplingParams(**{name: value})
    assert repr(value)[:20] in str(raised.value)
    assert isinstance(raised.value, RequestError)
    assert isinstance(raised.value, ValueError)


def test_a_message_names_the_range() -> None:
    with pytest.raises(InvalidRequest, match=r"top_p is 0; .* number above 0 and at most 1$"):
        SamplingParams(top_p=0)
    with pytest.raises(InvalidRequest, match=r"logprobs is 21; .* integer from 0 to 20$"):
        SamplingParams(logprobs=21)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidRequest) as raised:
        SamplingParams(temperature="x" * 10_000)  # type: ignore[arg-type]
    assert len(str(raised.value)) < 200


def test_the_default_is_greedy_and_changes_no_logits() -> None:
    plain = SamplingParams()
    assert (plain.greedy, plain.penalized, plain.filtered) == (True, False, False)
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=0.01).greedy


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_each_penalty_is_noticed(name: str) -> None:
    assert SamplingParams(**{name: 0.5}).penalized  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("top_p", 0.9), ("min_p", 0.1)])
def test_each_filter_is_noticed(name: str, value: float) -> None:
    assert SamplingParams(**{name: value}).filtered  # type: ignore[arg-type]
