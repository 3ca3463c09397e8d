"""Partial attention, its fusion (RelayAttention eq. 7), relocation, the reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ragcache.attention import (
    Partial,
    ReferenceAttentionBackend,
    Rotation,
    merge_states,
    partial_attention,
    rotate,
)
from ragcache.attention.ops import add_sinks, window_bias
from tests.conftest import scaled
from tests.ragcache.attention.scenes import Shape, make_scene, shapes

SCALE, KV_HEADS, DIM = 0.25, 2, 16
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def merge_state(a: Partial, b: Partial) -> Partial:
    """RelayAttention eq. 7: attention of the same rows over two disjoint key sets."""
    lse = torch.logaddexp(a.lse, b.lse)  # [N, Hkv, G]
    wa, wb = (a.lse - lse).exp(), (b.lse - lse).exp()  # sum to 1
    out = wa[..., None] * a.out + wb[..., None] * b.out
    return Partial(out.to(a.out.dtype), lse)


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
@settings(max_examples=scaled(60))
def test_merging_any_split_equals_full_softmax_in_float64(
    cuts: list[int], seed: int, group: int
) -> None:
    query, key, value = draw(group, 5, 30, seed)
    bounds = [0, *sorted(cuts), 30]
    parts = [
        partial_attention(query, key[:, a:b], value[:, a:b], scale=SCALE)
        for a, b in pairwise(bounds)
    ]
    whole = partial_attention(query, key, value, scale=SCALE)
    torch.testing.assert_close(whole.out, full_softmax(query, key, value), **EXACT)
    for order in (parts, parts[::-1]):
        joined = order[0]
        for part in order[1:]:
            joined = merge_state(joined, part)
        torch.testing.assert_close(joined.out, whole.out, **EXACT)
        torch.testing.assert_close(joined.lse, whole.lse, **EXACT)


@given(
    readers=st.lists(st.lists(st.integers(0, 4), min_size=1, unique=True), max_size=5),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=scaled(60))
def test_merge_states_with_empty_slots(readers: list[list[int]], seed: int) -> None:
    """readers: of each run of three keys, the rows that ask it. The last four are their own."""
    rows = 5
    query, key, value = draw(2, rows, 3 * len(readers) + 4, seed)
    runs = [slice(3 * i, 3 * i + 3) for i in range(len(readers))]
    asked = [
        partial_attention(query[:, asking], key[:, run], value[:, run], scale=SCALE)
        for asking, run in zip(readers, runs, strict=True)
    ]
    own = partial_attention(query, key[:, -4:], value[:, -4:], scale=SCALE)
    every = [row for asking in readers for row in asking]
    table = torch.full((len(readers), rows), len(every))  # one slot a run: holes where not asked
    at = 0
    for slot, asking in enumerate(readers):
        table[slot, asking] = torch.arange(at, at + len(asking))
        at += len(asking)
    joined = merge_states(own, asked, table) if asked else own
    for row in range(rows):
        seen = [torch.arange(key.shape[1])[run] for i, run in enumerate(runs) if row in readers[i]]
        keys = torch.cat([*seen, torch.arange(key.shape[1])[-4:]])
        alone = partial_attention(
            query[:, row : row + 1], key[:, keys], value[:, keys], scale=SCALE
        )
        torch.testing.assert_close(joined.out[row], alone.out[0], **EXACT)
        torch.testing.assert_close(joined.lse[row], alone.lse[0], **EXACT)


def test_merging_leaves_its_inputs_unchanged() -> None:
    query, key, value = draw(2, 3, 9, seed=1)
    own = partial_attention(query, key[:, :4], value[:, :4], scale=SCALE)
    asked = partial_attention(query, key[:, 4:], value[:, 4:], scale=SCALE)
    before = [tensor.clone() for tensor in (own.out, own.lse, asked.out, asked.lse)]
    merge_state(own, asked)
    merge_states(own, [asked], torch.tensor([[0, 1, 2]]))
    for tensor, old in zip((own.out, own.lse, asked.out, asked.lse), before, strict=True):
        assert torch.equal(tensor, old)


def test_scores_beyond_the_range_of_exp_are_merged() -> None:
    query, key, value = draw(2, 3, 8, seed=3)
    parts = [
        partial_attention(query, key[:, run] * 10_000, value[:, run], scale=SCALE)
        for run in (slice(0, 3), slice(3, 8))
    ]
    assert float(parts[0].lse.abs().max()) > 1000, "the case that this is about"
    expected = full_softmax(query, key * 10_000, value)
    torch.testing.assert_close(merge_state(*parts).out, expected, **EXACT)
    table = torch.tensor([[0, 1, 2]])
    torch.testing.assert_close(merge_states(parts[0], parts[1:], table).out, expected, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_keep_the_dtype_and_lse_is_float32(dtype: torch.dtype) -> None:
    query, key, value = draw(7, 3, 50, seed=4)
    rounded = [x.to(dtype) for x in (query, key, value)]
    exact = partial_attention(*(x.double() for x in rounded), scale=SCALE)
    whole = partial_attention(*rounded, scale=SCALE)
    table = torch.tensor([[0, 1, 2]])
    parts = [
        partial_attention(rounded[0], rounded[1][:, run], rounded[2][:, run], scale=SCALE)
        for run in (slice(0, 20), slice(20, 50))
    ]
    bound = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for each in (whole, merge_state(*parts), merge_states(parts[0], parts[1:], table)):
        assert isinstance(each, Partial)
        assert (each.out.dtype, each.lse.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(each.out.double(), exact.out, rtol=bound, atol=bound)
        torch.testing.assert_close(each.lse.double(), exact.lse, rtol=1e-5, atol=1e-5)


FREQUENCIES = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)


def rotation(delta: int, *, interleaved: bool = False) -> Rotation:
    angle = torch.tensor([delta], dtype=torch.float64)[:, None] * FREQUENCIES
    return Rotation(angle.cos(), angle.sin(), interleaved)


@given(st.integers(-300, 300), st.integers(0, 10_000), st.booleans())
@settings(max_examples=scaled(50))
def test_turning_the_query_back_equals_moving_the_key(
    delta: int, seed: int, interleaved: bool
) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    query, key = torch.randn(2, 1, 4, 16, generator=generator, dtype=torch.float64)
    moved = query @ rotate(key, rotation(delta, interleaved=interleaved)).transpose(-1, -2)
    turned = rotate(query, rotation(-delta, interleaved=interleaved)) @ key.transpose(-1, -2)
    torch.testing.assert_close(turned, moved, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("interleaved", [False, True])
def test_dimensions_beyond_the_rotated_width_pass_through(interleaved: bool) -> None:
    x = torch.randn(2, 3, 24, dtype=torch.float64)
    turned = rotate(x, rotation(5, interleaved=interleaved))
    torch.testing.assert_close(turned[..., 16:], x[..., 16:], rtol=0, atol=0)
    assert not torch.equal(turned[..., :16], x[..., :16])


def test_interleaved_pairs_are_the_halves_in_another_order() -> None:
    """Dimensions 2i and 2i+1 turn as i and i + R/2 do where the layout is by halves."""
    x = torch.randn(2, 3, 24, dtype=torch.float64)
    apart = torch.cat([x[..., 0:16:2], x[..., 1:16:2], x[..., 16:]], dim=-1)
    turned = rotate(apart, rotation(9))
    together = torch.stack([turned[..., :8], turned[..., 8:16]], dim=-1).flatten(-2)
    expected = torch.cat([together, turned[..., 16:]], dim=-1)
    torch.testing.assert_close(rotate(x, rotation(9, interleaved=True)), expected)


@pytest.mark.parametrize("alibi", [False, True])
@given(shape=shapes())
@settings(max_examples=scaled(60))
def test_every_row_equals_the_definition(shape: Shape, alibi: bool) -> None:
    for dtype, near in ((torch.float64, 1e-10), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)):
        scene = make_scene(shape, dtype, alibi=alibi)
        out = ReferenceAttentionBackend().attend(*scene.inputs, scale=scene.scale)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), scene.expected(), rtol=near, atol=near)


def test_scores_are_capped_before_the_bias() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 3, 1, 4, generator=generator) * 3 for _ in range(3))
    bias = torch.tensor([0.0, -torch.inf, 0.5]).expand(1, 3, 1, 3)
    part = partial_attention(query, key[:, :, 0], value[:, :, 0], scale=0.5, bias=bias, softcap=2.0)
    scores = query[0, :, 0] @ key[0, :, 0].T * 0.5
    capped = 2 * (scores / 2).tanh() + bias[0, :, 0]
    torch.testing.assert_close(part.out[:, 0, 0], capped.softmax(-1) @ value[0, :, 0])
    torch.testing.assert_close(part.lse[:, 0, 0], capped.logsumexp(-1))
    assert scores.abs().max() > 2


def test_a_row_that_sees_no_key_weighs_nothing() -> None:
    query, key = torch.ones(1, 2, 1, 4), torch.ones(1, 3, 4)
    distance = torch.tensor([[-9.0, -8, -7], [-3.0, -2, -1]])
    bias = window_bias(distance, 3)
    assert bias[1, 0].tolist() == [-torch.inf, 0, 0]
    part = partial_attention(query, key, key, scale=1.0, bias=bias)
    assert part.lse[0].item() == -torch.inf
    assert not part.out[0].any()
    own = Partial(torch.full((2, 1, 1, 4), 5.0), torch.zeros(2, 1, 1))
    joined = merge_states(own, [part], torch.tensor([[0, 1]]))
    assert joined.out[0].eq(5).all()
    assert bool(joined.out.isfinite().all())


def test_sinks_are_one_more_key_without_a_value() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, 3, 2, 4, generator=generator) for _ in range(3))
    key, value = key[:, :, 0], value[:, :, 0]
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0])
    part = add_sinks(partial_attention(query, key, value, scale=1.0), sinks)
    scores = query @ key[:, None].transpose(-1, -2)  # [Hkv, N, G, S]
    sink = sinks.view(2, 1, 2, 1).expand(2, 3, 2, 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(part.out, (weights @ value[:, None]).transpose(0, 1))
