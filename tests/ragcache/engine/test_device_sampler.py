"""Kernels sample what PyTorch's operations sample. They run in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.engine.sampler import Sampler, SamplerState
from ragcache.engine.sampling import SHARES, draw, keep_likeliest
from ragcache.engine.sampling_params import SamplingParams
from ragcache.errors import UnusableLogits
from tests.conftest import scaled
from tests.interpreted import interpreted
from tests.ragcache.engine.stepped_engine import sample_tokens

pytestmark = interpreted

V = 40
CPU = torch.device("cpu")
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.3, 1, 2.5]),
    top_k=st.sampled_from([0, 1, 5, V, V + 1]),
    top_p=st.sampled_from([1, 1, 0.01, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0, 0, 0.05, 0.5, 1]),
    repetition_penalty=st.sampled_from([1, 1, 1.3]),
    frequency_penalty=st.sampled_from([0, 0, 0.5]),
    presence_penalty=st.sampled_from([0, 0, 1.5]),
    seed=st.integers(0, 5),
    logprobs=st.sampled_from([None, None, 0, 3]),
    first_logprobs=st.booleans(),
)
SHARE = st.sampled_from([0, 0, 1, 2, 3, 7, 2**23, 2**30 - 64, 2**38, SHARES // 3])


def drawn(shares: Tensor, samplings: Sequence[SamplingParams], uniforms: list[float]) -> list[int]:
    """What the kernel draws."""
    from ragcache.engine.sampling_kernels import draw_kernel

    tokens = torch.full((len(shares),), -1)
    keys = shares.float().view(torch.int32)
    draw_kernel[(len(shares),)](
        keys,
        torch.tensor([s.top_k for s in samplings]),
        torch.tensor([s.top_p for s in samplings], dtype=torch.float64),
        torch.tensor([s.min_p for s in samplings], dtype=torch.float64),
        torch.tensor(uniforms, dtype=torch.float64),
        tokens,
        shares.shape[-1],
        BLOCK=16,
    )
    return tokens.tolist()


@pytest.mark.slow
@settings(max_examples=scaled(100))
@given(
    shares=st.lists(SHARE, min_size=1, max_size=40).filter(any),
    sampling=SAMPLINGS,
    uniforms=st.lists(st.integers(0, 2**48 - 1), min_size=2, max_size=2),
)
def test_the_kernel_draws_what_the_definition_draws(
    shares: list[int], sampling: SamplingParams, uniforms: list[int]
) -> None:
    rows = torch.tensor([shares] * 2).float().long()  # as float32 holds them
    numbers = [uniform / 2**48 for uniform in uniforms]
    expected = draw(keep_likeliest(rows, [sampling] * 2), numbers)
    assert drawn(rows, [sampling] * 2, numbers) == expected.tolist()


def test_the_ends_of_the_distribution_are_drawn() -> None:
    shares = torch.tensor([[0, 5, 0, 2**39, 1, 0]] * 2)
    assert drawn(shares, [SamplingParams()] * 2, [0.0, 1 - 2**-48]) == [1, 4]


def masks_of(rows: int, seed: int) -> list[Tensor | None]:
    """Packed and bool ones, shorter and longer than the vocabulary."""
    generator = torch.Generator("cpu").manual_seed(seed)
    packed = torch.randint(-(2**31), 2**31 - 1, (2,), generator=generator).int()
    allowed = torch.rand(V - 3, generator=generator) < 0.5
    return [(None, packed, allowed, packed[:1])[(row + seed) % 4] for row in range(rows)]


def same_logprobs(one: SamplerState, other: SamplerState) -> bool:
    """Whether both have those of all tokens, if they are wanted, and the same."""
    if one.first_logprobs is None or other.first_logprobs is None:
        return one.first_logprobs is other.first_logprobs and not one.sampling.first_logprobs
    return one.sampling.first_logprobs and torch.equal(one.first_logprobs, other.first_logprobs)


def check_sampling(
    samplings: Sequence[SamplingParams], seed: int, *, banned: bool, masked: bool
) -> None:
    """Over some steps, after which requests leave and join."""
    mine = [SamplerState.start(s, (1, 2, 3), i) for i, s in enumerate(samplings)]
    theirs = [SamplerState.start(s, (1, 2, 3), i) for i, s in enumerate(samplings)]
    sampler = Sampler(CPU, kernels=True)
    generator = torch.Generator("cpu").manual_seed(seed)
    for step in range(4):
        if step == 2:
            mine, theirs = mine[::-2], theirs[::-2]
        logits = torch.randn(len(mine), V, generator=generator) * 2
        bans = [{row, V + 1} if row % 2 else set() for row in range(len(mine))]
        forbidden = bans if banned else [set() for _ in mine]
        masks = masks_of(len(mine), seed) if masked else None
        pending = sampler.launch(logits.clone(), mine, forbidden if banned else None, masks)
        expected = sample_tokens(logits, theirs, forbidden, masks)
        found = pending.wait()
        for row, (one, other) in enumerate(zip(found, expected, strict=True)):
            if isinstance(other, UnusableLogits):
                assert isinstance(one, UnusableLogits)
                assert str(one) == str(other)
                continue
            assert one == other
            assert same_logprobs(mine[row], theirs[row])
            assert pending.inputs[row] == other.token
        assert [state.drawn for state in mine] == [state.drawn for state in theirs]


def test_a_device_samples_what_the_host_samples() -> None:
    samplings = [
        SamplingParams(temperature=1, top_k=5, min_p=0.05, seed=1),
        SamplingParams(temperature=2.5, top_p=0.9, repetition_penalty=1.3, seed=2, logprobs=3),
        SamplingParams(logprobs=0, frequency_penalty=0.5, first_logprobs=True),
        SamplingParams(temperature=0.3, presence_penalty=1.5, seed=3),
        SamplingParams(first_logprobs=True),
    ]
    check_sampling(samplings, seed=5, banned=True, masked=True)


@pytest.mark.slow
@settings(max_examples=scaled(60))
@given(
    samplings=st.lists(SAMPLINGS, min_size=1, max_size=9),
    seed=st.integers(0, 99),
    banned=st.booleans(),
    masked=st.booleans(),
)
def test_a_device_samples_as_the_host_whatever_is_wanted(
    samplings: list[SamplingParams], seed: int, banned: bool, masked: bool
) -> None:
    check_sampling(samplings, seed, banned=banned, masked=masked)


@pytest.mark.parametrize("trouble", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_cannot_be_sampled_fail_alone(trouble: float) -> None:
    states = [SamplerState.start(SamplingParams(temperature=1, seed=1), ()) for _ in range(3)]
    logits = torch.randn(3, V)
    logits[1, slice(None) if trouble < 0 else 9] = trouble
    pending = Sampler(CPU, kernels=True).launch(logits, states)
    first, failed, last = pending.wait()
    assert isinstance(failed, UnusableLogits)
    assert not isinstance(first, UnusableLogits)
    assert not isinstance(last, UnusableLogits)
    assert pending.inputs.min() >= 0
    assert [state.drawn for state in states] == [1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_likeliest_is_the_first_of_equals_and_of_finite_rows_only(dtype: torch.dtype) -> None:
    states = [SamplerState.start(SamplingParams(), ()) for _ in range(7)]
    logits = torch.randn(7, 9000).clamp(max=3).to(dtype)
    logits[0, [8200, 4095, 4096]] = 7  # equal, in two blocks
    logits[1, 8999] = 9
    logits[2, 17] = torch.nan
    logits[3, 5000] = torch.inf
    logits[4] = -torch.inf
    logits[5, :8999] = -torch.inf
    logits[6, 0] = 11
    pending = Sampler(CPU, kernels=True).launch(logits, states)
    expected = sample_tokens(logits, [SamplerState.start(SamplingParams(), ()) for _ in states],
                             [()] * 7)  # fmt: skip
    found = [getattr(each, "token", None) for each in pending.wait()]
    assert found == [getattr(each, "token", None) for each in expected]
    assert found == [4095, 8999, None, None, None, 8999, 0]
    assert pending.inputs.tolist() == [4095, 8999, 0, 0, 0, 8999, 0]


def test_no_rows_can_be_waited_for() -> None:
    assert Sampler(CPU, kernels=True).launch(torch.empty(0, V), []).wait() == []
