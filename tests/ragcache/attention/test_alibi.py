"""ALiBi by parts equals ALiBi over absolute positions (Press et al., 2022, §3), in float64."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.attention import causal_bias, merge, partial
from ragcache.attention.alibi import page_bias, run_bias, square_bias, starting_at

SCALE, KV_HEADS, GROUP, DIM = 0.25, 2, 3, 8
SLOPES = 2.0 ** (-8 * torch.arange(1, KV_HEADS * GROUP + 1, dtype=torch.float64) / 6)
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def normal(*sizes: int, seed: int) -> Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(*sizes, DIM, generator=generator, dtype=torch.float64)


def absolute(query: Tensor, at: Tensor, key: Tensor, where: Tensor, value: Tensor) -> Tensor:
    """By definition, head by head: every query at `at` over the keys at `where` up to it.

    query: [Hkv, N, G, D]; returns [N, Hkv, G, D].
    """
    distance = where[None] - at[:, None]  # [N, S]
    out = torch.empty(len(at), KV_HEADS, GROUP, DIM, dtype=torch.float64)
    for head in range(KV_HEADS):
        for i in range(GROUP):
            scores = query[head, :, i] @ key[head].T * SCALE
            scores = scores + SLOPES[head * GROUP + i] * distance
            scores = scores.masked_fill(distance > 0, -torch.inf)
            out[:, head, i] = scores.softmax(-1) @ value[head]
    return out


@given(
    start=st.integers(0, 500),
    gaps=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=40)
def test_a_moved_run_and_own_tokens_equal_the_whole(start: int, gaps: list[int], seed: int) -> None:
    """A run of seven keys placed at `start`, then new tokens with gaps between them."""
    rows = len(gaps)
    query = normal(KV_HEADS, rows, GROUP, seed=seed)
    key, value = normal(2, KV_HEADS, 7 + rows, seed=seed + 1)
    at = start + 6 + torch.tensor(gaps).cumsum(0)
    past = partial(query, key[:, :7], value[:, :7], scale=SCALE, bias=run_bias(SLOPES, key[:, :7]))
    past = starting_at(past, SLOPES, (start - at).double())
    bias = causal_bias(rows, key.device) + square_bias(SLOPES, at.double(), KV_HEADS)
    own = partial(query, key[:, 7:], value[:, 7:], scale=SCALE, bias=bias)
    where = torch.cat([torch.arange(start, start + 7), at])
    expected = absolute(query, at, key, where, value)
    torch.testing.assert_close(merge(past, own).out, expected, **EXACT)


def test_moving_a_run_shifts_its_lse_alone() -> None:
    query, key = normal(KV_HEADS, 4, GROUP, seed=1), normal(KV_HEADS, 5, seed=2)
    part = partial(query, key, key, scale=SCALE, bias=run_bias(SLOPES, key))
    distance = torch.tensor([-5.0, -8.0, -100.0, 0.0], dtype=torch.float64)
    placed = starting_at(part, SLOPES, distance)
    assert torch.equal(placed.out, part.out)
    shift = (placed.lse - part.lse).flatten(1)  # [N, Hq]
    torch.testing.assert_close(shift, distance[:, None] * SLOPES, **EXACT)


def test_pages_carry_the_bias_of_every_key() -> None:
    query = normal(KV_HEADS, 3, GROUP, seed=3)
    key, value = normal(2, KV_HEADS, 3, 6, seed=4)  # [Hkv, B, S, D]
    where = torch.tensor([[0, 1, 2, 3, 4, 5], [3, 9, 10, 11, 30, 31], [7, 8, 9, 10, 11, 12]])
    at = torch.tensor([5, 31, 40])
    distance = (where - at[:, None]).double()
    bias = page_bias(SLOPES, distance, KV_HEADS)
    together = partial(query, key, value, scale=SCALE, bias=bias)
    for row in range(3):
        one = slice(row, row + 1)
        alone = absolute(query[:, one], at[one], key[:, row], where[row], value[:, row])
        torch.testing.assert_close(together.out[row], alone[0], **EXACT)
