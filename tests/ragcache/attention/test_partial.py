"""Partial attention and its fusion (RelayAttention eq. 7)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.attention import Partial, backend_for, merge, merge_slots, partial
from ragcache.attention.backend import Reference
from ragcache.attention.cpu import FusedCpu

SCALE = 0.25


def draw(heads: int, kv_heads: int, rows: int, keys: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shape = lambda h, n: torch.randn(h, n, 16, generator=generator, dtype=torch.float64)  # noqa: E731
    return shape(heads, rows), shape(kv_heads, keys), shape(kv_heads, keys)


def full_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The definition, with every key head repeated for its group."""
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    return (query @ key.transpose(-1, -2) * SCALE).softmax(-1) @ value


@given(
    cuts=st.lists(st.integers(1, 29), max_size=4, unique=True),
    seed=st.integers(0, 10_000),
    group=st.sampled_from([1, 2, 7]),
)
@settings(deadline=None, max_examples=60)
def test_merging_any_split_equals_full_softmax_in_float64(
    cuts: list[int], seed: int, group: int
) -> None:
    query, key, value = draw(2 * group, 2, 5, 30, seed)
    bounds = [0, *sorted(cuts), 30]
    parts = [partial(query, key[:, a:b], value[:, a:b], scale=SCALE) for a, b in pairwise(bounds)]
    joined = parts[0]
    for part in parts[1:]:
        joined = merge(joined, part)
    expected = full_softmax(query, key, value)
    torch.testing.assert_close(joined.out, expected, rtol=1e-12, atol=1e-12)
    stacked = merge_slots(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))
    torch.testing.assert_close(stacked, expected, rtol=1e-12, atol=1e-12)


def test_an_empty_slot_changes_nothing() -> None:
    query, key, value = draw(4, 2, 3, 9, seed=1)
    part = partial(query, key, value, scale=SCALE)
    empty = Partial(torch.zeros_like(part.out), torch.full_like(part.lse, -torch.inf))
    joined = merge_slots(torch.stack([part.out, empty.out]), torch.stack([part.lse, empty.lse]))
    torch.testing.assert_close(joined, part.out, rtol=0, atol=0)


def test_lse_is_the_natural_logarithm_of_the_denominator() -> None:
    query, key, value = draw(2, 2, 3, 5, seed=2)
    scores = query @ key.transpose(-1, -2) * SCALE
    lse = partial(query, key, value, scale=SCALE).lse
    torch.testing.assert_close(lse, scores.exp().sum(-1).log())


def test_a_causal_row_sees_no_later_key() -> None:
    query, key, value = draw(4, 2, 6, 6, seed=3)
    before = partial(query, key, value, scale=SCALE, causal=True).out
    key[:, 4:], value[:, 4:] = 99.0, 99.0
    after = partial(query, key, value, scale=SCALE, causal=True).out
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=0, atol=0)
    assert not torch.equal(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_fused_kernel_computes_the_reference(
    dtype: torch.dtype, causal: bool, rows: int
) -> None:
    keys = rows if causal else 50
    query, key, value = (x.to(dtype) for x in draw(14, 2, rows, keys, seed=4))
    fused = FusedCpu().partial(query, key, value, scale=SCALE, causal=causal)
    exact = partial(query.double(), key.double(), value.double(), scale=SCALE, causal=causal)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fused.out.double(), exact.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(fused.lse.double(), exact.lse, rtol=tolerance, atol=tolerance)
    assert fused.lse.dtype == torch.float32
    assert fused.out.dtype == dtype


def test_the_fused_kernel_copies_no_keys() -> None:
    """Fourteen query heads over two key heads: peak memory stays far under a repeated copy."""
    query, key, value = (x.float() for x in draw(14, 2, 1, 4096, seed=5))
    with torch.profiler.profile(profile_memory=True) as profile:
        FusedCpu().partial(query, key, value, scale=SCALE)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert allocated < key.nbytes


def test_every_device_has_a_backend() -> None:
    assert isinstance(backend_for(torch.device("cpu")), FusedCpu)
    assert isinstance(backend_for(torch.device("meta")), Reference)
