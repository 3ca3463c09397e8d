"""Sampling on a GPU: what the host draws from equal shares, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ragcache.engine.sampler import BLOCK, Sampler, SamplerState
from ragcache.engine.sampling import draw, keep_likeliest, shares_of
from ragcache.engine.sampling_params import SamplingParams

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

V = 152_064
MIXED = (
    SamplingParams(),
    SamplingParams(logprobs=3),
    SamplingParams(temperature=1, seed=3),
    SamplingParams(temperature=0.7, top_k=50, seed=1),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02, seed=2, logprobs=0),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=1, top_p=0.95, presence_penalty=1.5, seed=4),
)


@pytest.fixture
def nothing_waits() -> Iterator[None]:
    """Every call that waits for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def random_logits(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(rows, V, generator=generator, device="cuda") * 3).to(dtype)


@pytest.mark.parametrize("top_p", [1, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 1, 40, 3000])
@pytest.mark.parametrize("min_p", [0, 0.05])
def test_the_kernel_draws_what_the_host_draws(top_p: float, top_k: int, min_p: float) -> None:
    from ragcache.engine.sampling_kernels import draw_kernel

    sampling = SamplingParams(1, top_k, top_p, min_p)
    rows = 33
    shares = shares_of(random_logits(rows, seed=top_k), [0.3 + row / 20 for row in range(rows)])
    numbers = [row / rows for row in range(rows)]
    host = shares.cpu()
    expected = draw(keep_likeliest(host, [sampling] * rows), numbers)

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    tokens = column(-1, torch.int64)
    draw_kernel[(rows,)](
        shares.float().view(torch.int32), column(top_k, torch.int64),
        column(top_p, torch.float64), column(min_p, torch.float64),
        torch.tensor(numbers, dtype=torch.float64, device="cuda"), tokens, V,
        BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_between_logits_and_tokens(nothing_waits: None, dtype: torch.dtype) -> None:
    """Over steps with penalties, bans and masks; the greedy rows are those of the host."""
    mine = [SamplerState.start(s, (1, 2, 3), i) for i, s in enumerate(MIXED * 10)]
    theirs = [SamplerState.start(s, (1, 2, 3), i) for i, s in enumerate(MIXED * 10)]
    sampler = Sampler(torch.device("cuda"), kernels=True)
    forbidden = [{row, 7} if row % 3 == 0 else set() for row in range(len(mine))]
    packed = torch.full((V // 32,), 0x55555555, dtype=torch.int32)
    masks = [packed if row % 4 == 0 else None for row in range(len(mine))]
    for step in range(4):
        logits = random_logits(len(mine), step, dtype)
        pending = sampler.launch(logits, mine, forbidden, masks)
        torch.cuda.set_sync_debug_mode("default")
        found = pending.wait()
        host = Sampler(torch.device("cpu"))
        expected = host.launch(logits.cpu(), theirs, forbidden, masks).wait()
        torch.cuda.set_sync_debug_mode("error")
        for one, other, state in zip(found, expected, theirs, strict=True):
            if state.sampling.greedy:
                assert one.token == other.token  # type: ignore[union-attr]
        for state, other in zip(mine, theirs, strict=True):
            assert state.drawn == other.drawn == step + 1


def test_equal_draws_whatever_runs_beside(nothing_waits: None) -> None:
    logits = random_logits(len(MIXED), 1)
    together = Sampler(torch.device("cuda"), kernels=True).launch(
        logits, [SamplerState.start(s, (), i) for i, s in enumerate(MIXED)]
    )
    apart = [
        Sampler(torch.device("cuda"), kernels=True).launch(
            logits[row : row + 1], [SamplerState.start(sampling, (), row)]
        )
        for row, sampling in enumerate(MIXED)
    ]
    torch.cuda.set_sync_debug_mode("default")
    alone = [pending.wait()[0] for pending in apart]
    assert [each.token for each in together.wait()] == [each.token for each in alone]  # type: ignore[union-attr]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_hundred_thousand_draws_are_distributed_as_the_shares(temperature: float) -> None:
    """The chi-squared of 63 degrees of freedom, as a deviation from its mean."""
    draws, rows, tokens = 100_000, 2000, 64
    row = random_logits(1, 5)[0, :tokens] / 2
    shares = (row.double().cpu() / temperature).softmax(dim=0)
    sampler, counts = Sampler(torch.device("cuda"), kernels=True), torch.zeros(tokens)
    for first in range(0, draws, rows):
        states = [
            SamplerState(SamplingParams(temperature=temperature), seed)
            for seed in range(first, first + rows)
        ]
        found = sampler.launch(row.expand(rows, -1).contiguous(), states).wait()
        drawn = torch.tensor([each.token for each in found])  # type: ignore[union-attr]
        counts += torch.bincount(drawn, minlength=tokens)
    chi_squared = ((counts - draws * shares) ** 2 / (draws * shares)).sum().item()
    assert abs(chi_squared - (tokens - 1)) < 4 * (2 * (tokens - 1)) ** 0.5
