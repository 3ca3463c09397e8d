"""Answers that repeat one pattern end, at the first token that completes the repetition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragcache.engine import Request
from ragcache.engine.request import RepetitionRule
from ragcache.engine.sampling_params import SamplingParams
from ragcache.engine.sequence import RepetitionDetector
from ragcache.errors import InvalidRequest
from ragcache.models import LoadedModel
from ragcache.params import GenerationParams
from ragcache.pipeline.submit import READER_REPETITIONS, request_maker
from tests.ragcache.engine.stepped_engine import SteppedCore, plain_context

RULES = st.builds(RepetitionRule, limit=st.integers(2, 5), period=st.integers(1, 6))


def repeats(tokens: list[int], rule: RepetitionRule) -> bool:
    """Whether the last tokens are one pattern, `limit` times: the definition, word for word."""
    for period in range(1, rule.period + 1):
        run = tokens[-period * rule.limit :]
        if len(run) == period * rule.limit and run == run[:period] * rule.limit:
            return True
    return False


@given(RULES, st.lists(st.integers(0, 2), max_size=60))
def test_repetitions_are_found_where_they_end(rule: RepetitionRule, tokens: list[int]) -> None:
    detector = RepetitionDetector(rule)
    found = [detector.push(token) for token in tokens]
    assert found == [repeats(tokens[: end + 1], rule) for end in range(len(tokens))]


@given(RULES, st.lists(st.integers(0, 1), max_size=20), st.data())
def test_a_loop_ends_whatever_came_before(
    rule: RepetitionRule, before: list[int], data: st.DataObject
) -> None:
    size = st.integers(0, 1)
    pattern = data.draw(st.lists(size, min_size=1, max_size=rule.period))
    detector = RepetitionDetector(rule)
    found = [detector.push(token) for token in before + pattern * rule.limit]
    assert found[-1] or any(found[len(before) :])


@pytest.mark.parametrize("min_tokens", [0, 12])
def test_the_engine_ends_an_answer_that_loops(core: SteppedCore, min_tokens: int) -> None:
    rule = RepetitionRule(limit=4, period=3)
    sampling = SamplingParams(frequency_penalty=-2.0)  # a token becomes likelier with each use
    request = Request(
        plain_context(range(1, 8)), 40, sampling=sampling, repetition=rule, min_tokens=min_tokens
    )
    [output] = core.run(request)
    [choice] = output.choices
    tokens = list(choice.token_ids)
    assert choice.finish_reason == "repetition"
    assert choice.stopped_by is None
    ends = [end for end in range(1, 40) if repeats(tokens[:end], rule)]
    assert len(tokens) == max(min_tokens, ends[0])
    free = Request(plain_context(range(1, 8)), 40, sampling=sampling)
    [whole] = core.run(free)
    assert whole.finish_reason == "length"
    assert list(whole.token_ids[: len(tokens)]) == tokens


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, READER_REPETITIONS),
        ({"repetition_limit": 0}, None),
        ({"repetition_limit": 3, "repetition_period": 5}, 3),
        ({"ignore_eos": True}, None),
    ],
)
def test_the_embedded_reader_has_a_limit(
    quick_reader: LoadedModel, options: dict[str, int], limit: int | None
) -> None:
    made = request_maker(GenerationParams(**options), quick_reader, 4, None)
    rule = made(plain_context(range(1, 4))).repetition
    assert (None if rule is None else rule.limit) == limit
    assert rule is None or rule.period == options.get("repetition_period", 32)


def test_one_repetition_is_none() -> None:
    with pytest.raises(InvalidRequest, match="at least 2 times"):
        GenerationParams(repetition_limit=1)
