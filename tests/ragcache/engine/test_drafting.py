"""Answers with drafts are the answers without them, and the drafts that pay are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragcache.engine import (
    Context,
    EncodeJob,
    EngineConfig,
    Request,
    RequestOutput,
    SamplingParams,
    Segment,
    encode,
)
from ragcache.engine.drafter import LEAST_RATE, MATCH, Drafter
from ragcache.engine.request import ComputedTokens, RepetitionRule
from ragcache.models import CausalLM, wrap_causal
from ragcache.states import KVStates
from tests.ragcache.engine.delayed_runner import delayed_core
from tests.ragcache.engine.stepped_engine import (
    SteppedCore,
    assert_all_blocks_free,
    config_of,
    core_of,
    plain_context,
)
from tests.ragcache.engine.test_core_answers import words
from tests.tiny_models import random_tokens, tiny_model

MakeCore = Callable[..., SteppedCore]
LENGTH = 40


@pytest.fixture(scope="module")
def causal() -> CausalLM:
    return wrap_causal(tiny_model("llama", initializer_range=0.2))


def drafting(make: MakeCore, causal: CausalLM, tokens: int = 6, **limits: int) -> SteppedCore:
    return make(causal, replace(config_of(causal, **limits), draft_tokens=tokens))


def quoted(causal: CausalLM, seed: int, wrong: int = 12, **options: object) -> Request:
    """A request over a module whose tokens are said to be its answer's, but every `wrong`-th. The
    states are of other tokens, so the answer does not depend on it."""
    [states] = encode(causal, [EncodeJob(random_tokens(LENGTH + 3, seed=seed))])
    own = random_tokens(4, seed=seed + 100)
    places = tuple(range(states.length, states.length + len(own)))
    context = Context((Segment(states, 0),), tuple(own), places, places[-1] + 1)
    request = Request(context, LENGTH, **options)  # type: ignore[arg-type]
    [output] = core_of(causal).run(request)
    answer = [*output.token_ids, *own[:3]][: LENGTH + 3]
    said = [7 if at % wrong == wrong - 1 else token for at, token in enumerate(answer)]
    said += random_tokens(LENGTH + 3 - len(said), seed=5)
    segment = Segment(states, 0, token_ids=said)
    return replace(request, context=replace(context, segments=(segment,)))


class AnyToken:
    """A constraint that allows every token."""

    finished = False

    def mask(self) -> torch.Tensor:
        return torch.full((8,), -1, dtype=torch.int32)

    def accept(self, token: int) -> None:
        """Keeps nothing."""


SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, seed=3, logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=20, seed=4),
]


@pytest.mark.parametrize("make", [core_of, delayed_core])
@pytest.mark.parametrize(
    "sampling",
    [SAMPLINGS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in SAMPLINGS[1:])],
)
def test_drafts_change_no_answer(
    causal: CausalLM, make: MakeCore, sampling: SamplingParams
) -> None:
    requests = [quoted(causal, seed, sampling=sampling) for seed in range(3)]
    expected = [core_of(causal).run(request)[0] for request in requests]
    core = drafting(make, causal)
    found = core.run(*requests)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        for mine, theirs in zip(one.choices[0].chosen, other.choices[0].chosen, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    stats = core.stats
    assert stats.accepted_tokens > LENGTH, "most tokens were guessed"
    assert stats.steps < 0.6 * LENGTH
    assert stats.decoded_tokens == stats.drafted_tokens - stats.accepted_tokens + 3 * (LENGTH - 1)
    assert_all_blocks_free(core)


@pytest.mark.slow
@pytest.mark.parametrize("make", [core_of, delayed_core])
def test_an_answer_ends_within_a_draft(causal: CausalLM, make: MakeCore) -> None:
    """At a stop token, a stop string, a limit, or a pattern that repeats."""
    request = quoted(causal, 1, wrong=99)
    [whole] = core_of(causal).run(request)
    for at in (9, 10, 11, 12):
        token = whole.token_ids[at]
        ends = [
            replace(request, stop_ids=frozenset({token})),
            replace(request, stop=(f"word{token} ",), text=words),
            replace(request, max_tokens=at),
            replace(request, repetition=RepetitionRule(2, 3)),
            replace(request, sampling=SamplingParams(logprobs=1), stop_ids=frozenset({token})),
        ]
        for each in ends:
            [expected] = core_of(causal).run(each)[0].choices
            core = drafting(make, causal)
            [choice] = core.run(each)[0].choices
            assert (choice.token_ids, choice.text) == (expected.token_ids, expected.text)
            assert choice.finish_reason == expected.finish_reason
            assert choice.stopped_by == expected.stopped_by
            assert len(choice.chosen) == len(expected.chosen)
            assert (choice.ending is None) == (expected.ending is None)
            assert_all_blocks_free(core)


@pytest.mark.slow
@pytest.mark.parametrize("make", [core_of, delayed_core])
def test_drafts_need_no_room(causal: CausalLM, make: MakeCore) -> None:
    """In a pool that preempts, beside long prompts, and with several answers to a request."""
    requests = [quoted(causal, seed) for seed in range(4)]
    requests[2] = replace(requests[2], n=2, sampling=SamplingParams(temperature=0.5, seed=1))
    requests.append(Request(plain_context(random_tokens(50, seed=9)), 6))
    expected = [tokens_of(core_of(causal).run(request)[0]) for request in requests]
    for blocks in (24, 80):
        core = drafting(make, causal, blocks=blocks, step_tokens=12, prefill_tokens=12)
        assert [tokens_of(output) for output in core.run(*requests)] == expected
        assert core.stats.accepted_tokens > 20
        assert (core.stats.preempted > 0) == (blocks == 24)
        assert_all_blocks_free(core)


def tokens_of(output: RequestOutput) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in output.choices]


def test_kept_states_are_of_tokens_that_count(causal: CausalLM) -> None:
    kept: list[tuple[list[int], KVStates]] = []

    def keep(computed: ComputedTokens) -> None:
        tokens = list(computed.token_ids)
        kept.append((tokens, computed.read(0, len(tokens))))

    request = replace(quoted(causal, 2), keep=keep, max_tokens=23)
    [plain] = core_of(causal).run(request)
    [drafted] = drafting(core_of, causal).run(request)
    assert plain.token_ids == drafted.token_ids
    [(tokens, states), (others, drafts)] = kept
    most = min(len(tokens), len(others))
    assert most >= len(tokens) - 1
    assert tokens[:most] == others[:most]
    torch.testing.assert_close(states.keys[:, :, :most], drafts.keys[:, :, :most])


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": SamplingParams(frequency_penalty=0.1)},
        {"min_tokens": LENGTH},
        {"constraint": AnyToken},
    ],
)
def test_tokens_that_depend_on_each_other_are_not_drafted(
    causal: CausalLM, options: dict[str, Any]
) -> None:
    request = replace(quoted(causal, 1, wrong=99), **options)
    core = drafting(core_of, causal)
    [found] = core.run(request)
    assert found.token_ids == core_of(causal).run(request)[0].token_ids
    assert core.stats.drafted_tokens == 0


def test_many_requests_are_not_drafted(causal: CausalLM) -> None:
    core = drafting(core_of, causal)
    core.run(*[quoted(causal, 1, wrong=99)] * (EngineConfig().draft_requests + 1))
    assert core.stats.drafted_tokens == 0


def test_a_cpu_drafts_for_one_request_alone() -> None:
    assert EngineConfig.for_device(torch.device("cpu")).draft_requests == 1


def drafter_of(known: Sequence[int], tokens: Sequence[int]) -> Drafter:
    drafter = Drafter(known, 100)
    drafter.follow(tokens)
    return drafter


def test_the_longest_match_is_drafted() -> None:
    known = [1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 1, 2, 3, 4, 70, 71, 72, 8, 3, 4, 80]
    assert drafter_of(known, [9, 2, 3, 4]).propose(1) == [60]
    assert drafter_of(known, [5, 1, 2, 3, 4]).propose(3) == [70, 71, 72], "the last of equals"
    assert drafter_of(known, [5, 3, 4]).propose(3) == [], "two tokens are no match"
    assert drafter_of([], [1, 2, 3, 9, 1, 2, 3]).propose(2) == [9, 1], "the answer itself"
    assert drafter_of([], [1, 2]).propose(9) == []


def test_drafts_follow_what_was_right() -> None:
    """They get longer while guesses are right, and end when most are wrong."""
    known = list(range(60))
    drafter = Drafter(known, 200)
    drafter.follow(known[:3])
    lengths = []
    for end in range(4, 40):
        lengths.append(len(drafter.propose(16)))
        drafter.follow(known[:end])
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (3, 16)
    tokens, misses = known[:39], 0
    while drafter.expects:
        tokens = [*tokens, 255 + misses, *known[5:8]]
        drafter.follow(tokens)
        misses += 1
        assert misses < 10
    assert drafter.propose(16) == []
    drafter.follow([*tokens, *known[8:20]])
    assert len(drafter.propose(16)) > 1, "a quotation is drafted again"


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(0, 2), min_size=1, max_size=60),
    st.integers(1, 9),
)
def test_a_draft_stands_behind_an_equal_text(
    known: list[int], tokens: list[int], portion: int
) -> None:
    drafter = Drafter(known, len(tokens))
    for end in range(1, len(tokens) + 1, portion):
        drafter.follow(tokens[:end])
        draft = drafter.propose(5)
        text = [*known, *tokens[:end]]
        places = [
            at
            for at in range(MATCH, len(text))
            if text[at - MATCH : at] == text[-MATCH:] and text[at : at + len(draft)] == draft
        ]
        assert places or not draft
        assert bool(draft) == drafter.expects
        assert drafter.rate >= LEAST_RATE or not draft
