"""JSON as the service writes it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from ragcache_api.http.compact import CompactResponse, compact


@dataclass(frozen=True, slots=True)
class Told:
    text: str
    score: float
    tags: tuple[str, ...] = ()


def test_dataclasses_are_objects_and_characters_stay() -> None:
    told = compact({"a": Told("höfn\u2028", 0.5, ("x",))})
    assert told == '{"a":{"text":"höfn\u2028","score":0.5,"tags":["x"]}}'.encode()


def test_numbers_that_json_has_not_are_null() -> None:
    numbers = [math.nan, math.inf, -math.inf, 1.0, Told("", math.nan)]
    assert json.loads(compact(numbers)) == [
        None,
        None,
        None,
        1.0,
        {"text": "", "score": None, "tags": []},
    ]


def test_responses_are_written_so() -> None:
    response = CompactResponse({"score": math.inf})
    assert (response.body, response.media_type) == (b'{"score":null}', "application/json")
