"""Options of a request: by their plain names, and refused before anything is computed."""

from __future__ import annotations

from typing import Any

import pytest

from ragcache.engine import Context, SamplingParams
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel
from ragcache.pipeline import Generation
from ragcache.structured import Grammar

CONTEXT = Context((), (1, 2), (0, 1), 2)


def test_options_by_their_plain_names() -> None:
    made = Generation.of(temperature=0.5, seed=7, stop="\n", n=2, max_new_tokens=9, top_p=None)
    assert made == Generation(
        SamplingParams(temperature=0.5, seed=7), max_new_tokens=9, stop=("\n",), n=2
    )
    assert Generation.of() == Generation()
    assert Generation.of(stop=["a", "b"]).stop == ("a", "b")


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown option 'heat'; options: .*temperature"):
        Generation.of(heat=1)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"n": 0},
        {"min_new_tokens": 9, "max_new_tokens": 8},
        {"timeout": 0.0},
        {"stop": ["x"] * 17},
        {"stop": [""]},
        {"temperature": -1},
        {"top_p": 0},
    ],
)
def test_options_out_of_their_range_are_refused(
    model: LoadedModel, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest):
        Generation.of(**options).request(CONTEXT, model, 4, "local")


def test_the_default_is_greedy_and_as_long_as_the_setting(model: LoadedModel) -> None:
    request = Generation().request(CONTEXT, model, 4, "local")
    assert (request.max_new_tokens, request.sampling, request.n) == (4, SamplingParams(), 1)
    assert request.stop_ids == model.stop_ids
    assert Generation(max_new_tokens=7).request(CONTEXT, model, 4, "local").max_new_tokens == 7
    assert (request.tenant, Generation(share=False).request(CONTEXT, model, 4, "x").tenant) == (
        "local",
        None,
    )


def test_grammars_by_their_plain_names() -> None:
    schema = {"type": "integer"}
    assert Generation.of(json_schema=schema).grammar == Grammar.json_schema(schema)
    assert Generation.of(json_object=True).grammar == Grammar.json_object()
    assert Generation.of(regex="a+").grammar == Grammar.regex("a+")
    assert Generation.of(ebnf='root ::= "a"').grammar == Grammar.ebnf('root ::= "a"')
    assert Generation.of(grammar=Grammar.regex("a")).grammar == Grammar.regex("a")
    assert Generation.of(json_object=False, regex=None) == Generation()


@pytest.mark.parametrize(
    "options",
    [
        {"json_object": True, "regex": "a"},
        {"grammar": Grammar.regex("a"), "regex": "a"},
        {"json_schema": "{"},
        {"regex": ""},
    ],
)
def test_one_grammar_and_a_sound_one(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Generation.of(**options)


def test_a_grammar_is_compiled_with_the_request(model: LoadedModel) -> None:
    made = Generation.of(regex="[ab]+").request(CONTEXT, model, 4, "local").constraint
    assert made is not None
    assert made() is not made()
    assert Generation().request(CONTEXT, model, 4, "local").constraint is None
    with pytest.raises(InvalidRequest, match="the regex cannot be compiled"):
        Generation.of(regex="[a").request(CONTEXT, model, 4, "local")
