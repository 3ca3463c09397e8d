"""Partial attention and its fusion (RelayAttention eq. 7)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.attention import Partial, causal_bias, grouped, merge, merge_table, partial

SCALE, KV_HEADS, DIM = 0.25, 2, 16
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def draw(group: int, rows: int, keys: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """query: [Hkv, N, G, D]; key, value: [Hkv, S, D]."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, DIM, generator=generator, dtype=torch.float64)

    return normal(KV_HEADS, rows, group), normal(KV_HEADS, keys), normal(KV_HEADS, keys)


def full_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The definition, [N, Hkv, G, D]."""
    weights = (torch.einsum("hngd,hsd->hngs", query, key) * SCALE).softmax(-1)
    return torch.einsum("hngs,hsd->nhgd", weights, value)


@given(
    cuts=st.lists(st.integers(1, 29), max_size=4, unique=True),
    seed=st.integers(0, 10_000),
    group=st.sampled_from([1, 2, 7]),
)
@settings(max_examples=60)
def test_merging_any_split_equals_full_softmax_in_float64(
    cuts: list[int], seed: int, group: int
) -> None:
    query, key, value = draw(group, 5, 30, seed)
    bounds = [0, *sorted(cuts), 30]
    parts = [partial(query, key[:, a:b], value[:, a:b], scale=SCALE) for a, b in pairwise(bounds)]
    whole = partial(query, key, value, scale=SCALE)
    torch.testing.assert_close(whole.out, full_softmax(query, key, value), **EXACT)
    for order in (parts, parts[::-1]):
        joined = order[0]
        for part in order[1:]:
            joined = merge(joined, part)
        torch.testing.assert_close(joined.out, whole.out, **EXACT)
        torch.testing.assert_close(joined.lse, whole.lse, **EXACT)


@given(
    readers=st.lists(st.lists(st.integers(0, 4), min_size=1, unique=True), max_size=5),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60)
def test_a_table_with_holes_joins_every_row_with_what_it_asked(
    readers: list[list[int]], seed: int
) -> None:
    """readers: of each run of three keys, the rows that ask it. The last four are their own."""
    rows = 5
    query, key, value = draw(2, rows, 3 * len(readers) + 4, seed)
    runs = [slice(3 * i, 3 * i + 3) for i in range(len(readers))]
    asked = [
        partial(query[:, asking], key[:, run], value[:, run], scale=SCALE)
        for asking, run in zip(readers, runs, strict=True)
    ]
    own = partial(query, key[:, -4:], value[:, -4:], scale=SCALE)
    every = [row for asking in readers for row in asking]
    table = torch.full((len(readers), rows), len(every))  # one slot a run: holes where not asked
    at = 0
    for slot, asking in enumerate(readers):
        table[slot, asking] = torch.arange(at, at + len(asking))
        at += len(asking)
    joined = merge_table(own, asked, table) if asked else own
    for row in range(rows):
        seen = [torch.arange(key.shape[1])[run] for i, run in enumerate(runs) if row in readers[i]]
        keys = torch.cat([*seen, torch.arange(key.shape[1])[-4:]])
        alone = partial(query[:, row : row + 1], key[:, keys], value[:, keys], scale=SCALE)
        torch.testing.assert_close(joined.out[row], alone.out[0], **EXACT)
        torch.testing.assert_close(joined.lse[row], alone.lse[0], **EXACT)


def test_a_row_that_asked_nothing_keeps_its_own_bit_by_bit() -> None:
    query, key, value = draw(2, 3, 9, seed=1)
    own = partial(query, key[:, :4], value[:, :4], scale=SCALE)
    asked = partial(query[:, :1], key[:, 4:], value[:, 4:], scale=SCALE)
    joined = merge_table(own, [asked], torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert torch.equal(joined.out[:2], own.out[:2])
    assert torch.equal(joined.lse[:2], own.lse[:2])
    assert not torch.equal(joined.out[2], own.out[2])


def test_joining_leaves_its_inputs_as_they_were() -> None:
    query, key, value = draw(2, 3, 9, seed=1)
    own = partial(query, key[:, :4], value[:, :4], scale=SCALE)
    asked = partial(query, key[:, 4:], value[:, 4:], scale=SCALE)
    before = [tensor.clone() for tensor in (own.out, own.lse, asked.out, asked.lse)]
    merge(own, asked)
    merge_table(own, [asked], torch.tensor([[0, 1, 2]]))
    for tensor, old in zip((own.out, own.lse, asked.out, asked.lse), before, strict=True):
        assert torch.equal(tensor, old)


def test_lse_is_the_natural_logarithm_of_the_denominator() -> None:
    query, key, value = draw(1, 3, 5, seed=2)
    scores = torch.einsum("hngd,hsd->nhgs", query, key) * SCALE
    lse = partial(query, key, value, scale=SCALE).lse
    torch.testing.assert_close(lse, scores.exp().sum(-1).log())


def test_scores_beyond_the_range_of_exp_are_joined() -> None:
    query, key, value = draw(2, 3, 8, seed=3)
    parts = [
        partial(query, key[:, run] * 10_000, value[:, run], scale=SCALE)
        for run in (slice(0, 3), slice(3, 8))
    ]
    assert float(parts[0].lse.abs().max()) > 1000, "the case that this is about"
    expected = full_softmax(query, key * 10_000, value)
    torch.testing.assert_close(merge(*parts).out, expected, **EXACT)
    table = torch.tensor([[0, 1, 2]])
    torch.testing.assert_close(merge_table(parts[0], parts[1:], table).out, expected, **EXACT)


def test_a_causal_row_sees_itself_and_no_later_key() -> None:
    query, key, value = draw(2, 6, 6, seed=3)
    bias = causal_bias(6, key.device)
    assert bias.shape == (6, 1, 6)
    whole = partial(query, key, value, scale=SCALE, bias=bias)
    for row in range(6):
        alone = full_softmax(query[:, row : row + 1], key[:, : row + 1], value[:, : row + 1])
        torch.testing.assert_close(whole.out[row], alone[0], **EXACT)


def test_rows_may_have_keys_of_their_own() -> None:
    query, _, _ = draw(3, 4, 1, seed=4)
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    key, value = torch.randn(2, KV_HEADS, 4, 7, DIM, generator=generator, dtype=torch.float64)
    together = partial(query, key, value, scale=SCALE)
    for row in range(4):
        alone = full_softmax(query[:, row : row + 1], key[:, row], value[:, row])
        torch.testing.assert_close(together.out[row], alone[0], **EXACT)


def test_a_group_of_query_heads_reads_one_key_head() -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(6)
    query = torch.randn(6, 4, DIM, generator=generator, dtype=torch.float64)  # [Hq, N, D]
    _, key, value = draw(1, 1, 9, seed=7)
    rows = grouped(query, KV_HEADS)
    assert rows.shape == (KV_HEADS, 4, 3, DIM)
    assert rows.data_ptr() == query.data_ptr(), "a view"
    out = partial(rows, key, value, scale=SCALE).out.flatten(1, 2)  # [N, Hq, D]
    repeated_key, repeated_value = (x.repeat_interleave(3, 0) for x in (key, value))
    expected = (query @ repeated_key.transpose(-1, -2) * SCALE).softmax(-1) @ repeated_value
    torch.testing.assert_close(out, expected.transpose(0, 1), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_keep_the_dtype_and_lse_is_float32(dtype: torch.dtype) -> None:
    query, key, value = draw(7, 3, 50, seed=4)
    rounded = [x.to(dtype) for x in (query, key, value)]
    exact = partial(*(x.double() for x in rounded), scale=SCALE)
    whole = partial(*rounded, scale=SCALE)
    table = torch.tensor([[0, 1, 2]])
    parts = [
        partial(rounded[0], rounded[1][:, run], rounded[2][:, run], scale=SCALE)
        for run in (slice(0, 20), slice(20, 50))
    ]
    bound = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for each in (whole, merge(*parts), merge_table(parts[0], parts[1:], table)):
        assert isinstance(each, Partial)
        assert (each.out.dtype, each.lse.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(each.out.double(), exact.out, rtol=bound, atol=bound)
        torch.testing.assert_close(each.lse.double(), exact.lse, rtol=1e-5, atol=1e-5)
