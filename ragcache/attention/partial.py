"""Partial attention and its exact fusion.

Attention over a context that is split into disjoint key sets equals the sum of the partial outputs
weighted by their shares of the softmax denominator (RelayAttention §3.2 and eq. 7, Hydragen §3.1).
Every partial result therefore carries the natural logarithm of its denominator, `lse`, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """Attention of some query rows over some of their keys.

    out: [Hq, T, D] in the query's dtype; lse: [Hq, T], natural log. `lse` is float32, or float64
    where the inputs are.
    """

    out: Tensor
    lse: Tensor


def fold(query: Tensor, num_kv_heads: int) -> Tensor:
    """Folds grouped query heads into query rows: [Hq, T, D] to [Hkv, G*T, D].

    Query head `h` reads key head `h // G`, so the G heads of a group are rows of one product over
    the same keys, and no key is ever repeated.
    """
    heads, rows, dim = query.shape
    return query.reshape(num_kv_heads, heads // num_kv_heads * rows, dim)


def partial(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, causal: bool = False
) -> Partial:
    """The reference: plain products and a softmax, on any device and dtype.

    query: [Hq, T, D]; key, value: [Hkv, S, D]. With `causal`, T equals S and row t sees the keys
    up to t. Backends compute the same function faster.
    """
    heads, rows, dim = query.shape
    kv_heads, length, _ = key.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = fold(query, kv_heads).to(exact) @ key.to(exact).transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(rows, length, dtype=torch.bool, device=query.device).triu(1)
        by_head = scores.view(heads, rows, length)
        scores = by_head.masked_fill(hidden, -torch.inf).view_as(scores)
    lse = scores.logsumexp(dim=-1)  # [Hkv, G*T]
    out = (scores - lse[..., None]).exp() @ value.to(exact)
    return Partial(out.view(heads, rows, dim).to(query.dtype), lse.view(heads, rows))


def merge(a: Partial, b: Partial) -> Partial:
    """Joins attention over two disjoint key sets (RelayAttention eq. 7)."""
    lse = torch.logaddexp(a.lse, b.lse)  # [Hq, T]
    wa, wb = (a.lse - lse).exp(), (b.lse - lse).exp()  # sum to 1
    out = wa[..., None] * a.out + wb[..., None] * b.out
    return Partial(out.to(a.out.dtype), lse)


def merge_slots(out: Tensor | Sequence[Tensor], lse: Tensor) -> Tensor:
    """Joins up to N partial results a row in one go.

    out: N times [Hq, T, D], finite; lse: [N, Hq, T], minus infinity where a slot is empty; at least
    one slot of every row is filled. Returns [Hq, T, D] in the dtype of `out`.
    """
    weights = lse.softmax(dim=0)[..., None]  # [N, Hq, T, 1]
    joined = out[0] * weights[0]
    for part, weight in zip(out[1:], weights[1:], strict=True):
        joined.addcmul_(part.to(weight.dtype), weight)
    return joined.to(out[0].dtype)
