"""Sampling from logits in parts: the tokens of one sampler over all columns."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from ragcache.engine.sampler import Sampler, SamplerState
from ragcache.engine.sampling_params import SamplingParams
from ragcache.engine.split_sampler import SplitSampler, likeliest_pairs
from tests.interpreted import interpreted

CPU = torch.device("cpu")
ROWS, COLUMNS = 7, 45
WIDTHS = (16, 16, 13)  # the last rank has fewer


class Joins:
    """All ranks at once: the leader's part is replaced by what all of them have."""

    def __init__(self, logits: Tensor, *, kernels: bool) -> None:
        ends = list(accumulate(WIDTHS, initial=0))
        self.parts = [logits[:, begin:end] for begin, end in pairwise(ends)]
        self.logits, self.calls, self._kernels = logits, list[str](), kernels
        self.sampler = SplitSampler(CPU, COLUMNS, self.gather, self.pairs, kernels=kernels)

    def gather(self, part: Tensor) -> Tensor:
        assert part is self.parts[0]
        self.calls.append("logits")
        return self.logits

    def pairs(self, part: Tensor) -> Tensor:
        assert part is self.parts[0]
        self.calls.append("pairs")
        found = [
            likeliest_pairs(each, WIDTHS[0] * rank, kernels=self._kernels)
            for rank, each in enumerate(self.parts)
        ]
        return torch.cat(found, 1)


def logits_of(seed: int) -> Tensor:
    """With equal logits in two parts, NaN, and rows without a finite one."""
    logits = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))
    logits[0, 3] = logits[0, 20] = 9.0
    logits[1, 40] = 9.0
    logits[2, 17] = torch.nan
    logits[3] = -torch.inf
    logits[4, 44] = torch.inf
    logits[5, :32] = -torch.inf
    return logits.bfloat16()


def states_of(*samplings: SamplingParams) -> list[SamplerState]:
    return [SamplerState.start(samplings[row % len(samplings)], ()) for row in range(ROWS)]


def compare(joins: Joins, states: list[SamplerState], expected: list[SamplerState]) -> None:
    ours = joins.sampler.launch(joins.parts[0], states)
    theirs = Sampler(CPU).launch(joins.logits, expected)
    tokens = [getattr(each, "token", None) for each in ours.wait()]
    assert tokens == [getattr(each, "token", None) for each in theirs.wait()]
    assert torch.equal(ours.inputs, theirs.inputs)


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=interpreted)])
def test_likeliest_tokens_are_chosen_by_pairs(kernels: bool) -> None:
    for seed in range(3):
        joins = Joins(logits_of(seed), kernels=kernels)
        compare(joins, states_of(SamplingParams()), states_of(SamplingParams()))
        assert joins.calls == ["pairs"]


def test_other_rows_are_gathered() -> None:
    joins = Joins(logits_of(5), kernels=False)
    samplings = (SamplingParams(), SamplingParams(temperature=0.8, seed=3))
    compare(joins, states_of(*samplings), states_of(*samplings))
    compare(joins, states_of(SamplingParams(logprobs=2)), states_of(SamplingParams(logprobs=2)))
    greedy = states_of(SamplingParams())
    banned = [{3, 20} if row == 0 else set() for row in range(ROWS)]
    found = joins.sampler.launch(joins.parts[0], greedy, banned).wait()
    assert getattr(found[0], "token", None) not in {3, 20}
    masks = [torch.tensor([2**9, 0], dtype=torch.int32), *[None] * (ROWS - 1)]
    found = joins.sampler.launch(joins.parts[0], greedy, None, masks).wait()
    assert getattr(found[0], "token", None) == 9
    assert joins.calls == ["logits"] * 4


def test_whole_logits_are_not_gathered_again() -> None:
    joins = Joins(logits_of(1), kernels=False)
    joins.sampler.launch(joins.logits, states_of(SamplingParams())).wait()
    joins.sampler.launch(joins.parts[0], []).wait()
    assert not joins.calls
