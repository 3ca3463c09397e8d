"""Triton kernels of a mixture with few rows: its choice of experts, and its products, whose time is
the reading of weights."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3.0e38)


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
    K,
    N,
    ORDERED: tl.constexpr,
    GATED: tl.constexpr,
    PER: tl.constexpr,
    S: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows times the weights of one expert, BN columns a program.

    Pair s has the row s // PER of `rows` and the expert experts[s]: out [pairs, N]. A program finds
    the pairs of its expert among all, and ends at once if there are none; each weight is read once
    for BM pairs. S: room for pairs, a power of two. ORDERED: order [pairs] gets their numbers.
    GATED: the weights have 2 N columns, gates and then values; out is silu(gate) * value.
    """
    expert = tl.program_id(1)
    s = tl.arange(0, S)
    chosen = tl.load(experts + s, mask=s < pairs, other=-1) == expert
    count = tl.sum(chosen.to(tl.int32), 0)
    if ORDERED:
        tl.store(
            order + s, s.to(tl.int64), mask=s < tl.where(tl.program_id(0) + expert == 0, pairs, 0)
        )
    if count > 0:
        rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        columns = weight + expert.to(tl.int64) * expert_stride + n[None, :] * out_stride
        for first in range(0, count, BM):
            m = first + tl.arange(0, BM)
            found = chosen[None, :] & (rank[None, :] == m[:, None])
            pair = tl.sum(tl.where(found, s[None, :], 0), 1)
            at = rows + (pair // PER).to(tl.int64)[:, None] * row_stride
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
            place = out + pair.to(tl.int64)[:, None] * N + n[None, :]
            stored = (m < count)[:, None] & (n < N)[None, :]
            tl.store(place, acc.to(out.dtype.element_ty), mask=stored)


def multiply_few(
    rows: Tensor,
    weight: Tensor,
    experts: Tensor,
    room: int,
    order: Tensor | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Multiply rows by the weights of their experts.

    Args:
        rows: [T, K], or [T * k, K] for a row of each pair.
        weight: [E, K, N].
        experts: [T, k].
        room: Power of two, at least the number of pairs.
        order: [T * k], gets the numbers of the pairs.
        gated: Whether the first half of the columns are gates of the others.

    Returns:
        [T * k, N], or N / 2 if gated, pair by pair.
    """
    pairs, count, width = experts.numel(), weight.shape[0], weight.shape[2] // (1 + gated)
    out = rows.new_empty(pairs, width)
    block = choose_block(weight.dtype, pairs, count)
    block["BN"] //= 1 + gated
    expert_product_kernel[triton.cdiv(width, block["BN"]), count](
        *(rows, rows.stride(0), weight, *weight.stride(), experts, out),
        out if order is None else order,
        *(pairs, weight.shape[1], width),
        ORDERED=order is not None,
        GATED=gated,
        PER=pairs // len(rows),
        S=room,
        **block,
    )
    return out


def choose_block(dtype: torch.dtype, pairs: int, experts: int) -> dict[str, Any]:
    """Return the constants of the kernel. An expert has so many pairs in the mean."""
    few = pairs <= 8 * experts
    if dtype.itemsize > 2:
        return {"BM": 16, "BN": 32, "BK": 32, "STAGES": 2, "num_warps": 4}
    return {"BM": 16 if few else 64, "BN": 64, "BK": 128, "STAGES": 4, "num_warps": 4}


@triton.jit
def choose_kernel(scores, values, places, E, EP: tl.constexpr, COUNT: tl.constexpr):
    """The COUNT largest of a row's scores [T, E], one after another; a row a program. EP: E as a
    power of two."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, EP)
    left = tl.load(scores + row * E + at, mask=at < E, other=float("-inf")).to(tl.float32)
    left = tl.where(at < E, tl.maximum(left, LOWEST), float("-inf"))  # below: chosen already
    for number in tl.static_range(COUNT):
        place = tl.argmax(left, 0)
        found = tl.max(left, 0)
        found = tl.where(found > LOWEST, found, float("-inf"))
        tl.store(values + row * COUNT + number, found.to(values.dtype.element_ty))
        tl.store(places + row * COUNT + number, place.to(tl.int64))
        left = tl.where(at == place, float("-inf"), left)


def choose_few(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest `count` of each row's scores [T, E], the largest first, and their places
    [T, count], int64."""
    rows, width = scores.shape
    values = scores.new_empty(rows, count)
    places = torch.empty(rows, count, dtype=torch.int64, device=scores.device)
    room = triton.next_power_of_2(width)
    choose_kernel[rows,](scores, values, places, width, EP=room, COUNT=count, num_warps=1)
    return values, places
