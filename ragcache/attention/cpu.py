"""The CPU backend: large matrix products, and one exponential for every score.

Every score of a row is taken relative to the same value, which is known first: about its largest.
Numerators and denominators of all runs then simply add up, and nothing is rescaled (FlashDecoding++
§3, unified maximum). Where a score exceeds that value by more than an exponent holds, the sum shows
it, and the layer is computed again by definition. PyTorch's fused kernel needs 1.5 times as long
over a run (docs/adr/0011).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from ragcache.attention.metadata import AttentionMetadata, CausalBlock, PageRows, SharedQueries
from ragcache.attention.ops import grouped, rotate
from ragcache.attention.reference import ReferenceAttentionBackend

SAMPLE = 64  # every 64th key tells how large scores are
LARGEST = 1e30  # of a denominator: the numerators must still be finite
BLOCK = 2**22  # scores in the workspace: 8 MiB in bfloat16, so that they stay in cache


@dataclass(frozen=True, slots=True, eq=False)
class _Own:
    """Attention of rows over their own tokens. out: [Hkv, N, G, D] float32 or the query's dtype,
    lse: [Hkv, N, G]; heads first, unlike `Partial`."""

    out: Tensor
    lse: Tensor


class CpuAttentionBackend:
    """For rotary and learned positions in float32, bfloat16 and float64.

    ALiBi's biases and float16, whose exponent is short, go to the definition.
    """

    def __init__(self) -> None:
        self._reference = ReferenceAttentionBackend()
        self._local = threading.local()

    @staticmethod
    def available() -> bool:
        return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")

    def attend(
        self,
        plan: AttentionMetadata,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
    ) -> Tensor:
        """See `AttentionBackend.attend`."""
        if plan.slopes is not None or query.dtype == torch.float16:
            return self._reference.attend(plan, layer, query, key, value, scale=scale)
        rows = grouped(query, key.shape[0])  # [Hkv, T, G, D]
        own = self._own(plan, layer, rows, key, value, scale)
        if plan.asking is None:
            return _rows_first(own.out, query.dtype)
        turned = _turned(plan.asking, rows)
        base = _base(plan, layer, own.lse, turned, scale).to(query.dtype)
        taken = -base.index_select(1, plan.asking.rows)
        out, total = self._runs(plan, layer, turned, taken, scale)
        weight = (own.lse - base).exp_()
        joined = own.out * weight[..., None]
        for slot in plan.table:
            joined += out.index_select(1, slot)
            weight = weight + total.index_select(1, slot)
        if not bool((weight < LARGEST).all()):  # NaN is not less either
            return self._reference.attend(plan, layer, query, key, value, scale=scale)
        return _rows_first(joined / weight[..., None], query.dtype)

    def _own(
        self,
        plan: AttentionMetadata,
        layer: int,
        rows: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
    ) -> _Own:
        parts = [_square(square, rows, key, value, scale) for square in plan.squares]
        if plan.pages is not None:
            parts.append(_pages(plan.pages, layer, rows, scale))
        if len(parts) == 1:
            return parts[0]
        out, lse = torch.cat([p.out for p in parts], 1), torch.cat([p.lse for p in parts], 1)
        if plan.own is None:
            return _Own(out, lse)
        return _Own(out.index_select(1, plan.own), lse.index_select(1, plan.own))

    def _runs(
        self, plan: AttentionMetadata, layer: int, turned: Tensor, taken: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Numerators [Hkv, M + 1, G, D] and denominators [Hkv, M + 1, G] of the M asking rows,
        times exp(taken); the last of each is zero. turned: [Hkv, M, G, D]; taken: [Hkv, M, G]."""
        kv_heads, count, group, dim = turned.shape
        exact = torch.promote_types(turned.dtype, torch.float32)
        out = turned.new_empty(kv_heads, (count + 1) * group, dim)
        total = turned.new_empty(kv_heads, (count + 1) * group, dtype=exact)
        query, taken = turned.flatten(1, 2), taken.flatten(1, 2)[..., None]
        for run in plan.runs:
            at = slice(run.begin * group, run.end * group)
            states = run.keys[layer], run.values[layer]
            out[:, at], total[:, at] = self._run(query[:, at], *states, taken[:, at], scale)
        out[:, count * group :], total[:, count * group :] = 0, 0
        shape = (kv_heads, count + 1, group)
        return out.view(*shape, dim), total.view(shape)

    def _run(
        self, query: Tensor, key: Tensor, value: Tensor, taken: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Numerator [Hkv, R, D] and denominator [Hkv, R] of query rows [Hkv, R, D] over a run."""
        exact = torch.promote_types(query.dtype, torch.float32)
        size = query.shape[0] * query.shape[1] * key.shape[1]
        if size > BLOCK:  # the fused kernel is as fast there, and needs no room
            out, lse = _fused(query[None], key[None], value[None], scale, causal=False)
            weight = (lse[0] + taken[..., 0]).exp_()
            return out[0] * weight[..., None], weight
        scores = self._room(query.dtype)[:size].view(*query.shape[:2], key.shape[1])
        torch.baddbmm(taken, query, key.transpose(1, 2), alpha=scale, out=scores)
        total = scores.exp_().sum(-1, dtype=exact)
        return torch.bmm(scores, value), total

    def _room(self, dtype: torch.dtype) -> Tensor:
        """Room for scores, one a thread: freshly mapped pages cost more than the products that
        fill them."""
        room: Tensor | None = getattr(self._local, "room", None)
        if room is None or room.dtype != dtype:
            room = self._local.room = torch.empty(BLOCK, dtype=dtype)
        return room


def _turned(asking: SharedQueries, rows: Tensor) -> Tensor:
    """The asking rows, turned towards the runs: [Hkv, M, G, D]."""
    turned = rows.index_select(1, asking.rows)
    return turned if asking.rotation is None else rotate(turned, asking.rotation)


def _base(plan: AttentionMetadata, layer: int, lse: Tensor, turned: Tensor, scale: float) -> Tensor:
    """What each row's scores are taken relative to: about the largest of them. [Hkv, T, G].

    The larger of the `lse` over its own tokens, which is given, and of its scores at a sample of
    every run's keys. The first key is in it: in a model with attention sinks it has the largest.
    """
    kv_heads, count, group, _ = turned.shape
    highest = lse.new_full((kv_heads, count + 1, group), -torch.inf)
    for run in plan.runs:
        if not run.keys.shape[2]:
            continue
        query = turned[:, run.begin : run.end].flatten(1, 2)
        sample = run.keys[layer][:, ::SAMPLE].transpose(1, 2)
        scores = torch.bmm(query, sample).amax(-1)
        highest[:, run.begin : run.end] = scores.view(kv_heads, -1, group)
    highest *= scale
    for slot in plan.table:
        lse = torch.maximum(lse, highest.index_select(1, slot))
    return lse


def _square(square: CausalBlock, rows: Tensor, key: Tensor, value: Tensor, scale: float) -> _Own:
    """PyTorch's fused attention (docs/adr/0005) of new tokens over themselves.

    A causal mask needs whole query heads. The heads of a group become heads of one batch row, and
    the keys are broadcast over them by a stride of zero: no copy.
    """
    own = slice(square.begin, square.end)
    query = rows[:, own].transpose(1, 2)  # [Hkv, G, N, D]
    keys, values = (x[:, None, own].expand(query.shape) for x in (key, value))
    out, lse = _fused(query, keys, values, scale, causal=True)
    return _Own(out.transpose(1, 2), lse.transpose(1, 2))


def _pages(pages: PageRows, layer: int, rows: Tensor, scale: float) -> _Own:
    """Every row over the pages of its own, which are few: gathered, then one product for all."""
    kv_heads, _, group, dim = rows.shape
    count = len(pages.rows)
    query = rows if count == rows.shape[1] else rows.index_select(1, pages.rows)
    query = query.reshape(kv_heads * count, group, dim)
    keys = pages.gather(pages.keys[layer]).view(kv_heads * count, -1, dim)
    values = pages.gather(pages.values[layer]).view(kv_heads * count, -1, dim)
    hidden = pages.mask.expand(kv_heads, -1, -1).reshape(kv_heads * count, 1, -1)
    scores = torch.baddbmm(hidden, query, keys.transpose(1, 2), alpha=scale)
    largest = scores.amax(-1, keepdim=True)
    exact = torch.promote_types(rows.dtype, torch.float32)
    total = scores.sub_(largest).exp_().sum(-1, dtype=exact)  # [Hkv * B, G]
    out = torch.bmm(scores, values) / total[..., None]
    lse = total.log_().add_(largest[..., 0])
    return _Own(out.view(kv_heads, count, group, dim), lse.view(kv_heads, count, group))


def _fused(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """PyTorch's fused attention (docs/adr/0005). query, key, value: [B, H, N or S, D]; returns
    [B, H, N, D] and lse [B, H, N]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    return out, lse


def _rows_first(out: Tensor, dtype: torch.dtype) -> Tensor:
    """[Hkv, T, G, D] as [T, Hq, D]."""
    return out.to(dtype).transpose(0, 1).flatten(1, 2)
