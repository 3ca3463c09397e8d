"""Constraints: masks beside penalties and sampling, their state over pre-emption, their errors."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ragcache.engine import Request, RequestOutput, SamplingParams
from ragcache.engine.constraint import penalties, penalty_table
from ragcache.engine.sampler import SampledToken, SamplerState
from ragcache.errors import ConstraintFailed, UnusableLogits
from ragcache.models import CausalLM
from tests.ragcache.engine.stepped_engine import (
    SteppedCore,
    assert_all_blocks_free,
    config_of,
    core_of,
    plain_context,
    sample_tokens,
)
from tests.tiny_models import DEVICE, VOCABULARY, random_tokens

STOP = 5
PROMPT = random_tokens(9, seed=2)
Tokens = tuple[int, ...]


def packed(tokens: Collection[int], width: int = VOCABULARY) -> Tensor:
    """The mask that allows these tokens, int32 [ceil(width / 32)]."""
    words = [0] * -(-width // 32)
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    signed = [word - (1 << 32) if word >= 1 << 31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32, device="cpu")


class Rising:
    """Every token is above the last, by at most `step`. Remembers what it was told."""

    def __init__(self, step: int = 10, length: int | None = None) -> None:
        self.step, self.length = step, length
        self.taken: list[int] = []

    def mask(self) -> Tensor:
        low = self.taken[-1] + 1 if self.taken else 20
        return packed(range(low, low + self.step))

    def accept(self, token: int) -> None:
        assert token != STOP
        self.taken.append(token)

    @property
    def finished(self) -> bool:
        return len(self.taken) == self.length


class Either(Rising):
    """Allows a token or the end of the answer."""

    def mask(self) -> Tensor:
        return packed((STOP, 40))


class Broken(Rising):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "make":
            raise RuntimeError("broken")

    def mask(self) -> Tensor:
        if self.where == "mask" and len(self.taken) == 2:
            raise RuntimeError("broken")
        return super().mask()

    def accept(self, token: int) -> None:
        if self.where == "accept" and len(self.taken) == 2:
            raise RuntimeError("broken")
        super().accept(token)


def one(core: SteppedCore, tokens: int = 8, **changes: object) -> RequestOutput:
    [completion] = core.run(Request(plain_context(PROMPT), tokens, **changes))  # type: ignore[arg-type]
    return completion


def rises(tokens: Tokens) -> bool:
    return 20 <= tokens[0] < 30 and all(0 < b - a <= 10 for a, b in pairwise(tokens))


@given(st.sets(st.integers(0, 95)))
def test_a_packed_mask_names_the_tokens_that_are_allowed(tokens: set[int]) -> None:
    mask = packed(tokens, 96)[None]
    assert (
        set((penalties(mask, penalty_table(mask.device))[0] == 0).nonzero().flatten().tolist())
        == tokens
    )


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.5, seed=3, top_k=5)]
)
def test_every_token_is_one_that_the_constraint_allows(
    core: SteppedCore, sampling: SamplingParams
) -> None:
    completion = one(core, sampling=sampling, constraint=Rising, n=3 if sampling.seed else 1)
    for choice in completion.choices:
        assert rises(choice.token_ids)
        assert len(choice.token_ids) == 8
    assert_all_blocks_free(core)


def test_a_row_with_no_allowed_token_fails_alone(causal: CausalLM) -> None:
    logits = torch.zeros(2, VOCABULARY, device=DEVICE)
    states = [SamplerState.start(SamplingParams(), ()) for _ in range(2)]
    first, second = sample_tokens(logits, states, [(), ()], [packed(()), None])
    assert isinstance(first, UnusableLogits)
    assert isinstance(second, SampledToken)


class Ending(Rising):
    """Allows the end of the answer, or nothing at all."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def mask(self) -> Tensor:
        return packed(self.tokens)


@pytest.mark.parametrize(
    ("tokens", "options"), [((), {}), ((STOP,), {"min_tokens": 2}), ((STOP,), {"ignore_eos": True})]
)
def test_a_constraint_without_a_token_is_the_requests_error(
    core: SteppedCore, tokens: Tokens, options: dict[str, int]
) -> None:
    with pytest.raises(ConstraintFailed, match="after 0 tokens the request's constraint allows no"):
        one(core, stop_ids=frozenset({STOP}), constraint=lambda: Ending(*tokens), **options)
    assert_all_blocks_free(core)


def test_a_finished_constraint_ends_the_answer(core: SteppedCore) -> None:
    [choice] = one(core, constraint=lambda: Rising(length=3), min_tokens=6).choices
    assert (len(choice.token_ids), choice.finish_reason, choice.stopped_by) == (3, "stop", None)


def test_a_stop_token_ends_where_the_constraint_allows_it(core: SteppedCore) -> None:
    stops = frozenset({STOP})
    sampling = SamplingParams(temperature=2, seed=1)
    completion = one(core, 40, stop_ids=stops, sampling=sampling, constraint=Either, n=4)
    for choice in completion.choices:
        assert set(choice.token_ids) <= {40}
        assert choice.stopped_by == STOP
    [late] = one(core, 9, stop_ids=stops, min_tokens=9, constraint=Either).choices
    assert late.token_ids == (40,) * 9
    [endless] = one(core, 9, stop_ids=stops, ignore_eos=True, constraint=Either).choices
    assert endless.token_ids == (40,) * 9


@pytest.mark.parametrize("where", ["make", "mask", "accept"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_constraint_that_fails_ends_its_own_request_only(
    core: SteppedCore, where: str, n: int
) -> None:
    broken = core.submit(Request(plain_context(PROMPT), 8, n=n, constraint=lambda: Broken(where)))
    fine = core.submit(Request(plain_context(PROMPT), 8, constraint=Rising))
    core.drain()
    assert rises(fine.result(0).token_ids)
    with pytest.raises(ConstraintFailed, match="broken") as caught:
        broken.result(0)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert_all_blocks_free(core)


def test_constraint_continues_after_preemption(causal: CausalLM) -> None:
    made: list[Rising] = []

    def make() -> Rising:
        made.append(Rising())
        return made[-1]

    def ask(core: SteppedCore) -> list[RequestOutput]:
        sampling = SamplingParams(temperature=1.0, seed=4)
        requests = [
            Request(
                plain_context(random_tokens(6, seed=n)), 12, sampling=sampling, n=2, constraint=make
            )
            for n in range(3)
        ]
        return core.run(*requests)

    roomy = [each.choices for each in ask(core_of(causal))]
    assert len(made) == 6  # one for each answer
    tight = core_of(causal, config_of(causal, blocks=9))
    narrow = [each.choices for each in ask(tight)]
    assert tight.stats.preempted > 0
    assert narrow == roomy
    assert len(made) == 12
    assert sorted(tuple(each.taken) for each in made[6:]) == sorted(
        choice.token_ids for choices in narrow for choice in choices
    )
    assert_all_blocks_free(tight)
