"""Triton kernels of a mixture with few rows: its choice of experts, and its products, whose time is
the reading of weights."""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3.0e38)

_ROOMS: Final = 256, 1024  # for pairs of a row and an expert


@triton.jit(do_not_specialize=["pairs"])
def expert_product_kernel(
    rows,
    row_stride,
    weight,
    expert_stride,
    in_stride,
    out_stride,
    experts,
    out,
    order,
    pairs,
    live,
    K,
    N,
    BACK: tl.constexpr,
    GATED: tl.constexpr,
    PADDED: tl.constexpr,
    PER: tl.constexpr,
    S: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows times the weights of one expert, BN columns a program.

    Pair s has the row s // PER of `rows` and the expert experts[s]; order [pairs] has the pairs by
    their experts: out [pairs, N] follows it. A program counts the pairs of its expert, and ends at
    once if there are none; each weight is read once for BM pairs. S: room for pairs, a power of
    two. BACK: `rows` [pairs, K] follow the order, and out follows the pairs. GATED: the weights
    have 2 N columns, gates and then values; out is silu(gate) * value. PADDED: only the first
    live[0] rows have experts. Pairs of others get zeros if BACK, and otherwise no results.
    """
    expert = tl.program_id(1)
    s = tl.arange(0, S)
    chosen = pairs
    if PADDED:
        chosen = tl.minimum(pairs, tl.load(live) * PER)
        if BACK:
            n = tl.program_id(0) * BN + tl.arange(0, BN)
            for first in range(chosen + expert * BM, pairs, tl.num_programs(1) * BM):
                m = first + tl.arange(0, BM)
                place = out + m.to(tl.int64)[:, None] * N + n[None, :]
                zeros = tl.zeros([BM, BN], out.dtype.element_ty)
                tl.store(place, zeros, mask=(m < pairs)[:, None] & (n < N)[None, :])
    of = tl.load(experts + s, mask=s < chosen, other=-1)
    count = tl.sum((of == expert).to(tl.int32), 0)
    if count > 0:
        before = tl.sum(((of >= 0) & (of < expert)).to(tl.int32), 0)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        columns = weight + expert.to(tl.int64) * expert_stride + n[None, :] * out_stride
        for first in range(0, count, BM):
            m = first + tl.arange(0, BM)
            pair = tl.load(order + before + m, mask=m < count, other=0)
            row = before + m if BACK else pair // PER
            at = rows + row.to(tl.int64)[:, None] * row_stride
            acc = tl.zeros([BM, BN], tl.float32)
            values = tl.zeros([BM, BN], tl.float32)
            for begin in tl.range(0, K, BK, num_stages=STAGES):
                here = begin + k
                x = tl.load(
                    at + here[None, :], mask=(m < count)[:, None] & (here < K)[None, :], other=0.0
                )
                w = tl.load(
                    columns + here[:, None] * in_stride,
                    mask=(here < K)[:, None] & (n < N)[None, :],
                    other=0.0,
                )
                acc = tl.dot(x, w, acc, input_precision="ieee")
                if GATED:
                    w = tl.load(
                        columns + N * out_stride + here[:, None] * in_stride,
                        mask=(here < K)[:, None] & (n < N)[None, :],
                        other=0.0,
                    )
                    values = tl.dot(x, w, values, input_precision="ieee")
            if GATED:
                acc = acc / (1 + tl.exp(-acc)) * values
            to = pair if BACK else before + m
            place = out + to.to(tl.int64)[:, None] * N + n[None, :]
            stored = (m < count)[:, None] & (n < N)[None, :]
            tl.store(place, acc.to(out.dtype.element_ty), mask=stored)


def multiply_few(
    rows: Tensor,
    weight: Tensor,
    experts: Tensor,
    order: Tensor,
    *,
    live: Tensor | None = None,
    back: bool = False,
    gated: bool = False,
) -> Tensor:
    """Multiply rows by the weights of their experts.

    Args:
        rows: [T, K], or [T * k, K] for a row of each pair.
        weight: [E, K, N].
        experts: [T, k]. A pair is a row with one of its experts.
        order: [T * k], the pairs by their experts (`sort_pairs`).
        live: int32 [1], how many of the T rows have experts. The others are padding.
        back: Whether the rows follow `order`, and the results the pairs. Otherwise the rows follow
            the pairs, and the results `order`.
        gated: Whether the first half of the columns are gates of the others.

    Returns:
        [T * k, N], or N / 2 if gated.
    """
    pairs, count, width = experts.numel(), weight.shape[0], weight.shape[2] // (1 + gated)
    out = rows.new_empty(pairs, width)
    block = choose_block(weight.dtype, pairs, count)
    block["BN"] //= 1 + gated
    expert_product_kernel[triton.cdiv(width, block["BN"]), count](
        *(rows, rows.stride(0), weight, *weight.stride(), experts, out),
        *(order, pairs, experts if live is None else live, weight.shape[1], width),
        BACK=back,
        GATED=gated,
        PADDED=live is not None,
        PER=experts.shape[1],
        S=_room(pairs),
        **block,
    )
    return out


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(
    experts, order, pairs, live, PADDED: tl.constexpr, PER: tl.constexpr, S: tl.constexpr
):
    """The pairs by their experts, order [pairs]; an expert a program. S: room for pairs. See
    `expert_product_kernel` for padding, which stays at the end."""
    expert = tl.program_id(0)
    s = tl.arange(0, S)
    chosen = pairs
    if PADDED:
        chosen = tl.minimum(pairs, tl.load(live) * PER)
    of = tl.load(experts + s, mask=s < chosen, other=-1)
    its = of == expert
    before = tl.sum(((of >= 0) & (of < expert)).to(tl.int32), 0)
    rank = tl.cumsum(its.to(tl.int32), 0) - 1
    tl.store(order + before + rank, s.to(tl.int64), mask=its)
    if PADDED and expert == 0:
        tl.store(order + s, s.to(tl.int64), mask=(s >= chosen) & (s < pairs))


def sort_pairs(experts: Tensor, count: int, live: Tensor | None = None) -> Tensor:
    """Return the pairs of `experts` [T, k] by their experts, of which there are `count`:
    [T * k]. Of the rows, only the first `live` [1] count; pairs of the others stay at the end."""
    order, pairs = torch.empty_like(experts).flatten(), experts.numel()
    sort_kernel[count,](
        *(experts, order, pairs, experts if live is None else live),
        PADDED=live is not None,
        PER=experts.shape[1],
        S=_room(pairs),
        num_warps=4,
    )
    return order


def _room(pairs: int) -> int:
    """Room for pairs. It has few sizes: kernels are compiled for each."""
    small, large = _ROOMS
    return small if pairs <= small else max(large, triton.next_power_of_2(pairs))


def choose_block(dtype: torch.dtype, pairs: int, experts: int) -> dict[str, Any]:
    """Return the constants of the kernel. An expert has so many pairs in the mean."""
    few = pairs <= 8 * experts
    if dtype.itemsize > 2:
        return {"BM": 16, "BN": 32, "BK": 32, "STAGES": 2, "num_warps": 4}
    return {"BM": 16 if few else 64, "BN": 64, "BK": 128, "STAGES": 4, "num_warps": 4}


@triton.jit
def choose_kernel(
    scores, stride, values, places, E, EP: tl.constexpr, COUNT: tl.constexpr, SOFTMAX: tl.constexpr
):
    """The COUNT largest of a row's scores [T, E], or of their SOFTMAX, one after another; a row a
    program. EP: E as a power of two."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, EP)
    left = tl.load(scores + row * stride + at, mask=at < E, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        left = tl.exp(left - tl.max(left, 0))
        left = left / tl.sum(left, 0)
    left = tl.where(at < E, tl.maximum(left, LOWEST), float("-inf"))  # below: chosen already
    for number in tl.static_range(COUNT):
        place = tl.argmax(left, 0)
        found = tl.max(left, 0)
        found = tl.where(found > LOWEST, found, float("-inf"))
        tl.store(values + row * COUNT + number, found.to(values.dtype.element_ty))
        tl.store(places + row * COUNT + number, place.to(tl.int64))
        left = tl.where(at == place, float("-inf"), left)


def choose_few(scores: Tensor, count: int, *, softmax: bool) -> tuple[Tensor, Tensor]:
    """Return the largest `count` of each row's scores [T, E], or of their softmax in float32, the
    largest first, and their places [T, count], int64."""
    rows, width = scores.shape
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    values = scores.new_empty(rows, count, dtype=torch.float32 if softmax else scores.dtype)
    places = torch.empty(rows, count, dtype=torch.int64, device=scores.device)
    room = triton.next_power_of_2(width)
    choose_kernel[rows,](
        *(scores, scores.stride(0), values, places, width),
        EP=room,
        COUNT=count,
        SOFTMAX=softmax,
        num_warps=1,
    )
    return values, places
